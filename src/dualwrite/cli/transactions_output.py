"""What `transactions` and `stuck` print of Kafka's transactions: each record's fields, and the columns that show them.

docs/reference/json.md describes the fields.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Final

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
)
from dualwrite.admin.decisions import Decided
from dualwrite.cli.options import say
from dualwrite.cli.output import Columns, Record, print_json, show_records, versioned
from dualwrite.diagnosis.stuck import decided_record, decision_text, reason_record
from dualwrite.errors import BrokerAuthorizationError, DualWriteError
from dualwrite.kafka.time_budget import NO_TIMEOUT_MS
from dualwrite.state import TransactionDescription
from dualwrite.texts import counted, error_text, seconds_text, time_text

_GRANT_TOPICS: Final = "grant the principal Describe on its topics"


def print_document(
    command: str,
    found: Record,
    *,
    complete: bool,
    problems: Iterable[BrokerProblem] = (),
    hidden: Iterable[DualWriteError] = (),
) -> None:
    """Print the document of a command: whether nothing is missing, the command's own fields, and what is missing."""
    missing = {"problems": [asdict(one) for one in problems], "hidden": list(hidden)}
    print_json(versioned(command, {"complete": complete, **found, **missing}))


# --- one transactional id ---------------------------------------------------------------------------------------------

LISTED: Final[Columns] = {
    "TransactionalId": "transactional_id",
    "ProducerId": "producer_id",
    "Coordinator": "coordinator",
    "State": "state",
}


def described_record(found: DescribedTransaction, decided: Decided | None, now_ms: int) -> Record:
    """One id of `describe`."""
    return {
        "transactional_id": found.transactional_id,
        "known": found.description is not None,
        "coordinator": found.coordinator,
        **_description_record(found.description, now_ms),
        "database": None if decided is None else decided_record(decided),
        "error": found.problem,
    }


_DESCRIBED: Final[Columns] = {
    "TransactionalId": "transactional_id",
    "ProducerId": "producer_id",
    "ProducerEpoch": "producer_epoch",
    "Coordinator": "coordinator",
    "State": "state",
    "TimeoutMs": lambda one: "none" if one["timeout_ms"] == NO_TIMEOUT_MS else one["timeout_ms"],
    "StartTime": lambda one: time_text(one["start_time_ms"]),
    "Duration(s)": lambda one: seconds_text(one["age_ms"]),
    "TopicPartitions": lambda one: ",".join(f"{each['topic']}-{each['partition']}" for each in one["partitions"]),
}


def _description_record(found: TransactionDescription | None, now_ms: int) -> Record:
    if found is None:
        unknown = ("state", "producer_id", "producer_epoch", "timeout_ms", "start_time_ms", "age_ms")
        return {**dict.fromkeys(unknown), "partitions": []}
    started = found.start_time_ms >= 0
    return {
        "state": found.status,
        "producer_id": found.producer_id,
        "producer_epoch": found.epoch,
        "timeout_ms": found.timeout_ms,
        "start_time_ms": found.start_time_ms if started else None,
        "age_ms": now_ms - found.start_time_ms if started else None,
        "partitions": [{"topic": topic, "partition": partition} for topic, partition in sorted(found.partitions)],
    }


_DECIDED: Final[Columns] = {
    "TransactionalId": "transactional_id",
    "Row": "database.transactional_id",
    "Fence": "database.fence",
    "Owner": "database.owner",
    "PreparedState": "database.prepared_state",
    "Recovery would": "database.decision",
    "Because": "database.why",
}


def show_described(described: Iterable[DescribedTransaction], records: Iterable[Record]) -> None:
    """The tables of `describe`: what Kafka knows, and what the database knows if one was given."""
    shown = list(records)
    if known := [one for one in shown if one["known"]]:
        show_records(_DESCRIBED, known)
    for one in described:
        if one.problem is not None:
            typer.echo(error_text(one.problem), err=True)
        elif one.is_unknown:
            where = "" if one.coordinator is None else f" (broker {one.coordinator})"
            say(f"{one.transactional_id}: unknown to its coordinator{where}", err=True)
        elif one.hides_topics:
            say(f"{one.transactional_id}: Kafka leaves out the topics of its transaction; {_GRANT_TOPICS}", err=True)
    if decided := [one for one in shown if one["database"] is not None]:
        typer.echo("In the database:")
        show_records(_DECIDED, decided)
        for message in dict.fromkeys(error_text(error) for one in decided if (error := one["database"]["error"])):
            typer.echo(message, err=True)


def hidden_topics(described: Iterable[DescribedTransaction]) -> list[DualWriteError]:
    """An error for each transaction whose topics Kafka leaves out."""
    return [
        BrokerAuthorizationError(
            f"Kafka leaves out the topics of the transaction of {one.transactional_id!r}.",
            transactional_id=one.transactional_id,
            cause="the principal lacks an ACL",
            next_step=_GRANT_TOPICS,
        )
        for one in described
        if one.hides_topics
    ]


# --- the producers of partitions --------------------------------------------------------------------------------------


def producers_record(found: PartitionProducers, now_ms: int) -> Record:
    """One partition of `describe-producers`, or one that `find-hanging` could not search."""
    return {**unreadable_record(found), "producers": [_producer_record(one, now_ms) for one in found.producers]}


def unreadable_record(found: PartitionProducers | PartitionEnd) -> Record:
    """A partition or topic, and why it could not be described, if so."""
    return {
        "topic": found.topic,
        "partition": None if found.partition < 0 else found.partition,
        "broker": found.broker,
        "error": found.problem,
    }


def _producer_record(found: ActiveProducer, now_ms: int) -> Record:
    return {
        "producer_id": found.producer_id,
        "producer_epoch": found.epoch,
        "last_sequence": found.last_sequence,
        "last_timestamp_ms": found.last_timestamp_ms,
        "age_ms": found.age_ms(now_ms),
        "coordinator_epoch": found.coordinator_epoch,
        "transaction_start_offset": found.transaction_start_offset,
    }


_PRODUCER: Final[Columns] = {
    "ProducerId": "producer_id",
    "ProducerEpoch": "producer_epoch",
    "StartOffset": "transaction_start_offset",
    "LastTimestamp": lambda one: time_text(one["last_timestamp_ms"]),
    "Duration(s)": lambda one: seconds_text(one["age_ms"]),
    "CoordinatorEpoch": "coordinator_epoch",
}


def show_producers(found: Iterable[PartitionProducers], records: Iterable[Record]) -> None:
    """The table of `describe-producers`."""
    partitions = list(found)
    rows = [{"partition": one["partition"], **each} for one in records for each in one["producers"]]
    if rows:
        show_records({"Partition": "partition", **_PRODUCER}, rows)
    elif any(one.problem is None for one in partitions):
        typer.echo("No producer has written here recently.")
    show_unreadable(partitions)


# --- hanging transactions ---------------------------------------------------------------------------------------------


def search_record(found: HangingSearch, now_ms: int) -> Record:
    """The fields of `find-hanging`."""
    return {
        "limit_ms": found.limit_ms,
        "searched_partitions": found.searched,
        "open_transactions": found.open,
        "hanging": [_hanging_record(one, now_ms) for one in found.hanging],
        "undecided": [_hanging_record(one, now_ms) for one in found.undecided],
        "unreadable": [producers_record(one, now_ms) for one in found.unreadable],
    }


def _hanging_record(found: HangingTransaction, now_ms: int) -> Record:
    examined = examined_record(Examined(found.opened, found, None), now_ms)
    return {**examined, "coordinator": found.coordinator}


def examined_record(found: Examined, now_ms: int) -> Record:
    """The transaction of `abort`."""
    return {
        "topic": found.opened.topic,
        "partition": found.opened.partition,
        "broker": found.opened.broker,
        **_producer_record(found.opened.producer, now_ms),
        **reason_record(None if found.verdict is None else found.verdict.reason),
        "transactional_id": found.name_at_kafka,
    }


HANGING: Final[Columns] = {
    "Topic": "topic",
    "Partition": "partition",
    **_PRODUCER,
    "TransactionalId": "transactional_id",
    "Because": lambda one: one["why"] or "its coordinator will end it",
}


def show_search(record: Record, unreadable: Iterable[PartitionProducers]) -> None:
    """The tables of `find-hanging`."""
    if record["hanging"]:
        show_records(HANGING, record["hanging"])
    else:
        typer.echo("No hanging transaction was found.")
    if record["undecided"]:
        typer.echo("These may hang; whether they do is not certain:")
        show_records(HANGING, record["undecided"])
    searched, opened = record["searched_partitions"], record["open_transactions"]
    typer.echo(
        f"Searched {counted(searched, 'partition')} with {counted(opened, 'open transaction')}; "
        f"examined those older than {record['limit_ms'] / 1000:g} s."
    )
    show_unreadable(unreadable)


# --- the transaction of a record --------------------------------------------------------------------------------------


def transaction_record(found: RecordTransaction, decided: Decided | None, now_ms: int) -> Record:
    """The record of `of`."""
    described = None if found.described is None else found.described.description
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
        "now": None if described is None else _description_record(described, now_ms),
        **reason_record(None if found.hanging is None else found.hanging.reason),
        "database": None if decided is None else decided_record(decided),
    }


def show_transaction(found: RecordTransaction, database: Record | None) -> None:
    """The lines of `of`; `database` is what the database knows about an open transaction."""
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
    if database is not None:
        lines.append(("In the database", decision_text(database)))
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


# --- where consumers wait ---------------------------------------------------------------------------------------------


# --- what is missing --------------------------------------------------------------------------------------------------


def show_unreadable(found: Iterable[PartitionProducers | PartitionEnd]) -> None:
    """The errors of partitions that could not be described."""
    for one in found:
        if one.problem is not None:
            typer.echo(error_text(one.problem), err=True)


def show_problems(problems: Iterable[BrokerProblem], hidden: Iterable[DualWriteError] = ()) -> None:
    """The brokers that did not respond, and the missing ACLs because of which Kafka may have left something out."""
    for problem in problems:
        say(f"{'Note' if problem.covered else 'The output is incomplete'}: {problem}", err=True)
    for error in hidden:
        typer.echo(error_text(error).replace("Error:", "Something may be missing:", 1), err=True)
