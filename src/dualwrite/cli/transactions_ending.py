"""`dualwrite transactions force-terminate | complete`: end a transaction that its coordinator knows.

Each shows what it will do, asks for confirmation, and does it only if nothing has changed since. What a database has committed
is never aborted: `dualwrite.admin.decisions` has the rules.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Annotated, Any

import typer

from dualwrite.admin import DescribedTransaction, Examined, TransactionAdmin
from dualwrite.admin.decisions import (
    is_made_by_dualwrite,
    is_open,
    refusal_of_committed,
    refusal_to_abort,
    refusal_to_complete,
    refusal_to_terminate,
)
from dualwrite.cli.options import (
    AsJson,
    Decided,
    Decisions,
    KafkaSettings,
    Schema,
    Url,
    Yes,
    confirm,
    refuse,
    say,
    settings_for,
)
from dualwrite.cli.output import print_json
from dualwrite.cli.recover_jobs import open_job_of
from dualwrite.cli.recovery_output import Entries, outcome_json, outcomes_json, show_lost, show_report, unacknowledged_json
from dualwrite.cli.texts import now_ms
from dualwrite.cli.tool_options import TIMEOUT, Kafka, Partition, Timeout, Topic, WithoutDatabase, admin_tools, end
from dualwrite.cli.transactions_output import (
    described_json,
    document,
    examined_json,
    hidden_topics,
    show_described,
    show_examined,
)
from dualwrite.errors import DualWriteError, RepairRefusedError, StateTableMissingError, StoreUnavailableError, shell_word
from dualwrite.recovery.decision import Decision
from dualwrite.settings import Settings

app = typer.Typer()

Id = Annotated[str | None, typer.Argument(metavar="ID", help="A transactional id, as it is at Kafka or in the database.")]
IdOption = Annotated[
    str | None, typer.Option("--transactional-id", "--transactionalId", help="The same, with the option name of Apache's tool.")
]


@dataclass
class _Repair:
    """One run of a command: what it has shown, and what it did."""

    command: str
    yes: bool
    as_json: bool
    described: list[DescribedTransaction] = field(default_factory=list)
    decided: dict[str, Decided] = field(default_factory=dict)
    outcomes: list[dict[str, Any]] = field(default_factory=list)
    unacknowledged: Entries = field(default_factory=list)

    def examine(self, admin: TransactionAdmin, decisions: Decisions | None, given: str) -> None:
        """Query Kafka and the database about all affected ids, and show them; refuse ids that an open job uses."""
        described = list(admin.describe([given] if decisions is None else decisions.affected(given)))
        if decisions is not None:
            self.decided = decisions.of_each(one.transactional_id for one in described)
            described = [self.decided[one.transactional_id].seen(one) for one in described]
        self.described = described
        if not self.as_json:
            show_described(described, self.decided, now_ms())
        rows = [found.row.transactional_id for found in self.decided.values() if found.row is not None]
        if decisions is not None and rows:
            _refuse_open_job(decisions, rows)

    def has_plan(self, one: DescribedTransaction) -> bool:
        """Whether recovery would end a transaction of the id; without one, a claim would only fence an idle writer."""
        found = self.decided.get(one.transactional_id)
        if found is None or found.plan is None:
            return False
        return is_open(one) or found.plan.decision not in (Decision.NOTHING, Decision.ALREADY_COMMITTED)

    def say(self, text: str) -> None:
        """Print a line, unless the output is JSON."""
        if not self.as_json:
            typer.echo(text)

    def carry_out(self, decisions: Decisions) -> None:
        """End the open transactions of the rows as the database decided, if nothing has changed since they were shown."""
        planned = [found for found in self.decided.values() if found.plan is not None]
        rows = dict.fromkeys(found.plan.transactional_id for found in planned if found.plan is not None)
        confirm(
            f"Claim {', '.join(rows)}, and end the open transactions as shown? "
            "A live writer on it gets FencedError at its next step.",
            yes=self.yes,
        )
        report = decisions.carry_out(planned)
        self.outcomes += outcomes_json(report)
        self.unacknowledged += report.unacknowledged
        if not self.as_json:
            show_report(report)

    def stop(self, one: DescribedTransaction, error: DualWriteError | typer.Abort) -> None:
        """Record why an id was not ended after others were; the outcomes of those must be shown, too."""
        why = str(error) if isinstance(error, DualWriteError) else "not confirmed"
        self.outcomes.append(outcome_json(one.transactional_id, None, error=why))
        say(f"{one.transactional_id}: {why}", err=True)

    def report_nothing_done(self, text: str) -> None:
        """Print that nothing was done, and the transactions that were recorded as lost or unverified earlier."""
        plans = {found.row.transactional_id: found.row.lost for found in self.decided.values() if found.row is not None}
        self.unacknowledged += [(name, entry) for name, entries in plans.items() for entry in entries]
        self.say(text)
        if self.unacknowledged and not self.as_json:
            typer.echo("Lost or unverified, not acknowledged:")
            show_lost(self.unacknowledged)

    def end(self) -> None:
        """Print the JSON, and exit with code 1 if something is left to do, or could not be seen."""
        hidden = hidden_topics(self.described)
        if self.as_json:
            now = now_ms()
            shown = [described_json(one, self.decided.get(one.transactional_id), now) for one in self.described]
            found = {
                "transactions": shown,
                "outcomes": self.outcomes,
                "unacknowledged": unacknowledged_json(self.unacknowledged),
            }
            print_json(document(self.command, found, complete=not hidden, hidden=hidden))
        unfinished = any(one["error"] is not None or one["taken_over_by"] is not None for one in self.outcomes)
        end(found=unfinished or bool(self.unacknowledged) or bool(hidden))


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

    Only the transaction that is shown is ended, not a later one of the same id. With a database, an id of that database is
    claimed first, and a transaction that the database has committed is not aborted.
    """
    name = _one_id(given, more)
    settings = settings_for(url, kafka, kafka_config, schema)
    repair = _Repair("transactions force-terminate", yes, as_json)
    with admin_tools(kafka, kafka_config, timeout) as admin, ExitStack() as opened:
        decisions = None if settings.database_url is None else opened.enter_context(Decisions(settings))
        repair.examine(admin, decisions, name)
        for one in repair.described:
            found = repair.decided.get(one.transactional_id)
            refusal = refusal_to_terminate(one, found, without_database=without_database)
            if refusal is not None:
                raise refusal
        planned = any(map(repair.has_plan, repair.described))
        if decisions is not None and planned:
            repair.carry_out(decisions)
        alone = [one for one in repair.described if _is_foreign(one, repair.decided)]
        for one in alone:
            try:
                _terminate(repair, admin, decisions, one)
            except (DualWriteError, typer.Abort) as error:
                if not repair.outcomes:
                    raise
                repair.stop(one, error)
                break
        if not planned and not alone:
            _check_ends(repair.described)
            repair.report_nothing_done("It has no open transaction: nothing to do.")
    repair.end()


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
    """Commit or abort the open transactions of an id as the database decided. Shows the evidence first.

    This is `dualwrite recover` for one id, which you name as it is at Kafka or in the database: the id is claimed, so a live
    writer on it is fenced. A logical id includes its lanes.
    """
    name = _one_id(given, more)
    settings = settings_for(url, kafka, kafka_config, schema)
    if settings.database_url is None:
        refuse("No database is given: use --url, or the environment variable DUALWRITE_DATABASE_URL.")
    repair = _Repair("transactions complete", yes, as_json)
    with admin_tools(kafka, kafka_config, timeout) as admin, Decisions(settings) as decisions:
        repair.examine(admin, decisions, name)
        for one in repair.described:
            refusal = refusal_to_complete(one, repair.decided[one.transactional_id])
            if refusal is not None:
                raise refusal
        if any(found.plan is not None for found in repair.decided.values()):
            repair.carry_out(decisions)
        else:
            _check_ends(repair.described)
            repair.report_nothing_done("It has no open transaction: nothing to do.")
    repair.end()


def _one_id(given: str | None, more: str | None) -> str:
    names = [name for name in (given, more) if name]
    if len(names) != 1:
        raise typer.BadParameter("give exactly one transactional id.", param_hint="ID")
    return names[0]


def _is_foreign(one: DescribedTransaction, decided: Mapping[str, Decided]) -> bool:
    """Whether the id is ended by compare-and-set on its epoch: no database has planned anything for it."""
    found = decided.get(one.transactional_id)
    if found is not None and found.plan is not None:
        return False
    return found is None or found.row is None or is_open(one)


def _terminate(repair: _Repair, admin: TransactionAdmin, decisions: Decisions | None, one: DescribedTransaction) -> None:
    """Abort the transaction of an id that no database decides about, by compare-and-set on what is shown."""
    if one.problem is not None:
        raise one.problem
    name, description = one.transactional_id, one.description
    if description is None:
        raise RepairRefusedError(
            "The coordinator does not know this transactional id.",
            transactional_id=name,
            next_step="`dualwrite transactions list` shows the ids that Kafka knows",
        )
    _check_ends([one])
    if not is_open(one):
        repair.report_nothing_done("It has no open transaction: nothing to do.")
        return
    out_of_reach = decisions is None or repair.decided[name].is_out_of_reach
    if decisions is not None and not out_of_reach:
        refusal = refusal_of_committed(decisions.committed(description.producer_id, description.epoch))
        if refusal is not None:
            raise refusal
    doubt = ""
    if out_of_reach and not is_made_by_dualwrite(name):
        doubt = "No dualwrite database was checked (--url): if one has committed it, its messages are lost. "
    confirm(
        f"{doubt}Abort the transaction of {name} (producer id {description.producer_id}, epoch {description.epoch})? "
        "No read_committed consumer will ever see its messages, and its producer is fenced.",
        yes=repair.yes,
    )
    admin.force_terminate(name, producer_id=description.producer_id, epoch=description.epoch)
    repair.outcomes.append(outcome_json(name, "aborted"))
    repair.say("Aborted.")


def _check_ends(described: list[DescribedTransaction]) -> None:
    """Raise if a coordinator has not written all markers yet: then a transaction is still open in some partitions."""
    for one in described:
        if one.description is not None and one.description.status.is_ending:
            raise RepairRefusedError(
                f"Its transaction has been decided, and its coordinator is ending it: {one.description.status.value}.",
                transactional_id=one.transactional_id,
                cause="the markers are being written; if this state persists, a partition that is still listed has no leader",
                next_step=f"look again with `dualwrite transactions describe {shell_word(one.transactional_id)}`, which lists "
                "the partitions without their marker; start the brokers that have them",
            )


def _refuse_open_job(decisions: Decisions, rows: list[str]) -> None:
    found = open_job_of(decisions.store, rows)
    if found is None:
        return
    name, job = found
    raise RepairRefusedError(
        f"A task of batch {job.batch_id} of job {job.job_id!r} uses the id, and the batch is open: it can't be committed "
        "without this transaction.",
        transactional_id=name,
        next_step=f"wait for the job, which commits or aborts all of its transactions; if its driver is gone, run "
        f"`dualwrite recover --prefix {shell_word(job.prefix)}`",
    )


@app.command("abort")
def abort_command(
    *,
    topic: Topic,
    partition: Partition,
    start_offset: Annotated[
        int | None, typer.Option("--start-offset", min=0, help="Where the transaction begins in the partition.")
    ] = None,
    producer_id: Annotated[int | None, typer.Option("--producer-id", help="Its producer id.")] = None,
    epoch: Annotated[int | None, typer.Option("--producer-epoch", help="Its producer's epoch.")] = None,
    coordinator_epoch: Annotated[
        int | None,
        typer.Option(
            "--coordinator-epoch",
            help="The coordinator's epoch for the marker.",
            show_default="the epoch of the producer's last marker there",
        ),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Abort it even if it may not hang, or if its coordinator may have committed it.")
    ] = False,
    url: Url = None,
    schema: Schema = None,
    without_database: WithoutDatabase = False,
    kafka: Kafka = None,
    kafka_config: KafkaSettings = None,
    timeout: Timeout = TIMEOUT,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Abort a hanging transaction in its partition, so that `read_committed` consumers continue (KIP-664).

    Identify it by its start offset, or by producer id and epoch, as `find-hanging` shows them. A transaction that does not
    hang, or that the database has committed, is not aborted. Give the database with `--url`: without it, a transaction of a
    dualwrite writer is refused. See `force-terminate` and `complete` for transactions that do not hang.
    """
    if start_offset is None and (producer_id is None or epoch is None):
        raise typer.BadParameter("give --start-offset, or --producer-id and --producer-epoch.", param_hint="--start-offset")
    settings = settings_for(url, kafka, kafka_config, schema)
    with admin_tools(kafka, kafka_config, timeout) as admin:
        found = admin.examine(topic, partition, start_offset=start_offset, producer_id=producer_id, epoch=epoch)
        if found is None:
            raise RepairRefusedError(
                f"{topic}-{partition} has no such open transaction.",
                next_step=f"list them with `dualwrite transactions describe-producers --topic {shell_word(topic)}`",
            )
        if not as_json:
            show_examined(found, now_ms())
        _confirm(settings, found, without_database=without_database, force=force, yes=yes)
        admin.abort(found, coordinator_epoch=coordinator_epoch, force=force)
    if as_json:
        print_json(document("transactions abort", {"aborted": examined_json(found, now_ms())}, complete=True))
    else:
        typer.echo("Aborted.")


def _confirm(settings: Settings, found: Examined, *, without_database: bool, force: bool, yes: bool) -> None:
    """Ask for confirmation.

    Raises:
        DualWriteError: The transaction must not be aborted, or it was committed while the user was answering.
    """
    refusal = (
        found.refusal(force=True)
        or _refusal_of_database(settings, found, without_database=without_database)
        or found.refusal(force=force)  # last: what the database knows is certain
    )
    if refusal is not None:
        raise refusal
    confirm(_question(found, has_database=settings.database_url is not None), yes=yes)
    refusal = None if yes else _refusal_of_database(settings, found, without_database=without_database)
    if refusal is not None:  # the database may have committed it in the meantime
        raise refusal


def _question(found: Examined, *, has_database: bool) -> str:
    doubts = []
    if found.may_have_been_committed:
        doubts.append("Kafka no longer knows how it ended: it may have been committed.")
    if not has_database and not is_made_by_dualwrite(found.name_at_kafka or ""):
        doubts.append("No dualwrite database was checked (--url): if one has committed it, these messages are lost.")
    question = f"Abort the transaction at {found.opened.topic}-{found.opened.partition}?"
    return " ".join((*doubts, question, "No read_committed consumer will ever see its records there."))


def _refusal_of_database(settings: Settings, found: Examined, *, without_database: bool) -> DualWriteError | None:
    if settings.database_url is None:
        return refusal_to_abort(found, None, None, without_database=without_database)
    producer, name = found.opened.producer, found.name_at_kafka
    with Decisions(settings) as decisions:
        try:
            committed = decisions.committed(producer.producer_id, producer.epoch)
        except (StoreUnavailableError, StateTableMissingError):
            if not without_database:
                raise
            return None
        decided = None if name is None else decisions.of(name)
    return refusal_to_abort(found, decided, committed, without_database=without_database)
