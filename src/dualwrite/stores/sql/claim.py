"""Claiming an id: raise the fence by one, waiting for the row's lock and retrying over broken connections."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from sqlalchemy import Connection, bindparam, case, insert, select, update
from tenacity import Retrying, retry_if_exception, stop_after_delay, wait_exponential, wait_random

from dualwrite.stores.rows import claimed, fenced
from dualwrite.stores.sql.dialect import ErrorClass
from dualwrite.stores.sql.errors import locked_too_long
from dualwrite.stores.sql.short import ShortTransactions
from dualwrite.stores.sql.table import columns_of
from dualwrite.stores.sql.table import state_table as t
from dualwrite.stores.state_row import Claim

_RETRIED: Final = frozenset({ErrorClass.CONNECTION, ErrorClass.CONFLICT, ErrorClass.DUPLICATE})
_WAIT: Final = wait_exponential(multiplier=0.02, max=1.0) + wait_random(0, 0.02)

_RAISED: Final = {
    "fence": t.c.fence + 1,
    "owner": bindparam("owner_"),
    "claim_token": bindparam("token"),
    "updated_at": bindparam("now"),
}
_RAISE_FENCE: Final = (
    update(t)
    .where(t.c.transactional_id == bindparam("id"))
    .ordered_values(  # MySQL assigns from left to right, so `forgotten` is still the old value where it is read
        ("cluster_id", case((t.c.forgotten.is_(True), ""), else_=t.c.cluster_id)),
        ("forgotten", False),
        ("transaction_number", 0),
        *_RAISED.items(),
    )
)
_RAISE_EXPECTED_FENCE: Final = (
    update(t).where(t.c.transactional_id == bindparam("id"), t.c.fence == bindparam("expected")).values(**_RAISED)
)
_INSERT: Final = insert(t)
_READ_FENCE: Final = select(t.c.fence, t.c.owner, t.c.claim_token).where(t.c.transactional_id == bindparam("id"))


@dataclass(frozen=True)
class ClaimAttempt:
    """One call of `claim`, with as many transactions as it needs.

    Args:
        short: Runs the transactions.
        transactional_id: The logical id.
        owner: Who claims, as text for people.
        timeout: Seconds to wait at most.
        token: Written with the claim, to recognize it if its COMMIT got no response.
        expected_fence: Claim only if the fence still is this number.
        condition: Called first in each of the claim's transactions; if it raises, the claim raises that error.
    """

    short: ShortTransactions
    transactional_id: str
    owner: str
    timeout: float
    token: str
    expected_fence: int | None = None
    condition: Callable[[Connection], None] | None = None

    def make(self) -> Claim:
        """Claim.

        Raises:
            FencedError: The expected fence is no longer the row's.
            ClaimTimeoutError: The row stayed locked.
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
                raise locked_too_long(errors, self.transactional_id, self.timeout, error, doing) from error
            raise errors.translated(error, doing, self.transactional_id) from error

    def _once(self, deadline: float) -> Claim:
        with self.short.begin(max(0.001, deadline - time.monotonic())) as connection:
            if self.condition is not None:
                self.condition(connection)
            if self.expected_fence is None:
                return self._claim(connection)
            return self._claim_expected(connection, self.expected_fence)

    def _claim(self, connection: Connection) -> Claim:
        parameters = {"id": self.transactional_id, "owner_": self.owner, "token": self.token, "now": datetime.now(UTC)}
        if connection.execute(_RAISE_FENCE, parameters).rowcount == 0:
            # Two processes may both get here; the second one's INSERT waits for the first one's COMMIT and fails, and the
            # second one starts again with the UPDATE.
            first = claimed(None, self.transactional_id, self.owner, token=self.token)
            connection.execute(_INSERT, {"transactional_id": first.transactional_id, **columns_of(first)})
            return Claim(self.transactional_id, first.fence, self.owner)
        return Claim(
            self.transactional_id, connection.execute(_READ_FENCE, {"id": self.transactional_id}).one().fence, self.owner
        )

    def _claim_expected(self, connection: Connection, expected: int) -> Claim:
        changed = connection.execute(
            _RAISE_EXPECTED_FENCE,
            {
                "id": self.transactional_id,
                "owner_": self.owner,
                "token": self.token,
                "now": datetime.now(UTC),
                "expected": expected,
            },
        ).rowcount
        if changed:
            return Claim(self.transactional_id, expected + 1, self.owner)
        row = connection.execute(_READ_FENCE, {"id": self.transactional_id}).one_or_none()
        if row is None or row.claim_token != self.token:
            ours = Claim(self.transactional_id, expected, self.owner)
            raise fenced(ours, *((None, None) if row is None else (row.fence, row.owner)))
        return Claim(self.transactional_id, row.fence, self.owner)
