"""The positions that consumer groups have committed, as the group's coordinator knows them (OffsetFetch)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from dualwrite.deadline import Deadline, Limit
from dualwrite.errors import BrokerAuthorizationError
from dualwrite.kafka.client.broker_connection import ConnectionLostError
from dualwrite.kafka.client.brokers import GROUP, CoordinatorUnavailableError
from dualwrite.kafka.client.kafka_errors import ErrorCode, error_name
from dualwrite.kafka.client.messages_generated import OffsetFetchRequest, OffsetFetchResponse
from dualwrite.kafka.client.retries import CoordinatorMovedError, RetryingClient, TryAgainError, check_response

_Group = OffsetFetchRequest.OffsetFetchRequestGroup


def committed_positions(
    client: RetryingClient, group_id: str, partitions: Iterable[tuple[str, int]], timeout: Limit | None
) -> dict[tuple[str, int], int]:
    """The offset of the next message to read in each partition; without those that the group has not committed.

    Offsets of a transaction that is still open are waited for (`requireStable`, KIP-447).

    Raises:
        BrokerUnavailableError: No conclusive response within the time limit.
        BrokerAuthorizationError: The principal lacks Describe on the group.
    """
    by_topic = defaultdict(list)
    for topic, partition in partitions:
        by_topic[topic].append(partition)
    topics = [_Group.OffsetFetchRequestTopics(name=topic, partition_indexes=indexes) for topic, indexes in by_topic.items()]
    request = OffsetFetchRequest(groups=[_Group(group_id=group_id, topics=topics)], require_stable=True)

    def once(deadline: Deadline) -> dict[tuple[str, int], int]:
        try:
            return _positions(client.network.coordinator(group_id, GROUP, deadline).call(request, deadline), group_id)
        except (ConnectionLostError, CoordinatorMovedError):
            client.network.forget_coordinator(group_id, GROUP)
            raise
        except CoordinatorUnavailableError as error:
            _check(error.code or 0, group_id)
            raise

    return client.repeated(once, f"the coordinator of the group {group_id!r}", timeout)


def _positions(response: OffsetFetchResponse, group_id: str) -> dict[tuple[str, int], int]:
    (group,) = response.groups
    found = {}
    for code in (group.error_code, *(one.error_code for topic in group.topics for one in topic.partitions)):
        _check(code, group_id)
        check_response(code, None, "OffsetFetch", "Describe")
    for topic in group.topics:
        for one in topic.partitions:
            if one.committed_offset >= 0:
                found[topic.name, one.partition_index] = one.committed_offset
    return found


def _check(code: int, group_id: str) -> None:
    if code == ErrorCode.UNSTABLE_OFFSET_COMMIT:
        raise TryAgainError("a transaction with offsets of the group is still open")
    if code == ErrorCode.GROUP_AUTHORIZATION_FAILED:
        raise BrokerAuthorizationError(
            f"Kafka refuses to show the positions of the consumer group {group_id!r}.",
            next_step="grant the principal Describe on the group",
            code=code,
            name=error_name(code),
        )
