"""Hands the transaction of a pool's thread over to the coroutine that uses it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress
from typing import Any

from dualwrite.aio.borrowed_thread import BorrowedThread, Closing
from dualwrite.aio.loop_notifier import LoopNotifier
from dualwrite.aio.transaction import AsyncTransaction, UnsentMessages
from dualwrite.errors import WriterClosedError
from dualwrite.transaction import Transaction, opened


class Handoff:
    """The thread calls `hand_over`, once for each transaction; the coroutine awaits `receive`, and runs its code in `body`.

    The coroutine's code runs in the task of its caller, so that cancellation, time limits and context variables work as in any
    coroutine.

    Args:
        name: The coroutine's name, for messages.
        notifier: Notifies the coroutine.
        pool: The thread's pool.
        close_timeout: See BorrowedThread.
    """

    def __init__(self, name: str, notifier: LoopNotifier, pool: Closing, *, close_timeout: float) -> None:
        self._name = name
        self._notifier = notifier
        self._pool = pool
        self._close_timeout = close_timeout
        self._ready: asyncio.Future[None] = notifier.new_future()
        self._offered: tuple[BorrowedThread, AsyncTransaction[Any]] | None = None
        self._thread: BorrowedThread | None = None
        self._body: asyncio.Timeout | None = None
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
        thread = BorrowedThread(
            self._name, self._notifier, self._pool, close_timeout=self._close_timeout, interrupt=self._interrupt
        )
        unsent = UnsentMessages(opened(transaction))
        self._offered = thread, AsyncTransaction(transaction, thread, unsent)
        if self._is_abandoned:
            raise asyncio.CancelledError
        self.notify()
        thread.serve()
        unsent.hand_over()

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

    @asynccontextmanager
    async def body(self) -> AsyncIterator[None]:
        """The coroutine's code with the transaction; the thread continues at its end.

        Raises:
            WriterClosedError: The code was interrupted because the pool was closed.
        """
        assert self._thread is not None
        body = self._body = asyncio.timeout(None)
        try:
            async with body:
                yield
        except TimeoutError as error:
            closed = self._closed() if body.expired() else None
            self._thread.end(closed or error)
            if closed is None:
                raise
            raise closed from error
        except BaseException as error:
            self._thread.end(error)
            raise
        else:
            self._thread.end()

    def abandon(self) -> None:
        """Receive no more transactions: if a thread hands one over after this, it is rolled back."""
        self._is_abandoned = True
        if self._offered is not None:
            self._offered[0].end(asyncio.CancelledError())

    def _interrupt(self) -> None:
        """Cancel the coroutine's code, which `body` turns into an error."""
        if self._body is not None and self.is_in_body:
            with suppress(RuntimeError):  # it ends at this moment
                self._body.reschedule(self._notifier.loop.time())

    def _closed(self) -> WriterClosedError:
        return WriterClosedError(
            f"The pool was closed while {self._name} was using a transaction: it was cancelled, and is rolled back.",
            next_step="let every coroutine that uses the pool end before the pool is closed",
        )
