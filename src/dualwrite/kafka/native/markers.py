"""Whether to wait for the markers of a producer's last transaction before the first message of the next one."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from dualwrite.deadline import Deadline
from dualwrite.errors import BrokerUnavailableError
from dualwrite.state import TransactionDescription

AT_FIRST: Final = 0.01
"""Seconds after which markers are assumed to be written, as long as nothing was measured."""

CHECK_AGAIN_AFTER: Final = 64
"""Transactions without a check, after which one is made to find out whether markers have become slower."""

_SLOW: Final = 0.015
"""Seconds; a message that comes too early waits longer at the broker (`add.partitions.to.txn.retry.backoff.ms`, 20)."""

_CAUTION: Final = 0.02
"""Which part of the difference the estimate is lowered by, once a message has come too early or a check found no markers."""

_MOST_SKIPPED: Final = 64 * CHECK_AGAIN_AFTER

_LIMIT: Final = 0.1
_PAUSE: Final = 0.0002  # the first one; doubled each time, so that a shared coordinator gets about ten requests at most


class MarkerWait:
    """Waits until the last transaction is complete, if that may take longer than the time that has passed since its end.

    A broker that gets a message while markers are being written backs off, for 20 ms in some releases. Checking whether they
    are written costs a request. So the time that a producer's markers take is estimated: at most the time after which the first
    check of a transaction found them written, or else twice the time until a later check did. If markers sometimes take longer
    than the pause between two transactions, the estimate falls slowly, and it doubles when a message without a check was
    answered as late as a message that came too early. The wait only saves time: such a message is refused, and sent again.

    A check without a response within its limit costs the connection. So the next transactions make none, twice as many each
    time: over a connection that slow, the markers are written before the next message arrives.

    Args:
        describe: Describes the producer's id at its coordinator.
    """

    def __init__(self, describe: Callable[[Deadline], TransactionDescription | None]) -> None:
        self._describe = describe
        self._ended_at = 0.0
        self._assumed_written_after = AT_FIRST
        self._without_check = 0
        self._unchecked_after: float | None = None
        self._lowered_by = 1.0
        self._to_skip = 0
        self._skipped_next = CHECK_AGAIN_AFTER

    def transaction_ended(self) -> None:
        """Called after the response to EndTxn."""
        self._ended_at = time.monotonic()

    def wait(self, deadline: Deadline) -> None:
        """Wait, at most until the deadline."""
        passed = time.monotonic() - self._ended_at
        self._unchecked_after = None
        if self._to_skip:
            self._to_skip -= 1
            return
        self._without_check += 1
        enough = self._assumed_written_after
        if self._without_check > CHECK_AGAIN_AFTER:
            enough = max(enough, AT_FIRST)
        if passed > enough:
            self._unchecked_after = passed
            return
        self._without_check = 0
        try:
            self._check(passed, deadline.within(_LIMIT))
        except BrokerUnavailableError:  # this wait only saves milliseconds; sending shows whether the broker is reachable
            self._to_skip, self._skipped_next = self._skipped_next, min(2 * self._skipped_next, _MOST_SKIPPED)
        else:
            self._skipped_next = CHECK_AGAIN_AFTER

    def _check(self, passed: float, limit: Deadline) -> None:
        began = time.monotonic()
        if self._are_written(limit):
            self._assumed_written_after -= max(self._assumed_written_after - passed, 0.0) * self._lowered_by
            return
        self._lowered_by = _CAUTION
        takes = time.monotonic() - began
        pause = _PAUSE
        while limit.left > takes:  # a check with less time would be one without a response
            limit.sleep(pause)
            pause *= 2
            if limit.left <= takes or self._are_written(limit):
                break
        self._assumed_written_after = min(2 * (time.monotonic() - self._ended_at), _LIMIT)

    def flushed(self, seconds: float) -> None:
        """Called when the messages of the transaction have been stored, with how long that was waited for at the end."""
        passed = self._unchecked_after
        if passed is not None and passed < AT_FIRST and seconds > _SLOW:
            self._assumed_written_after = 2 * passed
            self._lowered_by = _CAUTION

    def _are_written(self, limit: Deadline) -> bool:
        described = self._describe(limit)
        return described is None or not described.status.is_ending
