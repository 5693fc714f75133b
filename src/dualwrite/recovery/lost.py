"""What Kafka's log still has of a lost transaction, and the contract of whoever publishes it again."""

from __future__ import annotations

from typing import Protocol

from dualwrite.deadline import Limit
from dualwrite.kafka.base import TransactionCoordinator
from dualwrite.recovery.report import IdReport
from dualwrite.state import FoundMessages
from dualwrite.stores.base import Claim, LostTransaction


def found_in_log(
    coordinator: TransactionCoordinator, entry: LostTransaction, cluster_id: str, *, timeout: Limit | None = None
) -> FoundMessages:
    """The messages of a LOST transaction that can still be read on a cluster, whose `cluster.id` is given.

    Raises: as for `TransactionCoordinator.find_messages`.
    """
    if entry.delivery is None:
        return FoundMessages((), ("the row does not say where its messages are",))
    if not entry.cluster_id or entry.cluster_id != cluster_id:  # rule RC: the same offsets may be those of other messages
        return FoundMessages((), (f"its messages are on another Kafka cluster, {entry.cluster_id or 'which is not known'}",))
    return coordinator.find_messages(entry.state, entry.delivery, timeout=timeout)


class Republisher(Protocol):
    """Publishes the lost transactions of an id again, for a Recoverer."""

    def publish(self, claim: Claim, report: IdReport) -> IdReport:
        """Publish the LOST transactions of an id that was resolved under a claim; what became of them is added to the report.

        Raises:
            FencedError: Another writer or recoverer has claimed the id since.
            DualWriteError: The database or Kafka did not answer; recovering again resolves what was begun.
        """
        ...
