"""Transactions of no id, whose messages are committed with them in the journal: nothing decides about them but their COMMIT."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NoReturn, TypeVar

from sqlalchemy import Connection, select

from dualwrite.errors import DualWriteError, StoreError, UsageError
from dualwrite.stores.journal import JournalEntry, LaterEntry, UnclaimedTransaction
from dualwrite.stores.rows import Claim
from dualwrite.stores.sql.dialect import EntriesRecord, ErrorClass, Fence, Mark, driver_error
from dualwrite.stores.sql.home import OwnConnection
from dualwrite.stores.sql.joined_transaction import JoinedTransaction, UsersConnection
from dualwrite.stores.sql.sql_context import StoreContext
from dualwrite.stores.sql.sql_errors import TransactionErrors
from dualwrite.stores.sql.sql_journal import READ_EPOCH, cancel, insert_later, switched
from dualwrite.stores.sql.sql_transaction import SqlStoreTransaction

T = TypeVar("T")

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

    def write_later(self, later: LaterEntry) -> None:
        self._later(lambda connection: insert_later(connection, self._prefix, later))

    def cancel(self, cancel_id: str) -> bool:
        return self._later(lambda connection: cancel(connection, self._prefix, cancel_id))

    def _later(self, step: Callable[[Connection], T]) -> T:
        with self.own_statements() as connection:
            try:
                return step(connection)
            except self._context.driver_errors as error:
                raise _why_not_later(self._context, self._errors, error) from error

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

    def write_later(self, later: LaterEntry) -> None:
        assert self._gate is not None
        prefix = self._gate
        try:
            self._users.run(lambda: insert_later(self._connection, prefix, later))
        except self._context.driver_errors as error:
            raise _why_not_later(self._context, self._errors, error) from error

    def cancel(self, cancel_id: str) -> NoReturn:
        raise UsageError(f"The message {cancel_id!r} can't be cancelled here.", next_step="call pool.cancel(id)")


def _why_not_later(context: StoreContext, errors: TransactionErrors, error: BaseException) -> DualWriteError:
    if context.dialect.classify(error) is not ErrorClass.DUPLICATE:
        return errors.translated(error, "writing a message for later, or cancelling one")
    return StoreError(
        "A message waits under this cancel_id already. The transaction can't go on.",
        cause=str(driver_error(error)).strip(),
        next_step="cancel it first: tx.cancel(id); or give this one another id",
    )


def _why_not_written(context: StoreContext, prefix: str) -> DualWriteError:
    with OwnConnection(context.engine) as connection:
        return switched(prefix, prefix, connection.scalar(READ_EPOCH, {"prefix_": prefix}))
