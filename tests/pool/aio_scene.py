"""What the tests of the pool for asyncio share: pools, loops, units, and cancellation at a chosen await."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Generator
from contextlib import asynccontextmanager
from typing import Any, Generic, TypeVar

import sqlalchemy as sa

from crash.events import write_event
from crash.scene import Scene
from crash.worker import timeouts
from dualwrite import PoolOptions, Transaction, aio
from fixtures.pace import LIMIT

T = TypeVar("T")
Pool = aio.AsyncWriterPool[Any]


@asynccontextmanager
async def opened(scene: Scene, **changes: Any) -> AsyncIterator[Pool]:
    given = {"options": PoolOptions(timeout=LIMIT), "timeouts": timeouts(), **changes}
    async with aio.create_pool(scene.events.database, kafka=scene.settings, prefix=scene.transactional_id, **given) as pool:
        yield pool


def in_loop(coroutine: Coroutine[Any, Any, T]) -> T:
    async def limited() -> T:
        async with asyncio.timeout(LIMIT):
            return await coroutine

    return asyncio.run(limited())


def in_pool(scene: Scene, use: Callable[[Pool], Coroutine[Any, Any, T]], **changes: Any) -> T:
    """Run a coroutine with a pool, which is then closed."""

    async def main() -> T:
        async with opened(scene, **changes) as pool:
            return await use(pool)

    return in_loop(main())


@asynccontextmanager
async def held(pool: Pool) -> AsyncIterator[None]:
    """Keep the pool in a unit."""
    begun, release = threading.Event(), threading.Event()

    def hold(_: Transaction) -> None:
        begun.set()
        assert release.wait(LIMIT)

    holding = asyncio.ensure_future(pool.run(hold))
    assert await asyncio.to_thread(begun.wait, LIMIT)
    try:
        yield
    finally:
        release.set()
        await holding


async def grouped(pool: Pool, *calls: Coroutine[Any, Any, Any]) -> list[Any]:
    """The results and errors of calls that run in one group."""
    async with held(pool):
        running = [asyncio.ensure_future(call) for call in calls]
        await asyncio.sleep(0)
    return await asyncio.gather(*running, return_exceptions=True)


INSERT = sa.text("INSERT INTO events (writer, number) VALUES (:writer, :number)")


async def both_here(tx: aio.AsyncTransaction, scene: Scene, number: int) -> int:
    """Write an event and send its message, in a coroutine."""
    if isinstance(tx.db, aio.AsyncConnection):
        await tx.db.execute(INSERT, {"writer": scene.transactional_id, "number": number})
    else:
        write_event(scene.url, tx.db, scene.transactional_id, number)
    tx.send(scene.topic, str(number), key=scene.transactional_id)
    return number


class CancelledAt(Generic[T]):
    """Awaits a coroutine, and cancels the current task at one of its awaits.

    Args:
        place: Which of them, from 0.
        coroutine: The coroutine.

    Attributes:
        is_cancelled: Whether there was such an await.
    """

    def __init__(self, place: int, coroutine: Coroutine[Any, Any, T]) -> None:
        self._left = place
        self._coroutine = coroutine
        self.is_cancelled = False

    def __await__(self) -> Generator[Any, Any, T]:
        inner = self._coroutine.__await__()
        proceed = functools.partial(inner.send, None)
        while True:
            try:
                awaited = proceed()
            except StopIteration as end:
                result: T = end.value
                return result
            if self._left == 0:
                task = asyncio.current_task()
                assert task is not None
                self.is_cancelled = task.cancel()
            self._left -= 1
            try:
                yield awaited
            except BaseException as error:  # noqa: BLE001  (thrown into the coroutine)
                proceed = functools.partial(inner.throw, error)
            else:
                proceed = functools.partial(inner.send, None)
