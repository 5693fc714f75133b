"""DualWriter: the recipe for one transactional id (DESIGN.md §4, KIP-939 "dual write recipe")."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Concatenate, Final, NoReturn, ParamSpec, Self, TypeVar, overload

from dualwrite.errors import (
    BrokerError,
    ConcurrentUseError,
    DualWriteError,
    FencedError,
    InDoubtTransactionError,
    NestedTransactionError,
    StoreCommitFailedError,
    UsageError,
    WriterClosedError,
)
from dualwrite.failpoints import hit
from dualwrite.kafka.base import TransactionalProducer, TransactionCoordinator
from dualwrite.lifecycle import Event, Phase, WriterState
from dualwrite.report import RecoveryReport, raise_for_lost
from dualwrite.session import Session
from dualwrite.settings import OnLost
from dualwrite.state import validate_transactional_id
from dualwrite.stores.base import StoreTransaction, TxnStateStore
from dualwrite.timeouts import Timeouts
from dualwrite.transaction import Transaction, forked
from dualwrite.transactional import transactional
from dualwrite.truth import in_doubt, is_seen_committed, lost_error, pass_over, rolled_back, tell

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

_BEFORE_COMMIT_POINT: Final = frozenset({Phase.ACTIVE, Phase.PREPARING, Phase.PREPARED, Phase.RECORDED})
_IN_TRANSACTION: Final = _BEFORE_COMMIT_POINT | {Phase.COMMITTING_DATABASE, Phase.COMMITTING_KAFKA, Phase.ABORTING}
_MUST_RECOVER: Final = frozenset({Phase.NEEDS_RECOVERY, Phase.IN_DOUBT})


class DualWriter:
    """Writes to one database and to Kafka as one, under one transactional id. One thread at a time.

    `dualwrite.connect` builds one. Opening it claims the id, settles what an earlier holder left, and takes the id over;
    from then on an earlier holder can neither commit to the database nor to Kafka.

    Args:
        store: The database that keeps the row; closed with the writer if `owns_backends`.
        transactional_id: The logical id: the same over restarts, and used by one writer at a time.
        producers: Makes the producer for a Kafka transactional id.
        coordinator: Kafka's side, for recovery; closed with the writer if `owns_backends`.
        timeouts: Time limits.
        on_lost: What opening does while lost or unverified transactions stand in the row unacknowledged: "raise"
            LostTransactionError or UnverifiedTransactionError, or "report" them in `recovery_report` and go on.
        owns_backends: Whether `close` closes store and coordinator.

    Raises:
        InvalidTransactionalIdError: The id is empty, too long, or holds '#' or '~'.
    """

    def __init__(
        self,
        store: TxnStateStore,
        *,
        transactional_id: str,
        producers: Callable[[str], TransactionalProducer],
        coordinator: TransactionCoordinator,
        timeouts: Timeouts | None = None,
        on_lost: OnLost = "raise",
        owns_backends: bool = False,
    ) -> None:
        self._id = validate_transactional_id(transactional_id)
        self._store = store
        self._coordinator = coordinator
        self._timeouts = timeouts or Timeouts()
        self._on_lost = on_lost
        self._owns_backends = owns_backends
        self._session = Session(store, coordinator, producers, transactional_id=transactional_id, timeouts=self._timeouts)
        self._state = WriterState()
        self._store_transaction: StoreTransaction | None = None
        self._transaction: Transaction | None = None
        self._mutex = threading.Lock()
        self._user: int | None = None
        self._pid = os.getpid()

    # --- what can be asked ----------------------------------------------------------------------------------------------

    @property
    def transactional_id(self) -> str:
        """The logical transactional id."""
        return self._id

    @property
    def phase(self) -> Phase:
        """Where the writer stands."""
        return self._state.phase

    @property
    def recovery_report(self) -> RecoveryReport:
        """What the last opening found and settled."""
        return self._session.report

    @property
    def store(self) -> TxnStateStore:
        """The database's side."""
        return self._store

    # --- opening and closing --------------------------------------------------------------------------------------------

    def open(self) -> Self:
        """Claim the id, settle what an earlier holder left, and take the id over.

        Raises:
            StoreUnavailableError: The database can't be reached; the message names address and setting.
            StateTableMissingError: The table is missing; the message names the command that makes it.
            ClaimTimeoutError: Another transaction holds the id's row; the message names it where the database tells.
            BrokerUnavailableError: Kafka can't be reached; the message names address and setting.
            LostTransactionError: See `on_lost`. Everything is settled; acknowledge and open again.
            FencedError: Somebody else claimed the id while we were opening.
        """
        with self._exclusively("open()"):
            if self._state.phase is not Phase.OPENING:
                raise UsageError(f"open() was called, but the writer {self._state.phase.value}.", transactional_id=self._id)
            self._take_id()
        return self

    def reopen(self) -> Self:
        """Take the id again, from whoever has it: after FencedError, or to recover at once after trouble.

        Raises: as `open`.
        """
        with self._exclusively("reopen()"):
            if self._state.phase is Phase.CLOSED:
                raise WriterClosedError("The writer is closed.", transactional_id=self._id)
            self._take_id()
        return self

    def close(self) -> None:
        """Settle what is unsettled, clear the stored state, and release everything. May be called more than once.

        Raises:
            InDoubtTransactionError: The last transaction is still unsettled and could not be settled now; recovery will.
            UsageError: Called inside a transaction.
        """
        if self._state.phase is Phase.CLOSED:
            return
        with self._exclusively("close()"):
            phase = self._state.phase
            try:
                uncertain = self._session.producer_must_be_replaced
                self._session.drop_producer()
                if phase in _MUST_RECOVER or (phase is Phase.READY and uncertain):
                    self._settle_before_closing()
                elif phase is Phase.READY:
                    self._session.clear_row()
            finally:
                self._advance(Event.CLOSE)
                if self._owns_backends:
                    self._coordinator.close()
                    self._store.close()

    def __enter__(self) -> Self:
        if self._state.phase is Phase.OPENING:
            self.open()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None:
            self.close()
            return
        try:
            self._check_process("leaving the writer")
            self._forget_abandoned_transaction()
            self.close()
        except DualWriteError as closing:
            error.add_note(f"dualwrite, closing the writer: {closing}")

    # --- transactions -----------------------------------------------------------------------------------------------------

    @contextmanager
    def transaction(self) -> Iterator[Transaction]:
        """One business transaction: leaving the block well commits both sides, an exception rolls both back.

        The user's own exception goes through unchanged. Besides it:

        Raises:
            FencedError: Somebody else has claimed the id. Both sides are rolled back.
            StoreCommitFailedError: The database did not commit (retriable). Both sides are rolled back.
            DeliveryError: A message was not stored; UnknownTopicError and MessageTooLargeError where that is why. Both sides
                are rolled back.
            TransactionTimeoutError: The transaction grew too old to commit safely. Both sides are rolled back.
            InDoubtTransactionError: The outcome could not be learnt. Nothing is guessed: recovery settles it.
            LostTransactionError: The database committed and Kafka had timed out (no two-phase commit); recorded.
            NestedTransactionError: Inside another transaction of this writer.
            ConcurrentUseError: Another thread is using the writer.
            WriterClosedError: The writer is closed, or was never opened.
        """
        with self._exclusively("transaction()"):
            try:
                self._make_ready()
                transaction = self._begin()
                yield transaction
                self._check_process("the end of transaction()")
                transaction.end()
                self._commit(transaction)
            except BaseException as error:  # noqa: BLE001  (KeyboardInterrupt too must leave neither side open)
                self._after_trouble(error)
            finally:
                self._forget_transaction()

    @overload
    def transactional(self, function: Callable[Concatenate[Transaction, P], T], /) -> Callable[P, T]: ...

    @overload
    def transactional(self, /, *, attempts: int) -> Callable[[Callable[Concatenate[Transaction, P], T]], Callable[P, T]]: ...

    def transactional(
        self, function: Callable[Concatenate[Transaction, P], T] | None = None, /, *, attempts: int = 1
    ) -> Callable[P, T] | Callable[[Callable[Concatenate[Transaction, P], T]], Callable[P, T]]:
        """Make every call of a function one transaction; the function gets the Transaction as its first argument.

        As `@writer.transactional`, or `@writer.transactional(attempts=3)`: then the whole function runs again, with
        back-off, after an error that is retriable (serialization failures and the like, after which nothing is left).
        """
        decorate = transactional(self.transaction, attempts=attempts, may_be_repeated=self._may_be_repeated)
        return decorate if function is None else decorate(function)

    def _may_be_repeated(self, error: BaseException) -> bool:
        """Whether nothing is left of the transaction and the same one may succeed; the user's own statement may tell it too."""
        return error.retriable if isinstance(error, DualWriteError) else self._store.is_conflict(error)

    # --- the recipe -------------------------------------------------------------------------------------------------------

    def _begin(self) -> Transaction:
        producer = self._session.producer
        self._store_transaction = self._store.begin(self._session.claim)  # checks the fence: F2
        self._advance(Event.BEGIN)
        producer.begin_transaction()
        hit("after_begin")
        self._transaction = Transaction(self._id, self._store_transaction, producer, timeout=self._timeouts.kafka)
        return self._transaction

    def _commit(self, transaction: Transaction) -> None:
        producer = self._session.producer
        store_transaction = self._store_transaction
        assert store_transaction is not None
        self._advance(Event.PREPARE)
        transaction.state = producer.prepare_transaction(timeout=self._timeouts.delivery)
        self._advance(Event.PREPARED)
        hit("after_prepare")
        store_transaction.record(
            transaction.state, generation=self._session.generation, transaction_number=self._state.transaction_number
        )
        self._advance(Event.RECORDED)
        hit("after_record")
        producer.check_time_left()
        hit("before_db_commit")
        self._advance(Event.COMMIT_SENT)
        store_transaction.commit()
        self._advance(Event.DATABASE_COMMITTED)
        hit("after_db_commit")
        hit("before_kafka_commit")
        producer.commit_transaction(timeout=self._timeouts.kafka)
        self._advance(Event.KAFKA_COMMITTED)
        hit("after_kafka_commit")

    # --- trouble: what follows depends on the phase alone, since each phase is entered before its call is made --------------

    def _after_trouble(self, error: BaseException) -> None:
        """Return where the transaction turned out committed and `error` tells nothing else; raise otherwise."""
        phase = self._state.phase
        if os.getpid() != self._pid:
            raise error  # a forked child: the connections are its parent's, in the middle of its transaction
        if phase in _BEFORE_COMMIT_POINT:
            self._advance(Event.ABORT)
            assert self._store_transaction is not None
            self._store_transaction.rollback()
            self._abort_kafka(error)
        if phase is Phase.COMMITTING_DATABASE and isinstance(error, StoreCommitFailedError):
            self._advance(Event.DATABASE_ROLLED_BACK)
            self._abort_kafka(error)
        if phase in (Phase.COMMITTING_DATABASE, Phase.COMMITTING_KAFKA):
            self._advance(Event.OUTCOME_UNKNOWN)
            self._resolve(error, database_committed=True if phase is Phase.COMMITTING_KAFKA else None)
            return
        if self._tells_fenced(error):
            self._advance(Event.FENCED)
        raise error

    def _abort_kafka(self, error: BaseException) -> NoReturn:
        """Abort one's own epoch and raise `error`; where the abort may not have worked, recovery by a new claim does it."""
        producer = self._session.producer
        clean = not producer.must_be_replaced
        if clean:
            try:
                producer.abort_transaction(timeout=self._timeouts.kafka)
            except DualWriteError as aborting:
                log.warning("%s: aborting Kafka's side: %s", self._id, aborting)
                clean = False
        if self._tells_fenced(error):
            if not clean:
                log.warning("%s: fenced; whoever took the id ends what is left of this transaction", self._id)
            self._advance(Event.FENCED)
            raise error
        if clean:
            self._advance(Event.ABORTED)
            raise error
        self._advance(Event.BROKEN)
        if isinstance(error, Exception):  # after KeyboardInterrupt and the like it waits for the next use, or for close()
            self._recover_after_abort(error)
        raise error

    def _recover_after_abort(self, error: Exception) -> None:
        """Recover at once, so that nothing stays open at Kafka; what fails now is done by the next transaction or close()."""
        try:
            self._recover_own()
        except FencedError as fenced:
            if isinstance(error, BrokerError):  # what the broker refused has this reason
                raise fenced from error
        except DualWriteError as recovering:
            log.warning("%s: recovery after an aborted transaction is put off: %s", self._id, recovering)

    def _resolve(self, error: BaseException, *, database_committed: bool | None) -> None:
        """Learn the outcome past the commit point, by a claim that succeeds only while the fence is ours (F8)."""
        number = self._state.transaction_number
        state = None if self._transaction is None else self._transaction.state
        if self._store_transaction is not None:
            self._store_transaction.rollback()  # a connection whose COMMIT is unknown is closed; its row lock goes with it
        try:
            self._session.make_claim(only_if_ours=True)
            database_committed = self._store.read_claimed(self._session.claim).transaction_number == number
            outcomes = self._session.settle()
        except FencedError as fenced:
            self._advance(Event.FENCED)
            kafka_id = self._session.kafka_transactional_id
            if not is_seen_committed(self._coordinator, kafka_id, state, database_committed=database_committed):
                tell(error, in_doubt(self._id, state, fenced, database_committed=database_committed))
            pass_over(error, f"the transaction of {self._id!r} committed on both sides; then somebody else claimed the id")
            return
        except DualWriteError as unresolved:
            tell(error, in_doubt(self._id, state, unresolved, database_committed=database_committed))
        generation = self._session.generation
        try:
            self._session.start()
            self._advance(Event.OPENED)
        except DualWriteError as starting:
            log.warning("%s: a new session is put off: %s", self._id, starting)
        if not database_committed:
            tell(error, rolled_back(self._id))
        lost = lost_error(next((o for o in outcomes if o.generation == generation), None))
        if lost is not None:
            tell(error, lost)
        pass_over(error, f"the transaction of {self._id!r} committed on both sides")

    # --- the id -----------------------------------------------------------------------------------------------------------

    def _make_ready(self) -> None:
        """See that a transaction may begin; recover first where the last one left something to recover."""
        phase = self._state.phase
        if phase in (Phase.OPENING, Phase.CLOSED):
            raise WriterClosedError(f"The writer {phase.value}.", transactional_id=self._id)
        if phase is Phase.FENCED:
            raise FencedError(
                "Somebody else has claimed the id.",
                transactional_id=self._id,
                next_step="stop this process, or reopen() to take the id back",
            )
        if phase is not Phase.READY or self._session.producer_must_be_replaced:
            self._recover_own()

    def _recover_own(self) -> None:
        """Settle and start a new session, by a claim that succeeds only while the fence is ours."""
        with self._phase_kept_true():
            self._session.recover()
            self._advance(Event.OPENED)

    def _take_id(self) -> None:
        """Settle and start a session, by a claim that takes the id from whoever has it."""
        with self._phase_kept_true():
            self._session.see_kafka()
            self._session.make_claim(only_if_ours=False)
            self._session.settle()
            if self._on_lost == "raise":
                raise_for_lost(self._session.report.unacknowledged)
            self._session.start()
            self._advance(Event.OPENED)

    @contextmanager
    def _phase_kept_true(self) -> Iterator[None]:
        try:
            yield
        except FencedError:
            self._advance(Event.FENCED)
            raise
        except BaseException:
            self._advance(Event.BROKEN)
            raise

    def _settle_before_closing(self) -> None:
        try:
            self._session.make_claim(only_if_ours=True)
            self._session.settle()
        except FencedError as fenced:
            log.warning("%s: closing: %s", self._id, fenced)
        except DualWriteError as error:
            raise InDoubtTransactionError(
                "The writer is closed, but its last transaction could not be settled.",
                transactional_id=self._id,
                cause=str(error),
                next_step="opening a writer on this id, or `dualwrite recover`, settles it",
                state="",
                database_committed=None,
            ) from error

    # --- bookkeeping --------------------------------------------------------------------------------------------------------

    def _advance(self, event: Event) -> None:
        self._state = self._state.after(event)

    def _tells_fenced(self, error: BaseException) -> bool:
        return isinstance(error, FencedError) and error.transactional_id == self._id

    def _forget_transaction(self) -> None:
        """Release the database connection, and leave no phase of a transaction behind, whatever interrupted it."""
        if os.getpid() != self._pid:
            return
        if self._transaction is not None:
            self._transaction.end()
        if self._state.phase in _IN_TRANSACTION:
            past = self._state.phase in (Phase.COMMITTING_DATABASE, Phase.COMMITTING_KAFKA)
            self._advance(Event.OUTCOME_UNKNOWN if past else Event.BROKEN)
        if self._store_transaction is not None:
            self._store_transaction.rollback()
        self._transaction = self._store_transaction = None

    def _forget_abandoned_transaction(self) -> None:
        """End what a block left that was interrupted between its last line and our first: only the traceback holds it then."""
        with self._mutex:
            if self._user == threading.get_ident():
                self._forget_transaction()
                self._user = None

    def _check_process(self, what: str) -> None:
        if os.getpid() != self._pid:
            raise forked(what, self._pid, self._id)

    @contextmanager
    def _exclusively(self, what: str) -> Iterator[None]:
        me = threading.get_ident()
        self._check_process(what)
        with self._mutex:
            if self._user == me and self._state.phase in _IN_TRANSACTION:
                raise NestedTransactionError(
                    f"{what} inside a transaction of the same writer.",
                    transactional_id=self._id,
                    next_step="for a part that may fail by itself, use a savepoint: tx.db.begin_nested()",
                )
            if self._user not in (None, me):
                raise ConcurrentUseError(
                    f"{what}, while another thread is using the writer.",
                    transactional_id=self._id,
                    next_step="one writer, with a transactional id of its own, for each thread",
                )
            self._user = me
        try:
            if self._store_transaction is not None or self._state.phase in _IN_TRANSACTION:
                self._forget_transaction()  # an interrupt kept an earlier call from finishing it
            yield
        finally:
            self._user = None
