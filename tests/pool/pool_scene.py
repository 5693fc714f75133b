"""What the pool's tests do with a scene of the crash tests: units of work, pools that run them, programs with a pool."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest
from psycopg_pool import ConnectionPool

import dualwrite
from crash.events import write_event
from crash.scene import Scene, Worker
from crash.worker import timeouts
from dualwrite import PoolOptions, Transaction, WriterPool
from dualwrite.stores.sql import SqlStateStore
from fixtures.pace import LIMIT, done
from fixtures.tiers import thinned

both_producers = pytest.mark.parametrize("producer", thinned(["native", "librdkafka"], quick=["native"]), indirect=True)


def open_pool(scene: Scene, database: Any = None, **changes: Any) -> WriterPool[Any]:
    """A pool with the scene's id as prefix, on the scene's database if no other handle on it is given."""
    given = {"size": 2, "options": PoolOptions(timeout=LIMIT), "timeouts": timeouts(), **changes}
    database = scene.events.database if database is None else database
    return dualwrite.create_pool(database, kafka=scene.settings, prefix=scene.transactional_id, **given)


@contextmanager
def psycopg_store(url: str, **options: Any) -> Iterator[SqlStateStore]:
    """A store on a pool of psycopg connections."""
    given = {"max_size": 4, "open": True, **options}
    with ConnectionPool(url.replace("+psycopg", ""), **given) as connections, SqlStateStore.from_psycopg(connections) as store:
        yield store


def both(tx: Transaction, scene: Scene, number: int) -> int:
    """Write an event and send its message."""
    if isinstance(tx.db, psycopg.Connection):
        tx.db.execute("INSERT INTO events VALUES (%s, %s)", (scene.transactional_id, number))
    else:
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


def pool_worker(scene: Scene, first: int, units: int, failpoints: str = "", **environment: str) -> Worker:
    """A process with a pool whose threads write events, one unit each."""
    where = [scene.url, scene.bootstrap, scene.transactional_id, scene.topic]
    return Worker([*where, str(first), str(units), "8"], failpoints, module="pool.worker", **environment)


def reported_committed(process: Worker) -> set[int]:
    """The units of which a caller in the process knows that they are committed."""
    return {int(line.split()[1]) for line in process.lines if line.startswith("told ")}


MAYBE = {"InDoubtTransactionError", "LostTransactionError", "UnverifiedTransactionError"}
"""Errors after which a unit may be there."""


def reported_failed(process: Worker) -> set[int]:
    """The units of which a caller in the process knows that they are not committed; it has not tried them again."""
    errors = (line.split()[1:3] for line in process.lines if line.startswith("error "))
    return {int(number) for number, name in errors if name not in MAYBE}


def assert_reports_true(scene: Scene, *processes: Worker) -> set[int]:
    """Recover the pool's ids: both sides agree, have all units reported committed, and none reported rolled back."""
    report = dualwrite.recover(scene.events.database, kafka=scene.settings, prefix=scene.transactional_id, timeouts=timeouts())
    assert not report.failed
    assert not report.unacknowledged
    found = set(scene.agree())
    for process in processes:
        missing = reported_committed(process) - found
        assert not missing, f"reported committed, but missing: {missing}"
        there = reported_failed(process) & found
        assert not there, f"reported failed, but present: {there}; {process.lines}"
    return found


def program(text: str, scene: Scene, *, signals: int | None = None) -> subprocess.CompletedProcess[str]:
    """Run a program that has `pool`, `unit` and `scene`'s names, as a process of its own."""
    start = f"""
import os, signal, sys, threading, time
import dualwrite
from sqlalchemy import text

def unit(tx, number, seconds=0.0):
    tx.db.execute(text("INSERT INTO events VALUES (:w, :n)"), dict(w={scene.transactional_id!r}, n=number))
    tx.send({scene.topic!r}, str(number), key={scene.transactional_id!r})
    time.sleep(seconds)
    return number

pool = dualwrite.create_pool({scene.url!r}, kafka={scene.settings!r}, prefix={scene.transactional_id!r})
"""
    command = [sys.executable, "-c", start + textwrap.dedent(text)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            if signals is not None:
                assert process.stdout is not None
                ready = process.stdout.readline()
                if ready:
                    process.send_signal(signals)
            output, errors = process.communicate(timeout=LIMIT)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(process.args, process.returncode, output, errors)


def scene_rows_are_clear(scene: Scene) -> None:
    """A pool that was closed leaves nothing to recover."""
    with dualwrite.store_from_url(scene.url) as store:
        rows = [store.read(each) for each in store.list(scene.transactional_id)]
    assert rows
    assert not any(row.prepared_state for row in rows if row is not None)
