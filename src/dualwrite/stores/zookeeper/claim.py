"""Claiming an id: raise the fence by one, on the condition of the node's version; without waiting for a lock."""

from __future__ import annotations

from dataclasses import dataclass

from dualwrite.stores.rows import claimed
from dualwrite.stores.state_row import Claim
from dualwrite.stores.zookeeper.nodes import StateNodes


@dataclass(frozen=True)
class ClaimAttempt:
    """One call of `claim`, with as many attempts as it needs.

    It does not wait for another writer's transaction that is recorded and not committed yet. Once this claim has changed the
    node's version, that transaction can't commit any more, wherever its multi is: in its writer, kazoo's queue or the network.

    Args:
        nodes: The rows.
        transactional_id: The logical id.
        owner: Who claims, as text for people.
        timeout: Seconds to try at most.
        token: Written with the claim, to recognize it if its response was lost.
        expected_fence: Claim only if the fence still is this number.
    """

    nodes: StateNodes
    transactional_id: str
    owner: str
    timeout: float
    token: str
    expected_fence: int | None = None

    def make(self) -> Claim:
        """Claim; see TxnStateStore.claim for the errors."""
        return self.nodes.change(self._once, "claiming the id", self.transactional_id, self.timeout)

    def _once(self, deadline: float) -> Claim:
        read = self.nodes.read(self.transactional_id, deadline)
        before = None if read is None else read.row
        row = claimed(before, self.transactional_id, self.owner, token=self.token, expected_fence=self.expected_fence)
        if row is not before:
            self.nodes.write(row, read, deadline)
        return Claim(self.transactional_id, row.fence, row.owner)
