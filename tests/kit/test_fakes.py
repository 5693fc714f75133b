"""FakeTransaction, FakeAsyncTransaction, FakePool, FakeMessage: they have and refuse what the real ones have and refuse."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import aiosqlite
import pytest
import sqlalchemy as sa
from confluent_kafka import Consumer, Message, TopicPartition
from pydantic import BaseModel
from sqlalchemy import event
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, relationship, sessionmaker

import dualwrite
from dualwrite import aio
from dualwrite.aio.async_transaction import AsyncTransaction
from dualwrite.kafka.base import GroupMetadata
from dualwrite.processor import to_arrow
from dualwrite.testing import failpoints
from dualwrite.testing.fakes import FakeAsyncTransaction, FakeMessage, FakePool, FakeTransaction
from dualwrite.testing.sent import SentMessage
from fixtures.tables import table


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True)
    item: Mapped[str]
    lines: Mapped[list[Line]] = relationship()


class Line(Base):
    __tablename__ = "lines"
    id: Mapped[int] = mapped_column(primary_key=True)
    order: Mapped[int] = mapped_column(sa.ForeignKey("orders.id"))


class Placed(BaseModel):
    item: str


PLACED = dualwrite.Topic.of_models("placed", Placed)


@pytest.fixture
def engine() -> Iterator[sa.Engine]:
    """In memory, on one connection."""
    made = sa.create_engine("sqlite://", poolclass=sa.StaticPool)
    Base.metadata.create_all(made)
    yield made
    made.dispose()


def items(engine: sa.Engine) -> list[str]:
    with engine.connect() as connection:
        return list(connection.scalars(sa.select(Order.item).order_by(Order.id)))


def insert(item: str) -> sa.Insert:
    return sa.insert(Order).values(item=item)


def fail_in(tx: FakeTransaction[Any], work: Callable[[], object]) -> None:
    with tx:
        work()
        _ = 1 / 0


# --- messages ---------------------------------------------------------------------------------------------------------


def test_it_keeps_what_is_sent_as_kafka_would_store_it() -> None:
    tx: FakeTransaction[Any] = FakeTransaction()
    tx.send("a", "text", key="key", headers={"one": "1", "two": None}, partition=3, timestamp=17)
    tx.send("b", None)
    tx.send_many("c", [b"x", "y"], keys=["1", None])
    PLACED.send(tx, Placed(item="lamp"), key="k")
    assert tx.sent == [
        SentMessage(topic="a", value=b"text", key=b"key", headers=(("one", b"1"), ("two", None)), partition=3, timestamp=17),
        SentMessage(topic="b", value=None),
        SentMessage(topic="c", value=b"x", key=b"1"),
        SentMessage(topic="c", value=b"y"),
        SentMessage(topic="placed", value=b'{"item":"lamp"}', key=b"k"),
    ]
    assert (tx.sent[0].text, tx.sent[0].key_text, tx.sent[0].header) == ("text", "key", {"one": b"1", "two": None})
    assert (tx.sent[1].text, tx.sent[1].key_text, tx.sent[1].json()) == (None, None, None)
    assert tx.sent[4].json() == {"item": "lamp"}
    assert (tx.sent[4].decoded(PLACED), tx.sent[4].decoded_key(PLACED)) == (Placed(item="lamp"), "k")


def test_a_failpoint_makes_sending_fail() -> None:
    tx: FakeTransaction[Any] = FakeTransaction()
    not_sent = failpoints.armed("after_send", failpoints.raises(dualwrite.DeliveryError("No.")))
    with not_sent, pytest.raises(dualwrite.DeliveryError):
        tx.send("a", "x")


def test_it_keeps_the_positions_of_a_consumer_that_has_no_broker() -> None:
    consumer = Consumer({"group.id": "shop", "bootstrap.servers": "127.0.0.1:9", "log_level": 0})
    try:
        consumer.assign([TopicPartition("a", 0, 5)])
        with FakeTransaction() as tx:
            tx.send_offsets(consumer)  # nothing was read
            assert tx.sent_offsets == {}
            tx.send_offsets(consumer, {("a", 0): 5, ("a", 1): 6})
            tx.send_offsets(consumer, {("a", 0): 7})
        assert tx.sent_offsets == {"shop": {("a", 0): 7, ("a", 1): 6}}
    finally:
        consumer.close()


# --- the block --------------------------------------------------------------------------------------------------------


def test_a_block_ends_as_a_real_one() -> None:
    with FakeTransaction("the database", transactional_id="shop-0") as tx:
        assert (tx.db, tx.transactional_id, tx.state, tx.outcome) == ("the database", "shop-0", None, None)
        tx.send("a", "x")
    assert (tx.outcome, len(tx.sent)) == ("published", 1)
    for use in (lambda: tx.db, lambda: tx.session, lambda: tx.send("a", "x"), lambda: tx.send_offsets(None)):
        with pytest.raises(dualwrite.WriterClosedError):
            use()


def test_a_block_that_fails_has_sent_nothing() -> None:
    tx: FakeTransaction[Any] = FakeTransaction()
    with pytest.raises(ZeroDivisionError):
        fail_in(tx, lambda: tx.send("a", "x"))
    assert (tx.outcome, tx.sent) == (None, [])


def test_a_block_may_end_as_it_does_while_kafka_is_down() -> None:
    with FakeTransaction(outcome="journaled") as tx:
        tx.send("a", "x")
    assert tx.outcome == "journaled"


def test_another_thread_may_not_use_it() -> None:
    tx: FakeTransaction[Any] = FakeTransaction()
    errors = []

    def use() -> None:
        try:
            tx.send("a", "x")
        except dualwrite.ConcurrentUseError as error:
            errors.append(error)

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert len(errors) == 1


def test_without_a_database_it_says_what_to_pass() -> None:
    tx: FakeTransaction[Any] = FakeTransaction()
    with pytest.raises(dualwrite.UsageError, match=r"FakeTransaction\(db\)"):
        _ = tx.db
    with pytest.raises(dualwrite.UsageError, match=r"FakeTransaction\(engine\)"):
        _ = tx.session


# --- an engine --------------------------------------------------------------------------------------------------------


def test_on_an_engine_the_block_is_a_transaction(engine: sa.Engine) -> None:
    with FakeTransaction(engine) as tx:
        tx.db.execute(insert("lamp"))
        tx.session.add(Order(item="chair"))
    assert (items(engine), tx.outcome) == (["lamp", "chair"], "published")
    failing = FakeTransaction(engine)
    with pytest.raises(ZeroDivisionError):
        fail_in(failing, lambda: failing.db.execute(insert("sofa")))
    assert items(engine) == ["lamp", "chair"]


@table(
    "end",
    [
        lambda tx: tx.db.commit(),
        lambda tx: tx.db.rollback(),
        lambda tx: tx.db.close(),
        lambda tx: tx.db.exec_driver_sql("COMMIT"),
        lambda tx: tx.session.commit(),
        lambda tx: tx.session.close(),
    ],
)
def test_on_an_engine_it_refuses_to_end_the_transaction(engine: sa.Engine, end: Any) -> None:
    with FakeTransaction(engine) as tx:
        tx.db.execute(insert("lamp"))
        with pytest.raises(dualwrite.TransactionControlError):
            end(tx)
    assert items(engine)[-1] == "lamp"


def test_on_an_engine_a_flush_that_fails_at_the_end_fails_the_block(engine: sa.Engine) -> None:
    tx = FakeTransaction(engine)
    tx.session.add(Order(item=None))
    tx.send("a", "x")
    with pytest.raises(sa.exc.IntegrityError), tx:
        pass
    assert (items(engine), tx.outcome, tx.sent) == ([], None, [])


def test_on_an_engine_objects_of_a_failed_block_can_be_added_again(engine: sa.Engine) -> None:
    order = Order(item="lamp")
    failing = FakeTransaction(engine)
    failing.session.add(order)
    with pytest.raises(ZeroDivisionError):
        fail_in(failing, failing.session.flush)
    with FakeTransaction(engine) as tx:
        tx.session.add(order)
    assert items(engine) == ["lamp"]


def test_on_an_engine_sessions_are_made_as_in_a_store(engine: sa.Engine) -> None:
    maker, seen = sessionmaker(info={"who": "shop"}), []
    event.listen(maker, "after_commit", lambda session: seen.append(session.info["who"]))
    with FakeTransaction(engine, session=maker) as tx:
        tx.session.add(Order(item="lamp"))
    assert seen == ["shop"]


def test_on_an_engine_a_listener_of_the_commit_that_fails_is_reported(engine: sa.Engine) -> None:
    maker = sessionmaker()
    event.listen(maker, "after_commit", lambda _: 1 / 0)
    tx = FakeTransaction(engine, session=maker)
    tx.session.add(Order(item="lamp"))
    tx.send("a", "x")
    with pytest.raises(dualwrite.AfterCommitError), tx:
        pass
    assert (items(engine), tx.outcome, len(tx.sent)) == (["lamp"], "published", 1)


def test_a_given_connection_or_session_stays_the_tests_own(engine: sa.Engine) -> None:
    with engine.connect() as connection, Session(connection) as session:
        with FakeTransaction(connection, session=session) as tx:
            tx.db.execute(insert("lamp"))
            tx.session.add(Order(item="chair"))
        assert list(connection.scalars(sa.select(Order.item))) == ["lamp", "chair"]
        connection.rollback()
    assert items(engine) == []


# --- coroutines -------------------------------------------------------------------------------------------------------


def test_a_coroutine_gets_the_handles_of_a_real_transaction(engine: sa.Engine) -> None:
    async def unit(tx: AsyncTransaction[Any], item: str) -> int:
        await tx.db.execute(insert(item))
        tx.session.add(Order(item="chair"))
        await tx.session.flush()
        await tx.run_sync(lambda plain: plain.db.execute(insert("sofa")))
        tx.send("orders", item)
        await tx.run_sync(lambda plain: plain.send("orders", "sofa"))
        tx.send_many("orders", ["chair"])
        assert [message.text for message in tx.sent] == ["lamp", "sofa", "chair"]  # type: ignore[attr-defined]  # a fake
        return int(await tx.db.scalar(sa.select(sa.func.count(Order.id))))

    async def test() -> None:
        async with FakeAsyncTransaction(engine) as tx:
            assert await unit(tx, "lamp") == 3
        assert (tx.outcome, [message.text for message in tx.sent]) == ("published", ["lamp", "sofa", "chair"])
        with pytest.raises(dualwrite.WriterClosedError):
            tx.send("orders", "x")

    asyncio.run(test())
    assert items(engine) == ["lamp", "chair", "sofa"]


def test_a_coroutine_that_fails_has_sent_nothing(engine: sa.Engine) -> None:
    tx = FakeAsyncTransaction(engine)

    async def failing() -> None:
        async with tx:
            await tx.db.execute(insert("lamp"))
            await tx.run_sync(lambda plain: plain.send("orders", "lamp"))
            tx.send("orders", "chair")
            _ = 1 / 0

    with pytest.raises(ZeroDivisionError):
        asyncio.run(failing())
    assert (items(engine), tx.outcome, tx.sent, tx.sent_offsets) == ([], None, [], {})


def test_a_coroutine_may_use_a_stub() -> None:
    async def test() -> None:
        async with FakeAsyncTransaction("the database", outcome="journaled") as tx:
            assert (tx.db, await tx.run_sync(lambda plain: plain.db)) == ("the database", "the database")
            with pytest.raises(dualwrite.InvalidMessageError):
                tx.send("a b", "x")
        assert tx.outcome == "journaled"

    asyncio.run(test())


# --- messages of handlers ---------------------------------------------------------------------------------------------


def test_a_message_is_as_confluent_kafkas() -> None:
    given = {"topic": "orders", "partition": 2, "offset": 7, "key": b"k", "value": b"value", "headers": [("a", b"1")]}
    real = Message(**given, timestamp=(1, 1700000000000))
    fake = FakeMessage("orders", "value", key="k", headers={"a": "1"}, partition=2, offset=7, timestamp=1700000000000)
    for method in ("topic", "partition", "offset", "key", "value", "headers", "timestamp", "error", "__len__"):
        assert getattr(fake, method)() == getattr(real, method)(), method
    empty, none = FakeMessage("orders", None), Message(topic="orders", partition=0, offset=0)
    for method in ("key", "value", "headers", "error", "__len__"):
        assert getattr(empty, method)() == getattr(none, method)(), method
    assert empty.timestamp()[0] == 0
    assert to_arrow([fake, empty]).to_pylist()[0]["value"] == b"value"


def test_a_message_of_a_topic_passes_its_serializers() -> None:
    message = FakeMessage(PLACED, Placed(item="lamp"), key="k")
    assert (message.value(), message.key(), len(message)) == (Placed(item="lamp"), "k", len('{"item":"lamp"}'))
    reads = dualwrite.Topic[Any, Any]("numbers", value_deserializer=lambda content, _: int(content))
    assert FakeMessage(reads, b"17").value() == 17
    with pytest.raises(dualwrite.DeserializationError):
        FakeMessage(reads, b"x")


# --- they keep up with the real ones ----------------------------------------------------------------------------------

_USES: dict[str, Any] = {
    "cancel": lambda tx: tx.cancel("a"),
    "db": lambda tx: tx.db,
    "session": lambda tx: tx.session,
    "transactional_id": lambda tx: tx.transactional_id,
    "state": lambda tx: tx.state,
    "outcome": lambda tx: tx.outcome,
    "send": lambda tx: tx.send("a", "x"),
    "send_many": lambda tx: tx.send_many("a", ["x"]),
    "send_offsets": lambda tx: tx.send_offsets(_Group()),
    "run_sync": lambda tx: tx.run_sync(lambda plain: plain.db),
}
"""How a test uses each public member of a transaction. A new member needs an entry, and must work on a fake."""


class _Group:
    def consumer_group_metadata(self) -> bytes:
        return GroupMetadata("shop").for_librdkafka()

    def assignment(self) -> list[Any]:
        return []

    def position(self, _: object) -> list[Any]:
        return []


def _public(kind: type) -> set[str]:
    return {name for name in dir(kind) if not name.startswith("_")}


def test_every_member_of_a_transaction_works_on_a_fake(engine: sa.Engine) -> None:
    assert _public(dualwrite.Transaction) == _USES.keys() - {"run_sync"}
    with FakeTransaction(engine) as tx:
        for name in _public(dualwrite.Transaction):
            _USES[name](tx)


def test_every_member_of_an_async_transaction_works_on_a_fake(engine: sa.Engine) -> None:
    assert _public(aio.AsyncTransaction) == _USES.keys()

    async def test() -> None:
        async with FakeAsyncTransaction(engine) as tx:
            for name in _public(aio.AsyncTransaction):
                result = _USES[name](tx)
                if asyncio.iscoroutine(result):
                    await result

    asyncio.run(test())


# --- a pool that is joined --------------------------------------------------------------------------------------------


def place(session: Session, pool: Any, item: str) -> Any:
    session.add(Order(item=item))
    tx = pool.join(session)
    tx.send("orders", item, key=item)
    return tx


def values(pool: FakePool) -> list[str | None]:
    return [message.text for message in pool.sent]


def test_a_joined_session_sends_when_it_commits(engine: sa.Engine) -> None:
    pool = FakePool()
    with Session(engine) as session:
        tx = place(session, pool, "lamp")
        assert pool.join(session)._opened is tx._opened
        assert (values(pool), tx.outcome) == ([], None)
        session.commit()
        assert (values(pool), tx.outcome) == (["lamp"], "published")
        with pytest.raises(dualwrite.WriterClosedError):
            tx.send("orders", "late")
        place(session, pool, "chair")
        session.rollback()
        place(session, pool, "table")
        with session.begin_nested() as savepoint:
            place(session, pool, "desk")
            savepoint.rollback()
        with session.begin_nested():
            place(session, pool, "shelf")
        session.commit()
        place(session, pool, "sofa")
    assert values(pool) == ["lamp", "table", "shelf"]
    assert [message.key_text for message in pool.sent] == values(pool)
    with engine.connect() as connection:
        assert connection.scalars(sa.select(Order.item).order_by(Order.id)).all() == values(pool)


def test_a_joined_commit_that_fails_sends_nothing(engine: sa.Engine) -> None:
    pool = FakePool()
    with engine.begin() as connection:
        connection.execute(sa.text("CREATE TABLE late (id INT REFERENCES orders DEFERRABLE INITIALLY DEFERRED)"))
    with Session(engine) as session:
        session.execute(sa.text("PRAGMA foreign_keys = ON"))
        session.commit()
        session.execute(sa.text("INSERT INTO late VALUES (17)"))
        place(session, pool, "lamp")
        with pytest.raises(dualwrite.StoreCommitFailedError, match="FOREIGN KEY"):  # as of a real pool
            session.commit()
        session.rollback()
        assert session.scalars(sa.select(Order)).all() == []
    assert pool.sent == []


def test_joined_messages_and_sessions_are_checked(engine: sa.Engine) -> None:
    pool, other = FakePool(outcome="journaled"), FakePool()
    with Session(engine) as session:
        with pytest.raises(dualwrite.InvalidMessageError):
            pool.join(session).send("no topic", "lamp")
        place(session, pool, "lamp")
        with pytest.raises(dualwrite.UsageError, match="Another pool"):
            other.join(session)
        tx = pool.join(session)
        tx.send_offsets(_Group(), {("incoming", 0): 17})
        session.commit()
    assert tx.outcome == "journaled"
    assert pool.sent_offsets == {"shop": {("incoming", 0): 17}}
    refused = pytest.raises(dualwrite.UsageError, match="AUTOCOMMIT")
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection, refused:
        pool.join(connection)


def test_an_async_session_is_joined_by_the_same_pool(tmp_path: Path) -> None:
    pool = FakePool()

    async def work() -> None:
        engine = create_async_engine(f"sqlite+aiosqlite:///{tmp_path}/shop.db")
        async with engine.begin() as connection:
            await connection.run_sync(Base.metadata.create_all)
        async with AsyncSession(engine) as session:
            place(session, pool, "lamp")
            await session.commit()
            place(session, pool, "chair")
            await session.rollback()
        await engine.dispose()
        async with aiosqlite.connect(tmp_path / "shop.db") as own, pool.transaction(connection=own) as tx:
            await own.execute("INSERT INTO orders (item) VALUES ('table')")
            tx.send("orders", "table")

    asyncio.run(work())
    assert values(pool) == ["lamp", "table"]


def test_a_drivers_connection_is_joined(tmp_path: Path) -> None:
    pool = FakePool()
    with closing(sqlite3.connect(tmp_path / "shop.db")) as connection:
        connection.execute("CREATE TABLE orders (item TEXT)")
        with pool.transaction(connection=connection) as tx:
            connection.execute("INSERT INTO orders VALUES ('lamp')")
            tx.send("orders", "lamp")
        with suppress(ZeroDivisionError), pool.transaction(connection=connection) as tx:
            connection.execute("INSERT INTO orders VALUES ('chair')")
            tx.send("orders", "chair")
            raise ZeroDivisionError
        assert connection.execute("SELECT item FROM orders").fetchall() == [("lamp",)]
    assert values(pool) == ["lamp"]
