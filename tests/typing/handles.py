"""Checked by mypy, and never run: a line with an error says so after `# E:`; everything else must pass."""

from typing import assert_type

import sqlalchemy as sa

import dualwrite
from dualwrite import DualWriter, Transaction, WriterPool, aio
from dualwrite.errors import BrokerError, ClaimTimeoutError, FencedError, InDoubtTransactionError
from dualwrite.stores.rocksdb import RocksDBStore
from dualwrite.stores.rocksdb.batch import TransactionBatch
from dualwrite.stores.zookeeper import ZooKeeperStore
from dualwrite.stores.zookeeper.batch import ZooKeeperBatch


def handles(engine: sa.Engine, rocks: RocksDBStore, zoo: ZooKeeperStore) -> None:
    with dualwrite.connect(engine, transactional_id="id", lanes=1) as writer, writer.transaction() as tx:
        assert_type(writer, DualWriter[sa.Connection])
        assert_type(tx, Transaction[sa.Connection])
        tx.db.execute(sa.text("SELECT 1"))
        tx.db.exekute(sa.text("SELECT 1"))  # E: "Connection" has no attribute "exekute"
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
    assert_type(await here.run(unit, "lamp"), int)
    assert_type(await here.run(plain, "lamp"), str)
    await here.run(unit, 7)  # E: No overload variant of "run" of "AsyncWriterPool" matches argument types
    async with here.transaction() as tx:
        await tx.db.execute(sa.text("SELECT 1"))


def topics(tx: Transaction[sa.Connection], unit: aio.AsyncTransaction[aio.AsyncConnection]) -> None:
    orders: dualwrite.Topic[int, str] = dualwrite.Topic("orders", value_serializer=lambda number, _: str(number))
    orders.send(tx, 7, key="lamp")
    orders.send(unit, None)
    orders.send(tx, "seven")  # E: Argument 2 to "send" of "Topic" has incompatible type "str"; expected "int | None"
