"""Checked by mypy, and never run: a line with an error says so after `# E:`; everything else must pass."""

from typing import Any, assert_type

import sqlalchemy as sa
from confluent_kafka import Message
from sqlalchemy.orm import Session

import dualwrite
from dualwrite import DualWriter, Transaction, WriterPool, aio
from dualwrite.errors import BrokerError, ClaimTimeoutError, FencedError, InDoubtTransactionError
from dualwrite.processor import AsyncDualProcessor, DualProcessor, Received
from dualwrite.stores.rocksdb import RocksDBStore
from dualwrite.stores.rocksdb.rocksdb_batch import TransactionBatch
from dualwrite.stores.zookeeper import ZooKeeperStore
from dualwrite.stores.zookeeper.zookeeper_transaction import ZooKeeperBatch
from dualwrite.testing.fakes import FakeAsyncTransaction, FakeMessage, FakeTransaction


def fakes(engine: sa.Engine, connection: sa.Connection) -> None:
    with FakeTransaction(engine) as tx:
        assert_type(tx, FakeTransaction[sa.Connection])
        unit(tx)
        tx.session.ad("lamp")  # E: "Session" has no attribute "ad"
    assert_type(FakeTransaction(connection).db, sa.Connection)
    unit(FakeTransaction(17))  # E: Argument 1 to "FakeTransaction" has incompatible type "int"; expected "Connection"
    assert_type(FakeAsyncTransaction(engine), FakeAsyncTransaction[aio.AsyncConnection])
    messages: list[Received[bytes, str]] = [FakeMessage("orders", b"lamp")]
    assert messages


def unit(tx: Transaction[sa.Connection]) -> None: ...


def handles(engine: sa.Engine, rocks: RocksDBStore, zoo: ZooKeeperStore) -> None:
    with dualwrite.connect(engine, transactional_id="id", lanes=1) as writer, writer.transaction() as tx:
        assert_type(writer, DualWriter[sa.Connection])
        assert_type(tx, Transaction[sa.Connection])
        tx.db.execute(sa.text("SELECT 1"))
        tx.db.exekute(sa.text("SELECT 1"))  # E: "Connection" has no attribute "exekute"
        assert_type(tx.session, Session)
        tx.session.ad("lamp")  # E: "Session" has no attribute "ad"
        tx.end()  # E: "Transaction[Connection]" has no attribute "end"
    with dualwrite.connect(engine.url) as by_url, by_url.transaction() as tx:
        assert_type(tx.db, sa.Connection)
    with dualwrite.connect(rocks) as on_rocks, on_rocks.transaction() as batch:
        assert_type(batch.db, TransactionBatch)
        batch.db.put(b"key", b"value")
        batch.db.execute("SELECT 1")  # E: "TransactionBatch" has no attribute "execute"
    with dualwrite.connect(zoo) as on_zoo, on_zoo.transaction() as multi:
        assert_type(multi.db, ZooKeeperBatch)
    with dualwrite.connect("sqlite:///shop.db", kafka="localhost:9092") as by_text, by_text.transaction() as anything:
        anything.db.execute("whatever the database takes")
        anything.send("topic", "value", "key")  # E: Too many positional arguments for "send" of "Transaction"
    dualwrite.connect(engine, transaktional_id="id")  # E: No overload variant of "connect" matches argument types


def pools(engine: sa.Engine) -> None:
    assert_type(dualwrite.create_pool(engine, prefix="shop", lanes=2, two_phase=True), WriterPool[sa.Connection])
    dualwrite.create_pool(engine, prefix="shop", transactional_id="id")  # E: No overload variant of "create_pool"
    dualwrite.create_pool(engine, prefix="shop", acknowledge="journaled")  # E: No overload variant of "create_pool"
    dualwrite.create_pool(engine)  # E: No overload variant of "create_pool"


async def pools_of_coroutines(url: sa.URL, rocks: RocksDBStore, zoo: ZooKeeperStore) -> None:
    assert_type(await aio.create_pool(url, prefix="shop"), aio.AsyncWriterPool[aio.AsyncConnection])
    assert_type(await aio.create_pool(rocks, prefix="shop"), aio.AsyncWriterPool[TransactionBatch])
    assert_type(await aio.create_pool(zoo, prefix="shop", size=3), aio.AsyncWriterPool[ZooKeeperBatch])
    assert_type(await aio.create_pool("sqlite:///shop.db", prefix="shop"), aio.AsyncWriterPool[Any])
    async with aio.create_pool(url, prefix="shop") as pool:
        assert_type(pool, aio.AsyncWriterPool[aio.AsyncConnection])
    aio.create_pool(url, prefix="shop").run  # E: has no attribute "run"
    await aio.create_pool(url, prefix="shop", transactional_id="id")  # E: No overload variant of "create_pool"


def functions(writer: DualWriter[sa.Connection]) -> None:
    @writer.transactional
    def order(tx: Transaction[sa.Connection], item: str) -> int:
        tx.send("orders", item)
        return len(item)

    @writer.transactional(attempts=3)
    def unparametrized(tx: Transaction, item: str) -> int:
        tx.db.execute(sa.text(item))
        return len(item)

    assert_type(order("chair"), int)
    assert_type(unparametrized("chair"), int)
    order(3)  # E: Argument 1 to "order" has incompatible type "int"; expected "str"


def errors(
    fenced: FencedError, doubt: InDoubtTransactionError, claim: ClaimTimeoutError, broker: BrokerError
) -> tuple[int, bool | None, float, str]:
    fenced.current_ovner  # E: "FencedError" has no attribute "current_ovner"
    doubt.database_comitted  # E: "InDoubtTransactionError" has no attribute "database_comitted"
    claim.fence  # E: "ClaimTimeoutError" has no attribute "fence"
    return fenced.fence, doubt.database_committed, claim.timeout, broker.name


async def coroutines(pool: WriterPool[sa.Connection]) -> None:
    async def unit(tx: aio.AsyncTransaction[aio.AsyncConnection], item: str) -> int:
        assert_type(await tx.run_sync(lambda plain: str(plain.db)), str)
        tx.db.exekute(sa.text("SELECT 1"))  # E: "AsyncConnection" has no attribute "exekute"
        tx.send("orders", item)
        return len(item)

    def plain(tx: Transaction[sa.Connection], item: str) -> str:
        tx.send("orders", item)
        return item

    here = aio.AsyncWriterPool(pool)
    assert_type(here, aio.AsyncWriterPool[aio.AsyncConnection])
    assert_type(await here.run(unit, "lamp"), int)
    assert_type(await here.run(plain, "lamp"), str)
    assert_type(await here.with_options(key="lamp").transactional(unit)("lamp"), int)
    assert_type(await here.transactional(attempts=3)(unit)("lamp"), int)
    assert_type(await here.transactional(attempts=3)(plain)("lamp"), str)
    await here.transactional(attempts=3)(unit)(7)  # E: Argument 1 has incompatible type "int"; expected "str"
    await here.run(unit, 7)  # E: No overload variant of "run" of "AsyncWriterPool" matches argument types
    async with here.transaction() as tx:
        await tx.db.execute(sa.text("SELECT 1"))
        tx.db.exekute(sa.text("SELECT 1"))  # E: "AsyncConnection" has no attribute "exekute"
        tx.hand_over_messages()  # E: "AsyncTransaction[AsyncConnection]" has no attribute "hand_over_messages"


async def coroutines_on_rocksdb(pool: WriterPool[TransactionBatch]) -> None:
    def plain(tx: Transaction[TransactionBatch]) -> int:
        tx.db.put(b"key", b"value")
        return 1

    def on_sql(tx: Transaction[sa.Connection]) -> None:
        tx.db.execute(sa.text("SELECT 1"))

    here = aio.AsyncWriterPool(pool)
    assert_type(await here.run(plain), int)
    await here.run(on_sql)  # E: No overload variant of "run" of "AsyncWriterPool" matches argument type
    async with here.transaction() as tx:
        assert_type(tx.db, TransactionBatch)


def topics(tx: Transaction[sa.Connection], unit: aio.AsyncTransaction[aio.AsyncConnection]) -> None:
    orders: dualwrite.Topic[int, str] = dualwrite.Topic("orders", value_serializer=lambda number, _: str(number))
    orders.send(tx, 7, key="lamp")
    orders.send(unit, None)
    orders.send(tx, "seven")  # E: Argument 2 to "send" of "Topic" has incompatible type "str"; expected "int | None"


def handlers(
    pool: WriterPool[sa.Connection],
    writer: DualWriter[sa.Connection],
    orders: dualwrite.Topic[int, str],
    names: dualwrite.Topic[str, bytes],
) -> None:
    def order(message: Received[int, str], tx: Transaction[sa.Connection]) -> None:
        assert_type(message.value(), int | None)
        assert_type(message.key(), str | None)
        orders.send(tx, message.value(), key=message.key(), headers=message.headers())

    def either(message: Received[int | str, str | bytes], tx: Transaction[sa.Connection]) -> None:
        assert_type(message.value(), int | str | None)

    def one_by_one(messages: list[Received[int, str]], tx: Transaction[sa.Connection]) -> None: ...

    def plain(message: Message, tx: Transaction) -> None: ...

    def of_bytes(message: Received[bytes, bytes], tx: Transaction) -> None: ...

    async def coroutine(message: Received[int, str], tx: Transaction[sa.Connection]) -> None: ...

    DualProcessor(pool, {}, [orders], handle=order)
    DualProcessor(pool, {}, [orders], handle=either)
    DualProcessor(pool, {}, [orders, names], handle=either)
    DualProcessor(pool, {}, [orders], handle_batch=one_by_one)
    DualProcessor(pool, {}, ["orders"], handle=plain)
    DualProcessor(pool, {}, ["orders"], handle=of_bytes)
    DualProcessor(writer, {}, ["orders"], handle=of_bytes)
    DualProcessor(pool, {}, ["payments", names], handle=lambda message, tx: tx.send("names", message.value()))
    DualProcessor(pool, {}, [names], handle=order)  # E: expected "Callable[[Received[str, bytes], Transaction
    DualProcessor(pool, {}, ["orders"], handle=order)  # E: List item 0 has incompatible type "str"
    DualProcessor(pool, {}, [orders, names], handle=order)  # E: List item 1 has incompatible type "Topic[str, bytes]"
    DualProcessor(pool, {}, [orders], handle=plain)  # E: Argument "handle" to "DualProcessor" has incompatible type
    DualProcessor(pool, {}, [orders], handle=coroutine)  # E: expected "Callable[[Received[int, str], Transaction


def async_handlers(pool: aio.AsyncWriterPool[aio.AsyncConnection], orders: dualwrite.Topic[int, str]) -> None:
    async def order(message: Received[int, str], tx: aio.AsyncTransaction[aio.AsyncConnection]) -> None:
        assert_type(message.value(), int | None)

    def plain(message: Received[int, str], tx: aio.AsyncTransaction[aio.AsyncConnection]) -> None: ...

    AsyncDualProcessor(pool, {}, [orders], handle=order)
    AsyncDualProcessor(pool, {}, ["orders"], handle=order)  # E: List item 0 has incompatible type "str"
    AsyncDualProcessor(pool, {}, [orders], handle=plain)  # E: Argument "handle" to "AsyncDualProcessor" has incompatible type
