"""Notifies coroutines from threads: the event loop is woken once for all futures that are ready, not once for each."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from concurrent.futures import Future
from typing import Any


class LoopNotifier:
    """Resolves futures that coroutines await, from other threads. Made in the event loop's thread.

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
        self._lock = threading.Lock()
        self._is_scheduled = False

    def notify(self, future: asyncio.Future[None]) -> None:
        """Resolve a future in the event loop; called in any thread."""
        with self._lock:
            self._ready.append(future)
            if self._is_scheduled:
                return
            self._is_scheduled = True
        try:
            self.loop.call_soon_threadsafe(self._resolve)
        except RuntimeError:  # the loop is closed: nothing awaits the futures any more
            self._ready.clear()

    async def until_done(self, job: Future[Any]) -> None:
        """Wait until a job has ended, whatever its outcome; see `through_cancellation`."""
        await through_cancellation(self.end_of(job))

    def end_of(self, job: Future[Any]) -> asyncio.Future[None]:
        """A future that is resolved when a job has ended, whatever its outcome."""
        future: asyncio.Future[None] = self.loop.create_future()
        job.add_done_callback(lambda _: self.notify(future))
        return future

    def _resolve(self) -> None:
        with self._lock:
            self._is_scheduled = False
            ready = list(self._ready)
            self._ready.clear()
        for future in ready:
            if not future.done():
                future.set_result(None)


async def through_cancellation(future: asyncio.Future[None]) -> None:
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
    if cancelled is not None:
        raise cancelled
