"""Which partitions are assigned to the members of consumer groups (DescribeGroups; ConsumerGroupDescribe of KIP-848)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from dualwrite.errors import BrokerError
from dualwrite.kafka.admin.brokers import TRANSIENT, Brokers, TryAgainError, batches
from dualwrite.kafka.admin.groups import CONSUMER, STREAMS, GroupListing, by_coordinator, note_refused
from dualwrite.kafka.admin.leaders import Key
from dualwrite.kafka.client.connection import Connection
from dualwrite.kafka.client.error_codes import error_name
from dualwrite.kafka.client.fields import Fields, KafkaProtocolError
from dualwrite.kafka.client.messages_generated import (
    ConsumerGroupDescribeRequest,
    ConsumerGroupDescribeResponse,
    ConsumerProtocolAssignment,
    DescribeGroupsRequest,
    DescribeGroupsResponse,
)
from dualwrite.kafka.client.together import MakeRequest

_VERSION_BYTES: Final = 2
_VERSION: Final = 3  # equal to the older ones; newer ones must begin with the same fields
_CLASSIC: Final = "consumer"  # the protocol type of classic groups whose members are consumers


def assigned_partitions(brokers: Brokers, groups: Sequence[GroupListing]) -> dict[str, set[Key]]:
    """The partitions that are assigned to the members of each group.

    A group of the classic protocol has none during a rebalance; groups of Kafka Streams' own protocol (KIP-1071) are left out.

    Raises:
        BrokerUnavailableError, BrokerAuthorizationError: As for `Brokers.view`.
    """
    found: dict[str, set[Key]] = defaultdict(set)
    for is_new in (False, True):
        described = [group for group in groups if (group.kind == CONSUMER) is is_new and group.kind != STREAMS]
        live = brokers.view([]).brokers if described else {}
        for node, names in by_coordinator(described).items():
            for batch in batches(names) if node in live else ():
                request = _request(batch, is_new=is_new)
                responses = brokers.request(live, {node: request}, lambda _, response: _groups(brokers, response))
                for group_id, keys in responses.get(node, {}).items():
                    found[group_id] |= keys
    return found


def _request(names: Sequence[str], *, is_new: bool) -> MakeRequest:
    def made(_: Connection) -> ConsumerGroupDescribeRequest | DescribeGroupsRequest:
        if is_new:
            return ConsumerGroupDescribeRequest(group_ids=list(names), include_authorized_operations=False)
        return DescribeGroupsRequest(groups=list(names), include_authorized_operations=False)

    return made


def _groups(brokers: Brokers, response: ConsumerGroupDescribeResponse | DescribeGroupsResponse) -> Mapping[str, set[Key]]:
    found = {}
    for group in response.groups:
        if group.error_code in TRANSIENT:
            raise TryAgainError(f"the description of a group returned {error_name(group.error_code)}")
        if group.error_code:
            note_refused(brokers, "DescribeGroups", group.group_id, group.error_code)
        else:
            found[group.group_id] = set(_keys(brokers, group))
    return found


def _keys(
    brokers: Brokers, group: ConsumerGroupDescribeResponse.DescribedGroup | DescribeGroupsResponse.DescribedGroup
) -> Iterator[Key]:
    if isinstance(group, ConsumerGroupDescribeResponse.DescribedGroup):
        assigned = (topic for member in group.members for topic in member.assignment.topic_partitions)
        yield from ((topic.topic_name, index) for topic in assigned for index in topic.partitions)
        return
    for member in group.members:
        if group.protocol_type == _CLASSIC and member.member_assignment:
            keys = _written(member.member_assignment)
            if keys is None:
                _note_unreadable(brokers, group.group_id)
            yield from keys or ()


def _written(assignment: bytes) -> list[Key] | None:
    """The partitions of an assignment, which a client has written; None if it can't be read."""
    try:
        found = ConsumerProtocolAssignment.read(Fields(assignment, _VERSION_BYTES), _VERSION)
    except KafkaProtocolError:
        return None
    return [(topic.topic, index) for topic in found.assigned_partitions for index in topic.partitions]


def _note_unreadable(brokers: Brokers, group_id: str) -> None:
    brokers.hide(
        "assignments",
        BrokerError(
            f"The assignment of a member of group {group_id!r} can't be read: whether the group waits is not fully known.",
            cause="its client does not write assignments as Kafka's consumers do",
            next_step="ask the owner of the group",
        ),
    )
