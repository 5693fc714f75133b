"""Which `StoreDialect` serves an engine or a URL; each is imported only when it is needed."""

from __future__ import annotations

from typing import Final

from sqlalchemy import URL, Engine

from dualwrite.errors import ConfigurationError
from dualwrite.stores.sql.dialect import StoreDialect

SQL_URL_EXAMPLES: Final = (
    "postgresql+psycopg://user@host/database, mysql+pymysql://user@host/database, mariadb+pymysql://user@host/database or "
    "sqlite:////path/to/file.db"
)
"""Example URLs of these databases, for errors."""


def dialect_of(engine: Engine) -> StoreDialect:
    """The dialect for an engine, by its actual driver: with SQLAlchemy `postgresql://` may mean psycopg2.

    Raises:
        ConfigurationError: This database or this driver is not supported.
    """
    return dialect_for(engine.url.set(drivername=f"{engine.dialect.name}+{engine.dialect.driver}"))


def dialect_for(url: URL) -> StoreDialect:
    """The dialect for a URL.

    Raises:
        ConfigurationError: This database or this driver is not supported.
    """
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
