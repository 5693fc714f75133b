"""Notifies coroutines from threads: the event loop is woken once for all futures that are ready, not once for each."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from concurrent.futures import Future
from contextlib import suppress
from typing import Any


class LoopNotifier:
    """Resolves futures that coroutines await, from other threads. Made in the event loop's thread.

    There, a signal handler may raise SystemExit or KeyboardInterrupt at any point. `asyncio.run` then cancels all tasks and
    waits for them, so no future may be forgotten: otherwise `through_cancellation` would wait for ever.

    Args:
        loop: The event loop.

    Attributes:
        loop: The event loop.
        thread: The identifier of its thread.
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
        """Wait for something that can't be stopped; a cancellation is raised only when it is done.

        Raises:
            asyncio.CancelledError: The coroutine was cancelled in the meantime.
        """
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
