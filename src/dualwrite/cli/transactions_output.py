"""The JSON of `dualwrite transactions` and `stuck`; docs/reference/json.md describes it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
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
    StuckPartition,
    StuckSearch,
    TransactionListing,
)
from dualwrite.cli.options import Decided, counted, say
from dualwrite.cli.output import error_json, show_table, versioned
from dualwrite.cli.texts import error_text, seconds_text, state_words, time_text
from dualwrite.errors import BrokerAuthorizationError, DualWriteError
from dualwrite.kafka.time_budget import NO_TIMEOUT_MS
from dualwrite.state import TransactionDescription, state_text


def document(
    command: str,
    found: Mapping[str, Any],
    *,
    complete: bool,
    problems: Iterable[BrokerProblem] = (),
    hidden: Iterable[DualWriteError] = (),
) -> dict[str, Any]:
    """A complete document.

    Args:
        command: The command's name.
        found: The command's own fields.
        complete: Whether nothing is missing.
        problems: The brokers that did not respond.
        hidden: The missing ACLs because of which Kafka may have left something out.
    """
    fields = {
        "complete": complete,
        **found,
        "problems": [
            {"broker": one.broker, "address": one.address, "reason": one.reason, "covered": one.covered} for one in problems
        ],
        "hidden": [_error_json(one) for one in hidden],
    }
    return versioned(command, fields)


def listing_json(found: TransactionListing) -> dict[str, Any]:
    """One id of `list`."""
    return {
        "transactional_id": found.transactional_id,
        "coordinator": found.coordinator,
        "producer_id": found.producer_id,
        "state": found.state,
    }


def described_json(found: DescribedTransaction, decided: Decided | None, now_ms: int) -> dict[str, Any]:
    """One id of `describe`."""
    return {
        "transactional_id": found.transactional_id,
        "known": found.description is not None,
        "coordinator": found.coordinator,
        **_description_json(found.description, now_ms),
        "database": None if decided is None else _decided_json(decided),
        "error": _error_json(found.problem),
    }


def producers_json(found: PartitionProducers, now_ms: int) -> dict[str, Any]:
    """One partition of `describe-producers`, or one that `find-hanging` could not search."""
    return {
        "topic": found.topic,
        "partition": None if found.partition < 0 else found.partition,
        "broker": found.broker,
        "producers": [_producer_json(one, now_ms) for one in found.producers],
        "error": _error_json(found.problem),
    }


def search_json(found: HangingSearch, now_ms: int) -> dict[str, Any]:
    """The fields of `find-hanging`."""
    return {
        "limit_ms": found.limit_ms,
        "searched_partitions": found.searched,
        "open_transactions": found.open,
        "hanging": [_hanging_json(one, now_ms) for one in found.hanging],
        "undecided": [_hanging_json(one, now_ms) for one in found.undecided],
        "unreadable": [producers_json(one, now_ms) for one in found.unreadable],
    }


def record_json(found: RecordTransaction, decided: Decided | None, now_ms: int) -> dict[str, Any]:
    """The record of `of`."""
    described = None if found.described is None else found.described.description
    verdict = found.hanging
    return {
        "topic": found.topic,
        "partition": found.partition,
        "offset": found.offset,
        "timestamp_ms": found.timestamp_ms,
        "is_marker": found.is_marker,
        "producer_id": found.producer_id,
        "producer_epoch": found.epoch,
        "ending": found.ending.name,
        "transaction_start_offset": None if found.opened is None else found.opened.producer.transaction_start_offset,
        "transactional_id": found.transactional_id,
        "coordinator": None if found.described is None else found.described.coordinator,
        "now": None if described is None else _description_json(described, now_ms),
        "reason": None if verdict is None else verdict.reason.name,
        "why": None if verdict is None else verdict.reason.value,
        "database": None if decided is None else _decided_json(decided),
    }


def examined_json(found: Examined, now_ms: int) -> dict[str, Any]:
    """The transaction of `abort`."""
    opened, verdict = found.opened, found.verdict
    return {
        "topic": opened.topic,
        "partition": opened.partition,
        "broker": opened.broker,
        **_producer_json(opened.producer, now_ms),
        "reason": None if verdict is None else verdict.reason.name,
        "why": None if verdict is None else verdict.reason.value,
        "transactional_id": found.transactional_id if verdict is None else verdict.transactional_id,
    }


def stuck_json(found: StuckSearch, decided: Mapping[str, Decided], next_commands: Iterable[str], now_ms: int) -> dict[str, Any]:
    """The fields of `stuck`; there is a command for each partition."""
    return {
        "searched_partitions": found.searched,
        "stuck": [
            {**_stuck_partition_json(one, decided, now_ms), "next_command": command}
            for one, command in zip(found.partitions, next_commands, strict=True)
        ],
        "unreadable": [
            {
                "topic": one.topic,
                "partition": None if one.partition < 0 else one.partition,
                "broker": one.broker,
                "error": _error_json(one.problem),
            }
            for one in found.unreadable
        ],
    }


def _stuck_partition_json(found: StuckPartition, decided: Mapping[str, Decided], now_ms: int) -> dict[str, Any]:
    holder, end = found.holder, found.end
    database = decided.get(holder.transactional_id or "")
    return {
        "topic": end.topic,
        "partition": end.partition,
        "broker": end.broker,
        "last_stable_offset": end.last_stable_offset,
        "high_watermark": end.high_watermark,
        "records_behind": end.records_behind,
        "age_ms": holder.age_ms(now_ms),
        "producer_id": holder.opened.producer.producer_id,
        "producer_epoch": holder.opened.producer.epoch,
        "transaction_start_offset": holder.opened.producer.transaction_start_offset,
        "transactional_id": holder.transactional_id,
        "coordinator": holder.coordinator,
        "state": None if holder.description is None else holder.description.status.value,
        "reason": None if holder.hanging is None else holder.hanging.name,
        "why": None if holder.hanging is None else holder.hanging.value,
        "groups": [
            {
                "group_id": one.group_id,
                "offset": one.offset,
                "is_stored": one.is_stored,
                "has_no_position": one.has_no_position,
            }
            for one in found.groups
        ],
        "database": None if database is None else _decided_json(database),
    }


def _hanging_json(found: HangingTransaction, now_ms: int) -> dict[str, Any]:
    return {
        "topic": found.opened.topic,
        "partition": found.opened.partition,
        "broker": found.opened.broker,
        **_producer_json(found.opened.producer, now_ms),
        "reason": found.reason.name,
        "why": found.reason.value,
        "transactional_id": found.transactional_id,
        "coordinator": found.coordinator,
    }


def _producer_json(found: ActiveProducer, now_ms: int) -> dict[str, Any]:
    return {
        "producer_id": found.producer_id,
        "producer_epoch": found.epoch,
        "last_sequence": found.last_sequence,
        "last_timestamp_ms": found.last_timestamp_ms,
        "age_ms": found.age_ms(now_ms),
        "coordinator_epoch": found.coordinator_epoch,
        "transaction_start_offset": found.transaction_start_offset,
    }


def _description_json(found: TransactionDescription | None, now_ms: int) -> dict[str, Any]:
    if found is None:
        unknown = ("state", "producer_id", "producer_epoch", "timeout_ms", "start_time_ms", "age_ms")
        return {**dict.fromkeys(unknown), "partitions": []}
    started = found.start_time_ms >= 0
    return {
        "state": found.status.value,
        "producer_id": found.producer_id,
        "producer_epoch": found.epoch,
        "timeout_ms": found.timeout_ms,
        "start_time_ms": found.start_time_ms if started else None,
        "age_ms": now_ms - found.start_time_ms if started else None,
        "partitions": [{"topic": topic, "partition": partition} for topic, partition in sorted(found.partitions)],
    }


def _decided_json(found: Decided) -> dict[str, Any]:
    row = found.row
    return {
        "transactional_id": None if row is None else row.transactional_id,
        "fence": None if row is None else row.fence,
        "owner": None if row is None else row.owner,
        "generation": found.generation,
        "newest_generation": None if row is None else row.generation,
        "prepared_state": state_text(found.state) or None,
        "decision": None if found.plan is None else found.plan.decision.value,
        "why": found.why,
        "error": _error_json(found.error),
    }


def _error_json(found: DualWriteError | None) -> dict[str, Any] | None:
    return None if found is None else error_json(found)


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
