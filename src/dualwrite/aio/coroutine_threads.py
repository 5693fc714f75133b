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
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from queue import Empty, SimpleQueue
from typing import Any, Final, ParamSpec, TypeVar

from dualwrite.aio.async_transaction import AsyncTransaction, send_unsent
from dualwrite.deadline import Deadline
from dualwrite.errors import ConcurrentUseError, WriterClosedError
from dualwrite.pool.pool import WriterPool
from dualwrite.transaction import Transaction

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

_CHECK_INTERVAL: Final = 0.2
"""Seconds between two checks whether the coroutine can still end."""

GRACE: Final = 2.0
"""Seconds within which a coroutine must end while the pool is being closed, if it was interrupted or its loop does not run."""


class LoopNotifier:
    """Resolves futures that coroutines await, from other threads. Made in the event loop's thread.

    There, a signal handler may raise SystemExit or KeyboardInterrupt at any point. `asyncio.run` then cancels all tasks and
    waits for them, so no future may be forgotten: otherwise `through_cancellation` would wait for ever.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.thread = threading.get_ident()
        self._ready: deque[asyncio.Future[None]] = deque()
        self._is_scheduled = False

    def notify(self, future: asyncio.Future[None]) -> None:
        """Resolve a future in the event loop; called in any thread."""
        self._ready.append(future)
        if not self._is_scheduled:
            self._schedule()

    async def until_done(self, job: Future[Any]) -> None:
        """Wait until a job has ended, whatever its outcome; see `through_cancellation`."""
        await self.through_cancellation(self.end_of(job))

    def end_of(self, job: Future[Any]) -> asyncio.Future[None]:
        """A future that is resolved when a job has ended, whatever its outcome."""
        future = self.new_future()
        job.add_done_callback(lambda _: self.notify(future))
        return future

    def new_future(self) -> asyncio.Future[None]:
        """A future for `notify`; called in the event loop's thread."""
        self._is_scheduled = False  # an exit right at the beginning of `_resolve` has left it set, with nothing scheduled
        if self._ready:
            self._schedule()
        return self.loop.create_future()

    async def through_cancellation(self, future: asyncio.Future[None]) -> None:
        """Wait for something that can't be stopped; a cancellation is raised only when it is done."""
        cancelled: asyncio.CancelledError | None = None
        while not future.done():
            try:
                await asyncio.shield(future)
            except asyncio.CancelledError as error:
                cancelled = error
                self._schedule()  # the exit that has led to the cancellation may have come at the very beginning of `_resolve`
        if cancelled is not None:
            raise cancelled

    def _schedule(self) -> None:
        """Let the event loop resolve what is ready; to schedule it twice does no harm."""
        try:
            self._is_scheduled = True
            self.loop.call_soon_threadsafe(self._resolve)
        except RuntimeError:  # the loop is closed: nothing awaits the futures any more
            self._is_scheduled = False
            self._ready.clear()
        except BaseException:  # of a signal handler, perhaps before it was scheduled
            self._is_scheduled = False
            with suppress(RuntimeError):
                self.loop.call_soon_threadsafe(self._resolve)
            raise

    def _resolve(self) -> None:
        self._is_scheduled = False  # first: a future that is added from now on may come too late for this call
        try:
            while self._ready:
                future = self._ready[0]
                if not future.done():
                    future.set_result(None)
                self._ready.popleft()
        finally:
            if self._ready:  # a signal handler has raised an exception
                self._schedule()


class BorrowedThread:
    """The current thread, in a transaction, serves one coroutine. The thread waits in `serve`; the coroutine calls the rest.

    A coroutine that does not end can't block the thread forever: the thread stops serving it if the event loop is closed. If
    the pool is being closed, the coroutine is interrupted after half of the pool's time limit, and abandoned `GRACE` seconds
    later.

    Attributes:
        ident: The thread's identifier.
        is_open: Whether the coroutine can still use the thread.
    """

    def __init__(self, name: str, notifier: LoopNotifier, pool: WriterPool[Any]) -> None:
        self.ident = threading.get_ident()
        self.is_open = True
        self._name = name
        self._notifier = notifier
        self._pool = pool
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()  # None: the coroutine has ended
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
                    call = self._calls.get(timeout=_CHECK_INTERVAL)
                    if call is None:
                        break
                    call.run()
                    self._notifier.notify(call.done)
                self._check_coroutine()
            if self._error is not None:
                raise self._error
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
            self._limit = Deadline.after(self._pool.options.timeout / 2 if loop.is_running() else GRACE)
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
                call = self._calls.get_nowait()
                if call is not None:
                    call.error = _has_ended()
                    self._notifier.notify(call.done)

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
        self._calls.put(call)
        if not self.is_open:  # since the check
            self._refuse_remaining()
        await self._notifier.through_cancellation(call.done)
        if call.error is not None:
            raise call.error
        result: T = call.result
        return result

    def end(self, error: BaseException | None = None) -> None:
        """Note that the coroutine has ended, with or without an error; the calls that were sent before are still run."""
        self.is_open, self._error = False, error
        self._calls.put(None)

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
        if threading.get_ident() != self._notifier.thread:
            raise ConcurrentUseError(
                "The transaction belongs to a coroutine, and was used in another thread than its event loop's.",
                next_step="use it in the coroutine; a function for another thread can return what should be written",
            )

    def _interrupt(self) -> None:
        """Cancel the coroutine's code, which `body` turns into an error."""
        if self._body is not None and self.is_open:
            with suppress(RuntimeError):  # it ends at this moment
                self._body.reschedule(self._notifier.loop.time())

    def _closed(self) -> WriterClosedError:
        return WriterClosedError(
            f"The pool was closed while {self._name} was using a transaction: it was cancelled, and is rolled back.",
            next_step="let every coroutine that uses the pool end before the pool is closed",
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


def _has_ended() -> WriterClosedError:
    return WriterClosedError("The transaction ended with its coroutine, or with its block.")


class Handoff:
    """The thread calls `hand_over`, once for each transaction; the coroutine awaits `receive`, and runs its code in `body`.

    The coroutine's code runs in the task of its caller, so that cancellation, time limits and context variables work as in any
    coroutine.
    """

    def __init__(self, name: str, notifier: LoopNotifier, pool: WriterPool[Any]) -> None:
        self._name = name
        self._notifier = notifier
        self._pool = pool
        self._ready: asyncio.Future[None] = notifier.new_future()
        self._offered: tuple[BorrowedThread, AsyncTransaction[Any]] | None = None
        self._thread: BorrowedThread | None = None
        self._is_abandoned = False

    @property
    def is_in_body(self) -> bool:
        """Whether the coroutine has a transaction."""
        return self._thread is not None and self._thread.is_open

    # --- in the thread ----------------------------------------------------------------------------------------------------

    def hand_over(self, transaction: Transaction[Any]) -> None:
        """Let the coroutine use the transaction and this thread until the coroutine has ended.

        Raises:
            BaseException: What the coroutine has raised.
            asyncio.CancelledError: The coroutine no longer waits for a transaction.
            WriterClosedError: See `BorrowedThread.serve`.
            DualWriteError: A message of the coroutine was not sent.
        """
        thread = BorrowedThread(self._name, self._notifier, self._pool)
        self._offered = thread, (tx := AsyncTransaction(transaction, thread))
        if self._is_abandoned:
            raise asyncio.CancelledError
        self.notify()
        thread.serve()
        send_unsent(tx)

    def notify(self) -> None:
        """Let the coroutine check again, because there is a transaction for it, or there will be no more transactions."""
        self._notifier.notify(self._ready)

    # --- in the event loop ------------------------------------------------------------------------------------------------

    async def receive(self, job: Future[Any]) -> AsyncTransaction[Any] | None:
        """Wait for a transaction; None if the job that should hand it over has ended."""
        while self._offered is None and not job.done():
            self._ready = self._notifier.new_future()
            if self._offered is None and not job.done():  # since the new future was made
                await self._ready
        if self._offered is None or job.done():
            return None
        (self._thread, tx), self._offered = self._offered, None
        return tx

    def body(self) -> AbstractAsyncContextManager[None]:
        """See `BorrowedThread.body`; after `receive`."""
        assert self._thread is not None
        return self._thread.body()

    def abandon(self) -> None:
        """Receive no more transactions: if a thread hands one over after this, it is rolled back."""
        self._is_abandoned = True
        if self._offered is not None:
            self._offered[0].end(asyncio.CancelledError())


async def finished(function: Callable[[], T], *, undo: Callable[[T], object] = lambda _: None) -> T:
    """Run a blocking function in a thread and return its result; if the caller is cancelled, undo its effect, in a thread too.

    A cancellation is raised only when that has ended, however often the caller is cancelled. No task is involved, because a
    loop that ends cancels all tasks.
    """
    loop = asyncio.get_running_loop()
    running = loop.run_in_executor(None, contextvars.copy_context().run, function)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError as cancelled:
        await _ended(running)
        error = running.exception()
        if error is None:
            undoing = loop.run_in_executor(None, undo, running.result())
            await _ended(undoing)
            error = undoing.exception()
        raise cancelled from error


async def _ended(future: asyncio.Future[Any]) -> None:
    while not future.done():
        with suppress(asyncio.CancelledError):
            await asyncio.wait([future])
