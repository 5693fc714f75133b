"""The journals of a SQL database (`dualwrite.stores.journal`), and the statements about their gates and entries."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, Final, Protocol

from sqlalchemy import (
    ARRAY,
    BigInteger,
    BindParameter,
    ColumnElement,
    Connection,
    any_,
    bindparam,
    case,
    delete,
    func,
    insert,
    null,
    or_,
    select,
    update,
)

from dualwrite.deadline import Deadline, Pauses
from dualwrite.errors import JournalSwitchedError, StoreError
from dualwrite.state import Delivery, PreparedTxnState, delivery_text, state_text
from dualwrite.stores.journal import (
    GateStatus,
    JournaledTransaction,
    JournalEntry,
    JournalLimits,
    JournalStore,
    LaterEntry,
    NumberedEntry,
    UnclaimedTransaction,
    is_open,
)
from dualwrite.stores.rows import MAX_OWNER_LENGTH, Claim
from dualwrite.stores.sql.dialect import ErrorClass, StateRecord
from dualwrite.stores.sql.short import ShortTransactions
from dualwrite.stores.sql.tables import gate_table as g
from dualwrite.stores.sql.tables import journal_table as j
from dualwrite.stores.sql.tables import later_table as later

_PREFIX: Final[BindParameter[str]] = bindparam("prefix_")
READ_EPOCH: Final = select(g.c.epoch).where(g.c.prefix == _PREFIX)
_SHARE: Final = READ_EPOCH.with_for_update(read=True)
_LOCK: Final = READ_EPOCH.with_for_update()
_CHANGE: Final = (
    update(g)
    .where(g.c.prefix == _PREFIX, g.c.epoch == bindparam("before"))
    .values(epoch=g.c.epoch + 1, changed_at=bindparam("now"), changed_by=bindparam("owner"), failure=None)
)
_LIMITS: Final[dict[str, BindParameter[int]]] = {
    "max_entries": bindparam("entries"),
    "max_size": bindparam("size"),
    "max_age_ms": bindparam("age_ms"),
}
_OPEN: Final = _CHANGE.values(_LIMITS)
_LIMIT: Final = (
    update(g)
    .where(g.c.prefix == _PREFIX, or_(*(g.c[name].is_distinct_from(limit) for name, limit in _LIMITS.items())))
    .values(_LIMITS)
)
_OWN_ID: Final[ColumnElement[int]] = func.pg_catalog.txid_current(type_=BigInteger)
_SHARE_AND_SAY: Final = _SHARE.add_columns(_OWN_ID.label("own_id"))
"""This and the following are for PostgreSQL, which tells later what has become of a transaction."""
_INSERT: Final = insert(j)
_CONTENT: Final = [column for column in j.c if column.name != "id"]
_INSERT_ONE: Final = (
    insert(j)
    .from_select(
        _CONTENT,
        select(*(bindparam(f"of_{column.name}", type_=column.type) for column in _CONTENT))
        .select_from(g)
        .where(g.c.prefix == bindparam("of_prefix", type_=j.c.prefix.type), g.c.epoch % 2 == 1)
        .with_for_update(read=True),
    )
    .execution_options(preserve_rowcount=True)
)
_INSERT_ONE_AND_SAY: Final = _INSERT_ONE.returning(_OWN_ID)
_IDS: Final = select(j.c.id).where(j.c.prefix == _PREFIX).limit(bindparam("most"))
_SUMMED: Final = (
    select(j, func.sum(j.c.size).over(order_by=j.c.id).label("total"))
    .where(j.c.prefix == _PREFIX)
    .order_by(j.c.id)
    .limit(bindparam("most"))
    .subquery()
)
_BATCH: Final = select(_SUMMED).where(_SUMMED.c.total - _SUMMED.c.size <= bindparam("bytes")).order_by(_SUMMED.c.id)
_ENTRIES: Final = select(j).where(j.c.prefix == _PREFIX, j.c.id > bindparam("after")).order_by(j.c.id).limit(bindparam("most"))
_INSERT_LATER: Final = insert(later)
_CANCEL: Final = delete(later).where(later.c.prefix == _PREFIX, later.c.cancel_id == bindparam("cancel"))
_DUE: Final = (
    select(later)
    .where(later.c.prefix == _PREFIX, later.c.due_ms <= bindparam("now_ms"))
    .order_by(later.c.due_ms, later.c.id)
    .limit(bindparam("most"))
)
_DUE_SIZES: Final = _DUE.with_only_columns(later.c.size)
_LOCK_DUE: Final = _DUE.with_for_update(skip_locked=True)
_NEXT_DUE: Final = select(func.min(later.c.due_ms)).where(later.c.prefix == _PREFIX)
_DELETE_LATER: Final = delete(later).where(later.c.id.in_(bindparam("ids", expanding=True)))
_DELETE: Final = delete(j).where(j.c.id.in_(bindparam("ids", expanding=True)))
_DELETE_ANY: Final = delete(j).where(j.c.id == any_(bindparam("ids", type_=ARRAY(BigInteger))))
"""The same on PostgreSQL, as one text for any number of them."""
_WRITTEN_AT: Final = case((j.c.has_own_time, null()), else_=j.c.sent_at_ms)
_COUNTS: Final = func.count().label("entries"), func.sum(j.c.size).label("size"), func.min(_WRITTEN_AT).label("oldest_ms")
_IS_DUE: Final = later.c.due_ms <= bindparam("now_ms")
_COUNTS_OF_LATER: Final = (
    func.count().label("number"),
    func.sum(case((_IS_DUE, 1), else_=0)).label("entries"),
    func.sum(case((_IS_DUE, later.c.size), else_=0)).label("size"),
    func.min(case((_IS_DUE, later.c.due_ms))).label("oldest_ms"),
)
_GATES: Final = (
    select(g).order_by(g.c.prefix),
    select(j.c.prefix, *_COUNTS).group_by(j.c.prefix),
    select(later.c.prefix, *_COUNTS_OF_LATER).group_by(later.c.prefix),
)
_GATES_OF_ONE: Final = tuple(each.where(each.selected_columns.prefix == _PREFIX) for each in _GATES)
_CREATE: Final = insert(g)
_FAIL: Final = update(g).where(g.c.prefix == _PREFIX).values(failure=bindparam("reason"))
_PAUSES: Final = 0.05, 1.0
"""Seconds before a transaction that has not ended yet is looked at again, and the limit up to which they are doubled."""
_CHUNK: Final = 1000
"""Entries of one INSERT or DELETE."""


def has_entries(connection: Connection, prefix: str, count: int = 1) -> bool:
    """Whether the prefix has at least so many entries, as far as this connection sees; looks at no more of them."""
    return len(connection.execute(_IDS, {"prefix_": prefix, "most": count}).all()) >= count


def close_gate(connection: Connection, prefix: str, epoch: int, owner: str) -> bool:
    """Close the gate, if it still has this epoch."""
    return connection.execute(_CHANGE, _changing(prefix, epoch, owner)).rowcount == 1


def open_gate(connection: Connection, prefix: str, epoch: int, owner: str, limits: JournalLimits) -> bool:
    """Open the gate, if it still has this epoch, and record the limits."""
    return connection.execute(_OPEN, {**_changing(prefix, epoch, owner), **_of_limits(limits)}).rowcount == 1


def record_limits(connection: Connection, prefix: str, limits: JournalLimits) -> None:
    """Record the limits, if they are others than the recorded ones."""
    connection.execute(_LIMIT, {"prefix_": prefix, **_of_limits(limits)})


def _of_limits(limits: JournalLimits) -> dict[str, int]:
    return {"entries": limits.entries, "size": limits.size, "age_ms": round(limits.age * 1000)}


def _changing(prefix: str, epoch: int, owner: str) -> dict[str, Any]:
    return {"prefix_": prefix, "before": epoch, "now": datetime.now(UTC), "owner": owner[:MAX_OWNER_LENGTH]}


def lock_gate(connection: Connection, prefix: str) -> int | None:
    """Lock the gate until the end of the transaction, once those that write into the journal have ended; its newest epoch."""
    epoch: int | None = connection.scalar(_LOCK, {"prefix_": prefix})
    return epoch


def insert_entries(connection: Connection, prefix: str, entries: Sequence[JournalEntry]) -> int | None:
    """Lock the gate, shared, and insert the entries if it is open.

    The ids are in the order by cause: they are taken after every statement of the unit, so after the commit of whatever it has
    read. Two units that can't have seen each other may commit in another order than that of their ids.

    Returns:
        What the database calls the transaction, or 0 if it does not say; None if the gate is not open.
    """
    says = connection.dialect.name == "postgresql"
    if len(entries) == 1:  # one round trip instead of two
        values = {f"of_{name}": value for name, value in _row(prefix, entries[0]).items()}
        done: Any = connection.execute(_INSERT_ONE_AND_SAY if says else _INSERT_ONE, values)
        return done.scalar() if says else (0 if done.rowcount == 1 else None)
    found: Any = connection.execute(_SHARE_AND_SAY if says else _SHARE, {"prefix_": prefix}).first()
    if found is None or not is_open(found.epoch):
        return None
    rows = [_row(prefix, entry) for entry in entries]
    for start in range(0, len(rows), _CHUNK):
        connection.execute(_INSERT, rows[start : start + _CHUNK])
    return int(found.own_id) if says else 0


def _row(prefix: str, entry: JournalEntry) -> dict[str, Any]:
    return {
        "prefix": prefix,
        "topic": entry.topic,
        "message_key": entry.key,
        "message_value": entry.value,
        "headers": entry.headers,
        "partition_number": entry.partition,
        "sent_at_ms": entry.sent_at_ms,
        "has_own_time": entry.has_own_time,
        "size": entry.size,
    }


def insert_later(connection: Connection, prefix: str, given: LaterEntry) -> None:
    """Insert a message for later."""
    connection.execute(_INSERT_LATER, {**_row(prefix, given.entry), "due_ms": given.due_ms, "cancel_id": given.cancel_id})


def cancel(connection: Connection, prefix: str, cancel_id: str) -> bool:
    """Delete the message that waits under this id, if there is one."""
    return connection.execute(_CANCEL, {"prefix_": prefix, "cancel": cancel_id}).rowcount == 1


def due_sizes(connection: Connection, prefix: str, now_ms: int, most: int) -> Sequence[int]:
    """The sizes of the first messages whose time has come."""
    return connection.scalars(_DUE_SIZES, {"prefix_": prefix, "now_ms": now_ms, "most": most}).all()


def lock_due(connection: Connection, prefix: str, now_ms: int, most: int) -> Sequence[Any]:
    """The first messages whose time has come, but those that somebody cancels now; locked."""
    return connection.execute(_LOCK_DUE, {"prefix_": prefix, "now_ms": now_ms, "most": most}).all()


def next_due(connection: Connection, prefix: str) -> int | None:
    """When the next message is due; None if none waits."""
    found: int | None = connection.scalar(_NEXT_DUE, {"prefix_": prefix})
    return found


def delete_later(connection: Connection, ids: Sequence[int]) -> int:
    """Delete messages that were due; return how many there were."""
    return connection.execute(_DELETE_LATER, {"ids": ids}).rowcount


def entry_of_row(row: Any) -> JournalEntry:
    """The entry that is stored in a row."""
    content = (row.topic, row.message_key, row.message_value, row.headers, row.partition_number)
    return JournalEntry(*content, row.sent_at_ms, row.has_own_time)


def first_batch(connection: Connection, prefix: str, most: int, size: int) -> tuple[Sequence[Any], bool]:
    """The first rows of the journal: as many as fit into so many rows and bytes, but one at least; and whether others did not.

    One row that does not fit any more may be fetched.
    """
    rows = connection.execute(_BATCH, {"prefix_": prefix, "most": most, "bytes": size}).all()
    has_more = len(rows) > 1 and rows[-1].total > size
    return (rows[:-1] if has_more else rows), has_more


def delete_entries(connection: Connection, ids: Sequence[int]) -> int:
    """Delete entries; return how many there were."""
    statement = _DELETE_ANY if connection.dialect.name == "postgresql" else _DELETE
    return sum(
        connection.execute(statement, {"ids": ids[start : start + _CHUNK]}).rowcount for start in range(0, len(ids), _CHUNK)
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


class RecordingTransaction(JournaledTransaction):
    """What the transactions of a SQL store record, whoever has begun them."""

    _claim: Claim
    _gate: str | None
    _token: str
    _store_id: str
    """Of the row, once the fence is checked; and the epoch of the gate."""
    _epoch: int | None

    @property
    def epoch(self) -> int:
        assert self._gate is not None
        return self._epoch or 0

    def _record_of(
        self, state: PreparedTxnState | None, generation: int, number: int, delivery: Delivery | None
    ) -> StateRecord:
        return StateRecord(
            id=self._claim.transactional_id,
            held_fence=self._claim.fence,
            held_store=self._store_id,
            token=self._token,
            state=state_text(state),
            of_generation=generation,
            number=number,
            delivered=delivery_text(delivery),
            now=datetime.now(UTC),
            gate=self._gate,
            seen_epoch=self._epoch,
        )

    def _insert_entries(self, connection: Connection, entries: Sequence[JournalEntry]) -> int:
        """As `insert_entries`. Raises: JournalSwitchedError, if the gate is not open."""
        assert self._gate is not None
        own_id = insert_entries(connection, self._gate, entries) if entries else 0
        if own_id is None:
            raise switched(self._gate, self._claim.transactional_id, None)
        return own_id


class BeginJournaled(Protocol):
    """Begins a transaction, which reads the gate of a prefix with its claim's fence."""

    def __call__(self, claim: Claim, /, *, may_wait: bool, gate: str) -> JournaledTransaction: ...


class BeginUnclaimed(Protocol):
    """Begins a transaction of no id, for the journal of a prefix; `on`: one that the user has begun on this connection."""

    def __call__(self, prefix: str, /, *, on: Any = None, may_wait: bool = False) -> UnclaimedTransaction: ...


class SqlJournal(JournalStore):
    """The journals of a SQL database.

    Args:
        short: Of the store.
        begin: Begins the store's transactions.
        begin_unclaimed: Those of no id.
    """

    def __init__(self, short: ShortTransactions, begin: BeginJournaled, begin_unclaimed: BeginUnclaimed) -> None:
        self._short = short
        self._begin = begin
        self._begin_unclaimed = begin_unclaimed

    def begin(self, claim: Claim, prefix: str, *, at_once: bool) -> JournaledTransaction:
        return self._begin(claim, may_wait=not at_once, gate=prefix)

    def begin_unclaimed(self, prefix: str, *, at_once: bool) -> UnclaimedTransaction:
        return self._begin_unclaimed(prefix, may_wait=not at_once)

    def begin_unclaimed_on(self, connection: Any, prefix: str) -> UnclaimedTransaction:
        return self._begin_unclaimed(prefix, on=connection)

    def has_committed(self, transaction: UnclaimedTransaction, *, timeout: float) -> bool | None:
        own_id, deadline, pauses = transaction.own_id, Deadline.after(timeout), Pauses(*_PAUSES)
        while own_id:
            found = self._short.query(
                lambda connection: self._short.dialect.has_committed(connection, own_id),
                "reading what has become of a transaction",
            )
            if found is not None or not deadline.pause(pauses):
                return found
        return None

    def prepare(self, prefix: str) -> GateStatus:
        found = self.gates(prefix, counts=False)
        if not found:
            values = {"prefix": prefix, "epoch": 0, "changed_at": datetime.now(UTC), "changed_by": ""}
            try:
                self._short.run(lambda connection: connection.execute(_CREATE, values) and None, "creating a journal's gate")
            except StoreError as error:
                if not self._short.is_caused_by(error, ErrorClass.DUPLICATE):  # another process has just created it
                    raise
            found = self.gates(prefix, counts=False)
        return found[0]

    def gates(self, prefix: str | None = None, *, counts: bool) -> list[GateStatus]:
        def work(connection: Connection) -> list[GateStatus]:
            (gates, entries, later_ones), only = (_GATES, {}) if prefix is None else (_GATES_OF_ONE, {"prefix_": prefix})
            rows = connection.execute(gates, only).all()
            if not counts:
                return [_status(row) for row in rows]
            in_journal = {row.prefix: row for row in connection.execute(entries, only)}
            now_ms = time.time_ns() // 1_000_000
            for_later = {row.prefix: row for row in connection.execute(later_ones, {"now_ms": now_ms, **only})}
            return [_counted(_status(row), in_journal.get(row.prefix), for_later.get(row.prefix)) for row in rows]

        return self._short.query(work, "reading journals and their gates")

    def entries(self, prefix: str, *, after: int = 0, most: int) -> list[NumberedEntry]:
        rows = self._short.query(
            lambda connection: connection.execute(_ENTRIES, {"prefix_": prefix, "most": most, "after": after}).all(),
            "reading journal entries",
        )
        return [NumberedEntry(row.id, entry_of_row(row)) for row in rows]

    def cancel(self, prefix: str, cancel_id: str) -> bool:
        return self._short.run(lambda connection: cancel(connection, prefix, cancel_id), "cancelling a message")

    def note_failure(self, prefix: str, failure: str | None) -> None:
        values = {"prefix_": prefix, "reason": failure}
        self._short.run(lambda connection: connection.execute(_FAIL, values) and None, "noting why a journal stays open")

    def open(self, prefix: str, owner: str, limits: JournalLimits) -> bool:
        def work(connection: Connection) -> bool:
            epoch = lock_gate(connection, prefix)
            if epoch is None or not is_open(epoch):
                return epoch is not None and open_gate(connection, prefix, epoch, owner, limits)
            record_limits(connection, prefix, limits)
            return False

        return self._short.run(work, "opening the journal's gate")


def _status(row: Any) -> GateStatus:
    limits = None if row.max_entries is None else JournalLimits(row.max_entries, row.max_size, row.max_age_ms / 1000)
    return GateStatus(row.prefix, row.epoch, row.changed_at, row.changed_by, limits=limits, failure=row.failure)


def _counted(status: GateStatus, in_journal: Any, for_later: Any) -> GateStatus:
    counts = [each for each in (in_journal, for_later) if each is not None]
    entries, size = (sum(int(getattr(each, name)) for each in counts) for name in ("entries", "size"))
    later_ones = 0 if for_later is None else int(for_later.number) - int(for_later.entries)
    oldest = min((each.oldest_ms / 1000 for each in counts if each.oldest_ms is not None), default=None)
    return replace(status, entries=entries, size=size, later=later_ones, oldest=oldest)
