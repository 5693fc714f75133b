"""What the pool's tests do with a scene of the crash tests: units of work, and pools that run them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import dualwrite
from crash.events import write_event
from crash.scene import Scene, Worker
from crash.worker import timeouts
from dualwrite import PoolOptions, Transaction, WriterPool
from fixtures.pace import LIMIT, done


def open_pool(scene: Scene, database: Any = None, **changes: Any) -> WriterPool[Any]:
    """A pool with the scene's id as prefix, on the scene's database if no other handle on it is given."""
    given = {"size": 2, "options": PoolOptions(timeout=LIMIT), "timeouts": timeouts(), **changes}
    database = scene.events.database if database is None else database
    return dualwrite.create_pool(database, kafka=scene.settings, prefix=scene.transactional_id, **given)


def both(tx: Transaction, scene: Scene, number: int) -> int:
    """Write an event and send its message."""
    write_event(scene.url, tx.db, scene.transactional_id, number)
    tx.send(scene.topic, str(number), key=scene.transactional_id)
    return number


def then_raise(tx: Transaction, scene: Scene, number: int, error: BaseException) -> int:
    """Write an event and send its message, then fail."""
    both(tx, scene, number)
    raise error


@contextmanager
def held(pool: WriterPool[Any]) -> Iterator[None]:
    """Keep the pool in a unit; what is submitted meanwhile is taken into the same group."""
    begun, release = threading.Event(), threading.Event()

    def hold(_: Transaction) -> None:
        begun.set()
        assert release.wait(LIMIT)

    held_back = pool.submit(hold)
    assert begun.wait(LIMIT)
    try:
        yield
    finally:
        release.set()
        done(held_back)


def grouped(pool: WriterPool[Any], *units: Callable[[Transaction], Any]) -> list[Future[Any]]:
    """Run units in one group, and wait until all have ended."""
    with held(pool):
        futures = [pool.submit(unit) for unit in units]
    for future in futures:
        future.exception(LIMIT)
    return futures


def pool_worker(
    scene: Scene, first: int, units: int, failpoints: str = "", module: str = "pool.worker", **environment: str
) -> Worker:
    """A process with a pool whose threads (or with `pool.aio_worker` coroutines too) write events, one unit each."""
    where = [scene.url, scene.bootstrap, scene.transactional_id, scene.topic]
    return Worker([*where, str(first), str(units), "8"], failpoints, module=module, **environment)


def told(process: Worker) -> set[int]:
    """The units of which a caller in the process knows that they are committed."""
    return {int(line.split()[1]) for line in process.lines if line.startswith("told ")}


MAYBE = {"InDoubtTransactionError", "LostTransactionError", "UnverifiedTransactionError"}
"""Errors after which a unit may be there."""


def told_not(process: Worker) -> set[int]:
    """The units of which a caller in the process knows that they are not committed; it has not tried them again."""
    errors = (line.split()[1:3] for line in process.lines if line.startswith("error "))
    return {int(number) for number, name in errors if name not in MAYBE}


def assert_true(scene: Scene, *processes: Worker) -> set[int]:
    """Recover the pool's ids; both sides agree, and hold all that a caller was told, and nothing that it was told is not."""
    report = dualwrite.recover(scene.events.database, kafka=scene.settings, prefix=scene.transactional_id, timeouts=timeouts())
    assert not report.failed
    assert not report.unacknowledged
    found = set(scene.agree())
    for process in processes:
        missing = told(process) - found
        assert not missing, f"told as committed, but not there: {missing}"
        there = told_not(process) & found
        assert not there, f"told as not committed, but there: {there}; {process.lines}"
    return found
