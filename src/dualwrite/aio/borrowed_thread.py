"""A thread of the pool that serves a coroutine: until the coroutine ends, it runs the calls that would block the event loop."""

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

from dualwrite.aio.loop_notifier import LoopNotifier
from dualwrite.deadline import Deadline
from dualwrite.errors import ConcurrentUseError, WriterClosedError

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

_CHECK_INTERVAL: Final = 0.2
"""Seconds between two checks whether the coroutine can still end."""

GRACE: Final = 2.0
"""Seconds within which a coroutine must end while the pool is being closed, if it was interrupted or its loop does not run."""


class Closing(Protocol):
    """What the thread needs to know about its pool."""

    @property
    def is_closed(self) -> bool:
        """Whether the pool is closed, or is being closed."""


class BorrowedThread:
    """The current thread, in a transaction, serves one coroutine. The thread waits in `serve`; the coroutine calls the rest.

    A coroutine that does not end can't block the thread forever: the thread stops serving it if the event loop is closed, or,
    if the pool is being closed, `GRACE` seconds after interrupting the coroutine.

    Args:
        name: The coroutine's name, for messages.
        notifier: Notifies the coroutine.
        pool: The thread's pool.
        close_timeout: Seconds within which the coroutine must end once the pool is being closed.
        interrupt: Called in the event loop to ask the coroutine to end.

    Attributes:
        ident: The thread's identifier.
        is_open: Whether the coroutine can still use the thread.
    """

    def __init__(
        self, name: str, notifier: LoopNotifier, pool: Closing, *, close_timeout: float, interrupt: Callable[[], None]
    ) -> None:
        self.ident = threading.get_ident()
        self.is_open = True
        self._name = name
        self._notifier = notifier
        self._pool = pool
        self._close_timeout = close_timeout
        self._interrupt = interrupt
        self._tasks: SimpleQueue[_Call | _End] = SimpleQueue()
        self._limit: Deadline | None = None
        self._is_interrupted = False

    # --- in the thread ----------------------------------------------------------------------------------------------------

    def serve(self) -> None:
        """Run the coroutine's calls until it has ended.

        Raises:
            BaseException: What the coroutine has raised.
            WriterClosedError: It can't end any more, or did not end when the pool was closed.
        """
        try:
            while True:
                try:
                    task = self._tasks.get(timeout=_CHECK_INTERVAL)
                except Empty:
                    self._check_coroutine()
                    continue
                if isinstance(task, _End):
                    if task.error is not None:
                        raise task.error
                    return
                task.run()
                self._notifier.notify(task.done)
                self._check_coroutine()
        finally:
            self.is_open = False
            self._refuse_remaining()

    def _check_coroutine(self) -> None:
        loop = self._notifier.loop
        if loop.is_closed():
            raise self._abandoned("its event loop was closed before it ended")
        if not self._pool.is_closed:
            return
        if self._limit is None:
            self._limit = Deadline.after(self._close_timeout if loop.is_running() else GRACE)
        if not self._limit.expired:
            return
        if self._is_interrupted or not loop.is_running():
            raise self._abandoned("the pool was closed, and it did not end")
        self._is_interrupted = True
        self._limit = Deadline.after(GRACE)
        with suppress(RuntimeError):  # the loop was closed at this moment
            loop.call_soon_threadsafe(self._interrupt)

    def _abandoned(self, why: str) -> WriterClosedError:
        error = WriterClosedError(
            f"The coroutine {self._name} can't use its transaction any more: {why}. What it wrote is rolled back.",
            next_step="let every coroutine that uses the pool end before the pool and the event loop are closed",
        )
        log.warning("%s", error)
        return error

    def _refuse_remaining(self) -> None:
        with suppress(Empty):
            while True:
                task = self._tasks.get_nowait()
                if isinstance(task, _Call):
                    task.error = _has_ended()
                    self._notifier.notify(task.done)

    # --- in the event loop ------------------------------------------------------------------------------------------------

    async def call(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a function in the thread, after the calls before it, in a copy of the caller's context (`contextvars`).

        A call can't be stopped once it was sent: a cancellation is raised when the function has ended.

        Raises:
            BaseException: What the function raises.
            WriterClosedError: The coroutine has ended.
            ConcurrentUseError: Called in a thread other than the event loop's.
        """
        self.check()
        call = _Call(functools.partial(function, *args, **kwargs), self._notifier.new_future())
        self._tasks.put(call)
        if not self.is_open:  # since the check
            self._refuse_remaining()
        await self._notifier.through_cancellation(call.done)
        if call.error is not None:
            raise call.error
        result: T = call.result
        return result

    def end(self, error: BaseException | None = None) -> None:
        """Note that the coroutine has ended, with or without an error; the calls that were sent before are still run."""
        self.is_open = False
        self._tasks.put(_End(error))

    def check(self) -> None:
        """Check that the coroutine may use the transaction.

        Raises:
            WriterClosedError: The coroutine has ended.
            ConcurrentUseError: Called in a thread other than the event loop's.
        """
        if not self.is_open:
            raise _has_ended()
        if threading.get_ident() != self._notifier.thread:
            raise ConcurrentUseError(
                "The transaction belongs to a coroutine, and was used in another thread than its event loop's.",
                next_step="use it in the coroutine; a function for another thread can return what should be written",
            )


class _Call:
    """A function to run in the thread, and its outcome."""

    __slots__ = ("_context", "_function", "done", "error", "result")

    def __init__(self, function: Callable[[], Any], done: asyncio.Future[None]) -> None:
        self._function = function
        self._context = contextvars.copy_context()
        self.done = done
        self.result: Any = None
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self.result = self._context.run(self._function)
        except BaseException as error:  # noqa: BLE001  (it is raised in the coroutine)
            self.error = error


class _End:
    """The end of the coroutine."""

    __slots__ = ("error",)

    def __init__(self, error: BaseException | None) -> None:
        self.error = error


def _has_ended() -> WriterClosedError:
    return WriterClosedError("The transaction ended with its coroutine, or with its block.")
