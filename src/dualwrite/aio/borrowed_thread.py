"""A thread that is lent to a coroutine: while it waits for the coroutine's end, it runs the calls that would block the loop."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, Final, ParamSpec, Protocol, TypeVar

from dualwrite.aio.waking import Waker, through_cancellation
from dualwrite.deadline import Deadline
from dualwrite.errors import ConcurrentUseError, WriterClosedError

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

_LOOK: Final = 0.2
"""Seconds after which the thread looks whether the coroutine can still end."""

GRACE: Final = 2.0
"""Seconds to end for a coroutine that was interrupted, and for one whose loop does not run, while the pool is being closed."""


class Closing(Protocol):
    """What the thread must know of its pool."""

    @property
    def is_closed(self) -> bool:
        """Whether the pool is closed, or is being closed."""


class BorrowedThread:
    """The current thread, in a transaction, lent to one coroutine. The thread waits in `serve`; the rest is the coroutine's.

    A thread is never lost to a coroutine that does not end: it leaves if the event loop is closed, and, when the pool is
    closed, some time after it has interrupted the coroutine.

    Args:
        name: What the coroutine is, for messages.
        waker: Wakes the coroutine.
        pool: The thread's pool.
        patience: Seconds that the coroutine has to end once the pool is being closed.
        interrupt: Called in the event loop: ask the coroutine to end.

    Attributes:
        ident: The thread's identifier.
        is_open: Whether the coroutine still has the thread.
    """

    def __init__(self, name: str, waker: Waker, pool: Closing, *, patience: float, interrupt: Callable[[], None]) -> None:
        self.ident = threading.get_ident()
        self.is_open = True
        self._name = name
        self._waker = waker
        self._pool = pool
        self._patience = patience
        self._interrupt = interrupt
        self._tasks: SimpleQueue[_Step | _End] = SimpleQueue()
        self._limit: Deadline | None = None
        self._is_interrupted = False

    # --- in the thread ----------------------------------------------------------------------------------------------------

    def serve(self) -> None:
        """Run the coroutine's calls until it has ended.

        Raises:
            BaseException: What the coroutine has raised.
            WriterClosedError: It can't end any more, or did not when the pool was closed.
        """
        try:
            while True:
                try:
                    task = self._tasks.get(timeout=_LOOK)
                except Empty:
                    self._look()
                    continue
                if isinstance(task, _End):
                    if task.error is not None:
                        raise task.error
                    return
                task.run()
                self._waker.wake(task.arrived)
                self._look()
        finally:
            self.is_open = False
            self._refuse_the_rest()

    def _look(self) -> None:
        loop = self._waker.loop
        if loop.is_closed():
            raise self._given_up("its event loop was closed before it ended")
        if not self._pool.is_closed:
            return
        if self._limit is None:
            self._limit = Deadline.after(self._patience if loop.is_running() else GRACE)
        if not self._limit.expired:
            return
        if self._is_interrupted or not loop.is_running():
            raise self._given_up("the pool was closed, and it did not end")
        self._is_interrupted = True
        self._limit = Deadline.after(GRACE)
        with suppress(RuntimeError):  # the loop was closed at this moment
            loop.call_soon_threadsafe(self._interrupt)

    def _given_up(self, why: str) -> WriterClosedError:
        error = WriterClosedError(
            f"The coroutine {self._name} can't use its transaction any more: {why}. What it wrote is rolled back.",
            next_step="let every coroutine that uses the pool end before the pool and the event loop are closed",
        )
        log.warning("%s", error)
        return error

    def _refuse_the_rest(self) -> None:
        with suppress(Empty):
            while True:
                task = self._tasks.get_nowait()
                if isinstance(task, _Step):
                    task.error = _has_ended()
                    self._waker.wake(task.arrived)

    # --- in the event loop ------------------------------------------------------------------------------------------------

    async def call(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a function in the thread, after the calls before it, in a copy of the caller's context (`contextvars`).

        A call that was sent can't be stopped: a cancellation is raised when the function has ended.

        Raises:
            BaseException: What the function raises.
            WriterClosedError: The coroutine has ended.
            ConcurrentUseError: Called in another thread than the event loop's.
        """
        self.check()
        step = _Step(functools.partial(function, *args, **kwargs), self._waker.loop.create_future())
        self._tasks.put(step)
        if not self.is_open:  # since the check
            self._refuse_the_rest()
        await through_cancellation(step.arrived)
        if step.error is not None:
            raise step.error
        result: T = step.result
        return result

    def end(self, error: BaseException | None = None) -> None:
        """The coroutine has ended, with an error or without one; the thread runs the calls that were sent before."""
        self.is_open = False
        self._tasks.put(_End(error))

    def check(self) -> None:
        """Check that the coroutine may use the transaction.

        Raises:
            WriterClosedError: The coroutine has ended.
            ConcurrentUseError: Called in another thread than the event loop's.
        """
        if not self.is_open:
            raise _has_ended()
        if threading.get_ident() != self._waker.thread:
            raise ConcurrentUseError(
                "The transaction belongs to a coroutine, and was used in another thread than its event loop's.",
                next_step="use it in the coroutine; a function for another thread can return what should be written",
            )


class _Step:
    """One call."""

    __slots__ = ("_context", "_function", "arrived", "error", "result")

    def __init__(self, function: Callable[[], Any], arrived: asyncio.Future[None]) -> None:
        self._function = function
        self._context = contextvars.copy_context()
        self.arrived = arrived
        self.result: Any = None
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self.result = self._context.run(self._function)
        except BaseException as error:  # noqa: BLE001  (it is the coroutine's)
            self.error = error


class _End:
    """The end of the coroutine."""

    __slots__ = ("error",)

    def __init__(self, error: BaseException | None) -> None:
        self.error = error


def _has_ended() -> WriterClosedError:
    return WriterClosedError("The transaction ended with its coroutine, or with its block.")
