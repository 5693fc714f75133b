"""A transactional id as its coordinator describes it (KIP-664, DescribeTransactions)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from dualwrite.deadline import Deadline
from dualwrite.kafka.client.broker_connection import Connection
from dualwrite.kafka.client.kafka_errors import ErrorCode, status_of
from dualwrite.kafka.client.messages_generated import DescribeTransactionsRequest, DescribeTransactionsResponse, MetadataRequest
from dualwrite.kafka.client.retries import NoLeaderError, check_response
from dualwrite.state import TransactionDescription, TransactionStatus

_NAMED: Final = 5  # partitions listed in an error


def described(coordinator: Connection, kafka_transactional_id: str, deadline: Deadline) -> TransactionDescription | None:
    """Describe one id; None if its coordinator does not know it.

    Raises:
        TryAgainError, CoordinatorMovedError, ConnectionLostError: A transient error.
        BrokerAuthorizationError, UnknownTransactionStateError: As for all requests about an id.
    """
    request = DescribeTransactionsRequest(transactional_ids=[kafka_transactional_id])
    response = coordinator.call(request, deadline).transaction_states[0]
    if response.error_code == ErrorCode.TRANSACTIONAL_ID_NOT_FOUND:
        return None
    check_response(response.error_code, kafka_transactional_id, "DescribeTransactions", "Describe")
    return description_of(response)


def description_of(state: DescribeTransactionsResponse.TransactionState) -> TransactionDescription:
    """One id's part of a response to DescribeTransactions."""
    return TransactionDescription(
        status=status_of(state.transaction_state, state.transactional_id),
        producer_id=state.producer_id,
        epoch=state.producer_epoch,
        timeout_ms=state.transaction_timeout_ms,
        start_time_ms=state.transaction_start_time_ms,
        partitions=frozenset((t.topic, p) for t in state.topics for p in t.partitions),
    )


def check_leaders(coordinator: Connection, kafka_transactional_id: str, deadline: Deadline) -> None:
    """Check that every partition of an ongoing transaction has a leader, in the coordinator's own metadata.

    Raises: NoLeaderError, and as `described`.
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
    """Raise NoLeaderError unless each of the partitions has a leader, according to a response of the coordinator."""
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
