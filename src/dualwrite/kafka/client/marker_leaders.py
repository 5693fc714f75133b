"""Before a transaction is ended, each of its partitions must have a leader, which writes the marker (rule FB).

Kafka 4.3.0 to 4.4.0 treats a partition without a leader as deleted, and completes a transaction whose marker was never written
there (KAFKA-20734): its messages stay invisible until the next transaction's marker decides on them too.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from dualwrite.deadline import Deadline
from dualwrite.kafka.client.connection import Connection
from dualwrite.kafka.client.descriptions import described
from dualwrite.kafka.client.error_codes import ErrorCode
from dualwrite.kafka.client.messages_generated import MetadataRequest
from dualwrite.kafka.client.transient import NoLeaderError
from dualwrite.state import TransactionStatus

_NAMED: Final = 5  # partitions listed in an error


def check_leaders(coordinator: Connection, kafka_transactional_id: str, deadline: Deadline) -> None:
    """Check that every partition of an ongoing transaction has a leader, in the coordinator's own metadata.

    Raises:
        NoLeaderError: A partition has none.
        TryAgainError, CoordinatorMovedError, ConnectionLostError: Another transient error.
        BrokerAuthorizationError: The principal may not describe the id.
    """
    description = described(coordinator, kafka_transactional_id, deadline)
    if description is None or description.status is not TransactionStatus.ONGOING or not description.partitions:
        return
    check_partitions(coordinator.call(about_topics(description.partitions), deadline), description.partitions)


def about_topics(partitions: Iterable[tuple[str, int]]) -> MetadataRequest:
    """The request for `check_partitions`."""
    topics = [MetadataRequest.MetadataRequestTopic(name=name) for name in sorted({topic for topic, _ in partitions})]
    return MetadataRequest(topics=topics, allow_auto_topic_creation=False)


def check_partitions(response: Any, partitions: frozenset[tuple[str, int]]) -> None:
    """Check that each of the partitions has a leader, according to a response of the coordinator.

    Raises:
        NoLeaderError: One has none.
    """
    # For a topic that was deleted, or that the principal may not describe, there is nothing to wait for.
    leaderless = {
        (topic.name, partition.partition_index)
        for topic in response.topics
        for partition in topic.partitions
        if partition.leader_id < 0 and partition.error_code in (ErrorCode.NONE, ErrorCode.LEADER_NOT_AVAILABLE)
    }
    if missing := sorted(leaderless & partitions):
        named = ", ".join(f"{topic}-{index}" for topic, index in missing[:_NAMED])
        more = f" and {len(missing) - _NAMED} more" if len(missing) > _NAMED else ""
        raise NoLeaderError(f"{named}{more} has no leader to write the transaction's marker")
