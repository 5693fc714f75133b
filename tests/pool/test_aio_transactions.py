"""`async with pool.transaction()`, and event loops that end in the middle of a transaction."""

from __future__ import annotations

import asyncio
import gc
import itertools
import logging
import threading
from collections.abc import Coroutine
from typing import Any

import pytest

from crash.databases import DATABASES
from crash.scene import Scene
from dualwrite import WriterPool, aio
from dualwrite.errors import PoolTimeoutError, StoreCommitFailedError, WriterClosedError
from dualwrite.testing import failpoints
from fixtures.pace import LIMIT, until
from fixtures.tiers import thinned
from pool.aio_scene import CancelledAt, Pool, both_here, held, in_loop, in_pool, opened
from pool.pool_scene import both, open_pool


def is_idle(pool: Pool) -> bool:
    """Whether no writer of the pool has a transaction."""
    return pool._pool._writers.doing() == ()


@pytest.mark.parametrize("database", thinned(DATABASES, quick=["postgresql", "rocksdb"]))
def test_the_end_of_the_block_commits_and_an_error_rolls_back(scene: Scene, database: str) -> None:
    del database

    async def then_raise(pool: Pool) -> None:
        async with pool.transaction() as tx:
            await both_here(tx, scene, 2)
            raise KeyError("mine")

    async def main(pool: Pool) -> None:
        async with pool.transaction() as tx:
            await both_here(tx, scene, 1)
        with pytest.raises(KeyError, match="mine"):
            await then_raise(pool)
        assert is_idle(pool)
        assert await pool.run(both_here, scene, 3) == 3

    in_pool(scene, main)
    assert scene.agree() == [1, 3]


def test_many_transactions_wait_for_writers(scene: Scene) -> None:
    async def one(pool: Pool, number: int) -> None:
        async with pool.transaction() as tx:
            await both_here(tx, scene, number)

    in_pool(scene, lambda pool: asyncio.gather(*(one(pool, number) for number in range(70))))
    assert scene.agree() == list(range(70))


def test_an_error_of_the_commit_is_raised_by_the_block(scene: Scene) -> None:
    async def main(pool: Pool) -> None:
        with (
            failpoints.armed("before_db_commit", failpoints.raises(StoreCommitFailedError("the test's"))),
            pytest.raises(StoreCommitFailedError, match="the test's"),
        ):
            async with pool.transaction() as tx:
                await both_here(tx, scene, 1)

    in_pool(scene, main)
    assert scene.agree() == []


async def block(pool: Pool, scene: Scene, number: int, ended: list[int]) -> int:
    async with pool.transaction() as tx:
        await both_here(tx, scene, number)
        async with tx.session.begin_nested():
            await tx.session.connection()
        await asyncio.sleep(0)
        ended.append(number)
    return number


def test_a_transaction_cancelled_at_any_await_leaves_neither_side_open(scene: Scene) -> None:
    """A block that is cancelled has been rolled back when the error leaves it; a commit that has begun is finished."""
    told: set[int] = set()
    ended: list[int] = []

    async def at(pool: Pool, place: int) -> bool:
        cancelled = CancelledAt(place, block(pool, scene, place, ended))

        async def run() -> None:
            told.add(await cancelled)

        async with held(pool):  # or it might not have to wait for its transaction: one await less
            running = asyncio.ensure_future(run())
            await asyncio.sleep(0)
        await asyncio.wait([running])
        assert running.cancelled() == cancelled.is_cancelled
        if place == 0:  # there is no transaction yet: its thread is told to leave, which is not waited for
            threads = threading.enumerate()
            await asyncio.to_thread(lambda: [each.join() for each in threads if each.name == "dualwrite transaction"])
        assert is_idle(pool)
        return cancelled.is_cancelled

    async def main(pool: Pool) -> None:
        for place in itertools.count():
            if not await at(pool, place):
                break
        assert place > 5, "it waits for the beginning, for each call, and for the commit"

    in_pool(scene, main, size=1)
    assert scene.agree() == sorted(ended), "what came to its end is committed, even if it was cancelled then"
    assert len(ended) == len(told) + 1


def test_cancelled_during_a_commit_that_fails(scene: Scene) -> None:
    """The cancellation leaves the block, and the error of the commit is its cause."""

    async def run(pool: Pool) -> None:
        async with pool.transaction() as tx:
            await both_here(tx, scene, 1)
            task = asyncio.current_task()
            assert task is not None
            asyncio.get_running_loop().call_soon(task.cancel)

    async def main(pool: Pool) -> None:
        with failpoints.armed("before_db_commit", failpoints.raises(StoreCommitFailedError("the test's"))):
            running = asyncio.ensure_future(run(pool))
            await asyncio.wait([running])
        with pytest.raises(asyncio.CancelledError) as cancelled:
            running.result()
        assert isinstance(cancelled.value.__cause__, StoreCommitFailedError)

    in_pool(scene, main)
    assert scene.agree() == []


def test_a_timeout_names_what_holds_the_writer(scene: Scene) -> None:
    async def main() -> None:
        async with opened(scene, size=1) as pool, pool.transaction() as tx:
            with pytest.raises(PoolTimeoutError, match="a transaction of its own"):
                async with pool.transaction(timeout=0.05):
                    pass
            await both_here(tx, scene, 1)

    in_loop(main())
    assert scene.agree() == [1]


# --- event loops that end ---------------------------------------------------------------------------------------------


async def in_a_unit(pool: Pool, scene: Scene, begun: asyncio.Event) -> None:
    async def unit(tx: aio.AsyncTransaction) -> None:
        async with tx.db.begin_nested():
            await both_here(tx, scene, 1)
            begun.set()
            await asyncio.Event().wait()

    await pool.run(unit)


async def in_a_transaction(pool: Pool, scene: Scene, begun: asyncio.Event) -> None:
    async with pool.transaction() as tx:
        await both_here(tx, scene, 1)
        begun.set()
        await asyncio.Event().wait()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # the coroutine, which is never continued
@pytest.mark.parametrize("code", [in_a_unit, in_a_transaction])
def test_a_loop_closed_during_a_transaction(scene: Scene, code: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Without cancelling its tasks: the thread leaves, and nothing stays open."""

    async def begin(threads: WriterPool[Any]) -> asyncio.Task[None]:
        begun = asyncio.Event()
        task = asyncio.ensure_future(code(aio.AsyncWriterPool(threads), scene, begun))
        await begun.wait()
        return task

    with open_pool(scene, size=1) as threads:
        loop = asyncio.new_event_loop()
        task = loop.run_until_complete(begin(threads))
        other = threads.submit(both, scene, 2)  # behind it
        loop.close()
        assert other.result(LIMIT) == 2
        until(lambda: threads._writers.doing() == (), "the writer is free")
        assert "its event loop was closed before it ended" in caplog.text
        with caplog.at_level(logging.CRITICAL, "asyncio"):  # the task complains that it was destroyed
            del task
            gc.collect()
    assert scene.agree() == [2]


@pytest.mark.parametrize("code", [in_a_unit, in_a_transaction])
def test_a_loop_whose_tasks_are_cancelled_at_its_end(scene: Scene, code: Any) -> None:
    """As `asyncio.run` does."""

    async def main(threads: WriterPool[Any]) -> None:
        begun = asyncio.Event()
        tasks.append(asyncio.ensure_future(code(aio.AsyncWriterPool(threads), scene, begun)))
        await begun.wait()

    tasks: list[asyncio.Future[None]] = []
    with open_pool(scene, size=1) as threads:
        asyncio.run(main(threads))
        assert tasks[0].cancelled()
        assert threads.run(both, scene, 2) == 2
    assert scene.agree() == [2]


def test_the_pool_can_be_closed_after_its_loop_has_stopped(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dualwrite.aio.coroutine_threads.GRACE", 0.1)

    async def begin(threads: WriterPool[Any]) -> asyncio.Task[None]:
        begun = asyncio.Event()
        task = asyncio.ensure_future(in_a_unit(aio.AsyncWriterPool(threads), scene, begun))
        await begun.wait()
        return task

    loop = asyncio.new_event_loop()
    with open_pool(scene, size=1) as threads:
        task = loop.run_until_complete(begin(threads))
    with pytest.raises(WriterClosedError):
        loop.run_until_complete(cancelled(task))
    loop.close()
    assert scene.agree() == []


async def cancelled(task: asyncio.Task[None]) -> Coroutine[Any, Any, None] | None:
    task.cancel()
    return await task  # type: ignore[func-returns-value]  # it raises
