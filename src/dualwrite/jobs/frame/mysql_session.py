"""Settings of a session with MariaDB or MySQL while rows are loaded and moved: without them, it would alter values silently."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Final

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

STRICT: Final = "STRICT_ALL_TABLES"
"""Refuse a value that does not fit: otherwise the server shortens texts, and replaces numbers by the nearest that fits."""
ZEROS_KEPT: Final = "NO_AUTO_VALUE_ON_ZERO"
"""Keep a 0 in an AUTO_INCREMENT column: by default it is replaced by the next number."""


@contextmanager
def sql_mode(connection: Connection, *modes: str) -> Iterator[None]:
    """Add modes to the session's `sql_mode` for the `with` block."""
    with _setting(connection, "sql_mode", lambda before: ",".join(dict.fromkeys([*filter(None, before.split(",")), *modes]))):
        yield


@contextmanager
def in_utc(connection: Connection) -> Iterator[None]:
    """Set the session's time zone to UTC for the `with` block: the server reads the text of a TIMESTAMP in that time zone."""
    with _setting(connection, "time_zone", lambda _: "+00:00"):
        yield


@contextmanager
def _setting(connection: Connection, name: str, wanted: Callable[[str], str]) -> Iterator[None]:
    before: str = connection.exec_driver_sql(f"SELECT @@SESSION.{name}").scalar_one()
    value = wanted(before)
    if value == before:
        yield
        return
    connection.exec_driver_sql(f"SET SESSION {name} = %s", (value,))
    try:
        yield
    finally:
        with suppress(DBAPIError):  # the settings of a broken connection are gone anyway
            connection.exec_driver_sql(f"SET SESSION {name} = %s", (before,))
