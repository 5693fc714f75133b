"""In which schemas our tables are (PostgreSQL)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from sqlalchemy import Connection, text

from dualwrite.errors import ConfigurationError
from dualwrite.stores.sql.column_types import decoded
from dualwrite.stores.sql.table import TABLE_NAME

_TABLES: Final = text(
    "SELECT c.relname, n.nspname, pg_catalog.pg_backend_pid() AS pid FROM pg_catalog.pg_class c "
    "JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace "
    "WHERE c.relkind IN ('r', 'p', 'v', 'f') AND pg_catalog.left(c.relname::text, 6) = 'kafka_' "
    "AND n.nspname = ANY (pg_catalog.current_schemas(false)) AND pg_catalog.left(n.nspname::text, 8) <> 'pg_temp_' "
    "ORDER BY pg_catalog.array_position(pg_catalog.current_schemas(false), n.nspname) DESC"
)
"""The tables that unqualified names may mean, the first schema of the search_path last; no temporary ones."""
_PID: Final = text("SELECT pg_catalog.pg_backend_pid()")
_AS_CONNECTED: Final = text(
    "SELECT pg_catalog.set_config('search_path', reset_val, true) FROM pg_catalog.pg_settings WHERE name = 'search_path'"
)


def schemas_as_connected(connection: Connection, *, pid_at_login: int) -> Mapping[str, str] | None:
    """The schema of each table whose name begins like ours, on a connection that nobody has used before.

    None if a pooler is in between, which the process id shows: another client's `SET search_path` may still be in force on the
    connection to the server.

    Args:
        connection: The connection.
        pid_at_login: The server's process id as reported when the connection was made.
    """
    rows: Any = connection.execute(_TABLES).all()
    pid = rows[0].pid if rows else connection.scalar(_PID)
    return _schemas(rows) if pid == pid_at_login else None


def schemas_in_search_path(connection: Connection) -> Mapping[str, str]:
    """The schema of each table whose name begins like ours, as an unqualified name would be resolved.

    Args:
        connection: A connection that may have been used before, in no transaction.

    Raises:
        ConfigurationError: Its search_path means another table than the one that it was made with.
    """
    found = _schemas(connection.execute(_TABLES))
    connection.execute(_AS_CONNECTED)
    as_connected = _schemas(connection.execute(_TABLES))
    connection.rollback()
    now, first = found.get(TABLE_NAME), as_connected.get(TABLE_NAME)
    if None not in (now, first) and now != first:
        raise ConfigurationError(
            f"There is a table {TABLE_NAME} in the schema {first!r} and one in {now!r}, and either may be meant.",
            cause="the connection comes from a pool or a pooler, and its search_path was changed after it was made",
            next_step=f"name the schema that recovery shall read, too: schema={first!r}, or DUALWRITE_SCHEMA",
        )
    return found if first is None else as_connected


def _schemas(rows: Any) -> dict[str, str]:
    return {decoded(row.relname): decoded(row.nspname) for row in rows}
