"""How the pool's threads wake the event loop: once for all the coroutines that can continue, not once for each."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from concurrent.futures import Future
from typing import Any


class Waker:
    """Lets coroutines continue that wait for a thread. Made in the event loop's thread.

    Args:
        loop: The event loop.

    Attributes:
        loop: The event loop.
        thread: The identifier of its thread.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.thread = threading.get_ident()
        self._arrived: deque[asyncio.Future[None]] = deque()
        self._lock = threading.Lock()
        self._is_waking = False

    def wake(self, arrived: asyncio.Future[None]) -> None:
        """Called in any thread: let the coroutine continue that waits for this."""
        with self._lock:
            self._arrived.append(arrived)
            if self._is_waking:
                return
            self._is_waking = True
        try:
            self.loop.call_soon_threadsafe(self._deliver)
        except RuntimeError:  # the loop is closed: nobody waits any more
            self._arrived.clear()

    async def until_done(self, job: Future[Any]) -> None:
        """Wait until a job has ended, whatever its outcome; see `through_cancellation`."""
        await through_cancellation(self.end_of(job))

    def end_of(self, job: Future[Any]) -> asyncio.Future[None]:
        """Arrives when a job has ended, whatever its outcome."""
        arrived: asyncio.Future[None] = self.loop.create_future()
        job.add_done_callback(lambda _: self.wake(arrived))
        return arrived

    def _deliver(self) -> None:
        with self._lock:
            self._is_waking = False
            arrived = list(self._arrived)
            self._arrived.clear()
        for future in arrived:
            if not future.done():
                future.set_result(None)


async def through_cancellation(arrived: asyncio.Future[None]) -> None:
    """Wait for something that can't be stopped; a cancellation is raised when it has arrived.

    Raises:
        asyncio.CancelledError: The coroutine was cancelled meanwhile.
    """
    cancelled: asyncio.CancelledError | None = None
    while not arrived.done():
        try:
            await asyncio.shield(arrived)
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
