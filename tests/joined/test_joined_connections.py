"""`pool.transaction(connection=…)`: a driver's own connection, on which the block's transaction is begun and committed."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing
from functools import partial
from importlib import import_module
from typing import Any

import aiomysql
import aiosqlite
import asyncmy.cursors
import asyncpg
import psycopg
import psycopg2
import pymysql
import pytest
import sqlalchemy as sa
from psycopg.rows import dict_row
from psycopg2.extras import RealDictCursor

import dualwrite
from crash.scene import Scene
from dualwrite import WriterPool, aio
from joined.own_sessions import send, skip_unless_installed
from pool.pool_scene import open_pool


def plain(scene: Scene) -> str:
    """The URL as PostgreSQL's drivers understand it."""
    return scene.url.replace("+psycopg", "")


def of_mysql(scene: Scene, *without: str, database: str = "database") -> dict[str, Any]:
    """Arguments for connecting, without some of PyMySQL's, and with the driver's name of the database."""
    url = sa.make_url(scene.url)
    given = {"host": url.host, "port": url.port, "user": url.username, "password": url.password or "", database: url.database}
    return given | {name: value for name, value in url.query.items() if name not in without}


def _mysqlclient(scene: Scene, *, cursorclass: str = "Cursor", **options: Any) -> Any:
    skip_unless_installed("mysqldb")
    connect, kind = import_module("MySQLdb").connect, getattr(import_module("MySQLdb.cursors"), cursorclass)
    return connect(**of_mysql(scene, "ssl_disabled"), ssl_mode="DISABLED", cursorclass=kind, **options)


CONNECT: dict[str, tuple[str, Callable[[Scene], Any]]] = {
    "psycopg": ("postgresql", lambda scene: psycopg.connect(plain(scene))),
    "psycopg with dicts": ("postgresql", lambda scene: psycopg.connect(plain(scene), row_factory=dict_row)),
    "psycopg in autocommit": ("postgresql", lambda scene: psycopg.connect(plain(scene), autocommit=True)),
    "psycopg2": ("postgresql", lambda scene: psycopg2.connect(plain(scene))),
    "psycopg2 with dicts": ("postgresql", lambda scene: psycopg2.connect(plain(scene), cursor_factory=RealDictCursor)),
    "psycopg2 in autocommit": ("postgresql", lambda scene: _in_autocommit(psycopg2.connect(plain(scene)))),
    "pymysql": ("mariadb", lambda scene: pymysql.connect(**of_mysql(scene))),
    "pymysql with dicts": ("mariadb", lambda scene: pymysql.connect(**of_mysql(scene), cursorclass=pymysql.cursors.DictCursor)),
    "pymysql in autocommit": ("mariadb", lambda scene: pymysql.connect(**of_mysql(scene), autocommit=True)),
    "mysqlclient": ("mariadb", _mysqlclient),
    "mysqlclient with dicts": ("mariadb", lambda scene: _mysqlclient(scene, cursorclass="DictCursor")),
    "mysqlclient in autocommit": ("mariadb", lambda scene: _mysqlclient(scene, autocommit=True)),
    "sqlite3": ("sqlite", lambda scene: sqlite3.connect(sa.make_url(scene.url).database or "")),
    "sqlite3 in autocommit": (
        "sqlite",
        lambda scene: sqlite3.connect(sa.make_url(scene.url).database or "", isolation_level=None),
    ),
}


def _in_autocommit(connection: Any) -> Any:
    connection.autocommit = True
    return connection


@pytest.fixture
def producer() -> str:
    return "native"


@pytest.fixture
def pool(scene: Scene) -> Iterator[WriterPool[Any]]:
    with open_pool(scene) as pool:
        yield pool


def write(connection: Any, scene: Scene, number: int) -> None:
    cursor = connection.cursor()
    cursor.execute(f"INSERT INTO events (writer, number) VALUES ('{scene.transactional_id}', {number})")
    cursor.close()


def write_and_fail(tx: Any, scene: Scene, error: type[BaseException]) -> None:
    """Write an event and send its message; then raise the error, or send what makes the commit raise it."""
    write(tx.db, scene, 3)
    send(tx, scene, 3)
    if error is ZeroDivisionError:
        raise error
    tx.send(scene.topic, b"x" * 1_100_000)


@pytest.mark.parametrize(("how", "database"), [(how, database) for how, (database, _) in CONNECT.items()])
def test_a_block_commits_both_or_neither(scene: Scene, pool: WriterPool[Any], how: str) -> None:
    with closing(CONNECT[how][1](scene)) as connection:
        for number in (1, 2):
            with pool.transaction(connection=connection) as tx:
                write(connection, scene, number)
                send(tx, scene, number)
                assert tx.db is connection
            assert tx.outcome == "published"
        for error in (ZeroDivisionError, dualwrite.MessageTooLargeError):
            with pytest.raises(error), pool.transaction(connection=connection) as tx:
                write_and_fail(tx, scene, error)
        with pool.transaction(connection=connection) as tx:
            send(tx, scene, 5)
            write(connection, scene, 5)
        with pool.transaction(connection=connection):
            pass
    assert scene.agree() == [1, 2, 5]


@pytest.mark.parametrize(
    ("how", "database"),
    [(how, database) for how, (database, _) in CONNECT.items() if "autocommit" in how],
)
def test_a_block_that_has_ended_its_transaction_sends_nothing(scene: Scene, pool: WriterPool[Any], how: str) -> None:
    def end(tx: Any) -> None:
        write(tx.db, scene, 1)
        send(tx, scene, 1)
        tx.db.cursor().execute("COMMIT")

    with closing(CONNECT[how][1](scene)) as connection:
        with pytest.raises(dualwrite.TransactionControlError, match="WITHOUT"), pool.transaction(connection=connection) as tx:
            end(tx)
        with pool.transaction(connection=connection) as tx:
            write(connection, scene, 2)
            send(tx, scene, 2)
    assert scene.events.numbers(scene.transactional_id) == [1, 2]
    assert scene.messages() == [2]


async def _asyncpg(scene: Scene) -> Any:
    return await asyncpg.connect(plain(scene))


async def _psycopg(scene: Scene, **options: Any) -> Any:
    return await psycopg.AsyncConnection.connect(plain(scene), **options)


async def _aiomysql(scene: Scene, **options: Any) -> Any:
    return await aiomysql.connect(**of_mysql(scene, "ssl_disabled", database="db"), **options)


async def _asyncmy(scene: Scene, **options: Any) -> Any:
    return await asyncmy.connect(**of_mysql(scene, "ssl_disabled"), **options)


async def _aiosqlite(scene: Scene, **options: Any) -> Any:
    return await aiosqlite.connect(sa.make_url(scene.url).database or "", **options)


async def _aiosqlite_with_dicts(scene: Scene) -> Any:
    connection = await _aiosqlite(scene)
    connection.row_factory = lambda cursor, row: {
        column[0]: value for column, value in zip(cursor.description, row, strict=True)
    }
    return connection


CONNECT_ASYNC: dict[str, tuple[str, Callable[[Scene], Awaitable[Any]]]] = {
    "asyncpg": ("postgresql", _asyncpg),
    "psycopg": ("postgresql", _psycopg),
    "psycopg with dicts": ("postgresql", partial(_psycopg, row_factory=dict_row)),
    "psycopg in autocommit": ("postgresql", partial(_psycopg, autocommit=True)),
    "aiomysql": ("mariadb", _aiomysql),
    "aiomysql with dicts": ("mariadb", partial(_aiomysql, cursorclass=aiomysql.DictCursor)),
    "aiomysql in autocommit": ("mariadb", partial(_aiomysql, autocommit=True)),
    "asyncmy": ("mariadb", _asyncmy),
    "asyncmy with dicts": ("mariadb", partial(_asyncmy, cursor_cls=asyncmy.cursors.DictCursor)),
    "asyncmy in autocommit": ("mariadb", partial(_asyncmy, autocommit=True)),
    "aiosqlite": ("sqlite", _aiosqlite),
    "aiosqlite with dicts": ("sqlite", _aiosqlite_with_dicts),
    "aiosqlite in autocommit": ("sqlite", partial(_aiosqlite, isolation_level=None)),
}


async def execute(connection: Any, statement: str) -> None:
    """Those of aiomysql and asyncmy need a cursor."""
    if hasattr(connection, "execute"):
        await connection.execute(statement)
        return
    async with connection.cursor() as cursor:
        await cursor.execute(statement)


@pytest.mark.parametrize(("how", "database"), [(how, database) for how, (database, _) in CONNECT_ASYNC.items()])
def test_a_block_of_a_coroutine_commits_both_or_neither(scene: Scene, how: str) -> None:
    async def work(plain_pool: WriterPool[Any]) -> None:
        pool = aio.AsyncWriterPool(plain_pool)
        connection = await CONNECT_ASYNC[how][1](scene)
        insert = f"INSERT INTO events (writer, number) VALUES ('{scene.transactional_id}', %d)"

        async def block(number: int, error: type[BaseException] | None = None) -> None:
            async with pool.transaction(connection=connection) as tx:
                send(tx, scene, number)
                await execute(connection, insert % number)
                if error is ZeroDivisionError:
                    raise error
                if error is not None:
                    tx.send(scene.topic, b"x" * 1_100_000)
            assert tx.outcome == "published"

        await block(1)
        await block(2)
        for error in (ZeroDivisionError, dualwrite.MessageTooLargeError):
            with pytest.raises(error):
                await block(3, error)
        await block(5)
        with pytest.raises(dualwrite.UsageError, match="would block"):
            plain_pool.transaction(connection=connection).__enter__()
        closing = connection.close()
        if closing is not None:
            await closing

    with open_pool(scene) as pool:
        asyncio.run(work(pool))
    assert scene.agree() == [1, 2, 5]


@pytest.mark.parametrize(
    ("how", "database"),
    [(how, database) for how, (database, _) in CONNECT_ASYNC.items() if how == "asyncpg" or "autocommit" in how],
)
def test_a_block_of_a_coroutine_that_has_ended_its_transaction_sends_nothing(scene: Scene, how: str) -> None:
    async def work(plain_pool: WriterPool[Any]) -> None:
        pool = aio.AsyncWriterPool(plain_pool)
        connection = await CONNECT_ASYNC[how][1](scene)

        async def block(number: int, *statements: str) -> None:
            async with pool.transaction(connection=connection) as tx:
                send(tx, scene, number)
                await execute(connection, f"INSERT INTO events (writer, number) VALUES ('{scene.transactional_id}', {number})")
                for statement in statements:
                    await execute(connection, statement)

        with pytest.raises(dualwrite.TransactionControlError, match="WITHOUT"):
            await block(1, "COMMIT")
        await block(2)
        closing = connection.close()
        if closing is not None:
            await closing

    with open_pool(scene) as pool:
        asyncio.run(work(pool))
    assert scene.events.numbers(scene.transactional_id) == [1, 2]
    assert scene.messages() == [2]


@pytest.mark.parametrize("database", ["postgresql"])
def test_what_is_refused(scene: Scene, pool: WriterPool[Any]) -> None:
    with closing(psycopg.connect(plain(scene))) as connection:
        connection.execute("SELECT 1")
        with pytest.raises(dualwrite.UsageError, match="in a transaction already"):
            pool.transaction(connection=connection).__enter__()
        assert not connection.closed
    with pytest.raises(dualwrite.UsageError, match="not a connection"):
        pool.transaction(connection=object()).__enter__()


@pytest.mark.parametrize(
    ("how", "database"),
    [("psycopg", "postgresql"), ("pymysql", "mariadb"), ("mysqlclient", "mariadb"), ("sqlite3 in autocommit", "sqlite")],
)
def test_a_unit_of_a_transaction_that_a_framework_has_begun(scene: Scene, pool: WriterPool[Any], how: str) -> None:
    inside: set[str] = set()
    with closing(CONNECT[how][1](scene)) as connection:
        for number, ends_by in enumerate(("commit", "end", "commit")):
            if "autocommit" in how:
                connection.execute("BEGIN")
            unit = pool.unit_on(connection, savepoints=lambda: frozenset(inside), handle=lambda: "handle")
            assert unit.tx.db == "handle"
            write(connection, scene, number)
            send(unit.tx, scene, number)
            inside.add("savepoint")
            send(unit.tx, scene, 100)
            inside.clear()
            unit.forget_since("savepoint")
            assert (unit.has_content, len(unit.messages)) == (True, 1)
            getattr(unit, ends_by)()
            if ends_by == "end":
                connection.rollback()
            with pytest.raises(dualwrite.WriterClosedError):
                send(unit.tx, scene, 101)
        if "autocommit" in how:
            connection.execute("BEGIN")
        unit = pool.unit_on(connection)
        unit.tx.send(scene.topic, b"x" * 1_100_000)
        with pytest.raises(dualwrite.MessageTooLargeError):
            unit.commit()
        if how == "sqlite3 in autocommit":
            assert not connection.in_transaction
    assert scene.agree() == [0, 2]


@pytest.mark.parametrize("database", ["postgresql"])
def test_a_connection_that_the_server_has_ended(scene: Scene, pool: WriterPool[Any]) -> None:
    with closing(psycopg.connect(plain(scene))) as connection, scene.engine.connect() as other:
        with pytest.raises(dualwrite.StoreUnavailableError), pool.transaction(connection=connection) as tx:
            write_and_end(tx, scene, other)
        assert connection.closed
    assert scene.agree() == []


def write_and_end(tx: Any, scene: Scene, other: sa.Connection) -> None:
    """Write an event; then let the server end the session."""
    write(tx.db, scene, 1)
    send(tx, scene, 1)
    other.exec_driver_sql(f"SELECT pg_terminate_backend({tx.db.info.backend_pid})")
