"""A transactional id as its coordinator describes it (KIP-664, DescribeTransactions)."""

from __future__ import annotations

from dualwrite.deadline import Deadline
from dualwrite.kafka.client.connection import Connection
from dualwrite.kafka.client.error_codes import ErrorCode
from dualwrite.kafka.client.messages_generated import DescribeTransactionsRequest, DescribeTransactionsResponse
from dualwrite.kafka.client.refusals import status_of
from dualwrite.kafka.client.transient import check_response
from dualwrite.state import TransactionDescription


def described(coordinator: Connection, kafka_transactional_id: str, deadline: Deadline) -> TransactionDescription | None:
    """Describe one id; None if its coordinator does not know it.

    Raises:
        TryAgainError, CoordinatorMovedError, ConnectionLostError: A transient error.
        BrokerAuthorizationError: The principal may not describe the id.
        UnknownTransactionStateError: This release does not know the state.
    """
    request = DescribeTransactionsRequest(transactional_ids=[kafka_transactional_id])
    response = coordinator.call(request, deadline).transaction_states[0]
    if response.error_code == ErrorCode.TRANSACTIONAL_ID_NOT_FOUND:
        return None
    check_response(response.error_code, kafka_transactional_id, "DescribeTransactions", "Describe")
    return description_of(response)


def description_of(state: DescribeTransactionsResponse.TransactionState) -> TransactionDescription:
    """One id's part of a response to DescribeTransactions.

    Raises:
        UnknownTransactionStateError: This release does not know the state.
    """
    return TransactionDescription(
        status=status_of(state.transaction_state, state.transactional_id),
        producer_id=state.producer_id,
        epoch=state.producer_epoch,
        timeout_ms=state.transaction_timeout_ms,
        start_time_ms=state.transaction_start_time_ms,
        partitions=frozenset((t.topic, p) for t in state.topics for p in t.partitions),
    )
