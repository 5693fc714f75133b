"""The database's clock: all processes use it, so that differences between their machines' clocks don't matter."""

from __future__ import annotations

from functools import cache
from typing import Any, Final

from sqlalchemy import ColumnElement, Connection, Select, literal_column, select

# unix_timestamp() of a local time would go back by an hour at the end of the session's daylight saving time
_MYSQL: Final = "timestampdiff(MICROSECOND, '1970-01-01', utc_timestamp(6)) / 1e6"
_CLOCKS: Final = {
    "postgresql": "extract(epoch FROM pg_catalog.clock_timestamp())",
    "mysql": _MYSQL,
    "mariadb": _MYSQL,
    "sqlite": "(julianday('now') - 2440587.5) * 86400.0",
}


def clock_column(dialect: str) -> ColumnElement[Any]:
    """The clock as the column `clock` of a query: seconds since 1970, perhaps at the time before a wait for a lock."""
    return literal_column(_CLOCKS[dialect]).label("clock")


def database_clock(connection: Connection) -> float:
    """Seconds since 1970 by the database's clock, at the time of the call, not at the start of the transaction."""
    return float(connection.scalar(_reading(connection.dialect.name)) or 0.0)


@cache
def _reading(dialect: str) -> Select[Any]:
    return select(clock_column(dialect))
