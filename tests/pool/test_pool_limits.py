"""The limits that callers give: they hold until the unit begins, and a unit whose caller has given up never runs."""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import pytest
import sqlalchemy as sa

from crash.events import write_event
from crash.scene import Scene
from dualwrite import PoolOptions, Transaction, WriterPool
from dualwrite.errors import ConfigurationError, PoolTimeoutError
from dualwrite.pool.calls import UnitCall
from dualwrite.testing import failpoints
from dualwrite.testing.topics import read_committed
from fixtures.pace import LIMIT, done, happened, limit, until
from pool.pool_scene import both, grouped, held, open_pool, psycopg_store


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


@pytest.mark.parametrize("bad", [math.inf, 1e11, 10**400, -1], ids=["inf", "1e11", "10**400", "-1"])
def test_a_limit_for_which_nothing_can_wait_is_refused(scene: Scene, bad: float) -> None:
    """Before anything runs; with an infinite one, `run` raised OverflowError though the unit went on, and was committed."""
    with open_pool(scene) as pool:
        with pytest.raises(ConfigurationError, match="timeout must be"):
            pool.with_options(timeout=bad)
        with pytest.raises(ConfigurationError, match="timeout must be"), pool.transaction(timeout=bad):
            pass
        with pytest.raises(ConfigurationError, match="timeout must be"):
            pool.close(timeout=bad)
        assert pool.run(both, scene, 1) == 1


def test_the_timeout_applies_while_no_writer_is_free(scene: Scene) -> None:
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


@pytest.mark.slow
def test_the_timeout_applies_while_another_unit_of_the_group_runs(scene: Scene) -> None:
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


def test_a_call_that_timed_out_releases_its_key(scene: Scene) -> None:
    with open_pool(scene, size=1) as pool:
        keyed = pool.with_options(key="customer", timeout=0.1)
        with pool.transaction():
            for number in (1, 2):
                with pytest.raises(PoolTimeoutError):
                    keyed.run(both, scene, number)
        assert pool.with_options(key="customer").run(both, scene, 3) == 3
    assert scene.agree() == [3]


@pytest.mark.slow
def test_a_unit_runs_unless_its_call_timed_out(scene: Scene) -> None:
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


def test_a_call_starts_at_most_once() -> None:
    call = UnitCall(both, (), {}, None)
    assert call.begin()
    assert call.begin()
    assert not call.future.cancel()
    call = UnitCall(both, (), {}, None)
    assert call.future.cancel()
    assert not call.begin()
    assert not call.begin()
    call.deliver_error(ValueError())
    assert call.future.cancelled()


def test_a_delay_in_kafka_is_not_attributed_to_a_unit(scene: Scene) -> None:
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


# --- the size of a group --------------------------------------------------------------------------------------------------


def sizes_of_groups(pool: WriterPool[Any], *units: Callable[[Transaction], Any]) -> list[int]:
    """Submit the units at once; how many each group has committed, beginning with one that holds the pool back."""
    sizes, run = [], 0

    def counted(tx: Transaction, unit: Callable[[Transaction], Any]) -> None:
        nonlocal run
        unit(tx)
        run += 1

    def committed() -> None:
        nonlocal run
        sizes.append(run)
        run = 0

    with failpoints.armed("after_db_commit", committed):
        grouped(pool, *(partial(counted, unit=unit) for unit in units))
    return sizes


def test_queued_units_are_left_for_the_next_group_when_its_bytes_are_reached(scene: Scene) -> None:
    def large(tx: Transaction, number: int) -> None:
        both(tx, scene, number)
        tx.send(scene.topic + "-other", b"x" * 1000)

    with open_pool(scene, size=1, options=PoolOptions(group_bytes=2_500, timeout=LIMIT)) as pool:
        assert sizes_of_groups(pool, *(partial(large, number=number) for number in range(8))) == [0, 3, 3, 2]
    assert scene.agree() == list(range(8))


def test_units_that_are_left_for_the_next_group_keep_their_order(scene: Scene) -> None:
    keys, count = 3, 20

    def numbered(tx: Transaction, key: int, number: int) -> None:
        tx.send(scene.topic, f"{key}:{number}", partition=0)

    with open_pool(scene, size=4, options=PoolOptions(group_bytes=12, timeout=LIMIT)) as pool:
        with held(pool):
            futures = [
                pool.with_options(key=key).submit(numbered, key, number) for number in range(count) for key in range(keys)
            ]
        for future in futures:
            done(future)
    found = [tuple(map(int, (message.value or b"").split(b":"))) for message in read_committed(scene.settings, scene.topic)]
    assert sorted(found, key=lambda each: each[0]) == [(key, number) for key in range(keys) for number in range(count)]


def with_savepoints(tx: Transaction, scene: Scene, number: int) -> None:
    for _ in range(3):
        with tx.db.begin_nested():
            write_event(scene.url, tx.db, f"{scene.transactional_id}-more", number)
    both(tx, scene, number)


def with_psycopgs_savepoints(tx: Transaction, scene: Scene, number: int) -> None:
    for _ in range(3):
        with tx.db.transaction():
            tx.db.execute("INSERT INTO events VALUES (%s, %s)", (f"{scene.transactional_id}-more", number))
    both(tx, scene, number)


@pytest.mark.parametrize("careful", [False, True])
@pytest.mark.parametrize("unit", [with_savepoints, with_psycopgs_savepoints])
def test_savepoints_in_units_count(scene: Scene, unit: Callable[..., None], careful: bool) -> None:
    """PostgreSQL keeps 64 subtransactions of a transaction in memory: a group is complete before there is one more.

    Each that has written has a number of its own, which its rows have as `xmin`.
    """
    seen = [0]
    query = sa.text("SELECT count(DISTINCT xmin::text) FROM events WHERE writer LIKE :writer")

    def look() -> None:
        with scene.engine.connect() as connection:
            seen.append(connection.scalar(query, {"writer": f"{scene.transactional_id}%"}) or 0)

    def fails(_: Transaction) -> None:
        raise KeyError

    numbers = range(40)
    with ExitStack() as stack:
        database: Any = None
        if unit is with_psycopgs_savepoints:
            database = stack.enter_context(psycopg_store(scene.url))
        pool = stack.enter_context(open_pool(scene, database, size=1))
        units = [partial(unit, scene=scene, number=number) for number in numbers]
        with failpoints.armed("before_kafka_commit", look):
            grouped(pool, *([fails] if careful else []), *units)
    assert scene.agree() == list(numbers)
    subtransactions = [after - before for before, after in itertools.pairwise(seen)]
    assert max(subtransactions) <= 64
    assert max(subtransactions) > 40, "and groups are not smaller than they must be"
