"""The JSON of `dualwrite transactions`: one schema, with a version, which docs/reference/transactions-json.md describes.

A field may be added within a version; a change of what exists raises it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from dualwrite.admin import (
    ActiveProducer,
    BrokerProblem,
    DescribedTransaction,
    HangingSearch,
    HangingTransaction,
    PartitionProducers,
    TransactionListing,
)
from dualwrite.cli.decided import Decided
from dualwrite.errors import BrokerError, DualWriteError
from dualwrite.state import TransactionDescription, state_text

VERSION: Final = 1


def document(
    command: str, found: Mapping[str, Any], *, complete: bool, problems: Iterable[BrokerProblem] = ()
) -> dict[str, Any]:
    """A whole answer.

    Args:
        command: The command's name.
        found: The command's own fields.
        complete: Whether nothing is missing.
        problems: The brokers that did not answer.
    """
    return {
        "version": VERSION,
        "command": command,
        "complete": complete,
        **found,
        "problems": [
            {"broker": one.broker, "address": one.address, "reason": one.reason, "covered": one.covered} for one in problems
        ],
    }


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
    if found is None:
        return None
    return {
        "kind": type(found).__name__,
        "code": getattr(found, "name", None) if isinstance(found, BrokerError) else None,
        "message": str(found),
    }
