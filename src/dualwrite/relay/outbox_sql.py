"""The SQL on an outbox table. No I/O.

The sizes of rows are read first, so that not more rows are read than fit into a batch. On PostgreSQL rows are locked when they
are read. On MariaDB and MySQL their ids are read without a lock, then these rows are locked: locking while searching would lock
the gaps as well, in which programs insert new rows. SQLite has a single lock, which the transaction has acquired already.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy import ColumnElement, Delete, Select, Update, column, func, literal_column
from sqlalchemy.sql.expression import TableClause

from dualwrite.errors import ConfigurationError
from dualwrite.relay.layout import OutboxLayout

MYSQL: Final = ("mysql", "mariadb")
"""SQLAlchemy's names."""

# what the drivers return as `type_code` of a column
_PG_INTEGERS: Final = (20, 21, 23, 1700)
_PG_JSON: Final = (114, 3802)
_PG_LOCAL_TIME: Final = 1114
_PG_BYTES: Final = (17, 25, 1042, 1043)  # octet_length knows their length without reading them
_TIMES: Final = {"postgresql": (1082, _PG_LOCAL_TIME, 1184), **dict.fromkeys(MYSQL, (7, 10, 12, 14))}
_MYSQL_INTEGERS: Final = (1, 2, 3, 8, 9, 246)
_MYSQL_TIMESTAMP: Final = 7

LIMITS: Final = sa.text(
    "SELECT pg_catalog.set_config('lock_timeout', '10s', true), "
    "pg_catalog.set_config('idle_in_transaction_session_timeout', '60s', true)"
)
"""On PostgreSQL, for a transaction that locks rows: how long it waits for those of others, and others wait if it is paused.

MariaDB and MySQL limit the first by themselves (`innodb_lock_wait_timeout`), SQLite by the store.
"""

_UTC_NOW: Final = {
    "postgresql": "timezone('UTC', clock_timestamp())",
    **dict.fromkeys(MYSQL, "utc_timestamp(6)"),
    "sqlite": "julianday('now')",
}
_NOW_TEXT: Final = "strftime('%Y-%m-%d %H:%M:%f', 'now')"
"""What SQLite's columns for times get."""
_ZONED_NOW: Final = {"postgresql": "clock_timestamp()", **dict.fromkeys(MYSQL, "now(6)")}


@dataclass(frozen=True, slots=True)
class Shard:
    """A part of a table: the rows for which the remainder of `expression`, an integer in SQL, by `count` is `number`."""

    expression: ColumnElement[Any]
    number: int
    count: int

    @property
    def condition(self) -> ColumnElement[bool]:
        """The condition in SQL, which each row fulfils for one number: the expression may be negative, or NULL."""
        return ((func.coalesce(self.expression, 0) % self.count) + self.count) % self.count == self.number


@dataclass(frozen=True, slots=True)
class Statements:
    """The statements on one table.

    Attributes:
        sizes: The ids of the first `most` rows, and how many bytes their messages have. Without locks.
        read: The first `most` rows, on MariaDB and MySQL those of `ids`; locked.
        remove: Deletes or marks the rows of `ids`.
        whole: All columns of the row `id`.
        any: Finds something if there is a row to publish.
        count: The number of rows to publish.
        later: The number of rows to publish later, if the layout has `not_before`.
        oldest: The age of the oldest row to publish in seconds, if the layout has `created`.
        checks: Read nothing, and fail if the user's SQL in an option of this name can't be run.
    """

    sizes: Select[Any]
    read: Select[Any]
    remove: Delete | Update
    whole: Select[Any]
    any: Select[Any]
    count: Select[Any]
    later: Select[Any] | None
    oldest: Select[Any] | None
    checks: Mapping[str, Select[Any]]


def key_hash(layout: OutboxLayout, dialect: str) -> ColumnElement[Any]:
    """The hash of the key, by which rows belong to shards.

    Raises:
        ConfigurationError: There is none.
    """
    if layout.key is None:
        raise ConfigurationError("Rows without a key have no shard.", next_step="give shard_by=…, or use one shard")
    if dialect == "postgresql":
        return func.hashtext(sa.cast(column(layout.key), sa.Text), type_=sa.Integer)
    if dialect in MYSQL:
        return func.crc32(column(layout.key), type_=sa.Integer)
    raise ConfigurationError(
        "SQLite has no function for a hash of the key.",
        next_step="use one shard: SQLite lets only one transaction write at a time; or give shard_by=…",
    )


def is_integer(dialect: str, kind: Any) -> bool:
    """Whether a column's type, as the driver or SQLite's declaration has it, is an integer."""
    if dialect == "sqlite":
        return "INT" in kind
    return kind in (_PG_INTEGERS if dialect == "postgresql" else _MYSQL_INTEGERS)


def is_time(dialect: str, kind: Any) -> bool:
    """Whether values of a column's type are compared as times; on SQLite each value shows whether it is one."""
    return dialect == "sqlite" or kind in _TIMES[dialect]


def users_sql(expression: str) -> ColumnElement[Any]:
    """SQL of a user. It is no template: colons and percent signs in it have no meaning of SQLAlchemy's or the driver's."""
    return literal_column(f"({expression}\n)")  # it may end with a comment


def table_of(name: str) -> TableClause:
    """The table `name` or `schema.name`."""
    schema, _, last = name.rpartition(".")
    return sa.table(last, schema=schema or None)


def statements(layout: OutboxLayout, types: Mapping[str, Any], dialect: str, shard: Shard | None) -> Statements:
    """The statements for a layout.

    Args:
        layout: The layout.
        types: The type of each column, as the driver or SQLite's declaration has it.
        dialect: SQLAlchemy's name of the database.
        shard: Only rows of this shard are published.
    """
    outbox = table_of(layout.table)
    identity: ColumnElement[Any] = column(layout.id)
    asked = {} if layout.where is None else {"where": users_sql(layout.where)}
    if shard is not None:
        asked["shard_by"] = shard.condition
    due, later, oldest = list(asked.values()), None, None
    if layout.published is not None:
        due.append(column(layout.published).is_(None))
    read = [_read(dialect, name, types[name]) for name in layout.read_columns]
    count = sa.select(func.count()).select_from(outbox)
    if layout.not_before is not None:
        moment, now = _moment(dialect, column(layout.not_before)), _now(dialect, types[layout.not_before])
        later = count.where(*due, moment > now)
        due.append(sa.or_(moment.is_(None), moment <= now))
        if dialect == "sqlite":
            read.append(sa.case((moment.is_(None), column(layout.not_before))))
    if layout.created is not None:
        age = _seconds_since(dialect, func.min(_moment(dialect, column(layout.created))), types[layout.created])
        oldest = sa.select(age).select_from(outbox).where(*due)
    order: list[ColumnElement[Any]] = [column(name) for name in dict.fromkeys((layout.order_by or layout.id, layout.id))]
    if dialect == "postgresql":
        chosen: ColumnElement[bool] = identity == func.any(sa.bindparam("ids"), type_=sa.Boolean)
    else:
        chosen = identity.in_(sa.bindparam("ids", expanding=True))
    first = sa.select(*read).select_from(outbox).where(*due).order_by(*order)
    most = sa.bindparam("most", type_=sa.Integer)
    return Statements(
        sizes=first.with_only_columns(identity, _size(layout, types, dialect)).limit(most),
        read=(first.where(chosen) if dialect in MYSQL else first.limit(most)).with_for_update(),
        remove=_removal(layout, types, dialect, outbox).where(chosen),
        whole=sa.select(sa.text("*")).select_from(outbox).where(identity == sa.bindparam("id")),
        any=sa.select(identity).select_from(outbox).where(*due).limit(literal_column("1")),
        count=count.where(*due),
        later=later,
        oldest=oldest,
        checks={name: count.where(each, literal_column("1 = 0")) for name, each in asked.items()},
    )


def _removal(layout: OutboxLayout, types: Mapping[str, Any], dialect: str, outbox: TableClause) -> Delete | Update:
    if layout.published is None:
        return sa.delete(outbox)
    published: sa.ColumnClause[Any] = column(layout.published)
    now = literal_column(_NOW_TEXT) if dialect == "sqlite" else _now(dialect, types[layout.published])
    return sa.update(sa.table(outbox.name, published, schema=outbox.schema)).values({published: now}).where(published.is_(None))


def _read(dialect: str, name: str, kind: Any) -> ColumnElement[Any]:
    """The column in a SELECT: JSON as the text that the table has, not as the driver's objects."""
    return sa.cast(column(name), sa.Text).label(name) if dialect == "postgresql" and kind in _PG_JSON else column(name)


def _size(layout: OutboxLayout, types: Mapping[str, Any], dialect: str) -> ColumnElement[Any]:
    """The bytes of what may be large in a row."""
    size: ColumnElement[Any] = literal_column("0")
    for name in dict.fromkeys((layout.key, layout.value, layout.headers, *layout.header_columns.values())):
        if name is None:
            continue
        value: ColumnElement[Any] = column(name)
        if dialect == "postgresql" and types[name] not in _PG_BYTES:
            value = sa.cast(value, sa.Text)
        length = func.length(sa.cast(value, sa.LargeBinary)) if dialect == "sqlite" else func.octet_length(value)
        size += func.coalesce(length, 0)
    return size


def _moment(dialect: str, value: ColumnElement[Any]) -> ColumnElement[Any]:
    """A time, to be compared with others: SQLite's are texts in several forms; NULL if it can't be read as a time."""
    return func.julianday(value) if dialect == "sqlite" else value


def _now(dialect: str, kind: Any) -> ColumnElement[Any]:
    """The time now, to be compared with a `_moment` of a column of this type: without a time zone it must be in UTC."""
    is_zoned = kind != _PG_LOCAL_TIME if dialect == "postgresql" else kind == _MYSQL_TIMESTAMP
    return literal_column((_ZONED_NOW if is_zoned else _UTC_NOW)[dialect])


def _seconds_since(dialect: str, moment: ColumnElement[Any], kind: Any) -> ColumnElement[Any]:
    """The seconds since a `_moment` of a column of this type."""
    now = _now(dialect, kind)
    if dialect == "postgresql":
        return sa.extract("epoch", now - moment)
    if dialect == "sqlite":
        return (now - moment) * literal_column("86400.0")
    return func.timestampdiff(literal_column("MICROSECOND"), moment, now) / literal_column("1e6")
