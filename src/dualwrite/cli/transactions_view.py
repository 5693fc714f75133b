"""The tables of `dualwrite transactions`, with the columns of KIP-664."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import typer

from dualwrite.admin import (
    ActiveProducer,
    BrokerProblem,
    DescribedTransaction,
    Ending,
    Examined,
    HangingSearch,
    HangingTransaction,
    PartitionEnd,
    PartitionProducers,
    RecordTransaction,
    TransactionListing,
)
from dualwrite.cli.decided import Decided
from dualwrite.cli.errors import error_text
from dualwrite.cli.options import counted, say
from dualwrite.cli.tables import show_table
from dualwrite.cli.times import seconds_text, state_words, time_text
from dualwrite.errors import BrokerAuthorizationError, DualWriteError
from dualwrite.kafka.time_budget import NO_TIMEOUT_MS

INCOMPLETE: Final = "The output is incomplete"
_PRODUCER: Final = ("ProducerId", "ProducerEpoch", "StartOffset", "LastTimestamp", "Duration(s)", "CoordinatorEpoch")


def show_listings(found: Iterable[TransactionListing]) -> None:
    """The table of `list`."""
    rows = [(one.transactional_id, one.producer_id, one.coordinator, one.state) for one in found]
    if rows:
        show_table(("TransactionalId", "ProducerId", "Coordinator", "State"), rows)
    else:
        typer.echo("No transactional id was found.")


def hidden_topics(described: Iterable[DescribedTransaction]) -> list[DualWriteError]:
    """An error for each transaction whose topics Kafka leaves out."""
    return [
        BrokerAuthorizationError(
            f"Kafka leaves out the topics of the transaction of {one.transactional_id!r}.",
            transactional_id=one.transactional_id,
            cause="the principal lacks an ACL",
            next_step="grant the principal Describe on its topics",
        )
        for one in described
        if one.hides_topics
    ]


def show_described(found: Iterable[DescribedTransaction], decided: dict[str, Decided], now_ms: int) -> None:
    """The tables of `describe`: what Kafka knows, and what the database knows if one was given."""
    described = list(found)
    headings = (
        "TransactionalId",
        "ProducerId",
        "ProducerEpoch",
        "Coordinator",
        "State",
        "TimeoutMs",
        "StartTime",
        "Duration(s)",
        "TopicPartitions",
    )
    rows = [_described_row(one, now_ms) for one in described if one.description is not None]
    if rows:
        show_table(headings, rows)
    for one in described:
        if one.problem is not None:
            typer.echo(error_text(one.problem), err=True)
        elif one.is_unknown:
            where = "" if one.coordinator is None else f" (broker {one.coordinator})"
            say(f"{one.transactional_id}: unknown to its coordinator{where}", err=True)
        elif one.hides_topics:
            grant = "grant the principal Describe on its topics"
            say(f"{one.transactional_id}: Kafka leaves out the topics of its transaction; {grant}", err=True)
    if decided:
        typer.echo("In the database:")
        columns = ("TransactionalId", "Row", "Fence", "Owner", "PreparedState", "Recovery would", "Because")
        show_table(columns, [_decided_row(name, one) for name, one in decided.items()])
        for message in dict.fromkeys(error_text(one.error) for one in decided.values() if one.error is not None):
            typer.echo(message, err=True)


def show_producers(found: Iterable[PartitionProducers], now_ms: int) -> None:
    """The table of `describe-producers`."""
    partitions = list(found)
    rows = [(one.partition, *_producer_row(each, now_ms)) for one in partitions for each in one.producers]
    if rows:
        show_table(("Partition", *_PRODUCER), rows)
    elif any(one.problem is None for one in partitions):
        typer.echo("No producer has written here recently.")
    show_unreadable(partitions)


def show_search(found: HangingSearch, now_ms: int) -> None:
    """The table of `find-hanging`."""
    if found.hanging:
        _show_hanging(found.hanging, now_ms)
    else:
        typer.echo("No hanging transaction was found.")
    if found.undecided:
        typer.echo("These may hang; whether they do is not certain:")
        _show_hanging(found.undecided, now_ms)
    typer.echo(
        f"Searched {counted(found.searched, 'partition')} with {counted(found.open, 'open transaction')}; "
        f"examined those older than {found.limit_ms / 1000:g} s."
    )
    show_unreadable(found.unreadable)


def show_examined(found: Examined, now_ms: int) -> None:
    """The table of `abort`."""
    opened, verdict = found.opened, found.verdict
    because = "its coordinator will end it" if verdict is None else verdict.reason.value
    name = found.transactional_id if verdict is None else verdict.transactional_id
    row = (opened.topic, opened.partition, *_producer_row(opened.producer, now_ms), name, because)
    show_table(("Topic", "Partition", *_PRODUCER, "TransactionalId", "Because"), [row])


def show_record(found: RecordTransaction, decided: Decided | None) -> None:
    """The lines of `of`."""
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
    if decided is not None:
        lines.append(("In the database", decision_text(decided)))
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


def decision_text(found: Decided) -> str:
    """What recovery would do with an id, and why."""
    if found.error is not None:
        return str(found.error)
    return found.why if found.plan is None else f"{found.plan.decision.value}: {found.why}"


def show_unreadable(found: Iterable[PartitionProducers | PartitionEnd]) -> None:
    """The errors of partitions that could not be described."""
    for one in found:
        if one.problem is not None:
            typer.echo(error_text(one.problem), err=True)


def show_problems(problems: Iterable[BrokerProblem], hidden: Iterable[DualWriteError] = ()) -> None:
    """The brokers that did not respond, and the missing ACLs because of which Kafka may have left something out."""
    for problem in problems:
        say(f"{'Note' if problem.covered else INCOMPLETE}: {problem}", err=True)
    for error in hidden:
        typer.echo(error_text(error).replace("Error:", "Something may be missing:", 1), err=True)


def _show_hanging(found: Iterable[HangingTransaction], now_ms: int) -> None:
    rows = [
        (
            one.opened.topic,
            one.opened.partition,
            *_producer_row(one.opened.producer, now_ms),
            one.transactional_id,
            one.reason.value,
        )
        for one in found
    ]
    show_table(("Topic", "Partition", *_PRODUCER, "TransactionalId", "Because"), rows)


def _producer_row(found: ActiveProducer, now_ms: int) -> tuple[Any, ...]:
    return (
        found.producer_id,
        found.epoch,
        found.transaction_start_offset,
        time_text(found.last_timestamp_ms),
        seconds_text(found.age_ms(now_ms)),
        found.coordinator_epoch,
    )


def _described_row(found: DescribedTransaction, now_ms: int) -> tuple[Any, ...]:
    description = found.description
    assert description is not None
    start = description.start_time_ms if description.start_time_ms >= 0 else None
    return (
        found.transactional_id,
        description.producer_id,
        description.epoch,
        found.coordinator,
        description.status.value,
        "none" if description.timeout_ms == NO_TIMEOUT_MS else description.timeout_ms,
        time_text(start),
        None if start is None else seconds_text(now_ms - start),
        ",".join(f"{topic}-{partition}" for topic, partition in sorted(description.partitions)),
    )


def _decided_row(name: str, found: Decided) -> tuple[Any, ...]:
    row = found.row
    would = None if found.plan is None else found.plan.decision.value
    if row is None:
        return (name, None, None, None, None, would, found.why)
    return (name, row.transactional_id, row.fence, row.owner, state_words(found.state), would, found.why)
