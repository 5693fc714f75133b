"""Claiming ids: raise the fences by one, waiting for the rows' locks and retrying over broken connections."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from sqlalchemy import Connection
from tenacity import Retrying, retry_if_exception, stop_after_delay, wait_exponential, wait_random

from dualwrite.stores.identity import StoreIdentity
from dualwrite.stores.rows import claimed, on_cluster, with_generation
from dualwrite.stores.sql.dialect import ErrorClass
from dualwrite.stores.sql.errors import locked_too_long
from dualwrite.stores.sql.row_statements import identity_or_first, list_ids, lock_rows, write_rows
from dualwrite.stores.sql.short import ShortTransactions
from dualwrite.stores.state_row import Acquiring, ClaimedLanes, StateRow
from dualwrite.transactional_id import LANE_MARK, further_lanes

_RETRIED: Final = frozenset({ErrorClass.CONNECTION, ErrorClass.CONFLICT, ErrorClass.DUPLICATE})
_WAIT: Final = wait_exponential(multiplier=0.02, max=1.0) + wait_random(0, 0.02)


@dataclass(frozen=True)
class WithLanes:
    """What a claim of an id with all its lanes does besides; see `TxnStateStore.claim_lanes`.

    Args:
        cluster_id: The rows must not name another Kafka cluster.
        acquiring: Acquire generations, if nothing has to be recovered.
        first: The identity of a database that has none.
    """

    cluster_id: str
    acquiring: Acquiring | None
    first: StoreIdentity


@dataclass(frozen=True)
class ClaimAttempt:
    """One claim of one or several ids in one transaction, with as many attempts as it needs.

    Args:
        short: Runs the transactions.
        ids: The ids of the rows.
        owner: Who claims, as text for people.
        timeout: Seconds to wait at most.
        token: Written with the claim, to recognize it if its COMMIT got no response.
        expected_fence: Claim only if the fence of the first id still is this number.
        condition: Called first in each of the claim's transactions; if it raises, the claim raises that error.
        lanes: If the first id is claimed with all its lanes.
    """

    short: ShortTransactions
    ids: Sequence[str]
    owner: str
    timeout: float
    token: str
    expected_fence: int | None = None
    condition: Callable[[Connection], None] | None = None
    lanes: WithLanes | None = None

    def make(self) -> ClaimedLanes:
        """Claim.

        Raises:
            FencedError: The expected fence is no longer the row's.
            ClusterMismatchError: A row names another Kafka cluster.
            ClaimTimeoutError: A row stayed locked.
            StoreUnavailableError: The database was unreachable until the timeout.
        """
        deadline = time.monotonic() + self.timeout
        errors = self.short.errors
        retrying = Retrying(
            retry=retry_if_exception(
                lambda error: isinstance(error, self.short.driver_errors) and errors.classify(error) in _RETRIED
            ),
            stop=stop_after_delay(self.timeout),
            wait=_WAIT,
            reraise=True,
        )
        doing = "claiming the id"
        try:
            return retrying(self._once, deadline)
        except self.short.driver_errors as error:
            if errors.classify(error) is ErrorClass.LOCKED:
                raise locked_too_long(errors, self.ids, self.timeout, error, doing) from error
            raise errors.translated(error, doing, self.ids[0]) from error

    def _once(self, deadline: float) -> ClaimedLanes:
        with self.short.begin(max(0.001, deadline - time.monotonic())) as connection:
            if self.condition is not None:
                self.condition(connection)
            return self._claim(connection)

    def _claim(self, connection: Connection) -> ClaimedLanes:
        """Lock the rows, and write them as claimed.

        If a row is missing, two processes may both try to insert it; the second one's INSERT waits for the first one's COMMIT
        and fails, and the second one starts again.
        """
        found, identity = lock_rows(connection, self.ids)
        ids = list(self.ids)
        if self.lanes is not None:  # in a statement of its own, which begins when the first id is locked
            further = further_lanes(list_ids(connection, self.ids[0] + LANE_MARK), self.ids)
            if further:
                found |= lock_rows(connection, further).rows
            ids += [name for name in further if name in found]
            for row in found.values():
                on_cluster(row, self.lanes.cluster_id)
        rows = [self._claimed(name, found.get(name)) for name in ids]
        have_generations = False
        acquiring = None if self.lanes is None else self.lanes.acquiring
        if self.lanes is not None and acquiring is not None and all(row.is_clean for row in rows):
            store_id = (identity or identity_or_first(connection, self.lanes.first)).store_id
            rows = [acquired(row, acquiring, store_id) for row in rows]
            have_generations = True
        changed = [row for row in rows if row is not found.get(row.transactional_id)]
        write_rows(connection, changed, existing=found)
        return ClaimedLanes(tuple(rows), have_generations)

    def _claimed(self, name: str, row: StateRow | None) -> StateRow:
        expected = self.expected_fence if name == self.ids[0] else None
        return claimed(row, name, self.owner, token=self.token, expected_fence=expected)


def acquired(row: StateRow, acquiring: Acquiring, store_id: str) -> StateRow:
    """The row after `acquire_generation`, if its lane is one of those that acquire one."""
    name = row.transactional_id
    if name not in acquiring.lanes:
        return row
    return with_generation(
        row, acquiring.kind, reuse=name in acquiring.reuse, store_id=store_id, cluster_id=acquiring.cluster_id
    )
