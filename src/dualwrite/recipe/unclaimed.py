"""Transactions of no id, for `acknowledge="journaled"`: their messages are committed with their data, in the journal.

Their recipe has one side only. So there is nothing to claim, to fence or to recover, and any number of them run side by side.
docs/how-it-works/journal.md says why the order by cause is kept.
"""

from __future__ import annotations

from typing import Any

from dualwrite.deadline import Deadline
from dualwrite.errors import DualWriteError, InDoubtTransactionError, JournalSwitchedError, StoreCommitFailedError
from dualwrite.failpoints import hit
from dualwrite.observability.logs import SubjectLogger
from dualwrite.observability.outages import BEGIN, DATABASE, database_at
from dualwrite.recipe.journaling import Journal, JournalRoute, entry_of
from dualwrite.recipe.lanes import reported
from dualwrite.recipe.outcomes import note_committed, raise_outcome, rolled_back, unknown
from dualwrite.recipe.phases import BEFORE_COMMIT_POINT, IN_TRANSACTION, Change, Phase, Way, WriterState
from dualwrite.recipe.remembered import RecordedTransaction
from dualwrite.recovery.report import RecoveryReport
from dualwrite.settings import OnLost, Timeouts
from dualwrite.stores.base import TxnStateStore
from dualwrite.stores.journal import LaterEntry, UnclaimedTransaction
from dualwrite.transaction import LaterMessage, OpenTransaction

log = SubjectLogger(__name__)


class _Later:
    """The messages of a transaction that wait for their time."""

    def __init__(self, transaction: UnclaimedTransaction) -> None:
        self._transaction = transaction

    def send(self, later: LaterMessage) -> None:
        entry = entry_of(later.message)
        at_its_time = entry if entry.has_own_time else entry._replace(sent_at_ms=later.due_ms)
        self._transaction.write_later(LaterEntry(at_its_time, later.due_ms, later.cancel_id))

    def cancel(self, cancel_id: str) -> bool:
        return self._transaction.cancel(cancel_id)


class UnclaimedLane(WriterState):
    """Runs transactions of no id, one after another; has the methods of `Lanes` and of `Lane` that a writer calls.

    Args:
        store: The database.
        journal: Of the prefix.
        timeouts: Time limits.

    Attributes:
        logical_id: The prefix, which names the transactions in errors and events.
        transaction: The current transaction.
    """

    def __init__(self, store: TxnStateStore, journal: Journal, timeouts: Timeouts) -> None:
        super().__init__()
        self.id = self.logical_id = journal.prefix
        self.transaction: OpenTransaction | None = None
        self.watch = reported
        self._journal = journal
        self._timeouts = timeouts
        self._database = database_at(store.description, is_local=store.is_local)
        self._route = JournalRoute(journal, journal.prefix)
        self._store_transaction: UnclaimedTransaction | None = None

    # --- in place of `Lanes` ----------------------------------------------------------------------------------------------

    must_recover = must_claim = False
    report = RecoveryReport(())
    kafka_transactional_ids: tuple[str, ...] = ()

    @property
    def in_transaction(self) -> bool:
        """Whether a transaction is in progress."""
        return self.phase in IN_TRANSACTION

    @property
    def are_closed(self) -> bool:
        """Whether it is closed."""
        return self.phase is Phase.CLOSED

    def new_owners(self) -> tuple[str, ...]:
        """Nobody: there is nothing to claim."""
        return ()

    def open(self, *, on_lost: OnLost) -> None:
        """Nothing to acquire."""
        del on_lost
        self.advance(Change.OPENED)

    def next(self) -> UnclaimedLane:
        """This one."""
        return self

    def clear_if_idle(self, after: float) -> float:
        """Nothing to do; see `Lanes`."""
        return after

    def recover(self, limit: float) -> None:
        """Nothing to do; see `Lanes`."""
        del limit

    def close(self, limit: Deadline | None = None) -> None:
        """Take no more transactions."""
        del limit
        if self.phase is not Phase.CLOSED:
            self.advance(Change.CLOSE)

    # --- the recipe, in place of `Lane` -----------------------------------------------------------------------------------

    def begin(self, *, at_once: bool = False, on: Any = None) -> OpenTransaction:
        """Begin the transaction; `on`: take one that the user has begun on this connection."""
        store, prefix = self._journal.store, self._journal.prefix
        with self._database.call(BEGIN) as call:
            begun = store.begin_unclaimed(prefix, at_once=at_once) if on is None else store.begin_unclaimed_on(on, prefix)
            self._store_transaction = begun
            call.has_answer = begun.is_fence_checked
        buffer = self._route.producer
        self.transaction = OpenTransaction(
            self.id, begun, buffer, timeout=self._timeouts.kafka, database=self._database, is_fenced=False, later=_Later(begun)
        )
        if self.way is Way.KAFKA:
            self.advance(Change.SWITCHED)
        self.advance(Change.BEGIN)
        buffer.begin_transaction()
        hit("after_begin")
        return self.transaction

    def commit(self, transaction: OpenTransaction) -> None:
        """End the block; then write the messages, and commit."""
        store_transaction = self._store_transaction
        assert store_transaction is not None
        store_transaction.before_commit()
        transaction.end()
        self.advance(Change.PREPARE)
        self.advance(Change.PREPARED)
        self._route.record(store_transaction, RecordedTransaction(self.transaction_number, None, 0, None))
        self.advance(Change.RECORDED)
        hit("before_db_commit")
        self.advance(Change.COMMIT_SENT)
        with self._database.call(DATABASE):
            store_transaction.commit()
        self.advance(Change.DATABASE_COMMITTED)
        self._store_transaction = None
        hit("after_db_commit")
        self._has_committed(transaction)
        self.advance(Change.KAFKA_COMMITTED)

    def _has_committed(self, transaction: OpenTransaction) -> None:
        transaction.outcome = self._route.outcome
        if self._route.has_messages:
            self._journal.written.set()

    def forget_transaction(self) -> None:
        """As `Lane.forget_transaction`."""
        if self.transaction is not None:
            self.transaction.end()
        if self.phase in IN_TRANSACTION:
            self.advance(Change.INTERRUPTED)
            self.ended(InterruptedError("an interrupt ended the transaction"), is_in_doubt=self.phase is Phase.IN_DOUBT)
        if self.phase in (Phase.IN_DOUBT, Phase.NEEDS_RECOVERY):  # nothing is left to recover
            self.advance(Change.OPENED)
        if self._store_transaction is not None:
            self._store_transaction.rollback()
        self.transaction = self._store_transaction = None

    # --- errors -----------------------------------------------------------------------------------------------------------

    def handle_error(self, error: BaseException) -> None:
        """As `Lane.handle_error`."""
        try:
            self._handle_error(error)
        except BaseException as raised:
            self.ended(raised, is_in_doubt=isinstance(raised, InDoubtTransactionError))
            raise

    def _handle_error(self, error: BaseException) -> None:
        transaction, store_transaction = self.transaction, self._store_transaction
        if store_transaction is not None and (failed := store_transaction.after_commit_error) is not None:
            log.error("a listener of after_commit has failed", exc_info=failed, transactional_id=self.id)
        if self.phase is Phase.COMMITTING_KAFKA and transaction is not None:
            self.advance(Change.KAFKA_COMMITTED)
            self._note_committed(error, transaction)
            return
        if store_transaction is None or transaction is None:
            raise error
        if self.phase in BEFORE_COMMIT_POINT:
            self.advance(Change.ABORT)
        elif self.phase is Phase.COMMITTING_DATABASE and (
            store_transaction.is_surely_rolled_back or isinstance(error, StoreCommitFailedError)
        ):
            self.advance(Change.DATABASE_ROLLED_BACK)
        else:
            self._resolve(error, transaction, store_transaction)
            return
        store_transaction.rollback()
        self.advance(Change.ABORTED)
        raise self._judged(error)

    def _judged(self, error: BaseException) -> BaseException:
        """If somebody has closed the gate, open it, so that another attempt finds it open."""
        if isinstance(error, JournalSwitchedError):
            try:
                self._journal.keep_open()
            except DualWriteError as opening:
                error.add_note(f"dualwrite, opening the journal: {opening}")
        return error

    def _resolve(self, error: BaseException, transaction: OpenTransaction, ended: UnclaimedTransaction) -> None:
        """Find out whether a transaction has committed whose COMMIT was not answered."""
        self.advance(Change.OUTCOME_UNKNOWN)
        ended.rollback()  # its connection is closed
        is_committed, why = None, None
        try:
            is_committed = self._journal.store.has_committed(ended, timeout=self._timeouts.claim)
        except DualWriteError as unresolved:
            why = unresolved
        self.advance(Change.OPENED)
        if is_committed is None:
            raise_outcome(error, unknown(self.id, why or error))
        if not is_committed:
            raise_outcome(error, rolled_back(self.id, error))
        self._note_committed(error, transaction)

    def _note_committed(self, error: BaseException, transaction: OpenTransaction) -> None:
        self._has_committed(transaction)
        self.ended(None)
        note_committed(error, f"the transaction of {self.id!r} {self._route.committed}")
