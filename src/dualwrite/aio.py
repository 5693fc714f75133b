"""The pool for asyncio: coroutines wait for units of work that run in the pool's threads (docs/guides/asyncio.md)."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeVar

from dualwrite.api import Database
from dualwrite.api import create_pool as create_writer_pool
from dualwrite.errors import UsageError
from dualwrite.pool.pool import BoundPool, WriterPool
from dualwrite.transaction import H, Transaction

P = ParamSpec("P")
T = TypeVar("T")


async def create_pool(database: Database | None = None, *, prefix: str, **options: Any) -> AsyncWriterPool[Any]:
    """Build a pool, as `dualwrite.create_pool` does, without blocking the event loop.

    Args:
        database: See `dualwrite.create_pool`.
        prefix: See `dualwrite.create_pool`.
        **options: See `dualwrite.create_pool`.

    Returns:
        A pool for the running event loop. Close it with `async with` or `await close()`.

    Raises: as for `dualwrite.create_pool`.
    """
    pool = await _finished(lambda: create_writer_pool(database, prefix=prefix, **options), undo=WriterPool.close)
    return AsyncWriterPool(pool)


class AsyncWriterPool(Generic[H]):
    """A WriterPool for the coroutines of one event loop: units share their commits as those of threads do.

    A coroutine that is cancelled while its unit waits takes it back. A unit that has begun is finished: its transaction is
    never left open, and the coroutine does not learn whether it committed.

    Args:
        pool: The pool; closed with this one. Threads may use it at the same time.
        key: See `WriterPool.with_options`.
        timeout: See `WriterPool.with_options`.
    """

    def __init__(self, pool: WriterPool[H], *, key: Hashable = None, timeout: float | None = None) -> None:
        self._pool = pool
        self._key = key
        self._timeout = timeout
        self._bound: BoundPool[H] = pool.with_options(key=key, timeout=timeout)
        self._loop = asyncio.get_running_loop()
        self._results = _Results(self._loop)

    async def run(self, unit: Callable[Concatenate[Transaction[H], P], T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a unit of work, in one commit with those of other coroutines and threads; see `WriterPool.run`.

        Args:
            unit: A plain function: it runs in one of the pool's threads.
            *args: Positional arguments of the unit after the Transaction.
            **kwargs: Keyword arguments of the unit.

        Returns:
            What the unit returned; both sides are committed.

        Raises:
            UsageError: Called in another event loop than the pool's.
            BaseException: As for `WriterPool.run`.
        """
        self._check_loop()
        future = self._bound.submit(unit, *args, **kwargs)
        arrived: asyncio.Future[None] = self._loop.create_future()
        future.add_done_callback(lambda _: self._results.put(arrived))
        try:
            async with asyncio.timeout(self._bound.timeout):
                await arrived
        except TimeoutError:
            if future.cancel():
                raise self._bound.timed_out(unit) from None
            await self._until_done(future)  # it has begun: its outcome is not known before it ends
        except asyncio.CancelledError:
            future.cancel()
            raise
        return future.result()

    def with_options(self, *, key: Hashable = None, timeout: float | None = None) -> AsyncWriterPool[H]:
        """The pool with an ordering key, or another limit for waiting; see `WriterPool.with_options`."""
        self._check_loop()
        return AsyncWriterPool(self._pool, key=key, timeout=timeout)

    async def close(self) -> None:
        """Finish the units that wait, and close the pool; see `WriterPool.close`."""
        await _finished(self._pool.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _until_done(self, future: Future[Any]) -> None:
        arrived: asyncio.Future[None] = self._loop.create_future()
        future.add_done_callback(lambda _: self._results.put(arrived))
        await arrived

    def _check_loop(self) -> None:
        if asyncio.get_running_loop() is not self._loop:
            raise UsageError(
                "The pool belongs to another event loop.",
                next_step="make one in each loop: dualwrite.aio.AsyncWriterPool(pool) on one WriterPool, or aio.create_pool",
            )


class _Results:
    """Wakes the event loop once for all the units of a group, not once for each."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._arrived: deque[asyncio.Future[None]] = deque()
        self._lock = threading.Lock()
        self._is_waking = False

    def put(self, arrived: asyncio.Future[None]) -> None:
        """Called in a thread of the pool: let the coroutine continue that waits for this."""
        with self._lock:
            self._arrived.append(arrived)
            if self._is_waking:
                return
            self._is_waking = True
        try:
            self._loop.call_soon_threadsafe(self._deliver)
        except RuntimeError:  # the loop is closed: nobody waits any more
            self._arrived.clear()

    def _deliver(self) -> None:
        with self._lock:
            self._is_waking = False
            arrived = list(self._arrived)
            self._arrived.clear()
        for future in arrived:
            if not future.done():
                future.set_result(None)


async def _finished(function: Callable[[], T], *, undo: Callable[[T], object] = lambda _: None) -> T:
    """The result of a blocking function, run in a thread; if the caller is cancelled, its effect is undone."""
    running = asyncio.ensure_future(asyncio.to_thread(function))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        undo(await running)
        raise
