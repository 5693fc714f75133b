"""Pools with `acknowledge="journaled"`: calls end with the database's commit, side by side, and none waits for Kafka."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import sqlalchemy as sa
import sqlalchemy.orm

import dualwrite
from crash.databases import Databases
from crash.events import write_event
from crash.proxied import CUTS, through_a_proxy
from crash.scene import Scene
from crash.worker import timeouts
from dualwrite import (
    ConfigurationError,
    InDoubtTransactionError,
    InvalidMessageError,
    JournalFullError,
    JournalLimits,
    JournalSwitchedError,
    NestedTransactionError,
    PoolTimeoutError,
    StoreCommitFailedError,
    Transaction,
    TransactionControlError,
    UsageError,
    WriterClosedError,
    WriterPool,
    aio,
)
from dualwrite.devcluster import DevCluster
from dualwrite.observability import Event, RowsRelayed, TransactionCommitted, UnitEnded, current_readings, observing
from dualwrite.stores.sql import SqlStateStore
from dualwrite.stores.sql.sql_journal import close_gate
from fixtures.broker import read_topic
from fixtures.broker_door import BrokerBehindDoor
from fixtures.pace import LIMIT, done, until
from fixtures.tiers import thinned
from journal.journal_scene import gate_of
from journaled.journaled_scene import journaled_pool, published, until_published
from pool.pool_scene import both, pool_worker, psycopg_store, then_raise

on_each = pytest.mark.parametrize("database", thinned(["postgresql", "mariadb", "sqlite"], quick=["postgresql"]))
on_postgresql = pytest.mark.parametrize("database", ["postgresql"])


@on_each
def test_each_way_to_write(scene: Scene) -> None:
    seen: list[Transaction[Any]] = []

    def unit(tx: Transaction[Any], number: int) -> int:
        seen.append(tx)
        return both(tx, scene, number)

    with journaled_pool(scene) as pool:
        assert pool.run(unit, 1) == 1
        assert pool.submit(unit, 2).result(LIMIT) == 2
        assert pool.with_options(key="k").run(unit, 3) == 3
        with pool.transaction() as tx:
            unit(tx, 4)
        with pytest.raises(ValueError, match="no"):
            pool.run(then_raise, scene, 5, ValueError("no"))
        with pytest.raises(KeyError), pool.transaction() as tx:
            then_raise(tx, scene, 6, KeyError())
        pool.run(lambda tx: write_event(scene.url, tx.db, scene.transactional_id, 7))
        pool.run(lambda tx: tx.send(scene.topic, "7"))
        assert [tx.outcome for tx in seen] == ["journaled"] * 4
        until_published(scene, 1, 2, 3, 4, 7)
    assert scene.agree() == [1, 2, 3, 4, 7]


@on_each
def test_a_writer_alone(scene: Scene) -> None:
    with dualwrite.connect(
        scene.events.database,
        kafka=scene.settings,
        transactional_id=scene.transactional_id,
        acknowledge="journaled",
        timeouts=timeouts(),
    ) as writer:
        for number in range(3):
            with writer.transaction() as tx:
                both(tx, scene, number)
            assert tx.outcome == "journaled"
        assert (writer.kafka_transactional_ids, writer.is_two_phase, writer.when_kafka_is_down) == ((), True, "journal")
    assert scene.agree() == [0, 1, 2]


@on_postgresql
def test_many_messages_of_one_unit_keep_their_order_and_content(scene: Scene) -> None:
    contents: list[tuple[Any, Any, Any]] = [
        (b"\x00\xff'\\", None, None),
        (None, b"k'", {"h": b"\x00", "none": None}),
        ("ü '; DROP TABLE x; --", "k", {"ü": "'"}),
        *((str(number), f"{number}", None) for number in range(200)),
    ]

    def unit(tx: Transaction[Any]) -> None:
        for value, key, headers in contents:
            tx.send(scene.topic, value, key=key, headers=headers, timestamp=1_700_000_000_000, partition=0)
        tx.send(scene.topic, b"x" * 200_000, partition=0)

    with journaled_pool(scene) as pool:
        pool.run(unit)
    found = read_topic(scene.bootstrap, scene.topic)
    assert [message.value() for message in found][-1] == b"x" * 200_000
    for message, (value, key, headers) in zip(found, contents, strict=False):
        expected = {name: text.encode() if isinstance(text, str) else text for name, text in (headers or {}).items()}
        as_bytes = [text.encode() if isinstance(text, str) else text for text in (value, key)]
        assert ([message.value(), message.key()], dict(message.headers() or [])) == (as_bytes, expected)
        assert message.timestamp()[1] == 1_700_000_000_000


@on_postgresql
def test_units_run_side_by_side(scene: Scene) -> None:
    together = threading.Barrier(4, timeout=LIMIT)

    def unit(tx: Transaction[Any], number: int) -> None:
        both(tx, scene, number)
        together.wait()

    with journaled_pool(scene) as pool:
        others = [pool.submit(unit, number) for number in range(2)]
        thread = threading.Thread(target=pool.run, args=(unit, 2))
        thread.start()
        with pool.transaction() as tx:
            unit(tx, 3)
        thread.join(LIMIT)
        for other in others:
            done(other)
    assert sorted(published(scene)) == [0, 1, 2, 3]


@on_postgresql
def test_a_unit_that_is_rolled_back_because_of_another_one_runs_again(scene: Scene) -> None:
    together, runs = threading.Barrier(2, timeout=LIMIT), threading.Semaphore(2)
    change = sa.text("UPDATE events SET number = number WHERE writer = :writer AND number = 0")

    def unit(tx: Transaction[Any], number: int) -> int:
        """Both change a row as their snapshots have it."""
        tx.db.execute(sa.text("SELECT 1"))
        if runs.acquire(blocking=False):
            together.wait()
        tx.db.execute(change, {"writer": scene.transactional_id})
        return both(tx, scene, number)

    engine = sa.create_engine(scene.url, isolation_level="REPEATABLE READ")
    with journaled_pool(scene, engine) as pool, ThreadPoolExecutor(2) as threads:
        pool.run(both, scene, 0)
        assert list(threads.map(partial(pool.run, unit), [1, 2])) == [1, 2]
    engine.dispose()
    assert scene.agree() == [0, 1, 2]


@on_postgresql
def test_more_callers_than_places_take_turns(scene: Scene) -> None:
    """A place goes to the caller that has waited longest, and not to the one that has just given it back."""
    turns = [0] * 6
    enough = threading.Event()

    def call(place: int) -> None:
        while not enough.is_set():
            pool.run(lambda _: None)
            turns[place] += 1

    with journaled_pool(scene, size=2) as pool, ThreadPoolExecutor(len(turns)) as threads:
        calling = [threads.submit(call, place) for place in range(len(turns))]
        try:
            until(lambda: min(turns) > 0, "all take part")
            before = list(turns)
            until(lambda: min(turns) >= 40, "each caller has had its turns")
            had = [now - then for now, then in zip(turns, before, strict=True)]
        finally:
            enough.set()
        for each in calling:
            done(each)
    assert max(had) <= 2 * min(had), had


@on_postgresql
def test_there_are_no_more_places_than_the_size(scene: Scene) -> None:
    with journaled_pool(scene, size=1) as pool:
        assert (pool.size, pool.transactional_ids) == (1, ())
        place = pytest.raises(PoolTimeoutError, match="No place in the pool was free")
        with pool.transaction(), place, pool.transaction(timeout=0.1):
            pass
        with pytest.raises(UsageError, match="no writers that could be more or fewer"):
            pool.resize(3)
        pool.run(both, scene, 1)


@on_postgresql
def test_a_unit_cannot_use_its_own_pool(scene: Scene) -> None:
    with journaled_pool(scene) as pool:

        def nested(tx: Transaction[Any]) -> None:
            del tx
            pool.run(both, scene, 1)

        with pytest.raises(NestedTransactionError):
            pool.run(nested)
    with pytest.raises(WriterClosedError):
        pool.run(both, scene, 1)
    with pytest.raises(WriterClosedError):
        pool.submit(both, scene, 1)


@on_postgresql
def test_coroutines(scene: Scene) -> None:
    async def unit(tx: aio.AsyncTransaction[Any], number: int) -> str | None:
        values = {"writer": scene.transactional_id, "number": number}
        await tx.db.execute(sa.text("INSERT INTO events VALUES (:writer, :number)"), values)
        tx.send(scene.topic, str(number))
        await asyncio.sleep(0.01)
        return None

    async def main(pool: Any) -> None:
        shared = aio.AsyncWriterPool(pool)
        await asyncio.gather(*(shared.run(unit, number) for number in range(10)))
        await shared.run(both, scene, 10)
        async with shared.transaction() as tx:
            await unit(tx, 11)

    with journaled_pool(scene) as pool:
        asyncio.run(main(pool))
    assert scene.agree() == list(range(12))


@on_postgresql
def test_psycopg_connections(scene: Scene) -> None:
    with psycopg_store(scene.url) as store, journaled_pool(scene, store) as pool:
        for number in range(5):
            pool.run(both, scene, number)
    assert scene.agree() == list(range(5))


@on_each
def test_an_outage_of_kafka_is_not_noticed(outage: Scene, broker_behind_door: BrokerBehindDoor) -> None:
    broker_behind_door.kill()
    with journaled_pool(outage) as pool:
        for number in range(20):
            pool.run(both, outage, number)
        assert pool.check().database.is_ok
        assert gate_of(pool, outage).entries == 20
        broker_behind_door.start()
        until_published(outage, *range(20))
        assert gate_of(pool, outage).is_open
    assert published(outage) == list(range(20))


@on_postgresql
def test_what_is_left_is_published_at_the_end(outage: Scene, broker_behind_door: BrokerBehindDoor) -> None:
    with journaled_pool(outage) as pool:
        pool.run(both, outage, 0)
        until_published(outage, 0)
        broker_behind_door.kill()
        for number in (1, 2):
            pool.run(both, outage, number)
        broker_behind_door.start()
    assert published(outage) == [0, 1, 2]


@on_each
def test_the_gate_is_opened_again_if_somebody_has_closed_it(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the transaction that finds it closed; the thread, which looks from time to time, would do it as well."""
    monkeypatch.setattr("dualwrite.relay.journal_publisher._LOOK_SECONDS", 10 * LIMIT)
    with journaled_pool(scene) as pool:
        pool.run(both, scene, 0)
        store = pool.store
        assert isinstance(store, SqlStateStore)

        def close() -> None:
            gate = gate_of(pool, scene)
            assert store.short_transactions.run(
                lambda connection: close_gate(connection, scene.transactional_id, gate.epoch, "test"), "a test"
            )

        close()
        pool.run(both, scene, 1)
        close()
        with pytest.raises(JournalSwitchedError), pool.transaction() as tx:
            both(tx, scene, 2)
        with pool.transaction() as tx:
            both(tx, scene, 3)
        until_published(scene, 0, 1, 3)
    assert scene.agree() == [0, 1, 3]


@on_postgresql
def test_the_gate_closes_when_the_last_such_pool_has_ended(scene: Scene) -> None:
    with journaled_pool(scene) as first, journaled_pool(scene, pool_options={"acknowledge": "visible"} | WITH_JOURNAL) as other:
        other.run(both, scene, 0)
        first.run(both, scene, 1)
        assert gate_of(first, scene).is_open
        first.close()
        until(lambda: not gate_of(other, scene).is_open, "the gate closed")
        seen: list[Transaction[Any]] = []
        other.run(lambda tx: seen.append(tx) or both(tx, scene, 2))
        assert seen[-1].outcome == "published"
    assert scene.agree() == [0, 1, 2]


WITH_JOURNAL = {"when_kafka_is_down": "journal"}


@on_postgresql
def test_ids_of_dead_processes_are_recovered(scene: Scene) -> None:
    """Those of processes that have written to Kafka, and are replaced by such as write into the journal."""
    dying = pool_worker(scene, 0, 4, "after_db_commit=kill", LEASE="1")
    dying.killed()
    left = scene.rows()
    assert left
    with journaled_pool(scene, pool_options={"lease": 1}):
        until_published(scene, *left)
    assert scene.agree() == left


def until_full(pool: WriterPool[Any], scene: Scene, written: list[int]) -> JournalFullError:
    """Write events until that is refused."""

    def full() -> JournalFullError | None:
        try:
            written.append(pool.run(both, scene, len(written)))
        except JournalFullError as error:
            return error
        return None

    return until(full, "the journal full")


LIMITED = {"journal": JournalLimits(entries=3)}


@on_postgresql
def test_a_full_journal_refuses_units(outage: Scene, broker_behind_door: BrokerBehindDoor) -> None:
    broker_behind_door.kill()
    with journaled_pool(outage, pool_options=LIMITED) as pool:
        written: list[int] = []
        error = until_full(pool, outage, written)
        assert error.what.startswith(f"The journal of '{outage.transactional_id}' is full: it has")
        assert "the limit is 3" in error.limit
        assert error.cause == "Kafka does not answer, or takes fewer messages than are written"
        broker_behind_door.start()
        until_published(outage, *range(len(written)))


@pytest.mark.parametrize("database", thinned(["postgresql", "mariadb"], quick=["postgresql"]))
def test_a_limit_holds_while_the_process_that_publishes_waits_for_kafka(
    outage: Scene, broker_behind_door: BrokerBehindDoor
) -> None:
    """Not on SQLite, where units wait meanwhile: the batch has the only write lock."""
    with journaled_pool(outage, pool_options=LIMITED) as pool:
        written = [pool.run(both, outage, 0)]
        until_published(outage, 0)
        broker_behind_door.kill()
        until_full(pool, outage, written)
        broker_behind_door.start()
        until_published(outage, *range(len(written)))


@on_postgresql
def test_a_journal_that_is_full_although_kafka_answers_says_why(scene: Scene) -> None:
    with journaled_pool(scene, pool_options=LIMITED) as pool:
        written = [pool.run(both, scene, 0)]
        until_published(scene, 0)
        execute(scene, BREAK)
        try:
            until_full(pool, scene, written)
            until(lambda: "deletes none" in (until_full(pool, scene, written).cause or ""), "the reason is told")
        finally:
            execute(scene, "DROP TRIGGER breaks ON dualwrite_journal")
        until_published(scene, *range(len(written)))


def execute(scene: Scene, statement: str) -> None:
    with scene.engine.begin() as connection:
        connection.execute(sa.text(statement))


BREAK = """
CREATE OR REPLACE FUNCTION breaks() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'deletes none'; END $$;
CREATE TRIGGER breaks BEFORE DELETE ON dualwrite_journal FOR EACH STATEMENT EXECUTE FUNCTION breaks()
"""


@on_postgresql
def test_what_is_refused(scene: Scene) -> None:
    def ends(tx: Transaction[Any]) -> None:
        both(tx, scene, 1)
        tx.db.connection.driver_connection.rollback()

    def begins_another(tx: Transaction[Any]) -> None:
        ends(tx)
        tx.db.connection.driver_connection.execute("SELECT 1")

    with journaled_pool(scene) as pool:
        with pytest.raises(InvalidMessageError):
            pool.run(lambda tx: tx.send("", b"x"))
        with pytest.raises(TransactionControlError):
            pool.run(lambda tx: tx.db.commit())
        with pytest.raises(StoreCommitFailedError, match="no transaction any more"):
            pool.run(ends)
        with pytest.raises(TransactionControlError, match="ended the database's transaction itself"):
            pool.run(begins_another)
    assert scene.agree() == []


def test_only_sql_databases_have_a_journal(tmp_path: Any) -> None:
    store = dualwrite.store_from_url(f"rocksdb://{tmp_path}/db")
    with store, pytest.raises(ConfigurationError, match="A journal needs a SQL database"):
        dualwrite.create_pool(store, prefix="p", kafka="127.0.0.1:9", options=dualwrite.PoolOptions(acknowledge="journaled"))


@on_postgresql
def test_what_observers_see(scene: Scene) -> None:
    events: list[Event] = []
    with observing(events.append), journaled_pool(scene) as pool:
        pool.run(both, scene, 0)
        with pytest.raises(ValueError, match="no"):
            pool.run(then_raise, scene, 1, ValueError("no"))
        until_published(scene, 0)
        names = {reading.name for reading in current_readings() if reading.labels.get("prefix") == scene.transactional_id}
        assert {"journal_open", "pool_writers"} <= names
    ended = [event.error for event in events if isinstance(event, UnitEnded)]
    assert [type(error) for error in ended] == [type(None), ValueError]
    outcomes = [event.outcome for event in events if isinstance(event, TransactionCommitted)]
    assert "journaled" in outcomes
    assert sum(event.rows for event in events if isinstance(event, RowsRelayed)) == 1


# --- COMMIT without an answer ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["run", "join"])
@pytest.mark.parametrize("cut", CUTS)
def test_postgresql_tells_what_has_become_of_a_commit(databases: Databases, broker: DevCluster, cut: str, way: str) -> None:
    when, action, committed = CUTS[cut]
    with through_a_proxy(databases, "postgresql", broker) as proxied, journaled_pool(proxied.scene, proxied.url) as pool:
        write = _through_session if way == "join" else _in_unit
        write(pool, proxied.scene, proxied.url, 1)
        with proxied.at_commit(when, action):
            told = True
            try:
                write(pool, proxied.scene, proxied.url, 2)
            except StoreCommitFailedError:
                told = False
            except dualwrite.AfterCommitError:
                assert way == "join"
        assert committed in (None, told)
        write(pool, proxied.scene, proxied.url, 3)
    assert proxied.scene.agree() == ([1, 2, 3] if told else [1, 3])


def test_mariadb_does_not_tell(databases: Databases, broker: DevCluster) -> None:
    with through_a_proxy(databases, "mariadb", broker) as proxied, journaled_pool(proxied.scene, proxied.url) as pool:
        _in_unit(pool, proxied.scene, proxied.url, 1)
        when, action, _ = CUTS["cut when it was answered"]
        with proxied.at_commit(when, action), pytest.raises(InDoubtTransactionError, match="unknown whether") as raised:
            _in_unit(pool, proxied.scene, proxied.url, 2)
        assert raised.value.database_committed is None
        _in_unit(pool, proxied.scene, proxied.url, 3)
    assert proxied.scene.agree() == [1, 2, 3]


def _in_unit(pool: Any, scene: Scene, _url: str, number: int) -> None:
    pool.run(both, scene, number)


def _through_session(pool: Any, scene: Scene, url: str, number: int) -> None:
    engine = sa.create_engine(url)
    try:
        with sa.orm.Session(engine) as session:
            write_event(scene.url, session.connection(), scene.transactional_id, number)
            pool.join(session).send(scene.topic, str(number), key=scene.transactional_id)
            session.commit()
    finally:
        engine.dispose()
