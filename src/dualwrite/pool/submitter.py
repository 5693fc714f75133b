"""The callers' side of a pool: submits calls to the queue, and waits for their outcomes within a limit."""

from __future__ import annotations

from concurrent.futures import CancelledError, Future
from typing import Any, Protocol

from dualwrite.errors import PoolTimeoutError
from dualwrite.event_loop import check_may_block
from dualwrite.pool.call import Call
from dualwrite.pool.waiting import WaitingCalls
from dualwrite.pool.writers import Writers, closed, pool_timeout


class Check(Protocol):
    """Whether the pool can be used for a call here and now."""

    def __call__(self, what: str, *, waits: bool) -> None:
        """Raise an error if it can't be.

        Args:
            what: A description of the call.
            waits: Whether the call waits for something that a thread of the pool must do.
        """


class Submitter:
    """Submits calls to a pool's queue.

    Args:
        prefix: The prefix of the pool's ids, for errors.
        waiting: The queue.
        writers: The pool's writers: an error names what they are doing.
        check: Called before each call; raises an error if the pool can't be used for it here and now.
    """

    def __init__(self, prefix: str, waiting: WaitingCalls, writers: Writers, check: Check) -> None:
        self._prefix = prefix
        self._waiting = waiting
        self._writers = writers
        self._check = check

    def submit(self, call: Call, *, waits: bool = False) -> Future[Any]:
        """Put a call into the queue.

        Args:
            call: The call.
            waits: Whether the caller will wait for it, which a thread of the pool can't.

        Raises:
            NestedTransactionError: Called from a unit of this pool, or to wait in a done-callback.
            WriterClosedError: The pool is closed.
        """
        try:
            self._check("a unit", waits=waits)
            if self._waiting.put(call):
                return call.future
        except BaseException:
            call.future.cancel()  # KeyboardInterrupt: it may be in the queue already, but nobody would get its future
            raise
        raise closed(self._prefix)

    def run(self, call: Call, timeout: float) -> Any:
        """Submit a call and wait for its result.

        Args:
            call: The call.
            timeout: Seconds to wait for the unit to start.

        Raises:
            BaseException: As for `WriterPool.run`.
        """
        check_may_block(f"run({call.name})", "await pool.run(…)")
        try:
            return self.submit(call, waits=True).result(timeout)
        except TimeoutError:
            if call.future.cancel():
                raise self.timed_out(call.name, timeout) from None
            return call.future.result()  # it has begun, or raised a TimeoutError of its own
        except CancelledError:
            self.check_not_cancelled(call.future)
            raise
        except BaseException:
            call.future.cancel()  # KeyboardInterrupt: if it has not begun, it need not run
            raise

    def check_not_cancelled(self, future: Future[Any]) -> None:
        """Raise WriterClosedError if the call was cancelled: only `close` can have done that, as nobody else has the future."""
        if future.cancelled():
            raise closed(self._prefix)

    def timed_out(self, name: str, timeout: float) -> PoolTimeoutError:
        """The error for a unit that did not start within `timeout` seconds."""
        return pool_timeout(f"{name} did not start", timeout, self._writers.doing())
