"""The database's clock: all processes use it, so that differences between their machines' clocks don't matter."""

from __future__ import annotations

from typing import Final

from sqlalchemy import Connection, text

# unix_timestamp() of a local time would go back by an hour at the end of the session's daylight saving time
_MYSQL: Final = text("SELECT timestampdiff(MICROSECOND, '1970-01-01', utc_timestamp(6)) / 1e6")
_CLOCKS: Final = {
    "postgresql": text("SELECT extract(epoch FROM pg_catalog.clock_timestamp())"),
    "mysql": _MYSQL,
    "mariadb": _MYSQL,
    "sqlite": text("SELECT (julianday('now') - 2440587.5) * 86400.0"),
}


def database_clock(connection: Connection) -> float:
    """Seconds since 1970 by the database's clock, at the time of the call, not at the start of the transaction."""
    return float(connection.scalar(_CLOCKS[connection.dialect.name]) or 0.0)
