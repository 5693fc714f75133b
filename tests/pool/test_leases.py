"""Pools with leased ids, on real databases and a real broker: they share a prefix, come, go, die, are paused and resized."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from itertools import product
from typing import Any

import pytest
import sqlalchemy as sa

import dualwrite
from crash.databases import DATABASES
from crash.scene import Scene
from crash.worker import timeouts
from dualwrite import PoolOptions, Transaction, WriterPool, migration
from dualwrite.cli import main
from dualwrite.deadline import Deadline
from dualwrite.errors import (
    ConfigurationError,
    FencedError,
    NestedTransactionError,
    PoolTimeoutError,
    WriterClosedError,
)
from dualwrite.observability.outages import database_at
from dualwrite.pool.pool_ids import FixedIds, LeasedIds
from dualwrite.pool.writers import Writers
from dualwrite.state import ProducerKind
from dualwrite.stores.leases import Lease, LeaseStore
from dualwrite.stores.rocksdb import RocksDBStore
from dualwrite.stores.sql import SqlStateStore
from dualwrite.stores.sql.tables import lease_table
from dualwrite.testing.proxy import TcpProxy
from dualwrite.testing.topics import OpenTransactionsError
from fixtures.pace import LIMIT, done, limit, until, until_recorded
from fixtures.tiers import thinned
from pool.pool_scene import assert_reports_true, both, open_pool, pool_worker, reported_committed

every_database = pytest.mark.parametrize("database", thinned(DATABASES, kept=["postgresql", "rocksdb"], quick=["postgresql"]))
SHARED_DATABASES = [each for each in DATABASES if each != "rocksdb"]
"""RocksDB can be opened by one process only."""
shared_databases = pytest.mark.parametrize(
    "database", thinned(SHARED_DATABASES, kept=["postgresql", "mariadb"], quick=["postgresql"])
)

SHORT = PoolOptions(timeout=LIMIT, lease=1.0)
"""Leases that end soon, for pools that wait for it."""


def ids(scene: Scene, *numbers: int) -> set[str]:
    return {f"{scene.transactional_id}.{number}" for number in numbers}


def leases(scene: Scene) -> list[Lease]:
    with dualwrite.store_from_url(scene.url) as store:
        assert store.leases is not None
        return store.leases.entries(f"{scene.transactional_id}.")


def write_until(pool: WriterPool[Any], scene: Scene, condition: Callable[[], object], numbers: Iterator[int]) -> set[int]:
    """Run units until the condition holds; return the numbers of those that succeeded."""
    succeeded: set[int] = set()

    def step() -> object:
        number = next(numbers)
        try:
            pool.run(both, scene, number)
        except FencedError:
            pass
        else:
            succeeded.add(number)
        return condition()

    until(step, "the pool goes on")
    return succeeded


# --- pools that share a prefix ------------------------------------------------------------------------------------------------


@every_database
def test_pools_of_one_prefix_use_different_ids(scene: Scene) -> None:
    with open_pool(scene) as first, open_pool(scene, size=1) as second, ThreadPoolExecutor(8) as threads:
        assert (set(first.transactional_ids), set(second.transactional_ids)) == (ids(scene, 1, 2), ids(scene, 3))
        results = threads.map(lambda number: (first, second)[number % 2].run(both, scene, number), range(60))
        assert list(results) == list(range(60))
    assert scene.agree() == list(range(60))


# RocksDB has one process; for the others, processes that start at once show the same
@pytest.mark.parametrize("database", thinned(DATABASES, kept=["postgresql", "rocksdb"], quick=["postgresql"]))
def test_pools_that_start_at_once_in_threads(scene: Scene) -> None:
    barrier = threading.Barrier(4)

    def start(number: int) -> str:
        barrier.wait(LIMIT)
        pool = opened.enter_context(open_pool(scene, size=1))
        pool.run(both, scene, number)
        (name,) = pool.transactional_ids
        return name

    with ExitStack() as opened, ThreadPoolExecutor(4) as threads:
        assert set(threads.map(start, range(4))) == ids(scene, 1, 2, 3, 4)
    assert scene.agree() == [0, 1, 2, 3]


@pytest.mark.slow
@shared_databases
def test_processes_that_start_at_once(scene: Scene) -> None:
    workers = [pool_worker(scene, first, 20) for first in (0, 100, 200)]
    opened = [worker.wait_for("open").split()[1:] for worker in workers]
    assert [worker.end() for worker in workers] == [0, 0, 0], [worker.errors for worker in workers]
    assert len(reported_committed(workers[0]) | reported_committed(workers[1]) | reported_committed(workers[2])) == 60
    names = [name for some in opened for name in some]
    assert all(number <= 6 for number in (int(name.rpartition(".")[2]) for name in names)), names
    assert leases(scene) == []
    assert len(scene.agree()) == 60


@pytest.mark.slow
def test_ids_whose_leases_have_ended_are_leased_again(scene: Scene) -> None:
    """An id whose lease has ended is leased again: opening it recovers it."""
    dies = pool_worker(scene, 0, 60, "after_db_commit#3=kill", LEASE="0.5")
    dies.killed()
    until(lambda: all(each.has_ended for each in leases(scene)), "the leases have ended")
    with open_pool(scene) as pool:
        assert set(pool.transactional_ids) == ids(scene, 1, 2)
        pool.run(both, scene, 100)
        found = scene.agree()
    assert {100, *reported_committed(dies)} <= set(found)


# --- processes that die -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@shared_databases
def test_a_live_pool_recovers_the_transactions_of_a_dead_one(scene: Scene) -> None:
    """The database has committed, Kafka's transaction is prepared: a read_committed consumer waits for a live pool."""
    with open_pool(scene, size=1, options=SHORT) as pool:
        dies = pool_worker(scene, 0, 60, "after_db_commit#3=kill", LEASE="1")
        dies.killed()
        committed = scene.rows()
        until_recorded(lambda: readable(scene), committed, "a consumer reads what was prepared", pause=0.1)
        assert set(pool.transactional_ids) == ids(scene, 1), "it has given the others back"
        pool.run(both, scene, 100)
        assert reported_committed(dies) < {*scene.agree()}
        with dualwrite.open_recoverer(scene.events.database, kafka=scene.settings) as recoverer:
            until(lambda: set(recoverer.pending(prefix=scene.transactional_id)) == ids(scene, 1), "nothing else is open")
        until(lambda: {each.transactional_id for each in leases(scene)} == ids(scene, 1), "their leases are given back")


def readable(scene: Scene) -> list[int]:
    try:
        return scene.messages()
    except OpenTransactionsError:
        return []


@pytest.mark.slow
def test_ids_of_pools_without_leases_are_recovered(scene: Scene) -> None:
    """An id with something open on it that was never leased: from an earlier release."""
    left = f"{scene.transactional_id}.4"
    crashed = Scene(scene.events, scene.bootstrap, left)
    crashed.write(1, 1, "after_db_commit=kill").killed()
    with open_pool(scene, options=SHORT):
        until_recorded(lambda: readable(crashed), [1], "a consumer reads what was prepared", pause=0.1)
    with dualwrite.open_recoverer(scene.events.database, kafka=scene.settings) as recoverer:
        assert recoverer.pending(prefix=scene.transactional_id) == ()


@pytest.mark.slow
def test_an_id_used_without_a_lease_is_not_recovered(scene: Scene) -> None:
    """As long as its writer is at work."""
    options = PoolOptions(timeout=LIMIT, lease=3.0)
    name = f"{scene.transactional_id}.7"
    with (
        dualwrite.connect(scene.events.database, kafka=scene.settings, transactional_id=name, timeouts=timeouts()) as writer,
        open_pool(scene, options=options) as pool,
    ):
        end = time.monotonic() + 5
        number = 0
        while time.monotonic() < end:
            with writer.transaction() as tx:
                both(tx, scene, number)
            number += 1
        assert set(pool.transactional_ids) == ids(scene, 1, 2)
    assert scene.agree() == list(range(number))


# --- processes that are paused ------------------------------------------------------------------------------------------------


# Not SQLite: any thread of the paused process, such as the one that renews its leases, may have the write lock of the whole
# file, and every other process waits until it resumes. Other databases lock single rows, and end a paused transaction.
PAUSES = list(product(("postgresql", "mariadb", "zookeeper"), ("group_after_units", "after_db_commit"), ("used", "recovered")))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("database", "point", "ids_are"),
    thinned(
        PAUSES,
        kept=[
            ("mariadb", "group_after_units", "used"),
            ("postgresql", "after_db_commit", "recovered"),
        ],
    ),
)
def test_a_pool_paused_beyond_its_lease(scene: Scene, point: str, ids_are: str) -> None:
    """Others recover its ids, or use them. When it resumes it is fenced; it leases ids again, and continues."""
    units = 200
    sleeper = pool_worker(scene, 0, units, f"{point}#5=stop", LEASE="1", SIZE="1")
    (own,) = sleeper.wait_for("open").split()[1:]
    with open_pool(scene, size=1, options=SHORT) as pool:
        sleeper.wait_until_stopped()
        if ids_are == "used":
            until(lambda: own not in {each.transactional_id for each in leases(scene) if not each.has_ended}, "it has ended")
            pool.resize(3)  # if the id is not among the lowest because it is being recovered, the next size has it
            until(lambda: own in pool.transactional_ids or grown(pool), "the pool uses the id")
        else:
            until(lambda: own not in pending(scene), "the pool has recovered the id", pause=0.1)
        for number in range(1000, 1010):
            pool.run(both, scene, number)
        sleeper.resume()
        assert sleeper.end() == 0, sleeper.errors
    assert sleeper.last() == "closed"
    failed = [line for line in sleeper.lines if line.startswith("error")]
    kinds = {line.split()[2] for line in failed}
    assert kinds <= {"FencedError", "InDoubtTransactionError"}, failed
    assert len(failed) <= 8, "what its 8 threads ran when it was paused"
    assert len(reported_committed(sleeper)) + len(failed) == units
    assert set(range(1000, 1010)) <= assert_reports_true(scene, sleeper)


def grown(pool: WriterPool[Any]) -> bool:
    pool.resize(pool.size + 1)
    return False


def pending(scene: Scene) -> set[str]:
    with dualwrite.open_recoverer(scene.events.database, kafka=scene.settings) as recoverer:
        return set(recoverer.pending(prefix=scene.transactional_id))


# --- ids that are taken from a live pool --------------------------------------------------------------------------------------


@every_database
def test_a_pool_whose_leases_were_taken_uses_other_ids(scene: Scene) -> None:
    """As after a pause, without one."""
    numbers = iter(range(10_000))
    with open_pool(scene, options=SHORT) as pool:
        pool.run(both, scene, next(numbers))
        taken = set(pool.transactional_ids)
        with dualwrite.store_from_url(scene.url) as store:
            assert store.leases is not None
            store.leases.release(taken, next(each.owner for each in leases(scene)))
            assert store.leases.acquire(taken, "somebody", seconds=600) == taken
            succeeded = write_until(pool, scene, lambda: pool.size == 2 and not taken & set(pool.transactional_ids), numbers)
            store.leases.release(taken, "somebody")
        assert set(pool.transactional_ids) == ids(scene, 3, 4)
    assert {0, *succeeded} == set(scene.agree())
    assert leases(scene) == []


# --- the database is away -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("taken", thinned([False, True], kept=[True]))
def test_a_pool_that_could_not_renew_its_leases_continues(scene: Scene, taken: bool, caplog: pytest.LogCaptureFixture) -> None:
    address = sa.make_url(scene.url)
    numbers = iter(range(100, 10_000))
    assert address.host is not None
    assert address.port is not None
    with TcpProxy(address.host, address.port) as proxy:
        url = address.set(host="127.0.0.1", port=proxy.port).render_as_string(hide_password=False)
        with (
            dualwrite.create_pool(
                url, kafka=scene.settings, prefix=scene.transactional_id, options=SHORT, timeouts=timeouts()
            ) as pool,
            ExitStack() as others,
        ):
            pool.run(both, scene, 1)
            with caplog.at_level(logging.WARNING):
                proxy.refuse()
                proxy.cut()
                until(lambda: "does not answer" in caplog.text, "the renewal has failed")
                until(lambda: all(each.has_ended for each in leases(scene)), "the leases have ended")
                assert len(caplog.records) == 1, "one warning of the outage, whatever else has failed because of it"
            if taken:
                other = others.enter_context(open_pool(scene, options=SHORT))
                assert set(other.transactional_ids) == ids(scene, 1, 2)
                other.run(both, scene, 2)
            proxy.refuse(refusing=False)
            wanted = ids(scene, 3, 4) if taken else ids(scene, 1, 2)
            until(lambda: set(pool.transactional_ids) == wanted, lambda: f"{pool.transactional_ids}")
            write_until(pool, scene, lambda: True, numbers)
            until(lambda: not any(each.has_ended for each in leases(scene)), "the leases are renewed")
            until(lambda: "answers again" in caplog.text, "the end of the outage is logged")
    assert {1, *([2] if taken else [])} < set(scene.agree())


# --- another size -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@every_database
def test_the_size_changes_while_the_pool_is_used(scene: Scene) -> None:
    total = 400
    with open_pool(scene) as pool, ThreadPoolExecutor(16) as threads:
        results = [threads.submit(pool.run, both, scene, number) for number in range(total)]
        for step, size in enumerate((4, 1, 3, 3, 2)):
            pool.resize(size)
            assert pool.size == size
            assert len(pool.transactional_ids) == size
            assert {each.transactional_id for each in leases(scene)} == set(pool.transactional_ids)
            pool.run(both, scene, total + step)
        for number, result in enumerate(results):
            assert done(result) == number
        until(lambda: [pool.run(lambda _: None)] and len(pool._workers.threads) == 2, "a thread for each writer")
    assert scene.agree() == list(range(total + 5))


def test_a_smaller_pool_waits_for_transactions(scene: Scene) -> None:
    with open_pool(scene) as pool, ThreadPoolExecutor(1) as thread:
        with pool.transaction() as one:
            with pool.transaction() as two:
                both(one, scene, 1)
                resizing = thread.submit(pool.resize, 1)
                both(two, scene, 2)
                assert not resizing.done()
                assert len(leases(scene)) == 2
            done(resizing)
            assert len(leases(scene)) == pool.size == 1
        assert pool.run(both, scene, 3) == 3
    assert scene.agree() == [1, 2, 3]


@pytest.mark.slow
def test_a_size_that_cannot_be_reached_is_reported(scene: Scene) -> None:
    with open_pool(scene, options=PoolOptions(timeout=limit(1), max_size=3)) as pool:
        with pool.transaction(), pool.transaction(), pytest.raises(PoolTimeoutError, match="No writer of the pool was free"):
            pool.resize(1)
        assert pool.size == 2
        for wrong in (0, 4, True, 2.0):
            with pytest.raises(ConfigurationError, match="must be an integer from 1 to 3"):
                pool.resize(wrong)  # type: ignore[arg-type]  # that is what is tested
        with pytest.raises(NestedTransactionError):
            pool.with_options(timeout=LIMIT).run(lambda _: pool.resize(1))
        pool.resize(3)
    with pytest.raises(WriterClosedError):
        pool.resize(1)
    assert leases(scene) == []


# --- status -------------------------------------------------------------------------------------------------------------------


def test_status_shows_leases(tmp_path: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DUALWRITE_DATABASE_URL", url := f"sqlite:///{tmp_path / 'shop.db'}")
    migration.upgrade(url)
    with dualwrite.store_from_url(url) as store:
        assert store.leases is not None
        store.leases.acquire(["shop.1"], "pool here", seconds=600)
        store.leases.acquire(["shop.2"], "pool there", seconds=0.01)
        until(lambda: store.leases is not None and any(each.has_ended for each in store.leases.entries()), "one has ended")
    assert main(["status", "--wide"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.split()[:3] == ["shop.1", "pool", "here"] and line.rstrip().endswith(" s left") for line in lines), lines
    assert any("shop.2" in line and "expired" in line for line in lines), lines
    assert main(["status", "--json", "--prefix", "shop.2"]) == 0
    (lease,) = json.loads(capsys.readouterr().out)["leases"]
    assert (lease["transactional_id"], lease["owner"], lease["is_expired"]) == ("shop.2", "pool there", True)
    assert lease["seconds_left"] < 0


def test_status_says_that_a_lease_is_impossible(scene: Scene, capsys: pytest.CaptureFixture[str]) -> None:
    """The database's clock has gone back after a pool died: its lease would hold its transaction for that long."""
    with dualwrite.store_from_url(scene.url) as store:
        assert isinstance(store, SqlStateStore)
        name = f"{scene.transactional_id}.1"
        store.leases.acquire([name], "pool gone", seconds=5)
        store.acquire_generation(store.claim(name, "pool gone", timeout=LIMIT), ProducerKind.NATIVE)
        command = ["status", "--url", scene.url, "--prefix", scene.transactional_id]
        assert main(command) == 0
        with store.engine.begin() as connection:
            connection.execute(lease_table.update().values(leased_until=datetime.now(UTC) + timedelta(hours=1)))
        capsys.readouterr()
        assert main(command) == 3
        text = " ".join(capsys.readouterr().out.split())
        assert "more than was leased: the database's clock went back" in text
        assert "dualwrite recover" in text


# --- parts --------------------------------------------------------------------------------------------------------------------


def test_ids_that_cannot_be_opened_are_avoided(tmp_path: Any) -> None:
    ids = LeasedIds(memory_leases(tmp_path), "shop", seconds=600, database=database_at("memory"))
    assert ids.acquire(2) == ["shop.1", "shop.2"]
    ids.avoid("shop.1")
    assert ids.acquire(1) == ["shop.3"]
    assert ids.acquire_one("shop.1")
    assert not ids.acquire_one("shop.1"), "it has it already"
    ids.close()
    other = LeasedIds(memory_leases(tmp_path), "shop", seconds=600, database=database_at("memory"))
    assert other.acquire(1) == ["shop.1"]
    other.close()


def memory_leases(folder: Any) -> LeaseStore:
    return RocksDBStore(folder / "rocksdb").leases


def test_fixed_ids_are_reused() -> None:
    ids = FixedIds("shop")
    assert ids.acquire(3) == ["shop.1", "shop.2", "shop.3"]
    ids.release("shop.2")
    assert ids.acquire(2) == ["shop.2", "shop.4"]
    ids.close()
    assert ids.acquire(1) == ["shop.1"]


def test_a_checkout_timeout_reports_why_no_writer_can_be_opened(tmp_path: Any) -> None:
    writers = Writers("shop", LeasedIds(memory_leases(tmp_path), "shop", seconds=600, database=database_at("memory")))
    with ThreadPoolExecutor(1) as thread:

        def wait() -> None:
            with writers.checked_out("a group"):
                pass

        waiting = thread.submit(wait)
        writers.fail(error := ValueError("no database"))
        with pytest.raises(ValueError, match="no database") as caught:
            done(waiting)
        assert caught.value is not error
    for _ in range(2):
        with pytest.raises(ValueError, match="no database"), writers.checked_out("a group", Deadline(LIMIT)):
            pass
    writers = Writers("shop", FixedIds("shop"))
    writers._free.put(None)
    with pytest.raises(FencedError, match="a prefix of its own"), writers.checked_out("a group", Deadline(LIMIT)):
        pass


def test_units_of_a_transaction_are_not_lost_when_its_pool_grows(scene: Scene) -> None:
    """A unit that was submitted before is run by whichever writer is free."""
    release = threading.Event()

    def slow(tx: Transaction) -> int:
        release.wait(LIMIT)
        return both(tx, scene, 1)

    with open_pool(scene, size=1) as pool:
        first = pool.submit(slow)
        second = pool.submit(both, scene, 2)
        pool.resize(2)
        assert pool.size == 2
        release.set()
        assert (done(first), done(second)) == (1, 2)
    assert scene.agree() == [1, 2]
