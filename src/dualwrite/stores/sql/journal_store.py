"""The journals of a SQL database (`dualwrite.stores.journal`)."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, Final

from sqlalchemy import Connection, bindparam, func, insert, select

from dualwrite.errors import StoreError
from dualwrite.stores.journal import GateStatus, JournalLimits, JournalStore, NumberedEntry, is_open
from dualwrite.stores.rows import Claim
from dualwrite.stores.sql.dialect import ErrorClass
from dualwrite.stores.sql.short import ShortTransactions
from dualwrite.stores.sql.sql_context import StoreContext
from dualwrite.stores.sql.sql_journal import entry_of_row, lock_gate, open_gate
from dualwrite.stores.sql.sql_transaction import SqlStoreTransaction
from dualwrite.stores.sql.tables import gate_table as g
from dualwrite.stores.sql.tables import journal_table as j

_PREFIX: Final = "prefix_"
_READ_ALL: Final = select(g).order_by(g.c.prefix)
_READ: Final = select(g).where(g.c.prefix == bindparam(_PREFIX))
_COUNT: Final = select(j.c.prefix, func.count().label("entries"), func.sum(j.c.size).label("size")).group_by(j.c.prefix)
_COUNT_ONE: Final = _COUNT.where(j.c.prefix == bindparam(_PREFIX))
_CREATE: Final = insert(g)
_AFTER: Final = (
    select(j).where(j.c.prefix == bindparam(_PREFIX), j.c.id > bindparam("after")).order_by(j.c.id).limit(bindparam("most"))
)


class SqlJournal(JournalStore):
    """The journals of a SQL database."""

    def __init__(self, context: StoreContext, short: ShortTransactions) -> None:
        self._context = context
        self._short = short

    def begin(self, claim: Claim, prefix: str, *, is_group: bool, at_once: bool) -> SqlStoreTransaction:
        transaction = SqlStoreTransaction(self._context, claim, is_group=is_group, gate=prefix)
        transaction.begin(may_wait=not at_once)
        return transaction

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
            only = {} if prefix is None else {"prefix_": prefix}
            rows = connection.execute(_READ_ALL if prefix is None else _READ, only).all()
            counted = (
                {row.prefix: row for row in connection.execute(_COUNT if prefix is None else _COUNT_ONE, only)}
                if counts
                else {}
            )
            return [_status(row, counted.get(row.prefix), counts=counts) for row in rows]

        return self._short.query(work, "reading the journal's gate")

    def entries(self, prefix: str, *, after: int = 0, most: int) -> list[NumberedEntry]:
        def work(connection: Connection) -> list[NumberedEntry]:
            rows = connection.execute(_AFTER, {"prefix_": prefix, "after": after, "most": most})
            return [NumberedEntry(row.id, entry_of_row(row)) for row in rows]

        return self._short.query(work, "reading journal entries")

    def open(self, prefix: str, owner: str, limits: JournalLimits) -> bool:
        def work(connection: Connection) -> bool:
            epoch = lock_gate(connection, prefix)
            return epoch is not None and not is_open(epoch) and open_gate(connection, prefix, epoch, owner, limits)

        return self._short.run(work, "opening the journal's gate")


def _status(row: Any, counted: Any, *, counts: bool) -> GateStatus:
    entries: int | None = None
    size: int | None = None
    if counts:
        entries, size = (0, 0) if counted is None else (int(counted.entries), int(counted.size))
    limits = None if row.max_entries is None else JournalLimits(row.max_entries, row.max_size, row.max_age_ms / 1000)
    return GateStatus(row.prefix, row.epoch, row.changed_at, row.changed_by, entries, size, limits)
