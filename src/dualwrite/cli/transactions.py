"""`dualwrite transactions`: list, describe and examine the transactions of a Kafka cluster (KIP-664, KIP-939).

The commands that end one are in `transactions_ending`.

Exit codes: 0 no problem was found, 1 something was found, or the output is incomplete, 2 usage error, or Kafka can't be
reached.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from operator import itemgetter
from typing import Annotated, Final

import typer

from dualwrite.admin import (
    DescribedTransaction,
    Ending,
    Examined,
    HangingSearch,
    PartitionProducers,
    RecordTransaction,
    TransactionAdmin,
)
from dualwrite.admin.decisions import Decided
from dualwrite.cli import transactions_ending
from dualwrite.cli.options import (
    AsJson,
    Broker,
    Cluster,
    ClusterAndDatabase,
    Partition,
    Partitions,
    ToolGroup,
    Topic,
    decisions_for,
    grouped,
)
from dualwrite.cli.output import FOUND, UNREADABLE, conclude, print_document, say, show_facts, show_unreadable
from dualwrite.cli.transactions_ending import (
    DESCRIBED,
    EXAMINED,
    PRODUCER,
    PRODUCER_COLUMNS,
    STATE,
    DescribedId,
    hidden_topics,
    partitions_of,
    show_described,
)
from dualwrite.diagnosis.facts import Fact, Facts
from dualwrite.diagnosis.stuck import DECIDED, REASON, decision_words
from dualwrite.settings import Settings
from dualwrite.texts import counted, time_text

app = typer.Typer(
    cls=ToolGroup,
    no_args_is_help=True,
    epilog="As with kafka-transactions.sh, options may precede the command.",
)


# --- the facts, and what is printed of them -----------------------------------------------------------------------------------

LISTED: Final = Facts(
    Fact("transactional_id", "TransactionalId"),
    Fact("coordinator", "Coordinator"),
    Fact("producer_id", "ProducerId"),
    Fact("state", "State"),
    columns=("transactional_id", "producer_id", "coordinator", "state"),
)
"""The facts about an id of `list`."""


PRODUCERS: Final = Facts(*UNREADABLE, Fact("producers", value=lambda found: PRODUCER.records(found.producers)))
"""The facts about a partition of `describe-producers`, or one that `find-hanging` could not search."""

_IN_PARTITION: Final = Facts(
    Fact("partition", "Partition", itemgetter(0)), *PRODUCER.at(itemgetter(1)), columns=("partition", *PRODUCER_COLUMNS)
)


def show_producers(found: Iterable[PartitionProducers]) -> None:
    """The table of `describe-producers`."""
    partitions = list(found)
    rows = [(UNREADABLE.record(one)["partition"], each) for one in partitions for each in one.producers]
    if rows:
        show_facts(_IN_PARTITION, rows)
    elif any(one.problem is None for one in partitions):
        typer.echo("No producer has written here recently.")
    show_unreadable(partitions)


_HANGING: Final = Facts(
    *EXAMINED.at(lambda found: Examined(found.opened, found, None)), Fact("coordinator"), columns=EXAMINED.columns
)
SEARCH: Final = Facts(
    Fact("limit_ms"),
    Fact("searched_partitions", value="searched"),
    Fact("open_transactions", value="open"),
    Fact("hanging", value=lambda search: _HANGING.records(search.hanging)),
    Fact("undecided", value=lambda search: _HANGING.records(search.undecided)),
    Fact("unreadable", value=lambda search: PRODUCERS.records(search.unreadable)),
)
"""The facts of `find-hanging`."""


def show_search(search: HangingSearch) -> None:
    """The tables of `find-hanging`."""
    show_facts(_HANGING, search.hanging, empty="No hanging transaction was found.")
    if search.undecided:
        typer.echo("These may hang; whether they do is not certain:")
        show_facts(_HANGING, search.undecided)
    typer.echo(
        f"Searched {counted(search.searched, 'partition')} with {counted(search.open, 'open transaction')}; "
        f"examined those older than {search.limit_ms / 1000:g} s."
    )
    show_unreadable(search.unreadable)


_OF: Final = Facts(
    *(Fact(name) for name in ("topic", "partition", "offset", "timestamp_ms", "is_marker", "producer_id")),
    Fact("producer_epoch", value="epoch"),
    Fact("ending", value="ending.name"),
    Fact("transaction_start_offset", value="opened.producer.transaction_start_offset"),
    Fact("transactional_id"),
    Fact("coordinator", value="described.coordinator"),
    Fact("now", value=Facts(*STATE, Fact("partitions", value=partitions_of)).nested("described.description")),
    *REASON.at("hanging.reason"),
)
OF: Final = Facts(*_OF.at(itemgetter(0)), Fact("database", value=DECIDED.nested(itemgetter(1))))
"""The facts of `of`: about a RecordTransaction, and what the database decided."""


def show_transaction(found: RecordTransaction, decided: Decided | None) -> None:
    """The lines of `of`; `decided` is what the database knows about an open transaction."""
    what = "marker" if found.is_marker else "record"
    lines = [("Written", time_text(found.timestamp_ms)), ("Transaction", found.ending.value)]
    if found.producer_id is not None:
        lines.append(("Producer", f"id {found.producer_id}, epoch {found.epoch}"))
    if found.opened is not None:
        lines.append(("Began at", f"offset {found.opened.producer.transaction_start_offset}"))
    if found.ending is not Ending.NONE:
        lines += _id_lines(found)
    if found.hanging is not None:
        lines.append(("It hangs" if found.hanging.reason.is_conclusive else "It may hang", found.hanging.reason.value))
    if (words := decision_words(decided)) is not None:
        lines.append(("In the database", words))
    say(f"The {what} {found.topic}-{found.partition} at {found.offset}:")
    width = max(len(name) for name, _ in lines)
    for name, text in lines:
        say(f"{name:<{width}}  {text}")


def _id_lines(found: RecordTransaction) -> list[tuple[str, str]]:
    """The transactional id of `of`, or why there is none."""
    if found.described is None and found.is_searched:
        return [("TransactionalId", "no coordinator lists one with this producer id")]
    if found.described is None:
        missing = "; ".join(error.next_step for error in found.hidden if error.next_step)
        return [("TransactionalId", f"not known: {missing or 'not every coordinator responded'}")]
    lines = [("TransactionalId", f"{found.transactional_id} (coordinator: broker {found.described.coordinator})")]
    described = found.described.description
    if described is not None:
        lines.append(("Its state now", f"{described.status.value}, epoch {described.epoch}"))
    elif found.described.problem is not None:
        lines.append(("Its state now", f"not known: {found.described.problem}"))
    return lines


# --- the commands -------------------------------------------------------------------------------------------------------------


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
    found = {"transactions": LISTED.records(result)}
    show = partial(show_facts, LISTED, result, empty="No transactional id was found.")
    conclude("transactions list", found, show, result, as_json=as_json)


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
    seen = [DescribedId(one, decided.get(one.transactional_id)) for one in described]
    hidden = hidden_topics(described)
    complete = not hidden and not any(one.problem for one in described) and not any(one.error for one in decided.values())
    if as_json:
        print_document("transactions describe", {"transactions": DESCRIBED.records(seen)}, complete=complete, hidden=hidden)
    else:
        show_described(seen)
    if not complete or any(one.is_unknown for one in described):
        raise typer.Exit(FOUND)


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
    ok = all(one.problem is None for one in result)
    found, show = {"partitions": PRODUCERS.records(result)}, partial(show_producers, result.found)
    name = "transactions describe-producers"
    conclude(name, found, show, result, complete=result.complete and ok, as_json=as_json, failed=not ok)


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
    failed = bool(search.hanging) or not search.complete
    name = "transactions find-hanging"
    conclude(name, SEARCH.record(search), partial(show_search, search), search, as_json=as_json, failed=failed)


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
    record, show = {"record": OF.record((found, decided))}, partial(show_transaction, found, decided)
    failed = found.opened is not None or not complete
    conclude("transactions of", record, show, found, complete=complete, as_json=as_json, failed=failed)


app.registered_commands += transactions_ending.app.registered_commands
