"""Finds the consumer groups that wait in a stuck partition, by their positions: at Kafka, or stored with their data."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property

from dualwrite.admin.facts import BrokerProblem, Key, OpenTransaction, Search
from dualwrite.admin.groups import (
    GROUP_OFFSETS_TOPIC,
    CommittedOffset,
    GroupListing,
    assigned_partitions,
    committed_offsets,
    list_groups,
    partition_of_group,
)
from dualwrite.admin.hanging import Holder, holders_of
from dualwrite.admin.listing import note_hidden_groups, note_hidden_topics
from dualwrite.admin.partitions import PartitionEnd, partition_ends, producers_of
from dualwrite.admin.requests import DENIED, Brokers, denied
from dualwrite.errors import UnknownGroupError, UnknownTopicError

StoredPositions = Callable[[str], Mapping[Key, int]]
"""Returns the next offset in each partition for a group that does not keep its positions at Kafka; empty for other groups."""


@dataclass(frozen=True, slots=True, order=True)
class WaitingGroup:
    """A consumer group that is blocked.

    Args:
        group_id: The group.
        offset: Its position; None if the position is pending in the transaction itself, so that the group's members can't
            start (KIP-447), or if there is no position.
        is_stored: Whether the position is stored with the data, and not at Kafka.
        has_no_position: Whether a member has the partition, but neither Kafka nor `StoredPositions` has a position: the
            member may not have read anything yet.
    """

    group_id: str
    offset: int | None
    is_stored: bool = False
    has_no_position: bool = False


class Groups:
    """All consumer groups with members and their positions; or only one group, with or without members.

    The positions at Kafka of a group with `stored` positions are only for monitoring, and may be older.

    Raises:
        UnknownGroupError: There is no such group.
    """

    def __init__(self, brokers: Brokers, group: str | None, stored: StoredPositions | None) -> None:
        self._brokers = brokers
        self._only = group
        self._stored: StoredPositions = cache(stored or (lambda _: {}))
        self._homes = self._number_of_homes()
        listed = list_groups(brokers)
        self._listed = [one for one in listed if (one.has_members if group is None else one.group_id == group)]
        self._names = [one.group_id for one in self._listed]
        if group is not None and not self._listed:
            if not self._stored(group) and not brokers.problems:
                raise UnknownGroupError(
                    f"There is no consumer group {group!r}.",
                    cause="its name is wrong, or the principal may not describe it (Kafka then leaves it out)",
                    next_step="check the name, and the ACL Describe on the group",
                )
            self._names = [group]

    def partitions(self) -> set[Key]:
        """The partitions that the groups have a position in or a member for, and those in which Kafka stores the positions."""
        keys = {one.key for one in committed_offsets(self._brokers, self._listed)}
        keys |= {key for name in self._names for key in self._stored(name)}
        keys |= {key for assigned in self._assigned.values() for key in assigned}
        return keys | {(GROUP_OFFSETS_TOPIC, self._home(group)) for group in self._listed if self._homes}

    def waiting(self, ends: Mapping[Key, PartitionEnd]) -> Mapping[Key, Sequence[WaitingGroup]]:
        """The groups that have not read past the last stable offset of these partitions, sorted."""
        data = {key for key in ends if key[0] != GROUP_OFFSETS_TOPIC}
        found: dict[Key, list[WaitingGroup]] = defaultdict(list)
        for key, one in self._positions(data) if data else ():
            if _waits(one, ends[key]):
                found[key].append(one)
        for index, one in self._pending({partition for topic, partition in ends if topic == GROUP_OFFSETS_TOPIC}):
            found[GROUP_OFFSETS_TOPIC, index].append(one)
        return {key: sorted(set(groups), key=lambda group: group.group_id) for key, groups in found.items()}

    def _positions(self, keys: Collection[Key]) -> Iterator[tuple[Key, WaitingGroup]]:
        """The groups' positions in these partitions; then the groups that have a member for a partition, but no position."""
        stored = {(name, key): offset for name in self._names for key, offset in self._stored(name).items() if key in keys}
        positioned = set(stored)
        for one in committed_offsets(self._brokers, self._listed, keys):
            positioned.add((one.group_id, one.key))
            if (one.group_id, one.key) not in stored:
                yield one.key, WaitingGroup(one.group_id, one.offset)
        for (name, key), offset in stored.items():
            yield key, WaitingGroup(name, offset, is_stored=True)
        for name, assigned in self._assigned.items():
            for key in assigned & set(keys):
                if (name, key) not in positioned:
                    yield key, WaitingGroup(name, None, has_no_position=True)

    def _pending(self, indexes: Collection[int]) -> Iterator[tuple[int, WaitingGroup]]:
        """The groups with pending positions in partitions of `__consumer_offsets`."""
        concerned = [group for group in self._listed if self._homes and self._home(group) in indexes]
        for one in self._stable(concerned) if concerned else ():
            if one.offset is None:
                yield partition_of_group(one.group_id, self._homes), WaitingGroup(one.group_id, None)

    def _stable(self, groups: Sequence[GroupListing]) -> Iterator[CommittedOffset]:
        """The groups' stable positions, requested for named partitions.

        If all positions of a group are requested, Kafka leaves out partitions that had no position before the transaction. So
        the partitions of the topics that a group consumes are named; for a group without a known topic, and if only one group
        is examined, every partition of the cluster.
        """
        topics: dict[str, set[str]] = defaultdict(set)
        for one in committed_offsets(self._brokers, groups):
            topics[one.group_id].add(one.key[0])
        for name, assigned in self._assigned.items():
            topics[name] |= {topic for topic, _ in assigned}
        by_name = [group for group in groups if self._only is None and topics[group.group_id]]
        others = [group for group in groups if group not in by_name]
        if by_name:
            known = sorted({topic for group in by_name for topic in topics[group.group_id]})
            partitions: dict[str, list[Key]] = defaultdict(list)
            for found in self._brokers.view(known).partitions:
                partitions[found.topic].append(found.key)
            keys = {
                group.group_id: [key for topic in sorted(topics[group.group_id]) for key in partitions[topic]]
                for group in by_name
            }
            yield from committed_offsets(self._brokers, by_name, keys, stable=True)
        if others:
            every = {one.key for one in self._brokers.view(None).partitions if not one.topic.startswith("__")}
            yield from committed_offsets(self._brokers, others, every, stable=True)

    @cached_property
    def _assigned(self) -> Mapping[str, set[Key]]:
        return assigned_partitions(self._brokers, [group for group in self._listed if group.has_members])

    def _home(self, group: GroupListing) -> int:
        """The partition of `__consumer_offsets` that has a group's positions."""
        return partition_of_group(group.group_id, self._homes)

    def _number_of_homes(self) -> int:
        """The number of partitions of `__consumer_offsets`; 0 if there is no such topic. Records those without a leader."""
        seen = self._brokers.view([GROUP_OFFSETS_TOPIC])
        lost = [found.partition for found in seen.partitions if found.leader is None]
        if lost:
            named = ", ".join(map(str, lost))
            self._brokers.note(
                BrokerProblem(None, None, f"{GROUP_OFFSETS_TOPIC} {named} without a leader: their consumer groups are missing")
            )
        if self._only is not None and seen.refused.get(GROUP_OFFSETS_TOPIC) in DENIED:
            self._brokers.hide(GROUP_OFFSETS_TOPIC, denied("Metadata", seen.refused[GROUP_OFFSETS_TOPIC], GROUP_OFFSETS_TOPIC))
        return len(seen.partitions)


def _waits(group: WaitingGroup, end: PartitionEnd) -> bool:
    if group.has_no_position:
        return True
    return group.offset is not None and end.last_stable_offset is not None and group.offset <= end.last_stable_offset


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
class StuckSearch(Search):
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

    @property
    def unexamined(self) -> Collection[object]:
        """The partitions that could not be examined."""
        return self.unreadable


def find_stuck(
    brokers: Brokers, *, topic: str | None, group: str | None, longer_than_ms: int, stored: StoredPositions | None
) -> StuckSearch:
    """As `TransactionAdmin.stuck`."""
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
    blocked, unread = _blocked(brokers, {end.key: end for end in ends if end.records_behind})
    now = int(time.time() * 1000)
    long = [one for one in blocked if _age(one, now) >= longer_than_ms]
    waiting = groups.waiting({one.end.key: one.end for one in long})
    found = [replace(one, groups=tuple(waiting.get(one.end.key, ()))) for one in long]
    return StuckSearch(
        partitions=tuple(sorted(found, key=lambda one: (-_age(one, now), one.end.key))),
        searched=sum(end.problem is None for end in ends) - len(unread),
        unreadable=(*(end for end in ends if end.problem is not None), *unread),
        problems=brokers.problems,
        hidden=brokers.hidden,
    )


def _concerns(end: PartitionEnd, keys: Collection[Key]) -> bool:
    """Whether it is one of the partitions, or their topic can't be described. A deleted topic blocks no consumer."""
    if end.partition < 0:
        return not isinstance(end.problem, UnknownTopicError)
    return end.key in keys


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
        if described.opened:
            oldest[described.key] = min(described.opened, key=lambda one: one.producer.transaction_start_offset or 0)
    holders = {one.opened.name: one for one in holders_of(brokers, list(oldest.values()))}
    found = [StuckPartition(waiting[key], holders[opened.name]) for key, opened in oldest.items() if opened.name in holders]
    return found, unread
