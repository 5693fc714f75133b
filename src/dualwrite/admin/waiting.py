"""The consumer groups that wait in a stuck partition, by their positions: at Kafka, or stored elsewhere with the data."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from dualwrite.errors import UnknownGroupError
from dualwrite.kafka.admin.brokers import Brokers
from dualwrite.kafka.admin.groups import (
    GROUP_OFFSETS_TOPIC,
    CommittedOffset,
    GroupListing,
    committed_offsets,
    list_groups,
    partition_of_group,
)
from dualwrite.kafka.admin.leaders import Key
from dualwrite.kafka.admin.offsets import PartitionEnd

StoredPositions = Callable[[str], Mapping[Key, int]]
"""The next offset in each partition of a group that keeps its positions elsewhere than at Kafka; empty for others."""


@dataclass(frozen=True, slots=True, order=True)
class WaitingGroup:
    """A consumer group that can't read on.

    Args:
        group_id: The group.
        offset: Its position; None if that is pending in the transaction itself, so that the group's members can't begin
            (KIP-447).
        is_stored: Whether the position is one that is stored with the data, not the one at Kafka.
    """

    group_id: str
    offset: int | None
    is_stored: bool = False


class Groups:
    """Consumer groups and their positions.

    Args:
        brokers: The brokers, for this call.
        group: Only this group, with or without members; None for all with members.
        stored: Positions that are not kept at Kafka. A group's position there is for monitors only, and may be older.

    Raises:
        UnknownGroupError: There is no such group.
        BrokerUnavailableError, BrokerAuthorizationError: As for `Brokers.view`.
    """

    def __init__(self, brokers: Brokers, group: str | None, stored: StoredPositions | None) -> None:
        self._brokers = brokers
        self._stored = cache(stored or _nothing)
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
        """The partitions in which the groups have a position, and those in which Kafka stores the positions."""
        keys = {(one.topic, one.partition) for one in committed_offsets(self._brokers, self._listed)}
        keys |= {key for name in self._names for key in self._stored(name)}
        return keys | {(GROUP_OFFSETS_TOPIC, index) for index in self._homes()}

    def waiting(self, ends: Mapping[Key, PartitionEnd]) -> Mapping[Key, Sequence[WaitingGroup]]:
        """The groups that have not read past the last stable offset of these partitions, sorted.

        Args:
            ends: The stuck partitions.
        """
        data = {key for key in ends if key[0] != GROUP_OFFSETS_TOPIC}
        found: dict[Key, list[WaitingGroup]] = defaultdict(list)
        for key, one in self._positions(data) if data else ():
            if _waits(one, ends[key]):
                found[key].append(one)
        for index, one in self._pending({partition for topic, partition in ends if topic == GROUP_OFFSETS_TOPIC}):
            found[GROUP_OFFSETS_TOPIC, index].append(one)
        return {key: sorted(set(groups), key=_by_name) for key, groups in found.items()}

    def _positions(self, keys: Collection[Key]) -> Iterator[tuple[Key, WaitingGroup]]:
        """The groups' positions in these partitions."""
        stored = {(name, key): offset for name in self._names for key, offset in self._stored(name).items() if key in keys}
        for one in committed_offsets(self._brokers, self._listed, keys):
            key = (one.topic, one.partition)
            if (one.group_id, key) not in stored:
                yield key, WaitingGroup(one.group_id, one.offset)
        for (name, key), offset in stored.items():
            yield key, WaitingGroup(name, offset, is_stored=True)

    def _pending(self, indexes: Collection[int]) -> Iterator[tuple[int, WaitingGroup]]:
        """The groups with pending positions in partitions of `__consumer_offsets`."""
        home = {group.group_id: index for index, groups in self._homes().items() if index in indexes for group in groups}
        concerned = [group for group in self._listed if group.group_id in home]
        for one in self._stable(concerned) if concerned else ():
            if one.offset is None:
                yield home[one.group_id], WaitingGroup(one.group_id, None)

    def _stable(self, groups: Sequence[GroupListing]) -> Iterable[CommittedOffset]:
        """Their stable positions in every partition by name: asked for all, Kafka leaves out what had no position before."""
        every = {(one.topic, one.partition) for one in self._brokers.view(None).partitions}
        return committed_offsets(self._brokers, groups, {key for key in every if not key[0].startswith("__")}, stable=True)

    def _homes(self) -> dict[int, list[GroupListing]]:
        """The groups by the partition of `__consumer_offsets` that has their positions."""
        number = len(self._brokers.view([GROUP_OFFSETS_TOPIC]).partitions)
        found: dict[int, list[GroupListing]] = defaultdict(list)
        for group in self._listed if number else ():
            found[partition_of_group(group.group_id, number)].append(group)
        return found


def _nothing(group: str) -> Mapping[Key, int]:
    del group
    return {}


def _waits(group: WaitingGroup, end: PartitionEnd) -> bool:
    return group.offset is not None and end.last_stable_offset is not None and group.offset <= end.last_stable_offset


def _by_name(group: WaitingGroup) -> str:
    return group.group_id
