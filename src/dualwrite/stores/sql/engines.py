"""SQLAlchemy's engines: those of our own, from a database URL, and what every store needs of an engine and its pool."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any, Final

from sqlalchemy import URL, Connection, Engine, create_engine, event, make_url
from sqlalchemy.engine import ExceptionContext
from sqlalchemy.exc import ArgumentError
from sqlalchemy.pool import NullPool, QueuePool, SingletonThreadPool, StaticPool

from dualwrite.errors import ConfigurationError, MissingDependencyError
from dualwrite.observability.outages import WRITES, database_at
from dualwrite.stores.sql.dialect import TAKES_NO_WRITES, ErrorClass, StoreDialect, pooled_connection
from dualwrite.stores.sql.home import OwnConnection, home_of
from dualwrite.stores.sql.sql_errors import address

SQL_URL_EXAMPLES: Final = (
    "postgresql+psycopg://user@host/database, mysql+pymysql://user@host/database, mariadb+pymysql://user@host/database or "
    "sqlite:////path/to/file.db"
)
"""Example URLs of these databases, for errors."""

KEPT_CONNECTIONS: Final = 20
"""`pool_size` of our own engines: so many connections stay open once they were needed."""

_ANY_NUMBER: Final = 1_000

_DIALECTS: Final = {
    "postgresql": ("postgresql", "PostgresqlDialect", "postgres"),
    "sqlite": ("sqlite", "SqliteDialect", ""),
    "mysql": ("mysql", "MysqlDialect", "mysql"),
    "mariadb": ("mysql", "MariadbDialect", "mysql"),
}
"""By the beginning of a URL: the module, which is imported only for such a URL, its class, and the extra with the driver."""


_OF_USERS: Final = {
    "postgresql": ("psycopg2", "psycopg2cffi", "psycopg_async", "asyncpg"),
    "sqlite": ("aiosqlite",),
    **dict.fromkeys(("mysql", "mariadb"), ("mysqldb", "aiomysql", "asyncmy")),
}
"""Drivers of sessions that can be joined; the store's own connections have the driver of its dialect."""

_NOT_LIBPQS: Final = (
    *("command_timeout", "statement_cache_size", "max_cached_statement_lifetime", "max_cacheable_statement_size"),
    *("prepared_statement_cache_size", "prepared_statement_name_func", "async_fallback"),
)
"""Parameters of asyncpg in a URL, and of SQLAlchemy for it, that mean nothing to our own connections."""

_NOT_PYMYSQLS: Final = (
    *("auth_plugin", "multi_statements", "executemany_fallback", "local_infile_dir", "server_public_key_path", "compress"),
    *("echo", "stmt_cache_size"),
)
"""The same of mysqlclient, and of aiomysql and asyncmy."""

_TLS: Final = {
    "DISABLED": {"ssl_disabled": "true"},
    "REQUIRED": {"ssl_verify_cert": "false"},
    "VERIFY_CA": {"ssl_verify_cert": "true"},
    "VERIFY_IDENTITY": {"ssl_verify_identity": "true"},
}
"""mysqlclient's `ssl_mode` for PyMySQL, without a file of certificates. With one, PyMySQL demands TLS, and verifies the server;
it checks the server's name only then."""


def is_of_users(engine: Engine) -> bool:
    """Whether an engine is for the user's sessions only: its driver is not one that a store can use."""
    return engine.dialect.is_async or engine.dialect.driver in _OF_USERS.get(engine.dialect.name, ())


def own_url(url: URL) -> URL:
    """The URL for our own connections to the same database: without the driver of the user's sessions."""
    backend, _, driver = url.drivername.partition("+")
    if driver not in _OF_USERS.get(backend, ()):
        return url
    if driver == "asyncpg":
        renamed = {"ssl": "sslmode", "timeout": "connect_timeout"}
        kept = {renamed.get(name, name): value for name, value in url.query.items() if name not in _NOT_LIBPQS}
        url = url.set(query=kept)
    elif _DIALECTS[backend][0] == "mysql":
        url = url.set(query=for_pymysql({name: value for name, value in url.query.items() if name not in _NOT_PYMYSQLS}))
    return url.set(drivername=backend)


def for_pymysql(query: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters of a URL with PyMySQL's in the place of mysqlclient's `ssl_mode`."""
    found = dict(query)
    mode = str(found.pop("ssl_mode", "")).upper()
    if not {"ssl_ca", "ssl_capath"} & found.keys():
        return found | _TLS.get(mode, {})
    if mode in ("REQUIRED", "VERIFY_CA"):
        found.setdefault("ssl_check_hostname", "false")
    return found


def dialect_of(engine: Engine) -> StoreDialect:
    """The dialect for an engine, by its actual driver: with SQLAlchemy `postgresql://` may mean psycopg2."""
    return dialect_for(engine.url.set(drivername=f"{engine.dialect.name}+{engine.dialect.driver}"))


def dialect_for(url: URL) -> StoreDialect:
    """The dialect for a URL; ConfigurationError if this database or this driver is not supported."""
    backend, _, driver = url.drivername.partition("+")
    if backend not in _DIALECTS:
        raise ConfigurationError(f"Unsupported SQL database {backend!r}.", next_step=f"use a URL such as {SQL_URL_EXAMPLES}")
    module, kind, _ = _DIALECTS[backend]
    dialect: StoreDialect = getattr(import_module(f"dualwrite.stores.sql.{module}"), kind)()
    if driver not in ("", dialect.driver):
        raise ConfigurationError(
            f"dualwrite's store for {backend} needs the driver {dialect.driver!r}, not {driver!r}.",
            cause="the driver's own errors show whether a failed COMMIT may have committed",
            next_step=f"{dialect.name}+{dialect.driver}://…; your own sessions may have another driver: pool.join(session)",
        )
    return dialect


def parse_url(url: str | URL) -> tuple[URL, StoreDialect]:
    """A database URL with the driver that the store needs, and the dialect for it.

    Raises:
        ConfigurationError: The URL can't be parsed, or the database is not supported by the SQL store.
        MissingDependencyError: The driver is not installed.
    """
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError) as error:  # ValueError: the port is not a number
        raise ConfigurationError(
            "The database URL can't be parsed.",  # not quoted: it may contain a password
            next_step=f"use a URL such as {SQL_URL_EXAMPLES}",
        ) from error
    parsed = own_url(parsed)
    try:
        dialect = dialect_for(parsed)
    except ModuleNotFoundError as error:
        raise _missing_driver(parsed, error) from error
    return parsed.set(drivername=f"{dialect.name}+{dialect.driver}"), dialect


def make_engine(url: URL, dialect: StoreDialect, **options: Any) -> Engine:
    """`create_engine`, with what the dialect adds to each engine of ours, and our error for a driver that is not installed."""
    try:
        engine = create_engine(url, **options)
    except ModuleNotFoundError as error:
        raise _missing_driver(url, error) from error
    dialect.prepare_engine(engine)
    return engine


def close_engine(engine: Engine) -> None:
    """Close all connections of an engine: those that a thread still uses as soon as it returns them.

    `dispose` alone would close only the others, and the engine would keep the connections that are opened afterwards.
    """
    event.listen(engine, "checkin", _close)
    engine.dispose()


def _close(connection: Any, record: Any) -> None:
    if connection is not None:  # it is not broken
        record.invalidate()


def kept_connections(engine: Engine) -> int:
    """How many connections of an engine's pool transactions can have without any being opened, and closed, for one use.

    Leases and claims need one besides: of a pool that opens no others, one is left for them.
    """
    pool = engine.pool
    if isinstance(pool, QueuePool):
        size = pool.size() or _ANY_NUMBER  # 0: the pool has no limit
        return size if pool._max_overflow else size - 1  # noqa: SLF001  (SQLAlchemy has no public way to ask)
    return 1 if isinstance(pool, NullPool) else 2


def check_connections(engine: Engine) -> None:
    """Check that an engine has more than one connection: a claim runs beside a transaction.

    Raises:
        ConfigurationError: Its pool has a single connection for all, or for all calls of a thread.
    """
    if not isinstance(engine.pool, SingletonThreadPool | StaticPool):
        return
    pool = type(engine.pool).__name__
    if engine.dialect.name == "sqlite" and _is_in_memory(engine.url):
        cause = "an in-memory SQLite database exists in one connection only"
        next_step = "use a file, sqlite:////absolute/path/to/file.db, and no poolclass"
    else:
        cause, next_step = None, f"create the engine without poolclass={pool}"
    raise ConfigurationError(
        f"The engine's {pool} shares a single connection; claims need their own.", cause=cause, next_step=next_step
    )


def _is_in_memory(url: URL) -> bool:
    return not url.database or ":memory:" in url.database or url.query.get("mode") == "memory"


def _missing_driver(url: URL, error: ModuleNotFoundError) -> MissingDependencyError:
    backend = url.get_backend_name()
    return MissingDependencyError(
        f"The Python package {error.name!r}, the driver for {backend}, is not installed.",
        next_step=f'pip install "dualwrite[{_DIALECTS[backend][2]}]"',
    )


# --- connections that take no writes ------------------------------------------------------------------------------------------
#
# After a failover, or while an operator keeps a full disk from filling further, a server answers and refuses writes. A session
# may keep that state for ever: PostgreSQL reads `default_transaction_read_only` of a database when a session begins, MariaDB
# and MySQL copy `tx_read_only`, and a connection to the old primary stays there. So the pool must not lend such a connection
# again, and the outage is reported.


def watch_errors(engine: Engine) -> None:
    """Note the errors of all statements that SQLAlchemy executes for a store; a second call for its dialect adds nothing."""
    if not event.contains(engine.dialect, "handle_error", _note):
        event.listen(engine.dialect, "handle_error", _note)


def _note(context: ExceptionContext) -> None:
    if isinstance(context.connection, OwnConnection):
        note_error(context.connection, context.original_exception)


def note_error(connection: Connection, error: BaseException) -> None:
    """If the error says that the database takes no writes, report the outage, and have the pool replace the connection.

    It is replaced when it is lent the next time, so that the current transaction may go on: the block may have expected the
    error. If it is read-only, then so may be all others of its age in the pool, and they are replaced too.
    """
    found = home_of(connection.engine).dialect.classify(error)
    if found not in TAKES_NO_WRITES or connection.closed or connection.invalidated:
        return
    pooled_connection(connection).invalidate(error, soft=True)
    if found is ErrorClass.READ_ONLY:
        replace_others(connection, error)
    database_at(address(connection.engine.url)).failed(WRITES, error)


def replace_others(connection: Connection, error: BaseException) -> None:
    """Have the pool replace all of its connections that are as old as this one, as SQLAlchemy does when one has broken."""
    connection.engine.pool._invalidate(pooled_connection(connection), error, _checkin=False)  # noqa: SLF001  (a test fails if the name has moved)
