"""A pool writes on while the only broker is down, and everything is published once and in order when it is back."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import sqlalchemy as sa

from crash.scene import Scene
from dualwrite import (
    BrokerUnavailableError,
    JournalFullError,
    JournalLimits,
    JournalSwitchedError,
    StoreCommitFailedError,
    StoreCommitUnknownError,
    Transaction,
    UsageError,
    aio,
)
from dualwrite.observability import (
    Event,
    JournalClosed,
    JournalOpened,
    RowsRelayed,
    TransactionCommitted,
    observing,
)
from dualwrite.stores.sql.sql_transaction import SqlStoreTransaction
from fixtures.broker import read_topic, read_values
from fixtures.broker_door import BrokerBehindDoor
from fixtures.pace import LIMIT, until
from journal.journal_scene import gate_of, journal_pool, until_closed
from observability.recorded_spans import recording, traceparent
from pool.pool_scene import both, psycopg_store


def assert_in_order(scene: Scene, count: int) -> None:
    """Both sides have the events from 0 on, the topic in their order."""
    assert scene.agree() == list(range(count))
    assert [int(value or 0) for value in read_values(scene.bootstrap, scene.topic)] == list(range(count))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("database", "producer"),
    [("postgresql", "native"), ("mariadb", "native"), ("sqlite", "native"), ("postgresql", "librdkafka")],
    indirect=["producer"],
)
def test_units_go_on_while_the_broker_is_down(scene: Scene, own_broker: BrokerBehindDoor) -> None:
    seen: list[Transaction[Any]] = []

    def unit(tx: Transaction[Any], number: int) -> None:
        both(tx, scene, number)
        seen.append(tx)

    scene.kafka["reconnect.backoff.max.ms"] = 100  # by default librdkafka does not come back for up to 10 s: another outage
    events: list[Event] = []
    with journal_pool(scene) as pool, observing(events.append):
        for number in range(5):
            pool.run(unit, number)
        own_broker.kill()
        for number in range(5, 20):
            pool.run(unit, number)
        assert [tx.outcome for tx in seen[:5] + seen[-15:]] == ["published"] * 5 + ["journaled"] * 15
        status = gate_of(pool, scene)
        assert (status.is_open, status.entries) == (True, 15)
        own_broker.start()
        until_closed(pool, scene)
        count = 20

        def is_published() -> bool:  # on a busy machine librdkafka's other connections may not be back yet
            nonlocal count
            pool.run(unit, count)
            count += 1
            return seen[-1].outcome == "published"

        for _ in range(5):
            until(is_published, "messages go to Kafka again")
        until_closed(pool, scene)
    assert_in_order(scene, count)
    gates = [type(event) for event in events if isinstance(event, JournalOpened | JournalClosed)]
    assert gates == [JournalOpened, JournalClosed] * (len(gates) // 2)
    journaled = [event.outcome for event in events if isinstance(event, TransactionCommitted)].count("journaled")
    assert sum(event.rows for event in events if isinstance(event, RowsRelayed)) == journaled >= 15


@pytest.mark.slow
def test_a_message_in_the_journal_keeps_its_trace(scene: Scene, own_broker: BrokerBehindDoor) -> None:
    with recording() as spans, journal_pool(scene) as pool:
        own_broker.kill()
        pool.run(both, scene, 0)
        own_broker.start()
        until_closed(pool, scene)
    unit, sent = spans.named("both")[-1], spans.named(f"send {scene.topic}")[-1]
    assert spans.children(unit) == ["commit database", f"send {scene.topic}"]
    assert (unit.attributes or {})["dualwrite.outcome"] == "journaled"
    (message,) = read_topic(scene.bootstrap, scene.topic)
    assert message.headers() == [("traceparent", traceparent(sent))]


@pytest.mark.slow
def test_a_full_journal_refuses_units(scene: Scene, own_broker: BrokerBehindDoor) -> None:
    with journal_pool(scene, pool_options={"journal": JournalLimits(entries=3)}) as pool:
        pool.run(both, scene, 0)
        own_broker.kill()
        written = [0]

        def full() -> JournalFullError | None:
            try:
                written.append(pool.run(both, scene, len(written)))
            except JournalFullError as error:
                return error
            return None

        error = until(full, "the journal full")
        assert isinstance(error, BrokerUnavailableError)
        assert "the limit is 3" in str(error)
        own_broker.start()
        until_closed(pool, scene)
        pool.run(both, scene, len(written))
    assert_in_order(scene, len(written) + 1)


@pytest.mark.slow
def test_a_block_that_was_interrupted_says_that_it_can_run_again(scene: Scene, own_broker: BrokerBehindDoor) -> None:
    with journal_pool(scene) as pool:
        with pool.transaction() as tx:
            both(tx, scene, 0)
        own_broker.kill()
        with pytest.raises(JournalSwitchedError) as caught, pool.transaction() as tx:
            both(tx, scene, 1)
        assert caught.value.retriable
        with pool.transaction() as tx:
            both(tx, scene, 1)
        assert tx.outcome == "journaled"
        with pytest.raises(UsageError, match="positions"), pool.transaction() as tx:
            tx.send_offsets(_NoConsumer(), {(scene.topic, 0): 1})
        own_broker.start()
        until_closed(pool, scene)
    assert_in_order(scene, 2)


class _NoConsumer:
    """What `send_offsets` asks for."""

    def consumer_group_metadata(self) -> Any:
        import confluent_kafka  # noqa: PLC0415  (only here)

        return confluent_kafka.Consumer({"group.id": "g", "bootstrap.servers": "127.0.0.1:1"}).consumer_group_metadata()


@pytest.mark.slow
@pytest.mark.parametrize("has_committed", [True, False])
def test_a_commit_without_an_answer_is_looked_up_in_the_row(
    scene: Scene, own_broker: BrokerBehindDoor, monkeypatch: pytest.MonkeyPatch, has_committed: bool
) -> None:
    """Kafka is not asked: the row has the number of the transaction, or not."""
    with journal_pool(scene) as pool:
        pool.run(both, scene, 0)
        own_broker.kill()
        pool.run(both, scene, 1)
        real = SqlStoreTransaction.commit

        def unanswered(transaction: SqlStoreTransaction) -> None:
            monkeypatch.undo()
            if has_committed:
                real(transaction)
            raise StoreCommitUnknownError("no answer")

        monkeypatch.setattr(SqlStoreTransaction, "commit", unanswered)
        if has_committed:
            pool.run(both, scene, 2)
        else:
            with pytest.raises(StoreCommitFailedError, match="did not commit"):
                pool.with_options(alone=True).run(both, scene, 2)
            pool.run(both, scene, 2)
        own_broker.start()
        until_closed(pool, scene)
        pool.run(both, scene, 3)
    assert_in_order(scene, 4)


@pytest.mark.slow
def test_coroutines_go_on_as_well(scene: Scene, own_broker: BrokerBehindDoor) -> None:
    async def unit(tx: aio.AsyncTransaction, number: int) -> aio.AsyncTransaction:
        values = {"writer": scene.transactional_id, "number": number}
        await tx.db.execute(sa.text("INSERT INTO events VALUES (:writer, :number)"), values)
        tx.send(scene.topic, str(number))
        return tx

    async def main(pool: Any) -> None:
        shared = aio.AsyncWriterPool(pool)
        assert (await shared.run(unit, 0)).outcome == "published"
        own_broker.kill()
        for number in range(1, 4):
            assert (await shared.run(unit, number)).outcome == "journaled"

    with journal_pool(scene) as pool:
        asyncio.run(main(pool))
        assert gate_of(pool, scene).entries == 3
        own_broker.start()
        until_closed(pool, scene)
    assert_in_order(scene, 4)


@pytest.mark.slow
def test_statements_of_units_may_go_through_a_pipeline(scene: Scene, own_broker: BrokerBehindDoor) -> None:
    with psycopg_store(scene.url) as store, journal_pool(scene, database=store) as pool:
        pool.run(both, scene, 0)
        own_broker.kill()
        pool.run(both, scene, 1)
        futures = [pool.with_options(key="all").submit(both, scene, number) for number in range(2, 12)]
        assert [future.result(LIMIT) for future in futures] == list(range(2, 12))
        own_broker.start()
        until_closed(pool, scene)
    assert_in_order(scene, 12)
