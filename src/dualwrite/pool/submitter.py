"""The callers' side of a pool: submits calls to the queue, and waits for their outcome within a limit."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from typing import Any

from dualwrite.errors import PoolTimeoutError
from dualwrite.pool.call import Call
from dualwrite.pool.waiting import WaitingCalls
from dualwrite.pool.writers import Writers, closed, pool_timeout


class Submitter:
    """Submits calls to a pool's queue.

    Args:
        prefix: The prefix of the pool's ids, for errors.
        waiting: The queue.
        writers: The pool's writers: an error names what they are doing.
        check: Called before each call; raises if the pool can't be used here and now for what it is called with.
    """

    def __init__(self, prefix: str, waiting: WaitingCalls, writers: Writers, check: Callable[[str], None]) -> None:
        self._prefix = prefix
        self._waiting = waiting
        self._writers = writers
        self._check = check

    def submit(self, call: Call) -> Future[Any]:
        """Put a call into the queue.

        Raises:
            NestedTransactionError: Called by a unit of this pool.
            WriterClosedError: The pool is closed.
        """
        try:
            self._check("a unit")
            if self._waiting.put(call):
                return call.future
        except BaseException:
            call.future.cancel()  # KeyboardInterrupt, when it may be in the queue already: nobody has its future
            raise
        raise closed(self._prefix)

    def run(self, call: Call, timeout: float) -> Any:
        """Submit a call and wait for its result.

        Args:
            call: The call.
            timeout: Seconds that it waits for its turn.

        Raises:
            BaseException: As for `WriterPool.run`.
        """
        try:
            return self.submit(call).result(timeout)
        except TimeoutError:
            if call.future.cancel():
                raise self.timed_out(call.name, timeout) from None
            return call.future.result()  # it has begun, or raised a TimeoutError of its own
        except CancelledError:
            self.check_not_cancelled(call.future)
            raise
        except BaseException:
            call.future.cancel()  # KeyboardInterrupt: if it has not begun, it does not have to
            raise

    def check_not_cancelled(self, future: Future[Any]) -> None:
        """Raise WriterClosedError if `close` has cancelled the call, whose future nobody else has."""
        if future.cancelled():
            raise closed(self._prefix)

    def timed_out(self, name: str, timeout: float) -> PoolTimeoutError:
        """The error for a unit whose turn did not come within so many seconds."""
        return pool_timeout(f"The turn of {name} did not come", timeout, self._writers.doing())
