"""The statements of the journal: its gate's, and its entries' (`dualwrite.stores.journal`)."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, Final

from sqlalchemy import BindParameter, Connection, bindparam, delete, insert, select, update

from dualwrite.errors import JournalSwitchedError
from dualwrite.stores.journal import JournalEntry, JournalLimits, is_open
from dualwrite.stores.rows import MAX_OWNER_LENGTH
from dualwrite.stores.sql.tables import gate_table as g
from dualwrite.stores.sql.tables import journal_table as j

_PREFIX: Final[BindParameter[str]] = bindparam("prefix_")
READ_EPOCH: Final = select(g.c.epoch).where(g.c.prefix == _PREFIX)
_SHARE: Final = READ_EPOCH.with_for_update(read=True)
_LOCK: Final = READ_EPOCH.with_for_update()
_CHANGE: Final = (
    update(g)
    .where(g.c.prefix == _PREFIX, g.c.epoch == bindparam("before"))
    .values(epoch=g.c.epoch + 1, changed_at=bindparam("now"), changed_by=bindparam("owner"))
)
_OPEN: Final = _CHANGE.values(max_entries=bindparam("entries"), max_size=bindparam("size"), max_age_ms=bindparam("age_ms"))
_INSERT: Final = insert(j)
_ANY: Final = select(j.c.id).where(j.c.prefix == _PREFIX).limit(1)
_IDS: Final = select(j.c.id).where(j.c.prefix == _PREFIX).limit(bindparam("most"))
_FIRST: Final = select(j).where(j.c.prefix == _PREFIX).order_by(j.c.id).limit(bindparam("most"))
_DELETE: Final = delete(j).where(j.c.id.in_(bindparam("ids", expanding=True)))
_CHUNK: Final = 1000
"""Entries of one INSERT or DELETE."""


def has_none(connection: Connection, prefix: str) -> bool:
    """Whether the prefix has no entries, as far as this connection sees."""
    return connection.scalar(_ANY, {"prefix_": prefix}) is None


def has_many(connection: Connection, prefix: str, count: int) -> bool:
    """Whether the prefix has at least so many entries; looks at no more of them."""
    return len(connection.execute(_IDS, {"prefix_": prefix, "most": count}).all()) >= count


def close_gate(connection: Connection, prefix: str, epoch: int, owner: str) -> bool:
    """Close the gate, if it still has this epoch."""
    return connection.execute(_CHANGE, _changing(prefix, epoch, owner)).rowcount == 1


def open_gate(connection: Connection, prefix: str, epoch: int, owner: str, limits: JournalLimits) -> bool:
    """Open the gate, if it still has this epoch, and record the limits."""
    of_limits = {"entries": limits.entries, "size": limits.size, "age_ms": round(limits.age * 1000)}
    return connection.execute(_OPEN, {**_changing(prefix, epoch, owner), **of_limits}).rowcount == 1


def _changing(prefix: str, epoch: int, owner: str) -> dict[str, Any]:
    return {"prefix_": prefix, "before": epoch, "now": datetime.now(UTC), "owner": owner[:MAX_OWNER_LENGTH]}


def lock_gate(connection: Connection, prefix: str) -> int | None:
    """Lock the gate until the end of the transaction, once those that write into the journal have ended; its newest epoch."""
    epoch: int | None = connection.scalar(_LOCK, {"prefix_": prefix})
    return epoch


def insert_entries(connection: Connection, prefix: str, entries: Sequence[JournalEntry]) -> int | None:
    """Lock the gate, shared, and insert the entries if it is open. Returns its newest epoch.

    The ids are in the order by cause: they are taken after every statement of the unit, so after the commit of whatever it has
    read. Two units that can't have seen each other may commit in another order than that of their ids.
    """
    epoch: int | None = connection.scalar(_SHARE, {"prefix_": prefix})
    if epoch is None or not is_open(epoch):
        return epoch
    rows = [
        {
            "prefix": prefix,
            "topic": entry.topic,
            "message_key": entry.key,
            "message_value": entry.value,
            "headers": entry.headers,
            "partition_number": entry.partition,
            "sent_at_ms": entry.sent_at_ms,
            "size": len(entry.key or b"") + len(entry.value or b""),
        }
        for entry in entries
    ]
    for start in range(0, len(rows), _CHUNK):
        connection.execute(_INSERT, rows[start : start + _CHUNK])
    return epoch


def entry_of_row(row: Any) -> JournalEntry:
    """The entry that is stored in a row."""
    return JournalEntry(row.topic, row.message_key, row.message_value, row.headers, row.partition_number, row.sent_at_ms)


def first_entries(connection: Connection, prefix: str, most: int) -> Sequence[Any]:
    """The first rows of the journal."""
    return connection.execute(_FIRST, {"prefix_": prefix, "most": most}).all()


def delete_entries(connection: Connection, ids: Sequence[int]) -> int:
    """Delete entries; return how many there were."""
    return sum(
        connection.execute(_DELETE, {"ids": ids[start : start + _CHUNK]}).rowcount for start in range(0, len(ids), _CHUNK)
    )


def switched(prefix: str, transactional_id: str, epoch: int | None) -> JournalSwitchedError:
    """The error for a transaction that finds the gate in another state than at its beginning."""
    now = "open: messages go into the journal" if epoch is not None and is_open(epoch) else "closed: messages go to Kafka"
    return JournalSwitchedError(
        "The journal's gate has changed since the transaction began. Both sides are rolled back.",
        transactional_id=transactional_id,
        cause=f"the gate of the prefix {prefix!r} is {now} again",
        next_step="run the whole transaction again",
        epoch=epoch,
    )
