"""SQLAlchemy engines of our own: from a database URL, with the driver that the store needs."""

from __future__ import annotations

from typing import Any, Final

from sqlalchemy import URL, Engine, create_engine, event, make_url
from sqlalchemy.exc import ArgumentError
from sqlalchemy.pool import NullPool, QueuePool, SingletonThreadPool, StaticPool

from dualwrite.errors import ConfigurationError, MissingDependencyError
from dualwrite.stores.sql.dialect import StoreDialect

SQL_URL_EXAMPLES: Final = (
    "postgresql+psycopg://user@host/database, mysql+pymysql://user@host/database, mariadb+pymysql://user@host/database or "
    "sqlite:////path/to/file.db"
)
"""Example URLs of these databases, for errors."""

KEPT_CONNECTIONS: Final = 20
"""`pool_size` of our own engines: so many connections stay open once they were needed."""

_ANY_NUMBER: Final = 1_000


def dialect_of(engine: Engine) -> StoreDialect:
    """The dialect for an engine, by its actual driver: with SQLAlchemy `postgresql://` may mean psycopg2."""
    return dialect_for(engine.url.set(drivername=f"{engine.dialect.name}+{engine.dialect.driver}"))


def dialect_for(url: URL) -> StoreDialect:
    """The dialect for a URL; ConfigurationError if this database or this driver is not supported."""
    backend, _, driver = url.drivername.partition("+")
    dialect: StoreDialect
    match backend:
        case "postgresql":
            from dualwrite.stores.sql.postgresql import PostgresqlDialect  # noqa: PLC0415  (one backend, one import)

            dialect = PostgresqlDialect()
        case "sqlite":
            from dualwrite.stores.sql.sqlite import SqliteDialect  # noqa: PLC0415  (one backend, one import)

            dialect = SqliteDialect()
        case "mysql":
            from dualwrite.stores.sql.mysql import MysqlDialect  # noqa: PLC0415  (one backend, one import)

            dialect = MysqlDialect()
        case "mariadb":
            from dualwrite.stores.sql.mysql import MariadbDialect  # noqa: PLC0415  (one backend, one import)

            dialect = MariadbDialect()
        case _:
            raise ConfigurationError(
                f"Unsupported SQL database {backend!r}.", next_step=f"use a URL such as {SQL_URL_EXAMPLES}"
            )
    if driver not in ("", dialect.driver):
        raise ConfigurationError(
            f"dualwrite's store for {backend} needs the driver {dialect.driver!r}, not {driver!r}.",
            cause="the driver's own errors show whether a failed COMMIT may have committed",
            next_step=f"{dialect.name}+{dialect.driver}://…",
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
    try:
        dialect = dialect_for(parsed)
    except ModuleNotFoundError as error:
        raise _missing_driver(parsed, error) from error
    return parsed.set(drivername=f"{dialect.name}+{dialect.driver}"), dialect


def make_engine(url: URL, dialect: StoreDialect, **options: Any) -> Engine:
    """`create_engine`, with our error for a driver that is not installed."""
    try:
        return create_engine(url, **options)
    except ModuleNotFoundError as error:
        raise _missing_driver(url, error, dialect.extra) from error


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


def _missing_driver(url: URL, error: ModuleNotFoundError, extra: str | None = None) -> MissingDependencyError:
    extra = extra or {"postgresql": "postgres", "mysql": "mysql", "mariadb": "mysql"}.get(url.get_backend_name())
    return MissingDependencyError(
        f"The Python package {error.name!r}, the driver for {url.get_backend_name()}, is not installed.",
        next_step=f'pip install "dualwrite[{extra}]"',
    )
