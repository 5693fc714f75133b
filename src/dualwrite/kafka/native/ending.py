"""Ending a transaction at its coordinator: at once, or by a request whose response is read later."""

from __future__ import annotations

from dualwrite.deadline import Deadline
from dualwrite.kafka.base import EndTxnResult
from dualwrite.kafka.client.coordinator import RequestedCommit, WireTransactionCoordinator
from dualwrite.kafka.native.markers import MarkerWait
from dualwrite.kafka.time_budget import TimeBudget


class TransactionEnd:
    """Sends EndTxn v5 for the transactions of one id. A commit may be requested first, and its outcome read later.

    Args:
        coordinator: The coordinator of the id.
        kafka_transactional_id: The id.
        budget: Says whether the transaction has just begun: then its partitions have leaders (rule FB).
        markers: Learns when a transaction has ended.
    """

    def __init__(
        self, coordinator: WireTransactionCoordinator, kafka_transactional_id: str, budget: TimeBudget, markers: MarkerWait
    ) -> None:
        self._coordinator = coordinator
        self._id = kafka_transactional_id
        self._budget = budget
        self._markers = markers
        self._requested: RequestedCommit | None = None

    def request_commit(self, producer_id: int, epoch: int, deadline: Deadline) -> None:
        """Send EndTxn(commit) without waiting for the response, which the next `end` reads.

        Raises:
            BrokerUnavailableError: It could not be sent within the time limit, or the connection broke.
        """
        self._requested = self._coordinator.request_commit(
            self._id,
            producer_id=producer_id,
            epoch=epoch,
            timeout=deadline,
            just_written=self._budget.just_started,
        )
        self._markers.transaction_ended()  # about now, whenever the response is read

    def end(self, producer_id: int, epoch: int, deadline: Deadline, *, commit: bool) -> EndTxnResult:
        """The response to EndTxn: to the request that was sent before, if it is for the same outcome, or to one sent now.

        Raises:
            BrokerUnavailableError: No response within the time limit.
        """
        requested, self._requested = self._requested, None
        if requested is not None and commit:
            response = self._coordinator.requested_commit(requested, timeout=deadline)
            if response is not None and response.proven:
                return response
        response = self._coordinator.end_transaction(
            self._id,
            producer_id=producer_id,
            epoch=epoch,
            commit=commit,
            timeout=deadline,
            just_written=commit and requested is None and self._budget.just_started,
        )
        self._markers.transaction_ended()
        return response
