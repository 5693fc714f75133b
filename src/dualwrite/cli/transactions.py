"""`dualwrite transactions`: list, describe and examine the transactions of a Kafka cluster (KIP-664, KIP-939).

The commands that end one are in `transactions_ending`.

Exit codes: 0 no problem was found, 1 something was found, or the output is incomplete, 2 usage error, or Kafka can't be
reached.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from dualwrite.admin import DescribedTransaction, TransactionAdmin
from dualwrite.admin.decisions import Decided
from dualwrite.cli import transactions_ending
from dualwrite.cli.options import AsJson, decisions_for, grouped
from dualwrite.cli.output import show_records
from dualwrite.cli.tool_options import Broker, Cluster, ClusterAndDatabase, Partition, Partitions, ToolGroup, Topic, end
from dualwrite.cli.transactions_output import (
    LISTED,
    described_record,
    hidden_topics,
    print_document,
    producers_record,
    search_record,
    show_described,
    show_problems,
    show_producers,
    show_search,
    show_transaction,
    transaction_record,
)
from dualwrite.settings import Settings
from dualwrite.texts import now_ms

app = typer.Typer(
    cls=ToolGroup,
    no_args_is_help=True,
    epilog="As with kafka-transactions.sh, options may precede the command.",
)


@app.command("list")
@grouped
def list_command(
    *,
    states: Annotated[
        list[str] | None, typer.Option("--state", help="Only ids in this state, such as Ongoing; repeatable.")
    ] = None,
    producer_ids: Annotated[
        list[int] | None, typer.Option("--producer-id", help="Only the id with this producer id; repeatable.")
    ] = None,
    pattern: Annotated[
        str | None,
        typer.Option("--pattern", "--transactional-id-pattern", help="Only ids that match this regular expression completely."),
    ] = None,
    longer: Annotated[
        float | None,
        typer.Option(
            "--running-longer-than", metavar="SECONDS", min=0, help="Only ids with a transaction that has been open for longer."
        ),
    ] = None,
    milliseconds: Annotated[
        int | None,
        typer.Option(
            "--duration-filter", metavar="MS", help="The same in milliseconds, as in Apache's tool; a negative value means all."
        ),
    ] = None,
    cluster: Cluster,
    as_json: AsJson = False,
) -> None:
    """List the transactional ids that the coordinators know. Kafka leaves out those that you may not describe."""
    if milliseconds is not None:
        if longer is not None:
            raise typer.BadParameter("can't be combined with --running-longer-than.", param_hint="--duration-filter")
        longer = None if milliseconds < 0 else milliseconds / 1000
    with cluster.admin() as admin:
        result = admin.list(states=states or (), producer_ids=producer_ids or (), pattern=pattern, running_longer_than=longer)
    records = [asdict(one) for one in result]
    if as_json:
        found = {"transactions": records}
        print_document("transactions list", found, complete=result.complete, problems=result.problems, hidden=result.hidden)
    else:
        if records:
            show_records(LISTED, records)
        else:
            typer.echo("No transactional id was found.")
        show_problems(result.problems, result.hidden)
    end(found=bool(result.problems))


@app.command("describe")
@grouped
def describe_command(
    *,
    ids: Annotated[list[str] | None, typer.Argument(metavar="ID...", help="Transactional ids, as Kafka sees them.")] = None,
    more: Annotated[
        list[str] | None,
        typer.Option("--transactional-id", help="Another id, with the option name of Apache's tool; repeatable."),
    ] = None,
    cluster: ClusterAndDatabase,
    as_json: AsJson = False,
) -> None:
    """Describe transactional ids: coordinator, state, producer, timeout, start, partitions.

    With a database it also shows the id's row, its owner, and what recovery would do and why. Then you may also give an id as
    it is in the database, which stands for all ids under which Kafka knows it.
    """
    named = dict.fromkeys([*(ids or ()), *(more or ())])
    if not named:
        raise typer.BadParameter("give at least one transactional id.", param_hint="ID")
    settings = cluster.settings()
    with cluster.admin() as admin:
        described, decided = _described(admin, settings, list(named))
    now = now_ms()
    records = [described_record(one, decided.get(one.transactional_id), now) for one in described]
    hidden = hidden_topics(described)
    complete = not hidden and not any(one.problem for one in described) and not any(one.error for one in decided.values())
    if as_json:
        print_document("transactions describe", {"transactions": records}, complete=complete, hidden=hidden)
    else:
        show_described(described, records)
    end(found=not complete or any(one.is_unknown for one in described))


def _described(
    admin: TransactionAdmin, settings: Settings, named: list[str]
) -> tuple[list[DescribedTransaction], dict[str, Decided]]:
    if settings.database_url is None:
        return list(admin.describe(named)), {}
    with decisions_for(settings) as decisions:
        names = dict.fromkeys(name for given in named for name in decisions.kafka_ids(given))
        described = list(admin.describe(names))
        return described, decisions.of_each(names)


@app.command("describe-producers")
@grouped
def describe_producers_command(
    *,
    topic: Topic,
    partitions: Partitions = None,
    broker: Broker = None,
    cluster: Cluster,
    as_json: AsJson = False,
) -> None:
    """Show the producers that a topic's partitions remember, and where their open transactions begin."""
    with cluster.admin() as admin:
        result = admin.describe_producers(topic, partitions or (), broker=broker)
    now = now_ms()
    records = [producers_record(one, now) for one in result]
    ok = all(one.problem is None for one in result)
    if as_json:
        found = {"partitions": records}
        print_document("transactions describe-producers", found, complete=result.complete and ok, problems=result.problems)
    else:
        show_producers(result, records)
        show_problems(result.problems)
    end(found=bool(result.problems) or not ok)


@app.command("find-hanging")
@grouped
def find_hanging_command(
    *,
    topic: Annotated[str | None, typer.Option("--topic", help="Only this topic.", show_default="all")] = None,
    partitions: Partitions = None,
    broker: Broker = None,
    limit: Annotated[
        float | None,
        typer.Option(
            "--max-transaction-timeout",
            metavar="MINUTES",
            min=0,
            help="Examine open transactions whose last message is older.",
            show_default="the broker's transaction.max.timeout.ms and 5 minutes",
        ),
    ] = None,
    cluster: Cluster,
    as_json: AsJson = False,
) -> None:
    """Find open transactions that no coordinator will end, so that read_committed consumers wait for them forever.

    Old transactions that their coordinator will end, and prepared ones, are not reported.
    """
    with cluster.admin() as admin:
        search = admin.find_hanging(
            topic=topic,
            partitions=partitions or (),
            broker=broker,
            max_transaction_timeout=None if limit is None else limit * 60,
        )
    found = search_record(search, now_ms())
    if as_json:
        name = "transactions find-hanging"
        print_document(name, found, complete=search.complete, problems=search.problems, hidden=search.hidden)
    else:
        show_search(found, search.unreadable)
        show_problems(search.problems, search.hidden)
    end(found=bool(search.hanging or search.problems) or not search.complete)


@app.command("of")
@grouped
def of_command(
    *,
    topic: Topic,
    partition: Partition,
    offset: Annotated[int, typer.Option("--offset", min=0, help="The record's offset.")],
    cluster: ClusterAndDatabase,
    as_json: AsJson = False,
) -> None:
    """Show which transaction a record belongs to, who owns it, and how it ended.

    The exit code is 1 if the transaction is still open, or something about it is not known. With a database it also shows what
    the database decided about an open transaction.
    """
    settings = cluster.settings()
    decided = None
    with cluster.admin() as admin:
        found = admin.transaction_of(topic, partition, offset)
        if settings.database_url is not None and found.opened is not None and found.transactional_id is not None:
            with decisions_for(settings) as decisions:
                decided = decisions.of(found.transactional_id)
    complete = found.complete and (decided is None or decided.error is None)
    record = transaction_record(found, decided, now_ms())
    if as_json:
        fields = {"record": record}
        print_document("transactions of", fields, complete=complete, problems=found.problems, hidden=found.hidden)
    else:
        show_transaction(found, record["database"])
        show_problems(found.problems, found.hidden)
    end(found=found.opened is not None or bool(found.problems) or not complete)


app.registered_commands += transactions_ending.app.registered_commands
