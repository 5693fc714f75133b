"""Where consumers wait for an open transaction, with what the database knows about it: one search, and its records."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from dualwrite.admin import Reason, StuckPartition, StuckSearch, TransactionAdmin
from dualwrite.admin.decisions import Decided, Decisions
from dualwrite.errors import StoreError, UnknownGroupError
from dualwrite.stores.positions import Partition

Record = Mapping[str, Any]
"""The fields that people and programs get, as docs/reference/json.md describes them."""


@dataclass(frozen=True)
class Look:
    """The result of one search, with what the database knows about it."""

    found: StuckSearch
    decided: Mapping[str, Decided]
    """What the database decided, by transactional id; empty without a database."""

    unread: StoreError | None = None
    """The error that prevented reading the groups' positions in the database, if there was one."""

    @property
    def complete(self) -> bool:
        """Whether nothing is missing."""
        return self.found.complete and self.unread is None and all(one.error is None for one in self.decided.values())

    def records(self, now_ms: int) -> list[Record]:
        """The fields of each stuck partition."""
        return [stuck_record(one, self.decided, now_ms) for one in self.found.partitions]


def look(
    admin: TransactionAdmin,
    decisions: Callable[[], Decisions] | None,
    *,
    topic: str | None = None,
    group: str | None = None,
    longer_than: float = 0.0,
) -> Look:
    """Search once. `decisions` opens the database when it is needed; None if no database was given.

    Raises:
        StoreError: The group is unknown to Kafka, and its positions in the database can't be read.
        DualWriteError: As for `TransactionAdmin.stuck`.
    """
    if decisions is None:
        return Look(admin.stuck(topic=topic, group=group, longer_than=longer_than), {})
    unread: StoreError | None = None

    def stored(name: str) -> Mapping[Partition, int]:
        nonlocal unread
        try:
            return {} if unread is not None else decisions().positions(name)  # the next group would run into the same timeout
        except StoreError as error:
            unread = error
            return {}

    try:
        found = admin.stuck(topic=topic, group=group, longer_than=longer_than, stored=stored)
    except UnknownGroupError as error:
        raise unread or error from None
    names = dict.fromkeys(name for one in found.partitions if (name := one.holder.transactional_id) is not None)
    return Look(found, decisions().of_each(names) if names else {}, unread)


# --- records ----------------------------------------------------------------------------------------------------------


def stuck_record(found: StuckPartition, decided: Mapping[str, Decided], now_ms: int) -> Record:
    """One partition of `stuck`."""
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
        "state": None if holder.description is None else holder.description.status,
        **reason_record(holder.hanging),
        "groups": [asdict(one) for one in found.groups],
        "database": None if database is None else decided_record(database),
    }


def decision_text(database: Record) -> str:
    """What recovery would do with an id, and why."""
    if database["error"] is not None:
        return str(database["error"])
    decision, why = database["decision"], database["why"]
    return str(why) if decision is None else f"{decision.value}: {why}"


def decided_record(found: Decided) -> Record:
    """What the database knows about an id."""
    row = found.row
    return {
        "transactional_id": None if row is None else row.transactional_id,
        "fence": None if row is None else row.fence,
        "owner": None if row is None else row.owner,
        "generation": found.generation,
        "newest_generation": None if row is None else row.generation,
        "prepared_state": found.state,
        "decision": None if found.plan is None else found.plan.decision,
        "why": found.why,
        "error": found.error,
    }


def reason_record(found: Reason | None) -> Record:
    """Why a transaction hangs, or may hang; nothing if it does not."""
    return {"reason": None if found is None else found.name, "why": None if found is None else found.value}


# --- the same in words ------------------------------------------------------------------------------------------------


def holder_words(record: Record) -> Any:
    """The state of the transaction that a partition waits for, or why no coordinator ends it."""
    if record["reason"] is None:
        return record["state"]
    return f"{'hangs' if Reason[record['reason']].is_conclusive else 'may hang'}: {record['why']}"


def groups_words(record: Record) -> str:
    """The groups that wait, with their positions."""
    return ", ".join(f"{one['group_id']} ({_place(one)})" for one in record["groups"])


def _place(group: Record) -> str:
    if group["has_no_position"]:
        return "no position at Kafka"
    if group["offset"] is None:
        return "its offsets are pending"
    return f"at {group['offset']}{' in the database' if group['is_stored'] else ''}"
