"""The JSON of `dualwrite transactions` and `stuck`; docs/reference/json.md describes it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from dualwrite.admin import (
    ActiveProducer,
    BrokerProblem,
    DescribedTransaction,
    Examined,
    HangingSearch,
    HangingTransaction,
    PartitionProducers,
    RecordTransaction,
    StuckPartition,
    StuckSearch,
    TransactionListing,
)
from dualwrite.cli.decided import Decided
from dualwrite.cli.json_documents import error_json, versioned
from dualwrite.errors import DualWriteError
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
