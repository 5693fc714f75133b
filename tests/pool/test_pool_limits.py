"""The limits that callers give: they hold until the unit begins, and a unit whose caller has given up never runs."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from crash.scene import Scene
from dualwrite import Transaction, WriterPool, aio
from dualwrite.errors import PoolTimeoutError
from dualwrite.pool.call import Call
from dualwrite.testing import failpoints
from fixtures.pace import LIMIT, done, happened, limit, until
from pool.aio_scene import in_loop, opened
from pool.pool_scene import both, held, open_pool


@contextmanager
def stuck_in_a_group(pool: WriterPool[Any], *calls: Callable[[], Future[Any]]) -> Iterator[list[Future[Any]]]:
    """Keep the pool in a unit of a group that has taken these calls too, after this unit; their futures."""
    begun, release = threading.Event(), threading.Event()

    def stuck(_: Transaction) -> None:
        begun.set()
        assert release.wait(LIMIT)

    with held(pool):
        first = pool.submit(stuck)
        futures = [call() for call in calls]
        until(lambda: pool.waiting == len(calls) + 1, "all wait")
    try:
        happened(begun)
        yield futures
    finally:
        release.set()
        done(first)


def test_a_limit_holds_while_no_writer_is_free(scene: Scene) -> None:
    """All are in transactions of their own, when a thread of the pool has taken the call already."""
    with open_pool(scene) as pool:
        with pool.transaction(), pool.transaction():
            with pytest.raises(PoolTimeoutError, match="a transaction of its own") as caught:
                pool.with_options(timeout=0.1).run(both, scene, 1)
            assert caught.value.retriable
            assert pool.waiting == 0, "it was taken"
            waits = pool.submit(both, scene, 2)
        assert done(waits) == 2
    assert scene.agree() == [2]


def test_a_limit_holds_behind_a_unit_of_the_same_group(scene: Scene) -> None:
    with open_pool(scene, size=1) as pool, ThreadPoolExecutor(1) as threads:
        with stuck_in_a_group(
            pool,
            lambda: pool.submit(both, scene, 1),
            lambda: threads.submit(pool.with_options(timeout=limit(0.5)).run, both, scene, 2),
            lambda: pool.submit(both, scene, 3),
        ) as futures:
            assert pool.waiting == 0, "they are taken"
            assert futures[0].cancel(), "it has not begun"
            assert isinstance(futures[1].exception(LIMIT), PoolTimeoutError)
            assert "stuck_in_a_group.<locals>.stuck" in str(futures[1].exception())
        assert done(futures[2]) == 3
    assert scene.agree() == [3]


def test_a_call_that_gave_up_releases_its_key(scene: Scene) -> None:
    with open_pool(scene, size=1) as pool:
        keyed = pool.with_options(key="customer", timeout=0.1)
        with pool.transaction():
            for number in (1, 2):
                with pytest.raises(PoolTimeoutError):
                    keyed.run(both, scene, number)
        assert pool.with_options(key="customer").run(both, scene, 3) == 3
    assert scene.agree() == [3]


def test_a_unit_runs_exactly_if_its_caller_did_not_give_up(scene: Scene) -> None:
    """Cancelled by another thread at the moment when it may begin: one of the two happens, never both, never none."""
    ran: list[int] = []

    def unit(tx: Transaction, number: int) -> None:
        ran.append(number)
        both(tx, scene, number)

    cancelled = []
    with open_pool(scene, size=1) as pool:
        for first in range(0, 400, 40):
            futures = {number: pool.submit(unit, number) for number in range(first, first + 40)}
            cancelled += [number for number, future in reversed(futures.items()) if future.cancel()]
            for number, future in futures.items():
                if number not in cancelled:
                    done(future)
    assert not set(ran) & set(cancelled)
    assert scene.agree() == sorted(set(range(400)) - set(cancelled))


def test_a_call_begins_once_or_never() -> None:
    call = Call(both, (), {}, None)
    assert call.begin()
    assert call.begin()
    assert not call.future.cancel()
    call = Call(both, (), {}, None)
    assert call.future.cancel()
    assert not call.begin()
    assert not call.begin()
    call.tell_error(ValueError())
    assert call.future.cancelled()


def test_kafka_is_blamed_for_its_own_delay(scene: Scene) -> None:
    """When the units have run, none of them is named as what the others wait for."""
    reached, release = threading.Event(), threading.Event()

    def wait() -> None:
        reached.set()
        release.wait(LIMIT)

    with open_pool(scene, size=1) as pool, failpoints.armed("before_db_commit", wait):
        try:
            first = pool.submit(both, scene, 1)
            happened(reached)
            with pytest.raises(PoolTimeoutError, match="committing a group of 1 unit ") as caught:
                pool.with_options(timeout=0.1).run(both, scene, 2)
            assert "is running both" not in str(caught.value)
        finally:
            release.set()
        done(first)
    assert scene.agree() == [1]


# --- coroutines -----------------------------------------------------------------------------------------------------------


async def here(tx: aio.AsyncTransaction, scene: Scene, number: int) -> None:
    tx.send(scene.topic, str(number))


def test_coroutines_give_up_in_time(scene: Scene) -> None:
    async def main() -> None:
        async with opened(scene) as pool:
            async with pool.transaction(), pool.transaction():
                for unit in (both, here):
                    with pytest.raises(PoolTimeoutError, match="a transaction of its own"):
                        await pool.with_options(timeout=0.1).run(unit, scene, 1)
            assert await pool.run(both, scene, 2) == 2

    in_loop(main())
    assert scene.agree() == [2]


def test_coroutines_give_up_in_time_behind_a_unit_of_their_group(scene: Scene) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        threads = open_pool(scene, size=1)

        def started(unit: Callable[..., Any], seconds: float) -> Callable[[], Future[Any]]:
            async def run() -> Any:
                return await pool.with_options(timeout=seconds).run(unit, scene, 1)

            return lambda: asyncio.run_coroutine_threadsafe(run(), loop)

        async with aio.AsyncWriterPool(threads) as pool:
            units = [started(unit, seconds) for unit in (both, here) for seconds in (limit(0.5), LIMIT)]
            stuck = stuck_in_a_group(threads, *units)
            futures = await asyncio.to_thread(stuck.__enter__)
            for late, patient in (futures[:2], futures[2:]):
                with pytest.raises(PoolTimeoutError, match="stuck"):
                    await asyncio.wrap_future(late)
                patient.cancel()
            await asyncio.to_thread(stuck.__exit__, None, None, None)
            assert await pool.run(both, scene, 2) == 2

    in_loop(main())
    assert scene.agree() == [2]
