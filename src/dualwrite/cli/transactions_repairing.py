"""The commands of `dualwrite transactions` that end a transaction. Each shows what it will do, asks, and checks again.

What a database has committed is never aborted: the commands ask it first.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer

from dualwrite.admin import DescribedTransaction, Examined, TransactionAdmin
from dualwrite.cli.decided import NOT_OURS, OTHER_DATABASE, Decided, Decisions
from dualwrite.cli.options import AsJson, KafkaSettings, Schema, Url, Yes, ask, refuse, settings_for
from dualwrite.cli.recovered import outcome_json, outcomes_json, show_report
from dualwrite.cli.transactions_common import (
    TIMEOUT,
    Kafka,
    Partition,
    Timeout,
    Topic,
    admin_tools,
    end,
    now_ms,
    print_json,
)
from dualwrite.cli.transactions_json import described_json, document, examined_json
from dualwrite.cli.transactions_view import show_described, show_examined
from dualwrite.errors import RepairRefusedError
from dualwrite.recovery.decision import Decision
from dualwrite.settings import Settings
from dualwrite.state import TransactionStatus
from dualwrite.transactional_id import TransactionalId

app = typer.Typer()

WithoutDatabase = Annotated[
    bool,
    typer.Option(
        "--without-database", help="Abort it although no database was asked; what one has committed loses its messages."
    ),
]
Id = Annotated[str | None, typer.Argument(metavar="ID", help="A transactional id, as Kafka sees it, or one of the database's.")]
IdOption = Annotated[
    str | None, typer.Option("--transactional-id", "--transactionalId", help="The same, as Apache's tool takes it.")
]


# --- a hanging one, in one partition ----------------------------------------------------------------------------------


@app.command("abort")
def abort_command(
    *,
    topic: Topic,
    partition: Partition,
    start_offset: Annotated[
        int | None, typer.Option("--start-offset", min=0, help="Where the transaction begins there.")
    ] = None,
    producer_id: Annotated[int | None, typer.Option("--producer-id", help="Its producer id.")] = None,
    epoch: Annotated[int | None, typer.Option("--producer-epoch", help="Its producer's epoch.")] = None,
    coordinator_epoch: Annotated[
        int | None,
        typer.Option(
            "--coordinator-epoch",
            help="The coordinator's epoch for the marker.",
            show_default="that of the producer's last marker there",
        ),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Abort it even if it may not hang, or if its coordinator may have committed it.")
    ] = False,
    url: Url = None,
    schema: Schema = None,
    kafka: Kafka = None,
    kafka_config: KafkaSettings = None,
    timeout: Timeout = TIMEOUT,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Abort a hanging transaction in its partition, so that `read_committed` consumers go on (KIP-664).

    Name it by its start offset, or by producer id and epoch, as `find-hanging` shows them. One that does not hang is left
    alone, and so is one that the database has committed (give `--url`): see `force-terminate` and `complete`.
    """
    if start_offset is None and (producer_id is None or epoch is None):
        raise typer.BadParameter("give --start-offset, or --producer-id and --producer-epoch.", param_hint="--start-offset")
    settings = settings_for(url, kafka, kafka_config, schema)
    with admin_tools(kafka, kafka_config, timeout) as admin:
        found = admin.examine(topic, partition, start_offset=start_offset, producer_id=producer_id, epoch=epoch)
        if found is None:
            raise RepairRefusedError(
                f"{topic}-{partition} has no open transaction like this.",
                next_step=f"look with `dualwrite transactions describe-producers --topic {topic}`",
            )
        if not as_json:
            show_examined(found, now_ms())
        refusal = found.refusal(force=force) or _refusal_of_database(settings, found)
        if refusal is not None:
            raise refusal
        ask(f"Abort the transaction at {topic}-{partition}? Its records there will never be read.", yes=yes)
        admin.abort(found, coordinator_epoch=coordinator_epoch, force=force)
    if as_json:
        print_json(document("abort", {"aborted": examined_json(found, now_ms())}, complete=True))
    else:
        typer.echo("Aborted.")


def _refusal_of_database(settings: Settings, found: Examined) -> RepairRefusedError | None:
    if settings.database_url is None:
        return None
    producer = found.opened.producer
    with Decisions(settings) as decisions:
        row = decisions.committed(producer.producer_id, producer.epoch)
    if row is None:
        return None
    return RepairRefusedError(
        f"The database has committed the transaction at {found.opened.topic}-{found.opened.partition}.",
        transactional_id=row.transactional_id,
        cause="its row names the transaction, as prepared, lost or unverified",
        next_step=f"resolve it with `dualwrite recover --id {row.transactional_id}`; read its records before you abort them",
    )


# --- one that its coordinator knows -----------------------------------------------------------------------------------


@app.command("force-terminate")
@app.command("forceTerminateTransaction", hidden=True)  # as Apache's tool calls it
def force_terminate_command(
    *,
    given: Id = None,
    more: IdOption = None,
    url: Url = None,
    schema: Schema = None,
    without_database: WithoutDatabase = False,
    kafka: Kafka = None,
    kafka_config: KafkaSettings = None,
    timeout: Timeout = TIMEOUT,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """End an open transaction by aborting it, even a prepared one, and fence its producer (KIP-939).

    Only the transaction that is shown is ended, not a later one of the same id. With a database, an id of dualwrite's is
    claimed first, and what the database has committed is left alone.
    """
    name = _one_id(given, more)
    settings = settings_for(url, kafka, kafka_config, schema)
    with admin_tools(kafka, kafka_config, timeout) as admin:
        if settings.database_url is None or without_database:
            described = list(admin.describe([name]))
            if not without_database:
                _demand_database(described)
            decided: dict[str, Decided] = {}
            outcomes = _terminate(admin, described, decided, yes=yes, as_json=as_json)
        else:
            with Decisions(settings) as decisions:
                described = list(admin.describe(decisions.kafka_ids(name)))
                decided = {one.transactional_id: decisions.of(one.transactional_id) for one in described}
                for one in described:
                    _check_not_committed(one, decided[one.transactional_id])
                if all(found.row is None for found in decided.values()):
                    _demand_database(described)
                    outcomes = _terminate(admin, described, decided, yes=yes, as_json=as_json)
                else:
                    outcomes = _recover(decisions, described, decided, yes=yes, as_json=as_json)
    _tell("force-terminate", described, decided, outcomes, as_json=as_json)


@app.command("complete")
def complete_command(
    *,
    given: Id = None,
    more: IdOption = None,
    url: Url = None,
    schema: Schema = None,
    kafka: Kafka = None,
    kafka_config: KafkaSettings = None,
    timeout: Timeout = TIMEOUT,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Commit or abort what is open on an id, as the database decided; shows the evidence first.

    This is `dualwrite recover` for one id, by its name at Kafka: the id is claimed, so that a live writer on it is fenced.
    """
    name = _one_id(given, more)
    settings = settings_for(url, kafka, kafka_config, schema)
    if settings.database_url is None:
        refuse("No database is given: use --url, or the environment variable DUALWRITE_DATABASE_URL.")
    with admin_tools(kafka, kafka_config, timeout) as admin, Decisions(settings) as decisions:
        described = list(admin.describe(decisions.kafka_ids(name)))
        decided = {one.transactional_id: decisions.of(one.transactional_id) for one in described}
        for one in described:
            _check_ours(one, decided[one.transactional_id])
        outcomes = _recover(decisions, described, decided, yes=yes, as_json=as_json)
    _tell("complete", described, decided, outcomes, as_json=as_json)


def _one_id(given: str | None, more: str | None) -> str:
    names = [name for name in (given, more) if name]
    if len(names) != 1:
        raise typer.BadParameter("name one transactional id.", param_hint="ID")
    return names[0]


def _terminate(
    admin: TransactionAdmin,
    described: list[DescribedTransaction],
    decided: dict[str, Decided],
    *,
    yes: bool,
    as_json: bool,
) -> list[dict[str, Any]]:
    """Abort an id that is none of the database's, by compare-and-set on what is shown."""
    (one,) = described
    if one.problem is not None:
        raise one.problem
    if not as_json:
        show_described(described, decided, now_ms())
    found = one.description
    if found is None or found.status is not TransactionStatus.ONGOING:
        if not as_json:
            typer.echo("No transaction is open on it: nothing to do.")
        return []
    ask(
        f"Abort the transaction of {one.transactional_id} (producer id {found.producer_id}, epoch {found.epoch})? "
        "Its messages will never be read, and its producer is fenced.",
        yes=yes,
    )
    admin.force_terminate(one.transactional_id, producer_id=found.producer_id, epoch=found.epoch)
    if not as_json:
        typer.echo("Aborted.")
    return [outcome_json(one.transactional_id, "aborted")]


def _recover(
    decisions: Decisions,
    described: list[DescribedTransaction],
    decided: dict[str, Decided],
    *,
    yes: bool,
    as_json: bool,
) -> list[dict[str, Any]]:
    """End what is open as the database decided, which may have committed it meanwhile."""
    if not as_json:
        show_described(described, decided, now_ms())
    for found in decided.values():
        if found.error is not None:
            raise found.error
    if all(found.plan is None for found in decided.values()):
        if not as_json:
            typer.echo("Nothing is open on it: nothing to do.")
        return []
    rows = ", ".join(dict.fromkeys(found.row.transactional_id for found in decided.values() if found.row is not None))
    ask(f"Claim {rows}, and end what is open on it as shown? A live writer on it gets FencedError at its next step.", yes=yes)
    report = decisions.recover(decided)
    if not as_json:
        show_report(report)
    return outcomes_json(report)


def _tell(
    command: str,
    described: list[DescribedTransaction],
    decided: dict[str, Decided],
    outcomes: list[dict[str, Any]],
    *,
    as_json: bool,
) -> None:
    if as_json:
        now = now_ms()
        shown = [described_json(one, decided.get(one.transactional_id), now) for one in described]
        print_json(document(command, {"transactions": shown, "outcomes": outcomes}, complete=True))
    end(found=any(one["error"] is not None for one in outcomes))


def _demand_database(described: list[DescribedTransaction]) -> None:
    """Refuse an id that some database of dualwrite's decides about."""
    for one in described:
        named = TransactionalId.of_kafka(one.transactional_id)
        if named is not None and named.store_id:
            raise RepairRefusedError(
                "A dualwrite writer has made this id, and its database has not been asked.",
                transactional_id=one.transactional_id,
                next_step="give the database with --url; if it is gone for good, add --without-database",
            )


def _check_not_committed(one: DescribedTransaction, found: Decided) -> None:
    if found.error is not None:
        raise found.error
    if found.why == OTHER_DATABASE:
        raise _of_other_database(one)
    if found.plan is not None and found.plan.decision is not Decision.ABORT and found.plan.state is not None:
        assert found.row is not None
        raise RepairRefusedError(
            f"It is not aborted: {found.why}.",
            transactional_id=one.transactional_id,
            next_step=f"run `dualwrite recover --id {found.row.transactional_id}`, or `dualwrite transactions complete`",
        )


def _check_ours(one: DescribedTransaction, found: Decided) -> None:
    if found.why == NOT_OURS:
        raise RepairRefusedError(
            "The database has no such id, so it decided nothing about it.",
            transactional_id=one.transactional_id,
            next_step="to abort it all the same, run `dualwrite transactions force-terminate`",
        )
    if found.why == OTHER_DATABASE:
        raise _of_other_database(one)


def _of_other_database(one: DescribedTransaction) -> RepairRefusedError:
    return RepairRefusedError(
        "The id of this name belongs to another database, which decides about it.",
        transactional_id=one.transactional_id,
        next_step="give the other database with --url; if it is gone for good: `force-terminate --without-database`",
    )
