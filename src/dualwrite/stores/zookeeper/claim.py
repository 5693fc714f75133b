"""Claiming an id: raise the fence by one, on the condition of the node's version; without waiting for a lock."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field

from dualwrite.stores.rows import claimed, is_claim_of
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
        expected_fence: Claim only if the fence still is this number.
    """

    nodes: StateNodes
    transactional_id: str
    owner: str
    timeout: float
    expected_fence: int | None
    token: str = field(default_factory=lambda: uuid.uuid4().hex)
    """Written with the claim, to recognize it if its response was lost."""

    def make(self) -> Claim:
        """Claim; see TxnStateStore.claim for the errors."""
        return self.nodes.change(self._once, "claiming the id", self.transactional_id, self.timeout)

    def _once(self, deadline: float) -> Claim:
        read = self.nodes.read(self.transactional_id, deadline)
        row = None if read is None else read.row
        if row is None or not is_claim_of(row, self.token, expected_fence=self.expected_fence):
            row = claimed(row, self.transactional_id, self.owner, token=self.token, expected_fence=self.expected_fence)
            self.nodes.write(row, read, deadline)
        return Claim(self.transactional_id, row.fence, row.owner)
