"""Transactions of no id, whose messages are committed with them in the journal: nothing decides about them but their COMMIT."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from sqlalchemy import select

from dualwrite.errors import DualWriteError
from dualwrite.stores.journal import JournalEntry, UnclaimedTransaction
from dualwrite.stores.rows import Claim
from dualwrite.stores.sql.dialect import EntriesRecord, Fence, Mark
from dualwrite.stores.sql.home import OwnConnection
from dualwrite.stores.sql.joined_transaction import JoinedTransaction, UsersConnection
from dualwrite.stores.sql.sql_context import StoreContext
from dualwrite.stores.sql.sql_journal import READ_EPOCH, switched
from dualwrite.stores.sql.sql_transaction import SqlStoreTransaction

_WRITING: Final = "writing into the journal"
_MOST_ENTRIES: Final = 50
"""Sent with COMMIT: each number of them is a statement of its own."""


def _no_claim(prefix: str) -> Claim:
    """Names the transaction in errors."""
    return Claim(prefix, 0, "")


class UnclaimedSqlTransaction(SqlStoreTransaction, UnclaimedTransaction):
    """One on a connection of the store's.

    Args:
        context: Of the store.
        prefix: Of the journal.
    """

    def __init__(self, context: StoreContext, prefix: str) -> None:
        super().__init__(context, _no_claim(prefix), gate=prefix)
        self._prefix = prefix

    def _mark(self) -> Mark:
        return Mark("", self._token, None)

    def _check_fence(self, current: Fence | None) -> None:
        assert current is not None
        self.own_id = int(current.fence or 0)
        self.is_fence_checked = True

    def write_journal(self, entries: Sequence[JournalEntry], transaction_number: int) -> None:
        del transaction_number
        self._open_connection()
        self._units.flush()
        self._outgoing.send_last()
        if not entries:
            return
        record = EntriesRecord(self._token, self._prefix, entries)
        if len(entries) > _MOST_ENTRIES or not self._outgoing.record_at_commit(record):
            with self._recording(_WRITING) as connection:
                marked = self._context.dialect.marked_condition()
                if marked is not None and not connection.scalar(select(marked), {"token": self._token}):
                    raise self._errors.ended_by_block()
                self._insert_entries(connection, entries)

    def _why_not_recorded(self, *, was_marked: bool, wrong_encoding: str | None = None) -> DualWriteError:
        del wrong_encoding
        self.rollback()
        return _why_not_written(self._context, self._prefix) if was_marked else self._errors.ended_by_block()


class UnclaimedJoinedTransaction(JoinedTransaction, UnclaimedTransaction):
    """One that the user has begun.

    Args:
        context: Of the store.
        prefix: Of the journal.
        users: Its connection.
    """

    def __init__(self, context: StoreContext, prefix: str, users: UsersConnection) -> None:
        super().__init__(context, _no_claim(prefix), users, gate=prefix)

    def _lock(self) -> None:
        self._check_not_ended()
        self.is_fence_checked = True

    def write_journal(self, entries: Sequence[JournalEntry], transaction_number: int) -> None:
        del transaction_number

        def write() -> None:
            self.own_id = self._insert_entries(self._connection, entries)

        if entries:
            self._execute(write, _WRITING)


def _why_not_written(context: StoreContext, prefix: str) -> DualWriteError:
    with OwnConnection(context.engine) as connection:
        return switched(prefix, prefix, connection.scalar(READ_EPOCH, {"prefix_": prefix}))
