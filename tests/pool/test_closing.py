"""Closing a pool finishes what it has taken; if that does not end, it takes a limited time and says what is left; signals."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any

import pytest

from crash.scene import Scene
from dualwrite import PoolOptions, Transaction, WriterPool, aio
from dualwrite.errors import BrokerUnavailableError, ConcurrentUseError, WriterClosedError
from dualwrite.testing import failpoints
from fixtures.pace import LIMIT, done, happened, limit, until, until_recorded
from pool.aio_scene import in_loop
from pool.pool_scene import assert_reports_true, both, held, open_pool, program


@contextmanager
def stuck(pool: WriterPool[Any], scene: Scene, number: int) -> Iterator[Any]:
    """A unit that has begun and does not end; its future."""
    begun, release = threading.Event(), threading.Event()

    def stuck(tx: Transaction) -> int:
        both(tx, scene, number)
        begun.set()
        assert release.wait(LIMIT)
        return number

    future = pool.submit(stuck)
    happened(begun)
    try:
        yield future
    finally:
        release.set()


def test_closing_finishes_queued_calls(scene: Scene) -> None:
    pool = open_pool(scene, size=1)
    with held(pool):
        futures = [pool.submit(both, scene, number) for number in range(100)]
        closing = threading.Thread(target=pool.close)
        closing.start()
        until(lambda: pool._is_closed, "the pool is closing")
        for call in (lambda: pool.run(both, scene, 1), lambda: pool.submit(both, scene, 1)):
            with pytest.raises(WriterClosedError, match="is closed"):
                call()
    closing.join(LIMIT)
    assert [future.result(0) for future in futures] == list(range(100))
    assert scene.agree() == list(range(100))
    pool.close()
    with pytest.raises(WriterClosedError, match="is closed"), pool.transaction():
        pass


def test_closing_waits_for_separate_transactions(scene: Scene) -> None:
    pool = open_pool(scene)
    with ThreadPoolExecutor(1) as thread, pool.transaction() as tx:
        closing = thread.submit(pool.close)
        until(lambda: pool._is_closed, "the pool is closing")
        both(tx, scene, 1)
        assert not closing.done()
    done(closing)
    assert scene.agree() == [1]


def test_while_kafka_does_not_answer_closing_does_not_try_every_call(scene: Scene) -> None:
    """Each would cost the time limit of a delivery."""
    pool = open_pool(scene, size=1, options=PoolOptions(timeout=LIMIT, group_units=1))
    no_answer = failpoints.only_at(2, failpoints.raises(BrokerUnavailableError("Nobody answers.")))
    with failpoints.armed("after_prepare", no_answer), ThreadPoolExecutor(1) as thread:
        with held(pool):
            futures = [pool.submit(both, scene, number) for number in range(5)]
            closing = thread.submit(pool.close)
            until(lambda: pool._is_closed, "the pool is closing")
        done(closing)
    assert isinstance(futures[0].exception(0), BrokerUnavailableError)
    assert all(future.cancelled() for future in futures[1:])
    assert scene.agree() == []


def test_a_stuck_unit_is_named_and_queued_calls_never_run(scene: Scene) -> None:
    pool = open_pool(scene)
    with ThreadPoolExecutor(2) as threads:
        with stuck(pool, scene, 1) as unit:
            waits = threads.submit(pool.run, both, scene, 2)
            submitted = pool.submit(both, scene, 3)
            waits_for_all = threads.submit(wait, [submitted], LIMIT)
            until(lambda: pool.waiting == 2, "both wait")
            with pytest.raises(ConcurrentUseError, match=r"(?s)stuck.<locals>.stuck .*neither side has committed") as caught:
                pool.close(timeout=0.1)
            assert "within 0.1 s" in str(caught.value)
            assert f"dualwrite recover --prefix {scene.transactional_id}." in str(caught.value)
            with pytest.raises(WriterClosedError):
                done(waits)
            assert submitted.cancelled()
            assert done(waits_for_all).done == {submitted}
            pool.close()
        assert done(unit) == 1, "it has ended, and is committed: its caller is told so"
    until(lambda: not pool._writers._open, "its writer is closed")
    assert scene.agree() == [1]
    assert assert_reports_true(scene) == {1}


def test_a_pool_is_closed_while_resize_starts_threads(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """As by a signal handler, in the same thread: `close` must not wait for what `resize` has locked."""
    pool = open_pool(scene)
    start = pool._workers.match_size
    during: list[bool] = []

    def closed_at_its_end() -> None:
        start()
        pool.close()
        during.append(pool._has_ended)

    monkeypatch.setattr(pool._workers, "match_size", closed_at_its_end)
    pool.resize(pool.size + 1)
    assert (during, pool._has_ended) == ([False], True)


def test_a_callback_of_a_cancelled_call_may_close_the_pool(scene: Scene) -> None:
    """The thread that closes the pool runs it."""
    pool = open_pool(scene)
    with stuck(pool, scene, 1):
        submitted = pool.submit(both, scene, 2)
        submitted.add_done_callback(lambda _: pool.close())
        with ThreadPoolExecutor(1) as thread:
            closing = thread.submit(pool.close, timeout=0.1)
            with pytest.raises(ConcurrentUseError, match="stuck"):
                done(closing)
        assert submitted.cancelled()
    until(lambda: not pool._writers._open, "its writer is closed")
    assert assert_reports_true(scene) == {1}


def test_a_separate_transaction_that_does_not_end(scene: Scene) -> None:
    pool = open_pool(scene, size=1)
    with pool.transaction() as tx:
        waits = pool.submit(both, scene, 1)
        until(lambda: pool.waiting == 0, "a thread has taken it, and waits for a writer")
        with pytest.raises(ConcurrentUseError, match=r"(?s)a transaction of its own .*neither side has committed"):
            pool.close(timeout=0.1)
        assert waits.cancelled()
        both(tx, scene, 2)
    until(lambda: not any(thread.is_alive() for thread in pool._workers.threads), "the threads end")
    assert assert_reports_true(scene) == {2}


def test_a_commit_that_hangs_in_kafka(scene: Scene) -> None:
    reached, release = threading.Event(), threading.Event()
    pool = open_pool(scene)
    with failpoints.armed("before_kafka_commit", lambda: (reached.set(), release.wait(LIMIT))):
        try:
            future = pool.submit(both, scene, 1)
            happened(reached)
            with pytest.raises(ConcurrentUseError, match=r"(?s)committing a group of 1 unit .*the database has committed"):
                pool.close(timeout=0.1)
        finally:
            release.set()
        assert done(future) == 1
    until(lambda: not pool._writers._open, "its writer is closed")
    assert assert_reports_true(scene) == {1}


@pytest.mark.slow
def test_a_long_queue_is_finished(scene: Scene) -> None:
    """By default the limit is for a pool that does not get on."""

    def slow(tx: Transaction, number: int) -> None:
        time.sleep(limit(0.1))
        both(tx, scene, number)

    pool = open_pool(scene, options=PoolOptions(timeout=limit(1)))
    futures = [pool.submit(slow, number) for number in range(12)]
    pool.close()
    assert all(future.done() and not future.cancelled() for future in futures)
    assert scene.agree() == list(range(12))


def test_coroutines_queued_behind_a_stuck_unit_get_an_error(scene: Scene) -> None:
    async def here(tx: aio.AsyncTransaction) -> None:
        tx.send(scene.topic, "9")

    async def main() -> None:
        threads = open_pool(scene)
        pool = aio.AsyncWriterPool(threads)
        with stuck(threads, scene, 1):
            waits = [asyncio.ensure_future(pool.run(unit)) for unit in (here, lambda tx: both(tx, scene, 2))]
            await asyncio.sleep(0)
            with pytest.raises(ConcurrentUseError, match="stuck"):
                await pool.close(timeout=0.1)
            for task in waits:
                with pytest.raises(WriterClosedError):
                    await task

    in_loop(main())
    until_recorded(scene.rows, [1], "the stuck unit is committed")
    assert assert_reports_true(scene) == {1}


# --- processes ------------------------------------------------------------------------------------------------------------


def stuck_program(scene: Scene, end: str, number: signal.Signals | None = None) -> Any:
    return program(
        f"""
        pool.run(unit, 1)
        pool.close()
        options = dualwrite.PoolOptions(timeout=0.5)
        settings = dict(kafka={scene.settings!r}, prefix={scene.transactional_id!r})
        pool = dualwrite.create_pool({scene.url!r}, options=options, **settings)

        def stuck_unit(tx):
            unit(tx, 2)
            begun.set()
            time.sleep(1000)

        begun = threading.Event()
        {end}
        pool.submit(stuck_unit)
        begun.wait()
        pool.submit(unit, 3)
        print("ready", flush=True)
        {"time.sleep(1000)" if number else ""}
        """,
        scene,
        signals=number,
    )


@pytest.mark.slow
def test_a_program_with_a_stuck_unit_ends(scene: Scene) -> None:
    ended = stuck_program(scene, "")
    assert ended.returncode == 0
    assert "stuck_unit (for " in ended.stderr
    assert "neither side has committed" in ended.stderr
    assert assert_reports_true(scene) == {1}


@pytest.mark.slow
def test_sigterm_with_a_handler_that_exits(scene: Scene) -> None:
    ended = stuck_program(scene, "signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))", signal.SIGTERM)
    assert ended.returncode == 3
    assert "stuck_unit (for " in ended.stderr
    assert assert_reports_true(scene) == {1}


@pytest.mark.slow
def test_sigterm_without_a_handler(scene: Scene) -> None:
    """The process ends at once, as by SIGKILL: what the database has not committed is rolled back."""
    ended = stuck_program(scene, "", signal.SIGTERM)
    assert ended.returncode == -signal.SIGTERM
    assert assert_reports_true(scene) == {1}
