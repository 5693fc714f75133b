"""Finds what blocks `read_committed` consumers: the partitions, the open transactions, and the groups that wait there."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from dualwrite.admin.examiner import Examiner
from dualwrite.admin.hanging import CoordinatorSide, HangingTransaction, Name, OpenTransaction, Reason, open_transactions
from dualwrite.admin.waiting import Groups, StoredPositions, WaitingGroup
from dualwrite.errors import DualWriteError, UnknownTopicError
from dualwrite.kafka.admin.brokers import Brokers
from dualwrite.kafka.admin.facts import RUNNING, BrokerProblem
from dualwrite.kafka.admin.hidden import note_hidden_groups, note_hidden_topics
from dualwrite.kafka.admin.leaders import Key
from dualwrite.kafka.admin.offsets import PartitionEnd, partition_ends
from dualwrite.kafka.admin.producers import producers_of
from dualwrite.state import TransactionDescription


@dataclass(frozen=True, slots=True)
class Holder:
    """The oldest open transaction of a partition: consumers wait for its end.

    Args:
        opened: The transaction in the partition.
        transactional_id: The id that has its producer id; None if no coordinator lists one.
        coordinator: The node id of that id's coordinator, if known.
        description: The coordinator's description of the id, if it knows it.
        hanging: Why no coordinator will end it, or might not end it; None if its coordinator will end it.
    """

    opened: OpenTransaction
    transactional_id: str | None = None
    coordinator: int | None = None
    description: TransactionDescription | None = None
    hanging: Reason | None = None

    def age_ms(self, now_ms: int) -> int | None:
        """Milliseconds since it began according to its coordinator; if it hangs, since its last message. None if unknown."""
        described = self.description
        if self.hanging is None and described is not None and described.status in RUNNING and described.start_time_ms >= 0:
            return now_ms - described.start_time_ms
        return self.opened.producer.age_ms(now_ms)


@dataclass(frozen=True, slots=True)
class StuckPartition:
    """A partition in which `read_committed` consumers wait.

    Args:
        end: Its last stable offset and high watermark.
        holder: The transaction that they wait for.
        groups: The groups with members that have not read past the last stable offset, sorted.
    """

    end: PartitionEnd
    holder: Holder
    groups: tuple[WaitingGroup, ...] = ()


@dataclass(frozen=True, slots=True)
class StuckSearch:
    """The result of `TransactionAdmin.stuck`.

    Args:
        partitions: The partitions where consumers wait; the oldest transaction comes first.
        searched: How many partitions were examined.
        unreadable: The partitions and topics that could not be examined: it is not known whether consumers wait there.
        problems: The brokers that did not respond.
        hidden: The missing ACLs because of which Kafka may have left something out, as errors that name them.
    """

    partitions: tuple[StuckPartition, ...]
    searched: int
    unreadable: tuple[PartitionEnd, ...] = ()
    problems: tuple[BrokerProblem, ...] = ()
    hidden: tuple[DualWriteError, ...] = ()

    @property
    def complete(self) -> bool:
        """Whether every partition was examined, every broker responded, and no missing ACL hides anything."""
        return not self.unreadable and not self.hidden and all(problem.covered for problem in self.problems)


def find_stuck(
    brokers: Brokers, *, topic: str | None, group: str | None, longer_than_ms: int, stored: StoredPositions | None
) -> StuckSearch:
    """See `TransactionAdmin.stuck`."""
    groups = Groups(brokers, group, stored)
    if topic is None:
        note_hidden_topics(brokers)
    if group is None:
        note_hidden_groups(brokers)
        ends = list(partition_ends(brokers, None if topic is None else [topic]))
    else:
        keys = {key for key in groups.partitions() if topic in (None, key[0])}
        topics = sorted({name for name, _ in keys})
        ends = [end for end in partition_ends(brokers, topics) if _concerns(end, keys)] if topics else []
    blocked, unread = _blocked(brokers, {(end.topic, end.partition): end for end in ends if end.records_behind})
    now = int(time.time() * 1000)
    long = [one for one in blocked if _age(one, now) >= longer_than_ms]
    waiting = groups.waiting({(one.end.topic, one.end.partition): one.end for one in long})
    found = [replace(one, groups=tuple(waiting.get((one.end.topic, one.end.partition), ()))) for one in long]
    return StuckSearch(
        partitions=tuple(sorted(found, key=lambda one: (-_age(one, now), one.end.topic, one.end.partition))),
        searched=sum(end.problem is None for end in ends) - len(unread),
        unreadable=(*(end for end in ends if end.problem is not None), *unread),
        problems=brokers.problems,
        hidden=brokers.hidden,
    )


def _concerns(end: PartitionEnd, keys: Collection[Key]) -> bool:
    """Whether it is one of the partitions, or their topic can't be described. A deleted topic blocks no consumer."""
    if end.partition < 0:
        return not isinstance(end.problem, UnknownTopicError)
    return (end.topic, end.partition) in keys


def _age(found: StuckPartition, now_ms: int) -> int:
    age = found.holder.age_ms(now_ms)
    if age is None:
        return now_ms  # a transaction of unknown age is not left out
    return max(age, 0)  # the coordinator's clock may be ahead of ours


def _blocked(brokers: Brokers, waiting: Mapping[Key, PartitionEnd]) -> tuple[list[StuckPartition], list[PartitionEnd]]:
    """The partitions that an open transaction blocks, with the coordinators' descriptions; and those not described."""
    oldest: dict[Key, OpenTransaction] = {}
    unread = []
    for described in producers_of(brokers, waiting):
        if described.problem is not None:
            unread.append(PartitionEnd(described.topic, described.partition, described.broker, problem=described.problem))
            continue
        opened = open_transactions(described)
        if opened:
            oldest[described.topic, described.partition] = min(opened, key=_start)
    holders = _holders(brokers, list(oldest.values())) if oldest else {}
    found = [StuckPartition(waiting[key], holders[opened.name]) for key, opened in oldest.items() if opened.name in holders]
    return found, unread


def _holders(brokers: Brokers, opened: Sequence[OpenTransaction]) -> dict[Name, Holder]:
    """The holders by the name of their transaction, without those that have ended in the meantime."""
    examiner = Examiner(brokers)
    first = examiner.describe(opened)
    found = {one.opened.name: _hanging(one) for one in examiner.hanging(opened, first)}
    found |= _healthy(first, opened)
    cleared = [one for one in opened if one.name not in found]  # the second check found that they don't hang
    if cleared:
        side = examiner.describe(cleared)
        verdicts = filter(None, map(side.verdict, cleared))
        found |= {one.opened.name: _hanging(one) for one in verdicts if one.reason in _UNRELIABLE}
        found |= _healthy(side, cleared)
    return found


_UNRELIABLE: Final = (Reason.NOT_DESCRIBED, Reason.SEVERAL_COORDINATORS, Reason.OLDER_EPOCH)
"""About a transaction that an earlier look has cleared; one that is no longer listed has probably ended."""


def _hanging(found: HangingTransaction) -> Holder:
    return Holder(found.opened, found.transactional_id, found.coordinator, found.description, found.reason)


def _healthy(side: CoordinatorSide, opened: Sequence[OpenTransaction]) -> dict[Name, Holder]:
    """The transactions that their coordinators will end."""
    found: dict[Name, Holder] = {}
    for one in opened:
        described = side.description(one)
        if described is not None and side.verdict(one) is None:
            found[one.name] = Holder(one, described.transactional_id, described.coordinator, described.description)
    return found


def _start(opened: OpenTransaction) -> int:
    start = opened.producer.transaction_start_offset
    assert start is not None
    return start
