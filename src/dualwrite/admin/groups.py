"""Consumer groups, their committed offsets and the partitions of their members, from all group coordinators."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from dualwrite.admin.facts import BrokerProblem, Key
from dualwrite.admin.partitions import by_topic
from dualwrite.admin.requests import DENIED, TRANSIENT, Brokers, batches, check, denied
from dualwrite.errors import BrokerError, BrokerUnavailableError
from dualwrite.kafka.client.broker_connection import Connection
from dualwrite.kafka.client.fields import Fields, KafkaProtocolError, Request
from dualwrite.kafka.client.kafka_errors import ErrorCode, error_name
from dualwrite.kafka.client.messages_generated import (
    ConsumerGroupDescribeRequest,
    ConsumerGroupDescribeResponse,
    ConsumerProtocolAssignment,
    DescribeGroupsRequest,
    DescribeGroupsResponse,
    ListGroupsRequest,
    ListGroupsResponse,
    OffsetFetchRequest,
)
from dualwrite.kafka.client.retries import TryAgainError

GROUP_OFFSETS_TOPIC: Final = "__consumer_offsets"
_WITHOUT_MEMBERS: Final = ("Empty", "Dead")
_JAVA_FACTOR: Final = 31

CONSUMER: Final = "consumer"
STREAMS: Final = "streams"
_PROTOCOLS: Final = (CONSUMER, STREAMS, "")

Keys = Collection[Key] | Mapping[str, Collection[Key]] | None
"""The same partitions for every group, or partitions by group id; None for all in which a group has a position."""

_VERSION_BYTES: Final = 2
_ASSIGNMENT_VERSION: Final = 3  # equal to the older ones; newer ones must begin with the same fields
_CLASSIC: Final = "consumer"  # the protocol type of classic groups whose members are consumers


@dataclass(frozen=True, slots=True, order=True)
class GroupListing:
    """A consumer group that its coordinator, a node, listed; with Kafka's name for its state, such as Stable."""

    group_id: str
    coordinator: int
    state: str
    kind: str = ""
    """CONSUMER (KIP-848) or STREAMS (KIP-1071); anything else is a classic group."""

    @property
    def has_members(self) -> bool:
        """Whether the group has members."""
        return self.state not in _WITHOUT_MEMBERS


@dataclass(frozen=True, slots=True, order=True)
class CommittedOffset:
    """A group's position in one partition."""

    group_id: str
    key: Key
    offset: int | None
    """The next offset to read; None if it is pending in an open transaction (KIP-447)."""


def list_groups(brokers: Brokers) -> list[GroupListing]:
    """The consumer groups; a broker that does not respond is in `brokers.problems`."""
    live = brokers.view([]).brokers

    def conclude(node: int, response: ListGroupsResponse) -> list[GroupListing]:
        check(response.error_code, "ListGroups")
        return [
            GroupListing(one.group_id, node, one.group_state, one.group_type.lower())
            for one in response.groups
            if one.protocol_type in _PROTOCOLS
        ]

    found = brokers.request(live, {node: lambda _: ListGroupsRequest() for node in live}, conclude)
    return sorted(group for groups in found.values() for group in groups)


def partition_of_group(group_id: str, partitions: int) -> int:
    """The partition of `__consumer_offsets` that stores a group's positions: Java's hash of the id, modulo the partitions."""
    units = group_id.encode("utf-16-be")
    number = 0
    for at in range(0, len(units), 2):
        number = (_JAVA_FACTOR * number + int.from_bytes(units[at : at + 2], "big")) % 2**32
    signed = number - 2**32 if number >= 2**31 else number
    return 0 if signed == -(2**31) else abs(signed) % partitions


def committed_offsets(
    brokers: Brokers, groups: Iterable[GroupListing], keys: Keys = None, *, stable: bool = False
) -> Iterator[CommittedOffset]:
    """The positions of groups; if `stable`, one that an open transaction may change has the offset None (KIP-447)."""
    group_request = OffsetFetchRequest.OffsetFetchRequestGroup
    topic_request = group_request.OffsetFetchRequestTopics

    def topics(name: str) -> list[OffsetFetchRequest.OffsetFetchRequestGroup.OffsetFetchRequestTopics] | None:
        wanted = keys[name] if isinstance(keys, Mapping) else keys
        if wanted is None:
            return None
        return [topic_request(name=topic, partition_indexes=indexes) for topic, indexes in by_topic(wanted).items()]

    def request(names: list[str], connection: Connection) -> OffsetFetchRequest:
        if not connection.supports(OffsetFetchRequest, OffsetFetchRequest.OLDEST):
            raise BrokerUnavailableError(f"{connection.address} is older than Apache Kafka 3.0: no OffsetFetch v8.")
        asked = [group_request(group_id=name, topics=topics(name)) for name in names]
        return OffsetFetchRequest(groups=asked, require_stable=stable)

    for group in _described(brokers, groups, "OffsetFetch", request):
        for topic in group.topics:
            for one in topic.partitions:
                key = (topic.name, one.partition_index)
                if one.error_code == ErrorCode.UNSTABLE_OFFSET_COMMIT:
                    yield CommittedOffset(group.group_id, key, None)
                elif not one.error_code and one.committed_offset >= 0:
                    yield CommittedOffset(group.group_id, key, one.committed_offset)


def assigned_partitions(brokers: Brokers, groups: Sequence[GroupListing]) -> dict[str, set[Key]]:
    """The partitions that are assigned to the members of each group.

    A group of the classic protocol has none during a rebalance; groups of Kafka Streams' own protocol (KIP-1071) are left out.
    """
    classic = [group for group in groups if group.kind not in (CONSUMER, STREAMS)]
    new = [group for group in groups if group.kind == CONSUMER]
    described = (
        *_described(brokers, classic, "DescribeGroups", lambda names, _: DescribeGroupsRequest(groups=names)),
        *_described(brokers, new, "DescribeGroups", lambda names, _: ConsumerGroupDescribeRequest(group_ids=names)),
    )
    return {group.group_id: set(_keys(brokers, group)) for group in described}


def _described(
    brokers: Brokers, groups: Iterable[GroupListing], name: str, request: Callable[[list[str], Connection], Request[Any]]
) -> Iterator[Any]:
    """What the coordinators of groups respond about each, in batches; without those that are refused, which is noted."""
    by_node: dict[int, list[str]] = defaultdict(list)
    for group in groups:
        by_node[group.coordinator].append(group.group_id)
    live = brokers.view([]).brokers if by_node else {}
    for node, names in by_node.items():
        if node not in live:
            brokers.note(BrokerProblem(node, None, "is down: the positions of its consumer groups are missing"))
            continue
        for batch in batches(names):
            requests = {node: lambda connection, batch=batch: request(batch, connection)}
            for group in brokers.request(live, requests, lambda _, response: _settled(response, name)).get(node, ()):
                if group.error_code:
                    _note_refused(brokers, name, group.group_id, group.error_code)
                else:
                    yield group


def _settled(response: Any, name: str) -> list[Any]:
    """The groups of a response, if none has a transient error."""
    for group in response.groups:
        if group.error_code in TRANSIENT:
            raise TryAgainError(f"{name} returned {error_name(group.error_code)}")
    return list(response.groups)


def _note_refused(brokers: Brokers, request: str, group_id: str, code: int) -> None:
    """Note the first group about which a request was refused, unless it no longer exists."""
    if code == ErrorCode.GROUP_ID_NOT_FOUND:
        return
    if code in DENIED:
        brokers.hide(request, denied(request, code, group_id))
        return
    what = f"The state of group {group_id!r} is not fully known: {request} returned {error_name(code)}."
    brokers.hide(request, BrokerError(what, code=code, name=error_name(code)))


def _keys(
    brokers: Brokers, group: ConsumerGroupDescribeResponse.DescribedGroup | DescribeGroupsResponse.DescribedGroup
) -> Iterator[Key]:
    if isinstance(group, ConsumerGroupDescribeResponse.DescribedGroup):
        assigned = (topic for member in group.members for topic in member.assignment.topic_partitions)
        yield from ((topic.topic_name, index) for topic in assigned for index in topic.partitions)
        return
    for member in group.members:
        if group.protocol_type == _CLASSIC and member.member_assignment:
            try:  # a client has written it
                found = ConsumerProtocolAssignment.read(Fields(member.member_assignment, _VERSION_BYTES), _ASSIGNMENT_VERSION)
            except KafkaProtocolError:
                _note_unreadable(brokers, group.group_id)
            else:
                yield from ((topic.topic, index) for topic in found.assigned_partitions for index in topic.partitions)


def _note_unreadable(brokers: Brokers, group_id: str) -> None:
    brokers.hide(
        "assignments",
        BrokerError(
            f"The assignment of a member of group {group_id!r} can't be read: whether the group waits is not fully known.",
            cause="its client does not write assignments as Kafka's consumers do",
            next_step="ask the owner of the group",
        ),
    )
