"""What a coroutine writes with: SQLAlchemy's methods for connections and sessions, psycopg, RocksDB and ZooKeeper."""

from __future__ import annotations

import ast
import asyncio
import importlib.util
import inspect
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column, relationship, selectinload, sessionmaker

import dualwrite
from crash.scene import Scene
from crash.worker import timeouts
from dualwrite import PoolOptions, SqlStateStore, aio
from dualwrite.errors import TransactionControlError, UsageError
from dualwrite.stores.sql.psycopg_sources import PipelineBatch
from fixtures.pace import LIMIT
from pool.aio_scene import Pool, both_here, in_loop, in_pool
from pool.pool_scene import both


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "aio_orders"
    id: Mapped[int] = mapped_column(primary_key=True)
    item: Mapped[str]
    lines: Mapped[list[Line]] = relationship(back_populates="order")


class Line(Base):
    __tablename__ = "aio_lines"
    id: Mapped[int] = mapped_column(primary_key=True)
    order_id: Mapped[int] = mapped_column(sa.ForeignKey(Order.id))
    order: Mapped[Order] = relationship(back_populates="lines")


@contextmanager
def tables(scene: Scene) -> Iterator[None]:
    Base.metadata.create_all(scene.engine)
    try:
        yield
    finally:
        Base.metadata.drop_all(scene.engine)


# --- the connection ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("database", ["postgresql", "sqlite"])
def test_a_connection(scene: Scene, database: str) -> None:
    del database
    orders = Order.__table__

    async def unit(tx: aio.AsyncTransaction[aio.AsyncConnection]) -> list[str]:
        db = tx.db
        assert tx.db is db
        made = await db.execute(sa.insert(orders).values(item="lamp").returning(orders.c.id))
        assert made.scalar_one() == 1
        made = await db.execute(sa.insert(orders).values(item="chair"))
        assert made.inserted_primary_key == (2,)
        await db.execute(sa.insert(orders), [{"item": "desk"}, {"item": "sofa"}])
        assert (await db.execute(sa.update(orders).values(item=orders.c.item + "!"))).rowcount == 4
        assert await db.scalar(sa.select(sa.func.count()).select_from(orders)) == 4
        assert (await db.scalars(sa.select(orders.c.id).order_by(orders.c.id))).all() == [1, 2, 3, 4]
        rows = await db.execute(sa.select(orders.c.id, orders.c.item).order_by(orders.c.id))
        assert rows.fetchone() == (1, "lamp!")
        assert rows.mappings().fetchmany(1) == [{"id": 2, "item": "chair!"}]
        assert [row.item for row in rows] == ["desk!", "sofa!"]
        assert rows.fetchall() == []
        assert (await db.exec_driver_sql("SELECT 1")).first() == (1,)
        streamed = await db.execute(sa.select(orders.c.id), execution_options={"stream_results": True, "yield_per": 1})
        assert len(streamed.all()) == 4
        assert await db.run_sync(lambda plain, number: plain.scalar(sa.select(number)), 7) == 7
        async with db.begin_nested() as savepoint:
            assert savepoint.is_active
            assert db.in_nested_transaction()
            await db.execute(sa.delete(orders).where(orders.c.id == 1))
        nested = await db.begin_nested()
        found = db.get_nested_transaction()
        assert found is not None
        assert found.sync_transaction is nested.sync_transaction
        await db.execute(sa.delete(orders))
        await nested.rollback()
        assert not nested.is_active
        assert db.get_nested_transaction() is None
        with pytest.raises(KeyError):
            await delete_all_and_raise(db)
        assert await db.get_isolation_level()
        assert db.in_transaction()
        assert not db.closed
        assert not db.invalidated
        assert db.dialect is db.sync_engine.dialect
        assert (await db.execution_options(logging_token="x")) is db
        return list((await db.scalars(sa.select(orders.c.item).order_by(orders.c.id))).all())

    async def delete_all_and_raise(db: aio.AsyncConnection) -> None:
        async with db.begin_nested():
            await db.execute(sa.delete(orders))
            raise KeyError

    with tables(scene):
        assert in_pool(scene, lambda pool: pool.run(unit)) == ["chair!", "desk!", "sofa!"]


def test_a_unit_cannot_end_the_transaction(scene: Scene) -> None:
    async def unit(tx: aio.AsyncTransaction[aio.AsyncConnection]) -> None:
        db, session = tx.db, tx.session
        for refused in (db.commit, db.rollback, db.close, db.aclose, db.invalidate, db.__aenter__):
            with pytest.raises(TransactionControlError):
                await refused()
        for refused in (session.commit, session.rollback, session.close, session.aclose, session.reset, session.invalidate):
            with pytest.raises(TransactionControlError):
                await refused()
        for at_once in (db.begin, db.get_transaction, session.begin, session.get_transaction):
            with pytest.raises(TransactionControlError):
                at_once()
        with pytest.raises(TransactionControlError):
            await session.__aenter__()
        with pytest.raises(TransactionControlError):
            await db.exec_driver_sql("COMMIT")
        with pytest.raises(TransactionControlError):
            await db.run_sync(lambda plain: plain.commit())
        for stream in (db.stream, db.stream_scalars, session.stream, session.stream_scalars):
            with pytest.raises(UsageError, match="use execute"):
                stream(sa.text("SELECT 1"))
        await both_here(tx, scene, 1)

    async def main(pool: Pool) -> None:
        await pool.run(unit)
        async with pool.transaction() as tx:
            with pytest.raises(TransactionControlError):
                await tx.db.commit()
            await both_here(tx, scene, 2)

    in_pool(scene, main)
    assert scene.agree() == [1, 2]


def test_a_statement_in_the_event_loops_thread_is_refused(scene: Scene) -> None:
    """It would block all coroutines: a method of the synchronous connection, or an attribute that the ORM would load."""

    async def unit(tx: aio.AsyncTransaction[aio.AsyncConnection]) -> None:
        with pytest.raises(UsageError, match="in the event loop's thread"):
            tx.db.sync_connection.execute(sa.text("SELECT 1"))
        tx.session.add(Order(id=1, item="lamp", lines=[Line()]))
        await tx.session.flush()
        tx.session.expunge_all()
        order = await tx.session.get_one(Order, 1)
        with pytest.raises(UsageError, match="selectinload"):
            _ = order.lines
        await tx.session.refresh(order, ["lines"])
        assert len(order.lines) == 1
        await both_here(tx, scene, 1)

    with tables(scene):
        in_pool(scene, lambda pool: pool.run(unit))
    assert scene.agree() == [1]


# --- the session ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("database", ["postgresql", "sqlite"])
def test_a_session(scene: Scene, database: str) -> None:  # noqa: PLR0915  (one line for each method)
    del database

    async def unit(tx: aio.AsyncTransaction[aio.AsyncConnection]) -> Order:
        session = tx.session
        assert tx.session is session
        lamp = Order(item="lamp", lines=[Line(), Line()])
        session.add(lamp)
        session.add_all([Order(item="chair"), Order(item="desk")])
        assert lamp in session.new
        assert lamp in session
        await session.flush()
        assert lamp.id == 1
        session.expunge_all()
        assert await session.get(Order, 99) is None
        lamp = await session.get_one(Order, 1, options=[selectinload(Order.lines)])
        assert len(lamp.lines) == 2
        found = await session.scalars(sa.select(Order).options(selectinload(Order.lines)).order_by(Order.id))
        assert [(order.item, len(order.lines)) for order in found] == [("lamp", 2), ("chair", 0), ("desk", 0)]
        joined = await session.execute(sa.select(Order, Line).join(Line).order_by(Line.id))
        assert [(row.Order is lamp, row.Line.id) for row in joined] == [(True, 1), (True, 2)]
        assert await session.scalar(sa.select(sa.func.count()).select_from(Line)) == 2
        changed = await session.execute(sa.update(Order).where(Order.id > 1).values(item="other"))
        assert changed.rowcount == 2  # type: ignore[attr-defined]  # SQLAlchemy's type is Result, the object a CursorResult
        assert (await session.execute(sa.text("SELECT item FROM aio_orders WHERE id = 2"))).scalar_one() == "other"
        merged = await session.merge(Order(id=3, item="bed"))
        assert session.is_modified(merged)
        assert merged in session.dirty
        with pytest.raises(KeyError):
            await delete_and_raise(session, lamp)
        async with session.begin_nested():
            await session.delete(merged)
        assert not session.in_nested_transaction()
        assert await session.run_sync(lambda plain: len(plain.get_one(Order, 1).lines)) == 2
        with session.no_autoflush:
            assert not session.autoflush
        assert (await session.connection()).sync_connection is tx.db.sync_connection
        lamp.item = "flushed at the end"
        tx.send(scene.topic, "1")
        return lamp

    async def delete_and_raise(session: aio.AsyncSession, order: Order) -> None:
        async with session.begin_nested():
            for line in order.lines:
                await session.delete(line)
            await session.flush()
            raise KeyError

    async def main(pool: Pool) -> None:
        lamp = await pool.run(unit)
        assert lamp.item == "flushed at the end", "as its sessions don't expire objects"

    with tables(scene):
        in_pool(scene, main)
        with scene.engine.connect() as connection:
            found = connection.execute(sa.text("SELECT id, item FROM aio_orders ORDER BY id")).all()
    assert found == [(1, "flushed at the end"), (2, "other")]
    assert scene.messages() == [1]


@pytest.mark.slow
def test_the_session_class_of_the_user(scene: Scene) -> None:
    committed: list[str] = []
    sessions = sessionmaker(expire_on_commit=False)
    sa.event.listen(sessions, "after_commit", lambda _: committed.append("after_commit"))

    async def unit(tx: aio.AsyncTransaction) -> None:
        await tx.session.execute(sa.text("SELECT 1"))
        assert committed == []

    in_pool(scene, lambda pool: pool.run(unit), session=sessions)
    assert committed == ["after_commit"]


# --- the other stores -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("database", ["rocksdb", "zookeeper"])
def test_stores_with_batches_have_the_same_handle(scene: Scene, database: str) -> None:
    del database

    async def unit(tx: aio.AsyncTransaction) -> int:
        await both_here(tx, scene, 1)
        await tx.run_sync(both, scene, 2)
        with pytest.raises(UsageError, match="no ORM session"):
            _ = tx.session
        db = tx.db
        return await tx.run_sync(lambda plain: int(plain.db is db))

    assert in_pool(scene, lambda pool: pool.run(unit)) == 1
    assert scene.agree() == [1, 2]


@asynccontextmanager
async def opened_on_psycopg(scene: Scene) -> AsyncIterator[aio.AsyncWriterPool]:
    url = scene.engine.url.set(drivername="postgresql").render_as_string(hide_password=False)
    store = SqlStateStore.from_psycopg(lambda: psycopg.connect(url))
    options: dict[str, Any] = {"options": PoolOptions(timeout=LIMIT), "timeouts": timeouts()}
    try:
        async with aio.create_pool(store, kafka=scene.settings, prefix=scene.transactional_id, **options) as pool:
            yield pool
    finally:
        store.close()


def test_psycopg_connections_are_used_in_the_thread(scene: Scene) -> None:
    async def unit(tx: aio.AsyncTransaction) -> int:
        with pytest.raises(UsageError, match="run_sync"):
            _ = tx.db
        await tx.session.execute(sa.text("SELECT 1"))
        return await tx.run_sync(both, scene, 1)

    async def main() -> None:
        async with opened_on_psycopg(scene) as pool:
            assert await pool.run(unit) == 1

    in_loop(main())
    assert scene.agree() == [1]


@pytest.mark.parametrize("flushes", [True, False])
def test_a_session_leaves_the_pipeline_in_the_thread(scene: Scene, monkeypatch: pytest.MonkeyPatch, *, flushes: bool) -> None:
    """On psycopg connections a group runs in a pipeline; leaving it waits for the database."""
    left_in: list[int] = []
    end = PipelineBatch.end

    def noted(batch: PipelineBatch) -> None:
        left_in.append(threading.get_ident())
        end(batch)

    monkeypatch.setattr(PipelineBatch, "end", noted)

    async def unit(tx: aio.AsyncTransaction, number: int) -> None:
        tx.session.add(Order(id=number, item="lamp"))
        if flushes:
            await tx.session.flush()
            assert await tx.session.get_one(Order, number)

    async def main() -> None:
        async with opened_on_psycopg(scene) as pool:
            for first in range(0, 100, 20):
                await asyncio.gather(*(pool.run(unit, number) for number in range(first, first + 20)))

    with tables(scene):
        in_loop(main())
        with scene.engine.connect() as connection:
            assert connection.scalar(sa.select(sa.func.count()).select_from(Order)) == 100
    assert left_in
    assert threading.get_ident() not in left_in


# --- SQLAlchemy's own asyncio classes -----------------------------------------------------------------------------------

LEFT_OUT = {
    "AsyncConnection": {
        "start",  # it has begun
        "connection",  # refused there too
        "engine",  # an AsyncEngine: there is none
    },
    "AsyncSession": {
        "bind", "binds", "bind_mapper", "bind_table", "get_bind", "get_async_bind",  # there is one connection
        "close_all", "object_session", "identity_key", "execution_options",  # of the class; of a session that is made here
        "delete_all", "merge_all",  # not in SQLAlchemy 2.0
    },
    "AsyncTransaction": set(),
}  # fmt: skip
OURS = {"AsyncConnection": aio.AsyncConnection, "AsyncSession": aio.AsyncSession, "AsyncTransaction": aio.AsyncSavepoint}


def public_names(name: str) -> dict[str, bool]:
    """The public methods and properties of a class of SQLAlchemy, and whether they are coroutines; read from its source.

    To import it takes greenlet, which dualwrite does not need.
    """
    spec = importlib.util.find_spec("sqlalchemy")
    assert spec is not None
    assert spec.origin is not None
    module = {"AsyncSession": "session.py"}.get(name, "engine.py")
    tree = ast.parse((Path(spec.origin).parent / "ext" / "asyncio" / module).read_text(encoding="utf-8"))
    (found,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    defined = [node for node in found.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    streams = ("stream", "stream_scalars")  # decorated: what they return can be awaited
    return {
        node.name: isinstance(node, ast.AsyncFunctionDef) and node.name not in streams
        for node in defined
        if not node.name.startswith("_")
    }


@pytest.mark.parametrize("name", OURS)
def test_the_handle_has_all_methods_of_the_sqlalchemy_class(name: str) -> None:
    theirs = public_names(name)
    ours: Any = OURS[name]
    assert {each for each in theirs if not hasattr(ours, each)} - LEFT_OUT[name] == set()
    for each in theirs.keys() - LEFT_OUT[name]:
        assert inspect.iscoroutinefunction(getattr(ours, each)) == theirs[each] or each.startswith("stream"), each


def test_an_unknown_driver_is_explained(scene: Scene) -> None:
    async def main() -> None:
        with pytest.raises(dualwrite.ConfigurationError, match=r"psycopg"):
            await aio.create_pool("postgresql+pg8000://user@host/database", kafka=scene.settings, prefix="shop")

    in_loop(main())
