"""Messages that wait for their time, and are cancelled: each is published once, not before it, or never."""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import sqlalchemy as sa
import sqlalchemy.orm

from crash.scene import InThread, Scene
from dualwrite import InvalidMessageError, StoreError, Transaction, UsageError, aio
from dualwrite.relay.journal_keeper import drain_journal
from dualwrite.settings import Settings
from dualwrite.stores.sql import SqlStateStore
from dualwrite.testing import failpoints
from dualwrite.testing.fakes import FakePool, FakeTransaction
from fixtures.broker import read_topic
from fixtures.broker_door import BrokerBehindDoor
from fixtures.pace import joined
from fixtures.tiers import thinned
from journal.journal_scene import gate_of
from journaled.journaled_scene import journaled_pool, published, until_published
from pool.pool_scene import open_pool

on_each = pytest.mark.parametrize("database", thinned(["postgresql", "mariadb", "sqlite"], quick=["postgresql"]))
on_postgresql = pytest.mark.parametrize("database", ["postgresql"])


def later(tx: Any, scene: Scene, number: int, **given: Any) -> None:
    tx.send(scene.topic, str(number), key="k", **given)


@on_each
def test_a_message_is_published_when_its_time_has_come(scene: Scene) -> None:
    with journaled_pool(scene) as pool:
        due = datetime.now(UTC) + timedelta(seconds=0.7)
        pool.run(lambda tx: later(tx, scene, 1, not_before=due))
        pool.run(lambda tx: later(tx, scene, 2, delay=3600))
        pool.run(lambda tx: later(tx, scene, 3))
        until_published(scene, 1, 3)
        assert gate_of(pool, scene).later == 1
    message = next(each for each in read_topic(scene.bootstrap, scene.topic) if each.value() == b"1")
    assert message.timestamp()[1] == round(due.timestamp() * 1000)
    assert time.time() >= due.timestamp()


@on_each
def test_a_message_that_waits_is_cancelled_with_the_transaction(scene: Scene) -> None:
    def cancels(tx: Transaction[Any]) -> bool:
        return tx.cancel("a")

    def cancels_and_fails(tx: Transaction[Any]) -> None:
        assert tx.cancel("b")
        raise KeyError("no")

    with journaled_pool(scene) as pool:
        with pool.transaction() as tx:
            for number, name in enumerate("abc"):
                later(tx, scene, number, delay=0.8, cancel_id=name)
        assert pool.run(cancels)
        assert not pool.run(cancels)
        with pytest.raises(KeyError):
            pool.run(cancels_and_fails)
        assert pool.cancel("c")
        assert not pool.cancel("c")
        until_published(scene, 1)
        assert not pool.cancel("b")
    assert published(scene) == [1]


@on_each
def test_two_do_not_wait_under_one_id(scene: Scene) -> None:
    with journaled_pool(scene) as pool:
        pool.run(lambda tx: later(tx, scene, 1, delay=60, cancel_id="a"))
        with pytest.raises(StoreError, match="waits under this cancel_id already"):
            pool.run(lambda tx: later(tx, scene, 2, delay=60, cancel_id="a"))
        with pool.transaction() as tx:
            assert tx.cancel("a")
            later(tx, scene, 3, delay=0, cancel_id="a")
        until_published(scene, 3)


@on_postgresql
def test_who_cancels_while_it_is_published_waits_for_the_outcome(scene: Scene) -> None:
    """The publisher has it locked: what it decides is what the other is told."""
    told: list[bool] = []
    with journaled_pool(scene) as pool:
        cancelling = InThread(lambda: told.append(pool.cancel("a")))
        with failpoints.armed("before_db_commit", failpoints.only_at(2, cancelling.start)):  # the unit's COMMIT is the first
            pool.run(lambda tx: later(tx, scene, 1, delay=0, cancel_id="a"))
            until_published(scene, 1)
            joined(cancelling)
    cancelling.result()
    assert told == [False]


@on_each
def test_a_session_that_was_joined(scene: Scene) -> None:
    engine = sa.create_engine(scene.url)
    with journaled_pool(scene) as pool, sa.orm.Session(engine) as session:
        for number in range(3):
            tx = pool.join(session)
            later(tx, scene, number, delay=0, cancel_id=f"{number}")
            session.execute(sa.text("SELECT 1"))
            if number == 1:
                session.rollback()
            else:
                session.commit()
        tx = pool.join(session)
        with pytest.raises(UsageError, match=r"pool\.cancel"):
            tx.cancel("0")
        until_published(scene, 0, 2)
    engine.dispose()


@on_postgresql
def test_a_coroutine(scene: Scene) -> None:
    async def unit(tx: aio.AsyncTransaction[Any]) -> bool:
        tx.send(scene.topic, "1", delay=0)
        tx.send(scene.topic, "2", delay=60, cancel_id="a")
        return await tx.cancel("a")

    async def main(pool: Any) -> None:
        shared = aio.AsyncWriterPool(pool)
        assert await shared.run(unit)
        assert not await shared.cancel("a")

    with journaled_pool(scene) as pool:
        asyncio.run(main(pool))
        until_published(scene, 1)


@on_postgresql
def test_time_goes_on_while_kafka_is_down_and_while_nobody_runs(outage: Scene, broker_behind_door: BrokerBehindDoor) -> None:
    broker_behind_door.kill()
    with journaled_pool(outage) as pool:
        for number in range(20):
            pool.run(later, outage, number, delay=number / 100)
    broker_behind_door.start()
    with journaled_pool(outage):
        until_published(outage, *range(20))
    assert published(outage) == list(range(20))


COME = "UPDATE dualwrite_journal_later SET due_ms = :due WHERE prefix = :prefix AND cancel_id IS NULL"


def come(scene: Scene) -> None:
    """Let the time of those that can't be cancelled be ten seconds ago; no process of the prefix is running."""
    with scene.engine.begin() as connection:
        due = time.time_ns() // 1_000_000 - 10_000
        connection.execute(sa.text(COME), {"due": due, "prefix": scene.transactional_id})


@on_each
def test_messages_whose_time_has_come_count_as_those_in_the_journal(scene: Scene) -> None:
    with journaled_pool(scene) as pool:
        pool.run(lambda tx: [later(tx, scene, number, delay=3600) for number in range(3)])
        pool.run(lambda tx: later(tx, scene, 9, delay=3600, cancel_id="waits"))
        assert (gate_of(pool, scene).entries, gate_of(pool, scene).later) == (0, 4)
    come(scene)
    (gate,) = SqlStateStore(scene.engine).journal.gates(scene.transactional_id, counts=True)
    assert (gate.entries, gate.size, gate.later) == (3, 6, 1)
    assert gate.age(time.time()) >= 10


@on_postgresql
def test_all_whose_time_has_come_are_published_by_hand(scene: Scene) -> None:
    """Also if they don't fit into one batch."""
    numbers = range(350)
    with journaled_pool(scene) as pool:
        pool.run(lambda tx: [later(tx, scene, number, delay=3600) for number in numbers])
    come(scene)
    store = SqlStateStore(scene.engine)
    assert drain_journal(store, Settings(kafka=scene.settings), scene.transactional_id) == len(numbers)
    (gate,) = store.journal.gates(scene.transactional_id, counts=True)
    assert (gate.is_open, gate.entries) == (False, 0)
    until_published(scene, *numbers)


@on_postgresql
def test_a_unit_that_fails_leaves_none(scene: Scene) -> None:
    def fails(tx: Transaction[Any]) -> None:
        later(tx, scene, 1, delay=0)
        raise KeyError

    with journaled_pool(scene) as pool:
        with pytest.raises(KeyError):
            pool.run(fails)
        assert gate_of(pool, scene).later == 0


@on_postgresql
def test_where_none_can_wait(scene: Scene) -> None:
    with open_pool(scene) as pool:
        with pytest.raises(UsageError, match="No message can wait for its time here"):
            pool.run(lambda tx: later(tx, scene, 1, delay=1))
        with pytest.raises(UsageError, match="No message can wait"):
            pool.cancel("a")
        engine = sa.create_engine(scene.url)
        with sa.orm.Session(engine) as session, pytest.raises(UsageError, match="No message can wait"):
            later(pool.join(session), scene, 1, delay=1)
        engine.dispose()


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"delay": -1}, "delay must be"),
        ({"delay": 1e9}, "delay must be"),
        ({"delay": 1, "not_before": datetime.now(UTC)}, "one of both"),
        ({"cancel_id": "a"}, "one of both"),
        ({"not_before": datetime(2026, 1, 1)}, "no time zone"),  # noqa: DTZ001  (that is what is refused)
        ({"delay": 1, "cancel_id": ""}, "cancel_id must have"),
        ({"delay": 1, "cancel_id": "x" * 256}, "cancel_id must have"),
    ],
)
def test_invalid_times_are_refused(given: dict[str, Any], why: str) -> None:
    with pytest.raises(InvalidMessageError, match=why):
        FakeTransaction().send("t", "x", **given)


def test_fakes_keep_what_waits() -> None:
    due = datetime(2030, 1, 1, tzinfo=UTC)
    with FakeTransaction() as tx:
        tx.send("t", "1", not_before=due, cancel_id="a")
        tx.send("t", "2", delay=60, cancel_id="b")
        assert tx.cancel("b")
    (waiting,) = tx.sent_later
    assert (waiting.message.text, waiting.not_before, waiting.cancel_id, tx.sent) == ("1", due, "a", [])
    pool, engine = FakePool(), sa.create_engine("sqlite://")
    with sa.orm.Session(engine) as session:
        pool.join(session).send("t", "1", delay=60, cancel_id="a")
        assert pool.sent_later == []
        session.execute(sa.text("SELECT 1"))
        session.commit()
    assert [each.cancel_id for each in pool.sent_later] == ["a"]
    assert pool.cancel("a")
    assert pool.sent_later == []
