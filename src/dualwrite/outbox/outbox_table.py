"""An outbox table in a SQL database, by its layout: checks of it, and its rows as a `Source`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import Connection, text

from dualwrite.errors import ConfigurationError, StoreError
from dualwrite.kafka.base import Message
from dualwrite.outbox.layout import OutboxLayout, RowMapper
from dualwrite.outbox.outbox_sql import LIMITS, Shard, is_integer, quoted_table, statements
from dualwrite.outbox.source import Source
from dualwrite.stores.sql import SqlStateStore

_MOST_IDS: Final = 500
"""Ids in one statement, except on PostgreSQL, where they are one parameter: SQLite had a limit of 999 parameters."""

Row = Sequence[Any]


@dataclass(frozen=True, slots=True)
class Waiting:
    """What is in an outbox.

    Args:
        rows: The rows that could be published now.
        later: Those whose `not_before` is in the future.
        oldest: The age of the oldest row of `rows`, in seconds; None if there is none, or the layout has no `created`.
    """

    rows: int
    later: int
    oldest: float | None


class OutboxTable(Source):
    """The rows of an outbox, or of a shard of it.

    Args:
        store: The database.
        layout: The table and its columns.
        shard: Only rows of this shard.

    Raises:
        ConfigurationError: The table or a column does not exist, or the ids have no order.
        StoreUnavailableError: The database can't be reached.
    """

    def __init__(self, store: SqlStateStore, layout: OutboxLayout, shard: Shard | None = None) -> None:
        self._layout = layout
        self._mapper = RowMapper(layout)
        self._id = layout.read_columns.index(layout.id)
        self._store = store
        self._dialect = store.engine.dialect.name
        self._quote = store.engine.dialect.identifier_preparer.quote
        types = self._checked_types()
        if layout.order_by is None and not is_integer(self._dialect, types[layout.id]):
            raise _no_order(layout)
        self._sql = statements(layout, types, self._dialect, self._quote, shard)

    @property
    def name(self) -> str:
        return self._layout.table

    def _checked_types(self) -> Mapping[str, Any]:
        """The type of each column, as the driver or SQLite's declaration has it."""
        table, database = self._layout.table, self._store.description
        try:
            found = self._store.short_transactions.query(self._types, f"looking at the table {table}")
        except StoreError as error:
            if error.retriable:
                raise
            raise _no_table(table, database, str(error.cause or error.what)) from error
        if not found:
            raise _no_table(table, database, "there is no such table")
        missing = [column for column in self._layout.columns if column not in found]
        if missing:
            raise ConfigurationError(
                f"The table {table!r} in {database} has no column {', '.join(map(repr, missing))}.",
                cause=f"it has the columns {', '.join(found)}",
                next_step="add them, or give the layout the names of the table's columns (None: there is none)",
            )
        return found

    def _types(self, connection: Connection) -> Mapping[str, Any]:
        table = quoted_table(self._layout.table, self._quote)
        if self._dialect == "sqlite":
            found = connection.execute(text(f"PRAGMA table_info({table.rpartition('.')[2]})")).all()
            return {row[1]: row[2].upper() for row in found}
        cursor: Any = connection.execute(text(f"SELECT * FROM {table} WHERE 1 = 0")).cursor  # noqa: S608  (quoted)
        return {each[0]: each[1] for each in cursor.description}

    # --- the contract of a source -----------------------------------------------------------------------------------------

    def has_rows(self, connection: Connection) -> bool:
        return connection.execute(self._sql.any).first() is not None

    def read(self, connection: Connection, most: int) -> Sequence[Row]:
        if self._dialect == "postgresql":
            connection.execute(LIMITS)
        if self._sql.ids is None:
            return connection.execute(self._sql.read, {"most": most}).all()
        found: list[Row] = []
        for some in _in_chunks(connection.scalars(self._sql.ids, {"most": most}).all()):
            found += connection.execute(self._sql.read, {"ids": some}).all()
        return found

    def messages(self, row: Row) -> Sequence[Message]:
        return (self._mapper(row),)

    def remove(self, connection: Connection, rows: Sequence[Row]) -> None:
        ids = [row[self._id] for row in rows]
        chunks = [ids] if self._dialect == "postgresql" else _in_chunks(ids)
        removed = sum(connection.execute(self._sql.remove, {"ids": some}).rowcount for some in chunks)
        if removed != len(ids):
            raise StoreError(
                f"{removed} rows of {self.name!r} were removed instead of the {len(ids)} that were read: all is undone.",
                cause=f"the column {self._layout.id!r} is not unique, or a trigger or a policy keeps rows from being removed",
                next_step="make it unique, and let the relay's user remove the rows",
            )

    def identify(self, row: Row) -> str:
        return str(row[self._id])

    def whole(self, connection: Connection, row: Row) -> Mapping[str, Any]:
        """All columns; those that a message is made of as `read` has returned them."""
        found = connection.execute(self._sql.whole, {"id": row[self._id]}).mappings().one()
        return {**{str(name): value for name, value in found.items()}, **dict(zip(self._layout.read_columns, row, strict=True))}

    # --- for people -------------------------------------------------------------------------------------------------------

    def waiting(self) -> Waiting:
        """What is in the outbox now. Counts its rows.

        Raises:
            StoreError: The database can't be reached, or has refused the query.
        """
        return self._store.short_transactions.query(self._waiting, f"counting the rows of {self.name}")

    def _waiting(self, connection: Connection) -> Waiting:
        later = None if self._sql.later is None else connection.scalar(self._sql.later)
        oldest = None if self._sql.oldest is None else connection.scalar(self._sql.oldest)
        age = None if oldest is None else max(0.0, float(oldest))
        return Waiting(connection.scalar(self._sql.count) or 0, later or 0, age)


def _in_chunks(ids: Sequence[Any]) -> Iterator[list[Any]]:
    return (list(ids[start : start + _MOST_IDS]) for start in range(0, len(ids), _MOST_IDS))


def _no_table(table: str, database: str, cause: str) -> ConfigurationError:
    return ConfigurationError(
        f"The outbox table {table!r} in {database} can't be read.",
        cause=cause,
        next_step="give the layout the table's name (schema.name, if it is in another schema), and the relay's user the "
        "privileges to read, lock and remove its rows; `dualwrite relay create-table` makes a new table",
    )


def _no_order(layout: OutboxLayout) -> ConfigurationError:
    return ConfigurationError(
        f"The column {layout.id!r} of {layout.table!r} is no integer, so it does not say in which order rows are published.",
        next_step="give the layout order_by=…: a column that grows from one insert to the next (such as a bigserial or an "
        "auto_increment), or the id itself if it does, as ULIDs and UUIDs of version 7 do",
    )
