"""The pool for asyncio with plain units: results, errors, limits, cancellation."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest

import dualwrite
from crash.scene import Scene
from dualwrite import Transaction, WriterPool, aio
from dualwrite.aio.async_pool import OpeningPool
from dualwrite.errors import ConfigurationError, PoolTimeoutError, StoreCommitFailedError, UsageError
from fixtures.pace import LIMIT, done, limit, until
from pool.aio_scene import Pool, both_here, held, in_loop, in_pool, opened
from pool.pool_scene import both, open_pool, then_raise


def test_the_loop_is_woken_once_for_a_group(scene: Scene) -> None:
    """Not once for each unit, if it has not come to the results before the last one arrives."""
    woken: list[Any] = []

    async def main() -> None:
        threads = open_pool(scene, size=1)
        async with aio.AsyncWriterPool(threads) as pool:
            loop = asyncio.get_running_loop()
            async with held(pool):
                running = [asyncio.ensure_future(pool.run(both, scene, number)) for number in range(40)]
                await asyncio.sleep(0)
                wake = loop.call_soon_threadsafe
                loop.call_soon_threadsafe = lambda *a, **k: (woken.append(a), wake(*a, **k))[1]  # type: ignore[method-assign]
            done(threads.submit(lambda _: None))  # the loop is kept busy until every unit of the group has its result
            await asyncio.gather(*running)
            loop.call_soon_threadsafe = wake  # type: ignore[method-assign]

    in_loop(main())
    assert len(woken) <= 2, "the unit that was held back, and a group of 40"
    assert scene.agree() == list(range(40))


def test_a_pool_is_opened_by_await_or_by_a_block_and_says_what_it_is(scene: Scene) -> None:
    def made() -> OpeningPool[Any]:
        return aio.create_pool(scene.events.database, kafka=scene.settings, prefix=scene.transactional_id, size=1)

    async def main() -> None:
        with pytest.raises(AttributeError, match=r"(?s)not open.*await aio\.create_pool"):
            made().run  # type: ignore[attr-defined]  # noqa: B018  (forgotten, as everybody does at first)
        async with made() as pool:
            assert repr(pool) == f"<AsyncWriterPool on <WriterPool {scene.transactional_id!r}: 1 writers, 0 calls waiting>>"
            await pool.run(both, scene, 1)
        assert repr(pool).endswith(": closed>>")
        pool = await made()
        await pool.run(both, scene, 2)
        await pool.close()

    in_loop(main())
    with scene.connect() as writer:
        assert repr(writer) == f"<DualWriter {scene.transactional_id!r}: is open, between transactions>"
    assert scene.agree() == [1, 2]


def test_the_size_changes_while_coroutines_use_the_pool(scene: Scene) -> None:
    async def main(pool: Pool) -> None:
        for size in (3, 1, 2):
            running = [asyncio.ensure_future(pool.run(both, scene, 10 * size + number)) for number in range(10)]
            await pool.resize(size)
            assert pool.size == size
            await asyncio.gather(*running)
        with pytest.raises(ConfigurationError):
            await pool.resize(0)

    in_pool(scene, main, size=1)
    assert scene.agree() == list(range(10, 40))


def test_cancelling_a_coroutine_withdraws_its_queued_unit(scene: Scene) -> None:
    async def main(pool: Pool) -> None:
        async with held(pool):
            waiting = asyncio.ensure_future(pool.run(both, scene, 1))
            await asyncio.sleep(0.01)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
        assert await pool.run(both, scene, 2) == 2

    in_pool(scene, main, size=1)
    assert scene.agree() == [2]


def test_a_unit_that_has_started_is_finished_even_if_its_coroutine_is_cancelled(scene: Scene) -> None:
    begun = threading.Event()

    def slow(tx: Transaction) -> None:
        both(tx, scene, 1)
        begun.set()
        time.sleep(0.2)

    async def main(pool: Pool) -> None:
        running = asyncio.ensure_future(pool.run(slow))
        assert await asyncio.to_thread(begun.wait, LIMIT)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    in_pool(scene, main)
    assert scene.agree() == [1]


@pytest.mark.slow
def test_a_timeout_names_the_unit_that_was_waited_for(scene: Scene) -> None:
    def slow(tx: Transaction) -> int:
        time.sleep(limit(0.6))
        return both(tx, scene, 2)

    async def main(pool: Pool) -> None:
        async with held(pool):
            with pytest.raises(PoolTimeoutError, match=r"held.<locals>.hold"):
                await pool.with_options(timeout=0.05).run(both, scene, 1)
        assert await pool.with_options(timeout=limit(0.5)).run(slow) == 2, "it had begun"
        with pytest.raises(TimeoutError, match="mine"):
            await pool.run(then_raise, scene, 3, TimeoutError("mine"))

    in_pool(scene, main, size=1)
    assert scene.agree() == [2]


def test_the_event_loop_runs_during_units(scene: Scene) -> None:
    async def main() -> None:
        ticked = threading.Event()
        async with opened(scene) as pool:
            running = asyncio.ensure_future(pool.run(lambda _: ticked.wait(LIMIT)))
            for _ in range(5):
                await asyncio.sleep(0.01)
            assert not running.done()
            ticked.set()
            assert await running, "the loop stood still"

    in_loop(main())


def test_a_call_that_would_block_the_event_loop_is_refused_and_submit_is_not(scene: Scene) -> None:
    async def main(threads: WriterPool[Any]) -> None:
        for run in (threads.run, threads.with_options(key="k").run):
            with pytest.raises(UsageError, match=r"(?s)run\(both\) would block the event loop .* await pool\.run\("):
                run(both, scene, 1)
        with pytest.raises(UsageError, match="would block the event loop"):
            threads.transactional(attempts=3)(both)(scene, 1)
        with pytest.raises(UsageError, match=r"(?s)transaction\(\) would block .* async with pool\.transaction"):
            threads.transaction().__enter__()
        assert await asyncio.wrap_future(threads.submit(both, scene, 2)) == 2
        assert await asyncio.to_thread(threads.run, both, scene, 3) == 3

    with open_pool(scene) as threads:
        in_loop(main(threads))
    assert scene.agree() == [2, 3]


def test_a_decorated_function_is_a_unit_and_the_pool_tells_what_it_does(scene: Scene) -> None:
    attempts: list[int] = []

    async def unlucky(tx: aio.AsyncTransaction, number: int) -> int:
        await both_here(tx, scene, number)
        assert tx.transactional_id in pool.transactional_ids
        attempts.append(number)
        if len(attempts) < 3:
            raise StoreCommitFailedError("a conflict")
        return number

    async def main() -> None:
        nonlocal pool
        async with opened(scene, size=2) as pool:
            with pytest.raises(StoreCommitFailedError):
                await pool.transactional(attempts=2)(unlucky)(2)
            assert await pool.with_options(key="k").transactional(attempts=3)(unlucky)(3) == 3
            assert await pool.transactional(both)(scene, 4) == 4
            assert await pool.transactional(attempts=2)(both)(scene, 5) == 5
            with pytest.raises(UsageError, match="attempts must be at least 1"):
                pool.transactional(attempts=0)(both)
            assert (len(pool.transactional_ids), pool.waiting, pool.options.timeout, pool.is_closed) == (2, 0, LIMIT, False)
        assert pool.is_closed

    pool: aio.AsyncWriterPool[Any]
    in_loop(main())
    assert attempts == [2, 2, 3]
    assert scene.agree() == [3, 4, 5]


def test_a_pool_whose_creation_is_cancelled_is_closed_without_blocking_the_loop(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if it is cancelled again and again meanwhile."""
    made: list[WriterPool[Any]] = []
    release = {name: threading.Event() for name in ("create", "close")}
    closed_by: list[int] = []
    close = WriterPool.close

    def slowly_created(*args: Any, **options: Any) -> WriterPool[Any]:
        made.append(dualwrite.create_pool(*args, **options))
        assert release["create"].wait(LIMIT)
        return made[0]

    def slowly_closed(pool: WriterPool[Any], **options: Any) -> None:
        closed_by.append(threading.get_ident())
        if threading.get_ident() != here:
            assert release["close"].wait(LIMIT)
        close(pool, **options)

    async def main() -> None:
        creating = asyncio.ensure_future(aio.create_pool(scene.url, kafka=scene.settings, prefix=scene.transactional_id))
        await asyncio.to_thread(until, lambda: made)
        for step in ("create", "close"):
            for _ in range(3):
                creating.cancel()
                await asyncio.sleep(0.01)
            release[step].set()
            if step == "create":
                await asyncio.to_thread(until, lambda: closed_by)
        with pytest.raises(asyncio.CancelledError):
            await creating
        assert made[0].is_closed

    here = threading.get_ident()
    monkeypatch.setattr("dualwrite.aio.async_pool.create_writer_pool", slowly_created)
    monkeypatch.setattr(WriterPool, "close", slowly_closed)
    try:
        in_loop(main())
    finally:
        close(made[0])
    assert here not in closed_by
