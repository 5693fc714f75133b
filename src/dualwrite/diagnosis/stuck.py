"""Where consumers wait for an open transaction, with what the database knows about it: one search, and its facts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any, Final

from dualwrite.admin import StuckPartition, StuckSearch, TransactionAdmin, WaitingGroup
from dualwrite.admin.decisions import Decided, Decisions
from dualwrite.diagnosis.facts import Fact, Facts
from dualwrite.errors import StoreError, UnknownGroupError
from dualwrite.stores.positions import Partition
from dualwrite.texts import now_ms, seconds_text


@dataclass(frozen=True)
class Stuck(StuckPartition):
    """A partition in which consumers wait, and what the database decided about the transaction; None if it was not asked."""

    decided: Decided | None = None


@dataclass(frozen=True)
class DecidedSearch:
    """The result of one search, with what the database knows about it."""

    found: StuckSearch
    stuck: list[Stuck]
    """The partitions in which consumers wait; the oldest transaction comes first."""

    unread: StoreError | None = None
    """The error that prevented reading the groups' positions in the database, if there was one."""

    @property
    def complete(self) -> bool:
        """Whether nothing is missing."""
        decided = (one.decided for one in self.stuck)
        return self.found.complete and self.unread is None and all(one is None or one.error is None for one in decided)


def decided_search(
    admin: TransactionAdmin,
    decisions: Callable[[], AbstractContextManager[Decisions]] | None,
    *,
    topic: str | None = None,
    group: str | None = None,
    longer_than: float = 0.0,
) -> DecidedSearch:
    """Search once. `decisions` is opened when the database is needed; None if no database was given.

    Raises:
        StoreError: The group is unknown to Kafka, and its positions in the database can't be read.
        DualWriteError: As for `TransactionAdmin.stuck`.
    """
    if decisions is None:
        found = admin.stuck(topic=topic, group=group, longer_than=longer_than)
        return DecidedSearch(found, _with_decisions(found, {}))
    unread: StoreError | None = None
    opened = ExitStack()
    decided = cache(lambda: opened.enter_context(decisions()))

    def stored(name: str) -> Mapping[Partition, int]:
        nonlocal unread
        try:
            return {} if unread is not None else decided().positions(name)  # the next group would run into the same timeout
        except StoreError as error:
            unread = error
            return {}

    with opened:
        try:
            found = admin.stuck(topic=topic, group=group, longer_than=longer_than, stored=stored)
        except UnknownGroupError as error:
            raise unread or error from None
        names = dict.fromkeys(name for one in found.partitions if (name := one.holder.transactional_id) is not None)
        return DecidedSearch(found, _with_decisions(found, decided().of_each(names) if names else {}), unread)


def _with_decisions(found: StuckSearch, decided: Mapping[str, Decided]) -> list[Stuck]:
    return [Stuck(one.end, one.holder, one.groups, decided.get(one.holder.transactional_id or "")) for one in found.partitions]


# --- the facts --------------------------------------------------------------------------------------------------------


DECIDED: Final = Facts(
    Fact("transactional_id", "Row", "row.transactional_id"),
    Fact("fence", "Fence", "row.fence"),
    Fact("owner", "Owner", "row.owner"),
    Fact("generation"),
    Fact("newest_generation", value="row.generation"),
    Fact("prepared_state", "PreparedState", "state"),
    Fact("decision", "Recovery would", "plan.decision"),
    Fact("why", "Because"),
    Fact("error"),
)
"""The facts about what the database knows of an id (`Decided`)."""

REASON: Final = Facts(Fact("reason", value="name"), Fact("why", value="value"))
"""Why a transaction hangs, or may hang (`Reason`)."""


def decision_words(found: Decided | None) -> str | None:
    """What recovery would do with an id, and why; None if no database was asked."""
    if found is None or found.plan is None or found.error is not None:
        return None if found is None else str(found.error or found.why)
    return f"{found.plan.decision.value}: {found.why}"


def holder_words(one: StuckPartition) -> Any:
    """The state of the transaction that a partition waits for, or why no coordinator ends it."""
    hanging, description = one.holder.hanging, one.holder.description
    if hanging is not None:
        return f"{'hangs' if hanging.is_conclusive else 'may hang'}: {hanging.value}"
    return None if description is None else description.status


def groups_words(one: StuckPartition) -> str:
    """The groups that wait, with their positions."""
    return ", ".join(f"{group.group_id} ({_place(group)})" for group in one.groups)


def _place(group: WaitingGroup) -> str:
    if group.has_no_position:
        return "no position at Kafka"
    if group.offset is None:
        return "its offsets are pending"
    return f"at {group.offset}{' in the database' if group.is_stored else ''}"


STUCK: Final = Facts(
    Fact("topic", "Topic", "end.topic"),
    Fact("partition", "Partition", "end.partition"),
    Fact("broker", value="end.broker"),
    Fact("last_stable_offset", "LastStableOffset", "end.last_stable_offset"),
    Fact("high_watermark", "HighWatermark", "end.high_watermark"),
    Fact("records_behind", "Records", "end.records_behind"),
    Fact("age_ms", "Duration(s)", lambda one: one.holder.age_ms(now_ms()), seconds_text),
    Fact("producer_id", "ProducerId", "holder.opened.producer.producer_id"),
    Fact("producer_epoch", "ProducerEpoch", "holder.opened.producer.epoch"),
    Fact("transaction_start_offset", value="holder.opened.producer.transaction_start_offset"),
    Fact("transactional_id", "TransactionalId", "holder.transactional_id"),
    Fact("coordinator", value="holder.coordinator"),
    Fact("state", "State", "holder.description.status", shown=holder_words),
    *REASON.at("holder.hanging"),
    Fact("groups", "Groups", lambda one: list(map(asdict, one.groups)), shown=groups_words),
    Fact("database", "Database", DECIDED.nested("decided"), shown=lambda one: decision_words(one.decided)),
)
