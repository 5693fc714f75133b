"""SQLAlchemy engines of our own: from a database URL, with the driver that the store needs."""

from __future__ import annotations

from typing import Any

from sqlalchemy import URL, Engine, create_engine, make_url
from sqlalchemy.exc import ArgumentError

from dualwrite.errors import ConfigurationError, MissingDependencyError
from dualwrite.stores.sql.dialect import StoreDialect
from dualwrite.stores.sql.dialects import SQL_URL_EXAMPLES, dialect_for


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


def _missing_driver(url: URL, error: ModuleNotFoundError, extra: str | None = None) -> MissingDependencyError:
    extra = extra or {"postgresql": "postgres", "mysql": "mysql", "mariadb": "mysql"}.get(url.get_backend_name())
    return MissingDependencyError(
        f"The Python package {error.name!r}, the driver for {url.get_backend_name()}, is not installed.",
        next_step=f'pip install "dualwrite[{extra}]"',
    )
