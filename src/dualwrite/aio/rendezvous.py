"""Where a thread that has a transaction meets the coroutine that uses it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress
from typing import Any

from dualwrite.aio.borrowed_thread import BorrowedThread, Closing
from dualwrite.aio.transaction import AsyncTransaction
from dualwrite.aio.waking import Waker
from dualwrite.errors import WriterClosedError
from dualwrite.transaction import Transaction


class Rendezvous:
    """The thread calls `meet`, once for each transaction; the coroutine awaits `turn`, and runs its code in `body`.

    The coroutine's code runs in the task of its caller, so that cancellation, time limits and context variables work as in any
    coroutine.

    Args:
        name: What the coroutine is, for messages.
        waker: Wakes the coroutine.
        pool: The thread's pool.
        patience: See BorrowedThread.
    """

    def __init__(self, name: str, waker: Waker, pool: Closing, *, patience: float) -> None:
        self._name = name
        self._waker = waker
        self._pool = pool
        self._patience = patience
        self._arrived: asyncio.Future[None] = waker.loop.create_future()
        self._offered: tuple[BorrowedThread, AsyncTransaction[Any]] | None = None
        self._thread: BorrowedThread | None = None
        self._body: asyncio.Timeout | None = None
        self._is_left = False

    @property
    def is_in_body(self) -> bool:
        """Whether the coroutine has a transaction."""
        return self._thread is not None and self._thread.is_open

    # --- in the thread ----------------------------------------------------------------------------------------------------

    def meet(self, transaction: Transaction[Any]) -> None:
        """Lend the thread to the coroutine until it has ended.

        Raises:
            BaseException: What the coroutine has raised.
            asyncio.CancelledError: The coroutine has left before.
            WriterClosedError: See `BorrowedThread.serve`.
            DualWriteError: A message of the coroutine was not sent.
        """
        thread = BorrowedThread(self._name, self._waker, self._pool, patience=self._patience, interrupt=self._interrupt)
        lent = AsyncTransaction[Any](transaction, thread)
        self._offered = thread, lent
        if self._is_left:
            raise asyncio.CancelledError
        self.wake()
        thread.serve()
        lent.hand_over_messages()

    def wake(self) -> None:
        """Let the coroutine look again: there is a transaction for it, or it will get none any more."""
        self._waker.wake(self._arrived)

    # --- in the event loop ------------------------------------------------------------------------------------------------

    async def turn(self, job: Future[Any]) -> AsyncTransaction[Any] | None:
        """Wait for a transaction; None if the job that should bring it has ended."""
        while self._offered is None and not job.done():
            self._arrived = self._waker.loop.create_future()
            if self._offered is None and not job.done():  # since there is the new future
                await self._arrived
        if self._offered is None or job.done():
            return None
        (self._thread, lent), self._offered = self._offered, None
        return lent

    @asynccontextmanager
    async def body(self) -> AsyncIterator[None]:
        """The coroutine's code with the transaction; the thread continues at its end.

        Raises:
            WriterClosedError: The code had to end since the pool was closed.
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

    def leave(self) -> None:
        """The coroutine does not come any more: if a thread meets it all the same, its transaction is rolled back."""
        self._is_left = True
        if self._offered is not None:
            self._offered[0].end(asyncio.CancelledError())

    def _interrupt(self) -> None:
        """Cancel the coroutine's code, which `body` turns into an error."""
        if self._body is not None and self.is_in_body:
            with suppress(RuntimeError):  # it ends at this moment
                self._body.reschedule(self._waker.loop.time())

    def _closed(self) -> WriterClosedError:
        return WriterClosedError(
            f"The pool was closed while {self._name} was using a transaction: it was cancelled, and is rolled back.",
            next_step="let every coroutine that uses the pool end before the pool is closed",
        )
