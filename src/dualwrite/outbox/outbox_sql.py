"""The SQL on an outbox table. No I/O.

On PostgreSQL rows are locked when they are read. On MariaDB and MySQL their ids are read without a lock, then these rows are
locked: locking while searching would lock the gaps as well, in which programs insert new rows. SQLite has a single lock, which
the transaction has acquired already.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import TextClause, bindparam, text

from dualwrite.outbox.layout import OutboxLayout

MYSQL: Final = ("mysql", "mariadb")
"""SQLAlchemy's names."""

# what the drivers return as `type_code` of a column
_PG_INTEGERS: Final = (20, 21, 23, 1700)
_PG_JSON: Final = (114, 3802)
_PG_LOCAL_TIME: Final = 1114
_MYSQL_INTEGERS: Final = (1, 2, 3, 8, 9, 246)
_MYSQL_TIMESTAMP: Final = 7

LIMITS: Final = text(
    "SELECT pg_catalog.set_config('lock_timeout', '10s', true), "
    "pg_catalog.set_config('idle_in_transaction_session_timeout', '60s', true)"
)
"""On PostgreSQL, for a transaction that locks rows: how long it waits for those of others, and others wait if it is paused.

MariaDB and MySQL limit the first by themselves (`innodb_lock_wait_timeout`), SQLite by the store.
"""

_UTC_NOW: Final = {
    "postgresql": "timezone('UTC', clock_timestamp())",
    **dict.fromkeys(MYSQL, "utc_timestamp(6)"),
    "sqlite": "strftime('%Y-%m-%d %H:%M:%f', 'now')",
}
_ZONED_NOW: Final = {"postgresql": "clock_timestamp()", **dict.fromkeys(MYSQL, "now(6)")}


@dataclass(frozen=True, slots=True)
class Shard:
    """A part of a table: the rows for which the remainder of `expression`, an integer in SQL, by `count` is `number`."""

    expression: str
    number: int
    count: int

    @property
    def condition(self) -> str:
        """The condition in SQL, which each row fulfils for one number: the expression may be negative, or NULL."""
        return f"((coalesce(({self.expression}), 0) % {self.count}) + {self.count}) % {self.count} = {self.number}"


@dataclass(frozen=True, slots=True)
class Statements:
    """The statements on one table.

    Attributes:
        ids: On MariaDB and MySQL, the ids of the first `most` rows.
        read: The first `most` rows, or those of `ids`; locked.
        remove: Deletes or marks the rows of `ids`.
        whole: All columns of the row `id`.
        any: Finds something if there is a row to publish.
        count: The number of rows to publish.
        later: The number of rows to publish later, if the layout has `not_before`.
        oldest: The age of the oldest row to publish in seconds, if the layout has `created`.
    """

    ids: TextClause | None
    read: TextClause
    remove: TextClause
    whole: TextClause
    any: TextClause
    count: TextClause
    later: TextClause | None
    oldest: TextClause | None


def is_integer(dialect: str, kind: Any) -> bool:
    """Whether a column's type, as the driver or SQLite's declaration has it, is an integer."""
    if dialect == "sqlite":
        return "INT" in kind
    return kind in (_PG_INTEGERS if dialect == "postgresql" else _MYSQL_INTEGERS)


def quoted_table(table: str, quote: Callable[[str], str]) -> str:
    """The table's name in SQL, with its schema if it has one."""
    return ".".join(map(quote, table.split(".")))


def statements(
    layout: OutboxLayout, types: Mapping[str, Any], dialect: str, quote: Callable[[str], str], shard: Shard | None
) -> Statements:
    """The statements for a layout.

    Args:
        layout: The layout.
        types: The type of each column, as the driver or SQLite's declaration has it.
        dialect: SQLAlchemy's name of the database.
        quote: Quotes a name, if necessary.
        shard: Only rows of this shard are published.
    """
    table, identity = quoted_table(layout.table, quote), quote(layout.id)
    order = ", ".join(map(quote, dict.fromkeys((layout.order_by or layout.id, layout.id))))
    left = [f"({each})" for each in (layout.where, None if shard is None else shard.condition) if each is not None]
    if layout.published is not None:
        left.append(f"{quote(layout.published)} IS NULL")
    due, later = list(left), None
    if layout.not_before is not None:
        column, now = quote(layout.not_before), _now(dialect, types[layout.not_before])
        due.append(f"({column} IS NULL OR {column} <= {now})")
        later = f"SELECT count(*) FROM {table} {_where([*left, f'{column} > {now}'])}"
    oldest = None
    if layout.created is not None:
        kind = types[layout.created]
        oldest = f"SELECT {_seconds_since(dialect, f'min({quote(layout.created)})', kind)} FROM {table} {_where(due)}"
    rows = f"SELECT {', '.join(_read(dialect, quote(name), types[name]) for name in layout.read_columns)} FROM {table}"
    chosen = f"{identity} = ANY(:ids)" if dialect == "postgresql" else f"{identity} IN :ids"
    first, lock = f"{_where(due)} ORDER BY {order} LIMIT :most", "" if dialect == "sqlite" else " FOR UPDATE"
    among = f"{_where([*due, chosen])} ORDER BY {order}"
    return Statements(
        ids=text(f"SELECT {identity} FROM {table} {first}") if dialect in MYSQL else None,
        read=_with_ids(f"{rows} {among}{lock}", dialect) if dialect in MYSQL else text(f"{rows} {first}{lock}"),
        remove=_with_ids(_removal(layout, types, dialect, quote, chosen), dialect),
        whole=text(f"SELECT * FROM {table} WHERE {identity} = :id"),
        any=text(f"SELECT {identity} FROM {table} {_where(due)} LIMIT 1"),
        count=text(f"SELECT count(*) FROM {table} {_where(due)}"),
        later=None if later is None else text(later),
        oldest=None if oldest is None else text(oldest),
    )


def _removal(layout: OutboxLayout, types: Mapping[str, Any], dialect: str, quote: Callable[[str], str], chosen: str) -> str:
    table = quoted_table(layout.table, quote)
    if layout.published is None:
        return f"DELETE FROM {table} WHERE {chosen}"
    column = quote(layout.published)
    return f"UPDATE {table} SET {column} = {_now(dialect, types[layout.published])} WHERE {chosen} AND {column} IS NULL"


def _where(conditions: Sequence[str]) -> str:
    return f"WHERE {' AND '.join(conditions)}" if conditions else ""


def _with_ids(statement: str, dialect: str) -> TextClause:
    made = text(statement)
    return made if dialect == "postgresql" else made.bindparams(bindparam("ids", expanding=True))


def _read(dialect: str, column: str, kind: Any) -> str:
    """The column in a SELECT: JSON as the text that the table has, not as the driver's objects."""
    return f"{column}::text AS {column}" if dialect == "postgresql" and kind in _PG_JSON else column


def _now(dialect: str, kind: Any) -> str:
    """The time now, to be compared with a column of this type: without a time zone it must be in UTC."""
    is_zoned = kind != _PG_LOCAL_TIME if dialect == "postgresql" else kind == _MYSQL_TIMESTAMP
    return (_ZONED_NOW if is_zoned else _UTC_NOW)[dialect]


def _seconds_since(dialect: str, moment: str, kind: Any) -> str:
    """The seconds since a time in a column of this type."""
    now = _now(dialect, kind)
    if dialect == "postgresql":
        return f"extract(epoch FROM {now} - {moment})"
    if dialect == "sqlite":
        return f"(julianday({now}) - julianday({moment})) * 86400.0"
    return f"timestampdiff(MICROSECOND, {moment}, {now}) / 1e6"
