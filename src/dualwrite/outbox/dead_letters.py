"""Rows of outboxes that can't be sent, in the table `dualwrite_dead_letter`, until they are replayed or dropped."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final

from sqlalchemy import Connection, Select, bindparam, delete, func, insert, select

from dualwrite.errors import DualWriteError
from dualwrite.outbox.row_text import row_from, row_text
from dualwrite.outbox.source import Source
from dualwrite.state import MAX_TOPIC_LENGTH
from dualwrite.stores.sql import SqlStateStore
from dualwrite.stores.sql.tables import dead_letter_table as t

_LONGEST: Final = 255
_LONGEST_ERROR: Final = 4000
_MOST_IDS: Final = 500

_ADD: Final = insert(t)
_OURS: Final = t.c.relay == bindparam("of_relay")
_AMONG: Final = t.c.id.in_(bindparam("ids", expanding=True))
_LIST: Final = select(t).where(_OURS).order_by(t.c.id).limit(bindparam("most"))
_GET: Final = select(t).where(_OURS, _AMONG).order_by(t.c.id)
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
        row: Its columns.
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

    def oldest(self, most: int = 100) -> list[DeadLetter]:
        """The oldest dead letters.

        Raises:
            StoreError: The database's own errors, translated.
        """
        return self._query(_LIST, {"most": most})

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
                "source_table": source.name[:_LONGEST],
                "source_id": source.identify(each.row)[:_LONGEST],
                "topic": _topic_of(source, each.row),
                "error_kind": type(each.error).__qualname__,
                "error": str(each.error)[:_LONGEST_ERROR],
                "attempts": each.attempts,
                "failed_at": now,
                "source_row": row_text(source.whole(connection, each.row)),
            }
            for each in failed
        ]
        connection.execute(_ADD, rows)

    def taken(self, connection: Connection, ids: Collection[int]) -> list[DeadLetter]:
        """Those of the dead letters with these numbers that exist, locked, and removed at the end of this transaction."""
        some = {"of_relay": self._relay, "ids": list(ids)}
        found = _read(connection, _LOCK, some)
        if found:
            connection.execute(_DELETE, {**some, "ids": [each.id for each in found]})
        return found


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
    return [
        DeadLetter(
            row["id"],
            row["relay"],
            row["source_table"],
            row["source_id"],
            row["topic"],
            row["error_kind"],
            row["error"],
            row["attempts"],
            row["failed_at"],
            row_from(row["source_row"]),
        )
        for row in connection.execute(query, values).mappings()
    ]


def _topic_of(source: Source, row: Any) -> str | None:
    try:
        return source.messages(row)[0].topic[:MAX_TOPIC_LENGTH]
    except (DualWriteError, IndexError):
        return None
