"""Consumer groups and their committed offsets, from all group coordinators (ListGroups, OffsetFetch)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from kafka.protocol.admin import ListGroupsRequest
from kafka.protocol.consumer import OffsetFetchRequest

from dualwrite.errors import BrokerUnavailableError
from dualwrite.kafka.admin.brokers import PASSING, Brokers, TryAgainError, batches, check
from dualwrite.kafka.admin.leaders import Key, by_topic
from dualwrite.kafka.client.config import Address
from dualwrite.kafka.client.connection import Connection
from dualwrite.kafka.client.error_codes import ErrorCode, error_name

GROUP_OFFSETS_TOPIC: Final = "__consumer_offsets"
_NEWEST_BY_NAME: Final = 9  # OffsetFetch v10 names topics by id
_SEVERAL_GROUPS: Final = 8
_WITHOUT_MEMBERS: Final = ("Empty", "Dead")
_JAVA_FACTOR: Final = 31


@dataclass(frozen=True, slots=True, order=True)
class GroupListing:
    """A consumer group that its coordinator listed.

    Args:
        group_id: The group.
        coordinator: The node id of its coordinator.
        state: Kafka's name for its state, such as Stable.
    """

    group_id: str
    coordinator: int
    state: str

    @property
    def has_members(self) -> bool:
        """Whether somebody consumes in it."""
        return self.state not in _WITHOUT_MEMBERS


@dataclass(frozen=True, slots=True, order=True)
class CommittedOffset:
    """A group's position in one partition.

    Args:
        group_id: The group.
        topic: The topic.
        partition: The partition.
        offset: The next offset to read; None if it is pending in an open transaction (KIP-447).
    """

    group_id: str
    topic: str
    partition: int
    offset: int | None


def list_groups(brokers: Brokers) -> list[GroupListing]:
    """The consumer groups; a broker that does not answer is in `brokers.problems`.

    Raises:
        BrokerUnavailableError, BrokerAuthorizationError: As for `Brokers.view`.
    """
    live = brokers.view([]).brokers

    def conclude(node: int, answer: Any) -> list[GroupListing]:
        check(answer.error_code, "ListGroups")
        return [
            GroupListing(one.group_id, node, one.group_state) for one in answer.groups if one.protocol_type in ("consumer", "")
        ]

    found = brokers.ask(live, {node: lambda _: ListGroupsRequest() for node in live}, conclude)
    return sorted(group for groups in found.values() for group in groups)


def committed_offsets(
    brokers: Brokers, groups: Sequence[GroupListing], keys: Collection[Key] | None = None, *, stable: bool = False
) -> Iterator[CommittedOffset]:
    """The positions of groups.

    Args:
        brokers: The brokers, for this call.
        groups: The groups.
        keys: The partitions; None for all that a group has a position in.
        stable: Ask for stable positions: one that a transaction is about to change is pending, without an offset.

    Raises:
        BrokerUnavailableError, BrokerAuthorizationError: As for `Brokers.view`.
    """
    live = brokers.view([]).brokers
    by_node: dict[int, list[str]] = defaultdict(list)
    for group in groups:
        by_node[group.coordinator].append(group.group_id)
    for node, names in by_node.items():
        if node not in live:
            continue
        for batch in batches(names):
            yield from _committed(brokers, live, node, batch, keys, stable=stable)


def partition_of_group(group_id: str, partitions: int) -> int:
    """The partition of `__consumer_offsets` that has a group's positions: Java's hash of its id, modulo the partitions."""
    units = group_id.encode("utf-16-be")
    number = 0
    for at in range(0, len(units), 2):
        number = (_JAVA_FACTOR * number + int.from_bytes(units[at : at + 2], "big")) % 2**32
    signed = number - 2**32 if number >= 2**31 else number
    return 0 if signed == -(2**31) else abs(signed) % partitions


def _committed(
    brokers: Brokers,
    live: Mapping[int, Address],
    node: int,
    names: Sequence[str],
    keys: Collection[Key] | None,
    *,
    stable: bool,
) -> list[CommittedOffset]:
    def conclude(_: int, answer: Any) -> list[CommittedOffset]:
        found = []
        for group in answer.groups:
            if group.error_code in PASSING:
                raise TryAgainError(f"OffsetFetch answered {error_name(group.error_code)}")
            found += [
                CommittedOffset(
                    group.group_id, topic.name, one.partition_index, one.committed_offset if one.error_code == 0 else None
                )
                for topic in group.topics
                for one in topic.partitions
                if (one.error_code == 0 and one.committed_offset >= 0) or one.error_code == ErrorCode.UNSTABLE_OFFSET_COMMIT
            ]
        return found

    return brokers.ask(live, {node: _request(names, keys, stable=stable)}, conclude).get(node, [])


def _request(names: Sequence[str], keys: Collection[Key] | None, *, stable: bool) -> Callable[[Connection], Any]:
    def made(connection: Connection) -> Any:
        version = min(_NEWEST_BY_NAME, connection.version_of(OffsetFetchRequest))
        if version < _SEVERAL_GROUPS:
            raise BrokerUnavailableError(f"{connection.address} is older than Apache Kafka 3.0: no OffsetFetch v8.")
        group_request = OffsetFetchRequest.OffsetFetchRequestGroup
        topics = None
        if keys is not None:
            topic_request = group_request.OffsetFetchRequestTopics
            topics = [topic_request(name=topic, partition_indexes=indexes) for topic, indexes in by_topic(keys).items()]
        return OffsetFetchRequest(
            version=version, groups=[group_request(group_id=name, topics=topics) for name in names], require_stable=stable
        )

    return made
