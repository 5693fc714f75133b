"""Groups that run side by side, and the number of writers that the load asks for."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
from sqlalchemy import create_engine, text

import dualwrite
from crash.databases import Databases
from crash.scene import Scene
from crash.worker import timeouts
from dualwrite import PoolOptions, PoolTimeoutError, StoreUnavailableError, Transaction
from dualwrite.pool import scaling
from dualwrite.pool.scaling import SERIAL, Measured, Scaling
from dualwrite.testing.topics import read_committed
from fixtures.pace import LIMIT, done, until
from pool.pool_scene import both, open_pool
from pool.restless import MOST, make_restless

CALLERS = 16
SERVERS = ["postgresql", "mariadb"]
SLEEP = {"postgresql": "SELECT pg_sleep(0.01)", "mariadb": "SELECT sleep(0.01)"}


class Side(Scaling):
    """Runs four groups side by side until conflicts are repeated."""

    def decide(self, seen: Measured) -> None:
        del seen
        if self._clock() >= self._pauses_until:
            self.groups = 4


@contextmanager
def calling(call: Callable[[int], object], callers: int = CALLERS) -> Iterator[None]:
    """Threads that call all the time; ends with the first error of one of them."""
    stopped = threading.Event()

    def caller(number: int) -> None:
        while not stopped.is_set():
            call(number)

    with ThreadPoolExecutor(callers) as threads:
        running = [threads.submit(caller, number) for number in range(callers)]
        try:
            yield
        finally:
            stopped.set()
        for each in running:
            done(each)


class Counted:
    """Units with numbers of their own; knows how many run at the same time at most."""

    def __init__(self, scene: Scene, database: str) -> None:
        self.most = 0
        self._scene = scene
        self._sleep = text(SLEEP[database])
        self._lock = threading.Lock()
        self._running = self._number = 0

    def __call__(self, tx: Transaction) -> None:
        with self._lock:
            self._running += 1
            self._number += 1
            self.most, number = max(self.most, self._running), self._number
        try:
            tx.db.execute(self._sleep)
            both(tx, self._scene, number)
        finally:
            with self._lock:
                self._running -= 1


@pytest.mark.slow
@pytest.mark.parametrize("database", SERVERS)
def test_groups_that_wait_for_the_database_run_side_by_side(
    scene: Scene, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And with a fixed size too; a few seconds without calls later, the writers that are not needed are closed."""
    with open_pool(scene, size=None, options=PoolOptions(timeout=LIMIT, lease=3)) as pool:
        assert pool.size == 2
        unit = Counted(scene, database)
        with calling(lambda _: pool.run(unit)):
            until(lambda: pool.size > 2 and unit.most > 2)
        monkeypatch.setattr(scaling, "_QUIET", 0.0)
        until(lambda: pool.size == 2)
        pool.run(unit)
        monkeypatch.undo()
        pool.resize(3)
        unit.most = 0
        with calling(lambda _: pool.run(unit)):
            until(lambda: unit.most > 1)
        assert pool.size == 3
        assert unit.most <= 3
    scene.agree()


def test_one_after_another_no_two_units_run_at_the_same_time(scene: Scene) -> None:
    unit = Counted(scene, "postgresql")
    with open_pool(scene, size=2) as pool, ThreadPoolExecutor(CALLERS) as threads:
        for call in [threads.submit(pool.run, unit) for _ in range(CALLERS)]:
            done(call)
    assert unit.most == 1


@pytest.mark.parametrize("database", SERVERS)
def test_the_order_of_keys_while_the_number_of_writers_changes(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    make_restless(monkeypatch)
    sizes, calls = set(), 0

    def unit(tx: Transaction, key: int, number: int) -> None:
        tx.db.execute(text("INSERT INTO events VALUES (:prefix, :number)"), {"prefix": str(key), "number": number})
        tx.send(scene.topic, str(number), key=str(key))

    with open_pool(scene, size=None, options=PoolOptions(timeout=LIMIT, max_size=MOST)) as pool:
        while len(sizes) < 3 or max(sizes) < 3:
            futures = [
                pool.with_options(key=key).submit(unit, key, number) for number in range(calls, calls + 20) for key in range(8)
            ]
            calls += 20
            for future in futures:
                done(future)
                sizes.add(pool.size)
    of_key = defaultdict(list)
    for message in read_committed(scene.settings, scene.topic, timeout=LIMIT):
        of_key[message.key].append(int(message.value or b""))
    assert dict(of_key) == {str(key).encode(): list(range(calls)) for key in range(8)}


@pytest.mark.parametrize("database", SERVERS)
def test_groups_that_lock_the_same_rows_in_another_order_fail_for_nobody(
    scene: Scene, databases: Databases, database: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The database ends a deadlock of two groups by an error, of which callers see nothing; then groups run in turn."""
    del databases, database
    monkeypatch.setattr(scaling, "Scaling", Side)
    engine = create_engine(scene.url)
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE hot (id INT PRIMARY KEY, n INT NOT NULL)"))
        connection.execute(text("INSERT INTO hot VALUES (0, 0), (1, 0)"))
    update = text("UPDATE hot SET n = n + 1 WHERE id = :id")

    def unit(tx: Transaction, caller: int) -> None:
        tx.db.execute(update, {"id": caller % 2})
        time.sleep(0.001)
        tx.db.execute(update, {"id": 1 - caller % 2})
        tx.send(scene.topic, "x", key=str(caller))

    counted: list[int] = []

    def call(caller: int) -> None:
        pool.run(unit, caller)
        counted.append(caller)

    with open_pool(scene, size=4) as pool, calling(call, 8):
        until(lambda: pool._scaler._scaling._pauses_until > 0)
        assert pool._scaler.side_by_side == SERIAL
    with engine.begin() as connection:
        assert set(connection.scalars(text("SELECT n FROM hot"))) == {len(counted)}
        connection.execute(text("DROP TABLE hot"))
    engine.dispose()
    assert len(read_committed(scene.settings, scene.topic, timeout=LIMIT)) == len(counted)
    assert "error" not in {record.levelname.lower() for record in caplog.records}


def test_transactions_of_their_own_get_writers_as_far_as_the_engine_keeps_connections(scene: Scene) -> None:
    engine = create_engine(scene.url, pool_size=3)
    try:
        with dualwrite.create_pool(engine, kafka=scene.settings, prefix=scene.transactional_id, timeouts=timeouts()) as pool:
            with ExitStack() as open_ones:
                for number in range(3):
                    both(open_ones.enter_context(pool.transaction(timeout=LIMIT)), scene, number)
                assert pool.size == 3
                with pytest.raises(PoolTimeoutError), pool.transaction(timeout=0.2):
                    pass
            assert pool.size == 3
    finally:
        engine.dispose()
    assert scene.agree() == [0, 1, 2]


def test_a_writer_that_can_not_be_opened_is_no_trouble(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    """A mock of the opening: no database can be made to refuse exactly the third writer."""
    caplog.set_level("INFO")
    with open_pool(scene, size=None) as pool:
        opened, tried = pool._upkeep._open_writer, []

        def refused(name: str) -> Any:
            tried.append(name)
            raise StoreUnavailableError("too many connections")

        pool._upkeep._open_writer = refused
        with pool.transaction(), pool.transaction(timeout=LIMIT):
            with pytest.raises(PoolTimeoutError), pool.transaction(timeout=0.5):
                pass
            with pytest.raises(PoolTimeoutError), pool.transaction(timeout=0.2):
                pass
        assert len(tried) <= 2, "not with every call"  # the third one may be wanted before the second is refused
        assert pool.size == 2
        pool._upkeep._open_writer = opened
        assert pool.run(both, scene, 1) == 1
    assert scene.agree() == [1]
    assert [record.levelname for record in caplog.records if "stays at 2 writers" in record.getMessage()] == ["INFO"]


def test_several_writers_are_opened_side_by_side_and_one_of_them_is_refused(
    scene: Scene, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mock of the opening: it waits for the two others."""
    caplog.set_level("INFO")
    monkeypatch.setattr(scaling.Scaler, "rest", lambda _: None)  # nothing has asked for these writers
    with open_pool(scene, size=None) as pool:
        opened, together, refused = pool._upkeep._open_writer, threading.Barrier(3), []

        def open_writer(name: str) -> Any:
            if together.wait(LIMIT) == 0:
                refused.append(name)
                raise StoreUnavailableError("too many connections")
            return opened(name)

        pool._upkeep._open_writer = open_writer
        pool._scaler.wanted = 5
        pool._writers.changed.set()
        until(lambda: any("stays at 4 writers" in record.getMessage() for record in caplog.records))
        assert pool.size == pool._scaler.wanted == 4
        assert refused[0] not in pool.transactional_ids
        pool._upkeep._open_writer = opened
        with ExitStack() as open_ones:
            for number in range(4):
                both(open_ones.enter_context(pool.transaction(timeout=LIMIT)), scene, number)
    assert scene.agree() == [0, 1, 2, 3]


@pytest.mark.parametrize("database", ["sqlite", "rocksdb"])
def test_without_a_server_two_writers_are_enough(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    make_restless(monkeypatch)
    running, most = [], 0

    def unit(tx: Transaction, number: int) -> None:
        nonlocal most
        running.append(number)
        most = max(most, len(running))
        both(tx, scene, number)
        running.remove(number)

    with open_pool(scene, size=None) as pool:
        for futures in [[pool.submit(unit, number) for number in range(first, first + 8)] for first in (0, 8, 16)]:
            for future in futures:
                done(future)
            assert pool.size == 2
    assert most == 1
    assert scene.agree() == list(range(24))
