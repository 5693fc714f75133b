"""Rows of outboxes that can't be sent, in the table `dualwrite_dead_letter`, until they are replayed or dropped."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime
from decimal import Decimal
from functools import partial
from typing import Any, Final
from uuid import UUID

from sqlalchemy import Connection, Select, bindparam, delete, func, insert, literal_column, select

from dualwrite.errors import DualWriteError, StoredStateError
from dualwrite.relay.source import Source, fitting
from dualwrite.state import MAX_TOPIC_LENGTH
from dualwrite.stores.sql import SqlStateStore
from dualwrite.stores.sql.tables import dead_letter_table as t

_MAX_NAME_LENGTH: Final = 255
_MAX_ERROR_LENGTH: Final = 4000
_MAX_IDS: Final = 500

_ADD: Final = insert(t)
_OURS: Final = t.c.relay == bindparam("of_relay")
_AMONG: Final = t.c.id.in_(bindparam("ids", expanding=True))
_COLUMNS: Final = (
    *(t.c.id, t.c.relay, t.c.source_table, t.c.source_id, t.c.topic, t.c.error_kind, t.c.error, t.c.attempts, t.c.failed_at),
)
_LETTERS: Final = select(*_COLUMNS, t.c.source_row).where(_OURS)
_WITHOUT_ROWS: Final = select(*_COLUMNS, literal_column("'{}'")).where(_OURS)
_IDS: Final = select(t.c.id).where(_OURS).order_by(t.c.id)
_GET: Final = _LETTERS.where(_AMONG).order_by(t.c.id)
_SIZES: Final = _GET.with_only_columns(t.c.id, func.length(t.c.source_row))
_LOCK: Final = _GET.with_for_update()
_COUNT: Final = select(func.count()).select_from(t).where(_OURS)
_COUNT_SOME: Final = _COUNT.where(_AMONG)
_BY_RELAY: Final = select(t.c.relay, func.count()).group_by(t.c.relay).order_by(t.c.relay)
_DELETE: Final = delete(t).where(_OURS, _AMONG)


@dataclass(frozen=True, slots=True)
class Failed:
    """A row that can't be sent, why, and how often it was tried."""

    row: Any
    error: DualWriteError
    attempts: int


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A row that could not be sent.

    Args:
        id: Its number among the dead letters.
        relay: The relay's name.
        source: The table that it was in.
        source_id: Its id there.
        topic: Its topic, if the row names a valid one.
        error_kind: The class of the error.
        error: The error's message.
        attempts: How often it was tried alone.
        failed_at: When it was moved here.
        row: Its columns, unless they were left out.
    """

    id: int
    relay: str
    source: str
    source_id: str
    topic: str | None
    error_kind: str
    error: str
    attempts: int
    failed_at: datetime
    row: Mapping[str, Any]


class DeadLetters:
    """The dead letters of one relay.

    Args:
        store: The database.
        relay: The relay's name.
    """

    def __init__(self, store: SqlStateStore, relay: str) -> None:
        self._store = store
        self._relay = relay

    def check(self) -> None:
        """Check that the table exists.

        Raises:
            StateTableMissingError: It does not; `dualwrite db upgrade` creates it.
        """
        self.oldest(most=0)

    def oldest(self, most: int = 100, *, with_rows: bool = True) -> list[DeadLetter]:
        """The oldest dead letters, if asked for without the columns of their rows, which may be large.

        Raises:
            StoreError: The database's own errors, translated.
        """
        query = _LETTERS if with_rows else _WITHOUT_ROWS
        return self._query(query.order_by(t.c.id).limit(bindparam("most")), {"most": most})

    def ids(self) -> list[int]:
        """The numbers of all dead letters, the oldest first.

        Raises:
            StoreError: The database's own errors, translated.
        """
        ours = {"of_relay": self._relay}
        return self._store.short_transactions.query(
            lambda connection: list(connection.scalars(_IDS, ours)), "reading dead letters"
        )

    def get(self, ids: Collection[int]) -> list[DeadLetter]:
        """Those of the dead letters with these numbers that exist, in their order.

        Raises:
            StoreError: The database's own errors, translated.
        """
        return self._query(_GET, {"ids": list(ids)})

    def count(self) -> int:
        """How many there are.

        Raises:
            StoreError: The database's own errors, translated.
        """
        ours = {"of_relay": self._relay}
        return self._store.short_transactions.query(
            lambda connection: connection.execute(_COUNT, ours).scalar_one(), "counting dead letters"
        )

    def drop(self, ids: Collection[int]) -> int:
        """Delete dead letters, whose messages are never sent then.

        Returns:
            How many were deleted.

        Raises:
            StoreError: The database's own errors, translated.
        """
        some = {"of_relay": self._relay, "ids": list(ids)}
        return self._store.short_transactions.delete(_COUNT_SOME, _DELETE, some, "dropping dead letters")

    def _query(self, query: Select[Any], values: Mapping[str, Any]) -> list[DeadLetter]:
        work = partial(_read, query=query, values={"of_relay": self._relay, **values})
        return self._store.short_transactions.query(work, "reading dead letters")

    # --- in a dual write --------------------------------------------------------------------------------------------------

    def add(self, connection: Connection, source: Source, failed: Sequence[Failed]) -> None:
        """Add rows that `source` has read in this transaction, which removes them there."""
        now = datetime.now(UTC)
        rows = [
            {
                "relay": self._relay,
                "source_table": source.name[:_MAX_NAME_LENGTH],
                "source_id": source.identify(each.row)[:_MAX_NAME_LENGTH],
                "topic": _topic_of(source, each.row),
                "error_kind": type(each.error).__qualname__,
                "error": f"{each.error}"[:_MAX_ERROR_LENGTH],
                "attempts": each.attempts,
                "failed_at": now,
                "source_row": row_text(source.all_columns(connection, each.row)),
            }
            for each in failed
        ]
        connection.execute(_ADD, rows)

    def taken(self, connection: Connection, ids: list[int], size: int) -> tuple[list[DeadLetter], list[int]]:
        """The first of the dead letters with these numbers, locked, and removed at the end of this transaction.

        Args:
            connection: That of the dual write.
            ids: The numbers, in their order; those that don't exist (any more) are ignored.
            size: For how many bytes of rows; one letter may have more.

        Returns:
            The letters, and the numbers that are left for further transactions.
        """
        some = ids[:_MAX_IDS]
        found = connection.execute(_SIZES, {"of_relay": self._relay, "ids": some}).all()
        fit = fitting((row[1] for row in found), size)
        if fit < len(found):
            some = some[: some.index(found[fit][0])]
        values = {"of_relay": self._relay, "ids": some}
        letters = _read(connection, _LOCK, values)
        if letters:
            connection.execute(_DELETE, values)
        return letters, ids[len(some) :]


def letters_by_relay(store: SqlStateStore) -> dict[str, int]:
    """How many dead letters each relay has in a database; only relays that have some.

    Raises:
        StateTableMissingError: The database has no such table.
        StoreError: The database's own errors, translated.
    """
    return store.short_transactions.query(
        lambda connection: {row[0]: row[1] for row in connection.execute(_BY_RELAY)}, "counting dead letters"
    )


def _read(connection: Connection, query: Select[Any], values: Mapping[str, Any]) -> list[DeadLetter]:
    return [DeadLetter(*(*row[:-1], row_from(row[-1]))) for row in connection.execute(query, values)]


def _topic_of(source: Source, row: Any) -> str | None:
    try:
        return source.messages(row)[0].topic[:MAX_TOPIC_LENGTH]
    except (DualWriteError, IndexError):
        return None


# --- rows as text ---------------------------------------------------------------------------------------------------------

_TYPE: Final = "$type"
_VALUE: Final = "value"


def row_text(row: Mapping[str, Any]) -> str:
    """The row as JSON: an object with its columns. What JSON does not have is an object with `$type` and `value`."""
    return json.dumps({name: _plain(value) for name, value in row.items()}, ensure_ascii=False)


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | str | float):
        return value
    match value:
        case bytes() | bytearray() | memoryview():
            kind, plain = "bytes", base64.b64encode(bytes(value)).decode()
        case datetime() | date():
            kind, plain = "time", value.isoformat()
        case Decimal():
            kind, plain = "decimal", str(value)
        case UUID():
            kind, plain = "uuid", str(value)
        case dict() | list():
            kind, plain = "json", json.dumps(value)
        case _:
            kind, plain = "other", str(value)
    return {_TYPE: kind, _VALUE: plain}


_READ: Final[Mapping[str, Callable[[Any], Any]]] = {
    "bytes": base64.b64decode,
    "time": datetime.fromisoformat,
    "decimal": Decimal,
    "uuid": UUID,
    "json": json.loads,
    "other": str,
}


def row_from(text: str) -> dict[str, Any]:
    """The row of a text of `row_text`.

    Raises:
        StoredStateError: It is not one.
    """
    try:
        return {
            name: _READ[value[_TYPE]](value[_VALUE]) if isinstance(value, dict) else value
            for name, value in json.loads(text).items()
        }
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise StoredStateError(
            "The row of a dead letter can't be read.",
            cause="it was changed manually, or by a newer release",
            next_step="restore it, or drop the dead letter",
            text=text[:200],
        ) from error
