"""A thread of the pool that serves a coroutine: until the coroutine ends, it runs the calls that would block the event loop."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import logging
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress
from queue import Empty, SimpleQueue
from typing import Any, Final, ParamSpec, TypeVar

from dualwrite.deadline import Deadline
from dualwrite.errors import ConcurrentUseError, WriterClosedError
from dualwrite.pool.pool import WriterPool

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

_CHECK_INTERVAL: Final = 0.2
"""Seconds between two checks whether the coroutine can still end."""

GRACE: Final = 2.0
"""Seconds within which a coroutine must end while the pool is being closed, if it was interrupted or its loop does not run."""


class LoopCalls:
    """Calls of functions in an event loop, from any thread; the loop is woken once for all that come before it runs them.

    If the loop is closed, nobody waits there any more.

    Args:
        loop: The event loop.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._waiting: deque[Callable[[], object]] = deque()
        self._is_woken = False

    def add(self, function: Callable[..., object], *args: object) -> None:
        """Call a function soon."""
        self._waiting.append(functools.partial(function, *args))
        if not self._is_woken:
            self._wake()

    def end_of(self, job: Future[Any]) -> asyncio.Future[None]:
        """A future of the loop that is resolved when a job has ended, whatever its outcome; called in the loop."""
        ended = self.loop.create_future()
        job.add_done_callback(lambda _: self.add(_resolve, ended))
        return ended

    async def until_done(self, job: Future[Any]) -> None:
        """Wait for something that can't be stopped, whatever its outcome; a cancellation is raised only when it is done."""
        cancelled: asyncio.CancelledError | None = None
        while not job.done():
            try:
                await self.end_of(job)
            except asyncio.CancelledError as error:
                cancelled = error
        if cancelled is not None:
            raise cancelled

    def _wake(self) -> None:
        self._is_woken = True
        try:
            self.loop.call_soon_threadsafe(self._run)
        except RuntimeError:  # the loop is closed
            self._waiting.clear()
        except BaseException:  # a signal handler's, perhaps before the loop was woken
            self._is_woken = False
            raise

    def _run(self) -> None:
        self._is_woken = False  # first: what is added from now on may come too late for this run
        try:
            while self._waiting:
                self._waiting.popleft()()
        finally:
            if self._waiting:  # a call has raised
                self._wake()


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():  # cancelled
        future.set_result(None)


def settle(outcome: Future[T], function: Callable[[], T]) -> None:
    """Call a function; what it returns or raises is the outcome."""
    try:
        result = function()
    except BaseException as error:  # noqa: BLE001  (it is raised where somebody waits for the outcome)
        outcome.set_exception(error)
    else:
        outcome.set_result(result)


class BorrowedThread:
    """The current thread, in a transaction, serves one coroutine. The thread waits in `serve`; the coroutine calls the rest.

    A coroutine that does not end can't block the thread forever: the thread stops serving it if the event loop is closed. If
    the pool is being closed, the coroutine is interrupted after half of the pool's time limit, and abandoned `GRACE` seconds
    later.

    Attributes:
        ident: The thread's identifier.
        is_open: Whether the coroutine can still use the thread.
    """

    def __init__(self, name: str, calls: LoopCalls, pool: WriterPool[Any]) -> None:
        self.ident = threading.get_ident()
        self.is_open = True
        self._name = name
        self._in_loop = calls
        self._loop = calls.loop
        self._pool = pool
        self._asked: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()  # None: the coroutine has ended
        self._error: BaseException | None = None  # what it has raised
        self._body: asyncio.Timeout | None = None
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
                with suppress(Empty):
                    asked = self._asked.get(timeout=_CHECK_INTERVAL)
                    if asked is None:
                        break
                    settle(*asked)
                self._check_coroutine()
            if self._error is not None:
                raise self._error
        finally:
            self.is_open = False
            self._refuse_remaining()

    def _check_coroutine(self) -> None:
        loop = self._loop
        if loop.is_closed():
            raise self._abandoned("its event loop was closed before it ended")
        if not self._pool.is_closed:
            return
        if self._limit is None:
            self._limit = Deadline.after(self._pool.options.timeout / 2 if loop.is_running() else GRACE)
        if not self._limit.expired:
            return
        if self._is_interrupted or not loop.is_running():
            raise self._abandoned("the pool was closed, and it did not end")
        self._is_interrupted = True
        self._limit = Deadline.after(GRACE)
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(self._interrupt)

    def _abandoned(self, why: str) -> WriterClosedError:
        error = WriterClosedError(
            f"The coroutine {self._name} can't use its transaction any more: {why}. What it wrote is rolled back.",
            next_step="let every coroutine that uses the pool end before the pool and the event loop are closed",
        )
        log.warning("%s", f"{error}")
        return error

    def _refuse_remaining(self) -> None:
        with suppress(Empty):
            while True:
                asked = self._asked.get_nowait()
                if asked is not None:
                    asked[0].set_exception(_has_ended())

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
        outcome: Future[T] = Future()
        self._asked.put((outcome, functools.partial(contextvars.copy_context().run, function, *args, **kwargs)))
        if not self.is_open:  # since the check
            self._refuse_remaining()
        await self._in_loop.until_done(outcome)
        return outcome.result()

    def end(self, error: BaseException | None = None) -> None:
        """Note that the coroutine has ended, with or without an error; the calls that were sent before are still run."""
        self.is_open, self._error = False, error
        self._asked.put(None)

    @asynccontextmanager
    async def body(self) -> AsyncIterator[None]:
        """The coroutine's code with the transaction; the thread continues at its end.

        Raises:
            WriterClosedError: The code was interrupted because the pool was closed.
        """
        body = self._body = asyncio.timeout(None)
        try:
            async with body:
                yield
        except TimeoutError as error:
            closed = self._closed() if body.expired() else None
            self.end(closed or error)
            if closed is None:
                raise
            raise closed from error
        except BaseException as error:
            self.end(error)
            raise
        else:
            self.end()

    def check(self) -> None:
        """Check that the coroutine may use the transaction: it has not ended, and is in the event loop's thread."""
        if not self.is_open:
            raise _has_ended()
        if not _is_running(self._loop):
            raise ConcurrentUseError(
                "The transaction belongs to a coroutine, and was used in another thread than its event loop's.",
                next_step="use it in the coroutine; a function for another thread can return what should be written",
            )

    def _interrupt(self) -> None:
        """Cancel the coroutine's code, which `body` turns into an error."""
        if self._body is not None and self.is_open:
            with suppress(RuntimeError):  # it ends at this moment
                self._body.reschedule(self._loop.time())

    def _closed(self) -> WriterClosedError:
        return WriterClosedError(
            f"The pool was closed while {self._name} was using a transaction: it was cancelled, and is rolled back.",
            next_step="let every coroutine that uses the pool end before the pool is closed",
        )


def _is_running(loop: asyncio.AbstractEventLoop) -> bool:
    """Whether the event loop runs in this thread."""
    try:
        return asyncio.get_running_loop() is loop
    except RuntimeError:
        return False


def _has_ended() -> WriterClosedError:
    return WriterClosedError("The transaction ended with its coroutine, or with its block.")


async def finished(function: Callable[[], T], *, undo: Callable[[T], object] = lambda _: None) -> T:
    """Run a blocking function in a thread and return its result; if the caller is cancelled, undo its effect, in a thread too.

    A cancellation is raised only when that has ended, however often the caller is cancelled. No task is involved, because a
    loop that ends cancels all tasks.
    """
    calls = LoopCalls(asyncio.get_running_loop())
    job = _in_thread(calls.loop, function)
    try:
        await calls.until_done(job)
    except asyncio.CancelledError as cancelled:
        error = job.exception()
        if error is None:
            undoing = _in_thread(calls.loop, functools.partial(undo, job.result()))
            with suppress(asyncio.CancelledError):
                await calls.until_done(undoing)
            error = undoing.exception()
        raise cancelled from error
    return job.result()


def _in_thread(loop: asyncio.AbstractEventLoop, function: Callable[[], T]) -> Future[T]:
    job: Future[T] = Future()
    loop.run_in_executor(None, contextvars.copy_context().run, settle, job, function)
    return job
