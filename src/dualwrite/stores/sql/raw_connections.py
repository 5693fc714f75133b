"""Drivers' connections of the user's, without SQLAlchemy around them, for the last steps of a transaction on them."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from inspect import signature
from typing import Any, Final

from sqlalchemy import Dialect, make_url

from dualwrite.errors import UsageError
from dualwrite.stores.sql.dialect import TRANSACTION
from dualwrite.stores.sql.joined_transaction import UsersConnection


@dataclass(frozen=True, slots=True)
class Driver:
    """A driver of users' connections.

    Args:
        dialect: SQLAlchemy's name of it.
        cursor: Makes a cursor that returns tuples, whatever the connection's own factories are; None: it has none.
        begun: Whether a connection is in a transaction; None: the driver does not know.
        in_autocommit: Whether a connection, adapted, begins no transactions by itself.
        adapter: For asynchronous drivers: SQLAlchemy's class that makes its connections look synchronous.
    """

    dialect: str
    cursor: Callable[[Any], Any] | None = None
    begun: Callable[[Any], bool | None] = lambda _raw: None
    in_autocommit: Callable[[Any], bool] = lambda adapted: bool(adapted.autocommit)
    adapter: str | None = None


def _plain(module: str, name: str) -> Callable[[Any], Any]:
    return lambda raw: raw.cursor(getattr(import_module(module), name))


def _with_tuples(raw: Any) -> Any:
    cursor = raw.cursor()
    cursor.row_factory = None
    return cursor


class _AwaitedWithTuples:
    """A cursor of aiosqlite that SQLAlchemy awaits (2.0) or enters (2.1)."""

    def __init__(self, raw: Any) -> None:
        self._made = raw.cursor()

    def __await__(self) -> Generator[Any, None, Any]:
        return self.__aenter__().__await__()

    async def __aenter__(self) -> Any:
        cursor = await self._made
        cursor.row_factory = None
        return cursor


def _get_autocommit(connection: Any) -> bool:
    return bool(connection.get_autocommit())


def _begins_none(connection: Any) -> bool:
    return connection.isolation_level is None or getattr(connection, "autocommit", None) is True


def _in_transaction(raw: Any) -> bool:
    """By the server's last response, of drivers that descend from PyMySQL."""
    return bool(raw.get_transaction_status())


_ASYNCPG: Final = Driver(
    "postgresql+asyncpg",
    begun=lambda raw: bool(raw.is_in_transaction()),
    adapter="sqlalchemy.dialects.postgresql.asyncpg:AsyncAdapt_asyncpg_connection",
)

_DRIVERS: Final = {
    "psycopg.Connection": Driver(
        "postgresql+psycopg",
        lambda raw: import_module("psycopg").Cursor(raw, row_factory=import_module("psycopg.rows").tuple_row),
        lambda raw: bool(raw.info.transaction_status),
    ),
    "psycopg.AsyncConnection": Driver(
        "postgresql+psycopg_async",
        lambda raw: raw.cursor(row_factory=import_module("psycopg.rows").tuple_row),
        begun=lambda raw: bool(raw.info.transaction_status),
        adapter="sqlalchemy.dialects.postgresql.psycopg:AsyncAdapt_psycopg_connection",
    ),
    "psycopg2.extensions.connection": Driver(
        "postgresql+psycopg2",
        lambda raw: raw.cursor(cursor_factory=import_module("psycopg2.extensions").cursor),
        lambda raw: bool(raw.info.transaction_status),
    ),
    "asyncpg.connection.Connection": _ASYNCPG,
    "asyncpg.pool.PoolConnectionProxy": _ASYNCPG,
    "pymysql.connections.Connection": Driver(
        "mysql+pymysql", _plain("pymysql.cursors", "Cursor"), lambda raw: bool(raw.server_status & 1), _get_autocommit
    ),
    "MySQLdb.connections.Connection": Driver(
        "mysql+mysqldb", _plain("MySQLdb.cursors", "Cursor"), in_autocommit=_get_autocommit
    ),
    "aiomysql.connection.Connection": Driver(
        "mysql+aiomysql",
        begun=_in_transaction,
        in_autocommit=lambda adapted: _get_autocommit(adapted.driver_connection),
        adapter="sqlalchemy.dialects.mysql.aiomysql:AsyncAdapt_aiomysql_connection",
    ),
    "asyncmy.connection.Connection": Driver(
        "mysql+asyncmy",
        _plain("asyncmy.cursors", "Cursor"),
        _in_transaction,
        lambda adapted: _get_autocommit(adapted.driver_connection),
        adapter="sqlalchemy.dialects.mysql.asyncmy:AsyncAdapt_asyncmy_connection",
    ),
    "sqlite3.Connection": Driver("sqlite+pysqlite", _with_tuples, lambda raw: bool(raw.in_transaction), _begins_none),
    "aiosqlite.core.Connection": Driver(
        "sqlite+aiosqlite",
        _AwaitedWithTuples,
        begun=lambda raw: bool(raw.in_transaction),
        in_autocommit=_begins_none,
        adapter="sqlalchemy.dialects.sqlite.aiosqlite:AsyncAdapt_aiosqlite_connection",
    ),
}
"""By the class of the connection, or of one of its bases."""


def driver_of(raw: Any) -> Driver:
    """The driver of a connection.

    Raises:
        UsageError: It is not a connection, or its driver is not known.
    """
    for base in type(raw).__mro__:
        name = f"{base.__module__}.{base.__qualname__}"
        if name in _DRIVERS:
            return _DRIVERS[name]
    raise UsageError(
        f"A {type(raw).__module__}.{type(raw).__qualname__} is not a connection that dualwrite knows.",
        next_step="pass a connection of psycopg, psycopg2, asyncpg, PyMySQL, mysqlclient, aiomysql, asyncmy, sqlite3 or "
        "aiosqlite; a SQLAlchemy session or connection is joined: tx = pool.join(session)",
    )


def users_connection(raw: Any) -> UsersConnection:
    """A driver's connection for `TxnStateStore.begin_on`; an asynchronous one can be used in a greenlet of SQLAlchemy's only.

    Raises: as `driver_of`.
    """
    driver = driver_of(raw)
    dialect = _dialect(driver.dialect)
    adapted = raw
    if driver.adapter is not None:
        module, _, name = driver.adapter.partition(":")
        plain = raw if driver.cursor is None else _WithCursors(raw, driver.cursor)
        kind = getattr(import_module(module), name)
        takes_dbapi = len(signature(kind).parameters) > 1  # that of psycopg does so from SQLAlchemy 2.1 on
        adapted = kind(dialect.loaded_dbapi, plain) if takes_dbapi else kind(plain)
        if driver.dialect.endswith("asyncpg"):
            adapted.autocommit = True  # else it would begin a transaction inside the user's
    lent = _Lent(raw, adapted, driver)
    return UsersConnection(dialect, lent, lent.invalidate)


@cache
def _dialect(name: str) -> Dialect:
    kind: Any = make_url(f"{name}://").get_dialect()
    made: Dialect = kind(dbapi=kind.import_dbapi())
    return made


class _WithCursors:
    """An asynchronous driver's connection, whose cursors are made by a function."""

    def __init__(self, raw: Any, make: Callable[[Any], Any]) -> None:
        self._raw = raw
        self._make = make

    def __getattr__(self, name: str) -> Any:
        return getattr(self._raw, name)

    def cursor(self) -> Any:
        return self._make(self._raw)


class _Lent:
    """What SQLAlchemy's connections expect of a connection that a pool has lent them."""

    is_valid = True
    is_marked = False
    _has_sent_begin = False

    def __init__(self, raw: Any, adapted: Any, driver: Driver) -> None:
        self.driver_connection = raw
        self.dbapi_connection = adapted
        self.info: dict[Any, Any] = {}
        self._driver = driver

    def __getattr__(self, name: str) -> Any:
        """As SQLAlchemy's own: dialects ask it whether the connection is closed, for example."""
        return getattr(self.dbapi_connection, name)

    def cursor(self, *_: Any, **__: Any) -> Any:
        if self._driver.cursor is None or self._driver.adapter is not None:
            return self.dbapi_connection.cursor()
        return self._driver.cursor(self.driver_connection)

    def begin(self) -> None:
        if self._has_begun:
            raise UsageError(
                "The connection is in a transaction already.",
                cause="something was executed on it before, perhaps a SELECT",
                next_step="commit or roll back before the block; a session of SQLAlchemy's can be joined at any time",
            )
        if self._driver.in_autocommit(self.dbapi_connection):
            self._execute("BEGIN")
            self._has_sent_begin = True
            if self._has_begun is None:
                self._execute(f"SAVEPOINT {TRANSACTION}")
                self.is_marked = True

    def commit(self) -> None:
        """By a statement if the driver would do nothing: it does not know of the transaction."""
        if self._driver.in_autocommit(self.dbapi_connection):
            self._execute("COMMIT")
        else:
            self.dbapi_connection.commit()

    def rollback(self) -> None:
        if self._has_begun is False:
            return
        if self._driver.in_autocommit(self.dbapi_connection):
            self._execute("ROLLBACK")
        else:
            self.dbapi_connection.rollback()

    @property
    def was_ended(self) -> bool:
        """Whether the transaction that was begun by a statement was ended by somebody else."""
        return self._has_sent_begin and self._has_begun is False

    @property
    def _has_begun(self) -> bool | None:
        return self._driver.begun(self.driver_connection)

    def _execute(self, command: str) -> None:
        cursor = self.cursor()
        try:
            cursor.execute(command)
        finally:
            cursor.close()

    def invalidate(self, _error: object = None) -> None:
        """Close the connection, which makes the database roll back."""
        self.is_valid = False
        self.dbapi_connection.close()
