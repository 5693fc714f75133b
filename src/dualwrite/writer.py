"""DualWriter: one id with its lanes, for one thread at a time (docs/how-it-works/recipe.md, KIP-939 "dual write recipe")."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeVar, overload

from dualwrite import process
from dualwrite.deadline import Deadline, check_may_block
from dualwrite.errors import (
    ConcurrentUseError,
    DualWriteError,
    NestedTransactionError,
    UsageError,
    WriterClosedError,
)
from dualwrite.failpoints import note_ignored_variable
from dualwrite.kafka.base import Producers, TransactionCoordinator
from dualwrite.observability import tracing
from dualwrite.observability.logs import SubjectLogger
from dualwrite.recipe import idle
from dualwrite.recipe.journaling import Journal, Keeper
from dualwrite.recipe.lanes import Lanes
from dualwrite.recipe.outcomes import raise_after_commit_error
from dualwrite.recipe.ownership import Parties
from dualwrite.recipe.phases import Phase
from dualwrite.recipe.republish import LostMessages
from dualwrite.recipe.unclaimed import UnclaimedLane
from dualwrite.recovery.report import RecoveryReport
from dualwrite.settings import OnLost, Timeouts, WhenKafkaIsDown, validate_lanes
from dualwrite.state import ProducerKind
from dualwrite.stores.base import TxnStateStore
from dualwrite.transaction import H, OpenTransaction, Transaction
from dualwrite.transactional import transactional
from dualwrite.transactional_id import name_lane, validate_transactional_id

log = SubjectLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")


class DualWriter(Generic[H]):
    """Writes to one database and to Kafka atomically, under one transactional id. Used by one thread at a time.

    `connect` with a SQLAlchemy Engine returns a `DualWriter[Connection]`, whose transactions are `Transaction[Connection]`.

    `dualwrite.connect` builds a writer. Opening it claims the id, resolves what the previous owner left in doubt, and takes the
    id over; from then on no previous owner can commit to the database or to Kafka.

    A writer has one or more *lanes*: separate transactional ids (`orders`, `orders~1`, `orders~2`), each with its own claim,
    row and producer. Transactions rotate over the lanes, so that none waits until Kafka has written the markers of the previous
    one. They still run one after another: in each partition the messages are in the order of the transactions. Opening claims
    and resolves every lane of the id, including the additional lanes of an earlier writer.

    Args:
        store: The database that keeps the row; closed with the writer if `owns_store`.
        transactional_id: The logical id: stays the same across restarts; only one writer may use it at a time.
        producers: Makes the producer for a Kafka transactional id; its `kind` says which producer that is.
        coordinator: Kafka's side, for recovery; closed with the writer if `owns_coordinator`.
        lanes: The number of lanes, 1 to 100. It may change between one opening and the next.
        timeouts: Time limits.
        on_lost: What is done about transactions that the database has committed and Kafka has aborted. "republish" publishes
            their messages again, exactly once, from the log: when the writer opens, before its first transaction, and when
            Kafka aborts a transaction of the writer itself. What can't be published again, and what is unverified, makes
            opening raise LostTransactionError or UnverifiedTransactionError. "raise" raises these errors for all of them;
            "report" lists them in `recovery_report` and continues.
        mark_republished: Whether messages that are published again get the header `dualwrite-republished`.
        owns_store: Whether `close` closes the store.
        owns_coordinator: Whether `close` closes the coordinator.
        journal: Where messages go while Kafka is down; None: transactions fail then.
        keeper: Looks after the journal, if it is the writer's own: started by `open`, stopped by `close`.

    Raises:
        InvalidTransactionalIdError: The id is empty, too long (including the lane suffix), or contains '#' or '~'.
        ConfigurationError: The number of lanes is not from 1 to 100.
    """

    def __init__(
        self,
        store: TxnStateStore,
        *,
        transactional_id: str,
        producers: Producers,
        coordinator: TransactionCoordinator,
        lanes: int = 1,
        timeouts: Timeouts | None = None,
        on_lost: OnLost = "republish",
        mark_republished: bool = False,
        owns_store: bool = False,
        owns_coordinator: bool = False,
        journal: Journal | None = None,
        keeper: Keeper | None = None,
    ) -> None:
        name = validate_transactional_id(transactional_id, lanes=validate_lanes(lanes))
        all_lanes = Lanes(
            Parties(store, coordinator, producers, timeouts or Timeouts()),
            transactional_id=name,
            count=lanes,
            journal=journal,
            lost=LostMessages(is_marked=mark_republished) if on_lost == "republish" else None,
        )
        self._set_up(
            store,
            name,
            all_lanes,
            journal,
            keeper,
            owns_store=owns_store,
            on_lost=on_lost,
            close_coordinator=coordinator.close if owns_coordinator else None,
        )
        self._producers = producers

    def _set_up(
        self,
        store: TxnStateStore,
        name: str,
        lanes: Lanes | UnclaimedLane,
        journal: Journal | None,
        keeper: Keeper | None,
        *,
        owns_store: bool,
        on_lost: OnLost = "report",
        close_coordinator: Callable[[], object] | None = None,
    ) -> None:
        self._id = name
        self._store = store
        self._owns_store = owns_store
        self._lanes = lanes
        self._journal = journal
        self._keeper = keeper
        self._on_lost = on_lost
        self._close_coordinator = close_coordinator
        self._recovery_pause = idle.RECOVER_AFTER
        self._mutex = threading.Lock()
        self._user: list[int] | None = None  # its thread; another list for each use, see `_exclusively`
        self._pid = process.pid

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._id!r}: {self.phase.value}>"

    # --- properties -----------------------------------------------------------------------------------------------------

    @property
    def transactional_id(self) -> str:
        """The logical transactional id."""
        return self._id

    @property
    def kafka_transactional_ids(self) -> tuple[str, ...]:
        """The ids of its lanes as Kafka sees them, with their current generations."""
        return self._lanes.kafka_transactional_ids

    @property
    def phase(self) -> Phase:
        """The writer's phase. If its lanes differ, the phase of the lane that the next transaction would wait for."""
        return self._lanes.phase

    @property
    def must_claim(self) -> bool:
        """Whether the next transaction begins with a claim in the database, as far as that is known."""
        return self._lanes.must_claim

    @property
    def recovery_report(self) -> RecoveryReport:
        """What the last opening found and resolved, lane by lane."""
        return self._lanes.report

    @property
    def is_two_phase(self) -> bool:
        """Whether Kafka takes part in a two-phase commit (KIP-939): it never aborts what the database has committed.

        Raises:
            BrokerUnavailableError: The writer has started while Kafka was down, and Kafka has not answered since.
        """
        return self._producers.kind is ProducerKind.NATIVE_TWO_PHASE

    @property
    def when_kafka_is_down(self) -> WhenKafkaIsDown:
        """Whether messages are written into the journal while Kafka does not answer, or a transaction fails."""
        return "fail" if self._journal is None else "journal"

    def new_owners(self) -> tuple[str, ...]:
        """After FencedError: who has claimed the id, one text per lane: `recoverer HOST:PID PROGRAM` or `writer …`.

        A recoverer needs the id only while it recovers, so `reopen()` disturbs nothing. A writer is still using it.

        Raises:
            StoreUnavailableError: The database can't be reached.
        """
        return self._lanes.new_owners()

    @property
    def store(self) -> TxnStateStore:
        """The store, which is the database's side."""
        return self._store

    # --- opening and closing --------------------------------------------------------------------------------------------

    def open(self) -> Self:
        """Claim the id with all its lanes, resolve what the previous owner left in doubt, and take the id over.

        With a journal, a writer whose Kafka does not answer only claims the id. It resolves and takes over before its first
        transaction that sends anything to Kafka; errors of these steps are raised by that transaction.

        Raises:
            StoreUnavailableError: The database can't be reached; the message names the address and the setting.
            StateTableMissingError: The table is missing; the message names the command that creates it.
            ClaimTimeoutError: Another transaction locks the id's row; the message names it if the database shows it.
            BrokerUnavailableError: Kafka can't be reached; the message names the address and the setting.
            LostTransactionError, UnverifiedTransactionError: See `on_lost`. Nothing is in doubt any more; the error says what
                to do before the id can be opened again.
            FencedError: Another writer or recoverer claimed the id while this writer was opening.
        """
        with self._exclusively("open()"):
            note_ignored_variable()
            if self.phase is not Phase.OPENING:
                raise UsageError(f"open() was called, but the writer {self.phase.value}.", transactional_id=self._id)
            self._acquire()
            if self._keeper is not None:
                self._keeper.start()
        return self

    def reopen(self) -> Self:
        """Claim the id again, from its current owner: after FencedError, or to recover at once after another error.

        Raises: as for `open`.
        """
        with self._exclusively("reopen()"):
            if self.phase is Phase.CLOSED:
                raise WriterClosedError("The writer is closed.", transactional_id=self._id)
            self._acquire()
        return self

    def _acquire(self) -> None:
        self._lanes.open(on_lost=self._on_lost)
        idle.IDLE.watch(self, DualWriter._clear_if_idle)

    def close(self, *, limit: Deadline | None = None) -> None:
        """Resolve what is still in doubt, clear the stored state, and release all resources. May be called more than once.

        If closing a lane fails, the other lanes are still closed.

        Args:
            limit: For resolving what is in doubt; by default 10 seconds.

        Raises:
            InDoubtTransactionError: The last transaction is in doubt and could not be resolved now; recovery will resolve it.
            UsageError: Called inside a transaction.
        """
        if self._lanes.are_closed:
            return
        with self._exclusively("close()"):
            try:
                if self._keeper is not None:
                    self._keeper.stop()
                self._lanes.close(limit)
            finally:
                if self._close_coordinator is not None:
                    self._close_coordinator()
                if self._owns_store:
                    self._store.close()
                idle.IDLE.unwatch(self)

    def __enter__(self) -> Self:
        if self.phase is Phase.OPENING:
            self.open()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None:
            self.close()
            return
        try:
            process.check_not_forked("leaving the writer", self._pid, self._id)
            if self._user == [threading.get_ident()]:  # an interrupt kept the block from ending: only its traceback could do so
                self._lanes.forget_transaction()
            self.close()
        except DualWriteError as closing:
            error.add_note(f"dualwrite, closing the writer: {closing}")

    # --- transactions -----------------------------------------------------------------------------------------------------

    def transaction(self) -> AbstractContextManager[Transaction[H]]:
        """One business transaction: the end of the block commits both sides, an exception rolls back both.

        An exception raised in the block propagates unchanged. In addition:

        Raises:
            FencedError: Another writer or recoverer has claimed the id. Both sides are rolled back. Raised before the
                block; on PostgreSQL by its first statement or message, or at its end.
            StoreCommitFailedError: The database did not commit (retriable). Both sides are rolled back.
            DeliveryError: A message was not stored; UnknownTopicError or MessageTooLargeError if that is the reason. Both sides
                are rolled back.
            TransactionTimeoutError: Too little of the transaction's timeout is left to commit safely. Both sides are rolled
                back.
            BrokerUnavailableError: Before the block: what is in doubt, or lost, can't be resolved or published again now.
            InDoubtTransactionError: The outcome is unknown; or the database committed, Kafka's side had been aborted, and the
                messages are not published again yet. The writer resolves it as soon as it can reach both sides: before its
                next transaction, or without one after a second or more; or recovery does.
            AfterCommitError: The transaction committed, and a listener of `tx.session`'s `after_commit` has failed.
            ProducerFencedError: Kafka refuses the producer. Both sides are rolled back. The error says why: for example another
                process uses the id at Kafka, or the id expired at its coordinator inside the block, before its first message
                (with librdkafka a DeliveryError, "Purged in queue").
            LostTransactionError: The database committed, but Kafka's side had been aborted: by a timeout (without two-phase
                commit), or by someone else; and the messages could not be published again, or `on_lost` is not "republish". It
                is recorded in the row.
            NestedTransactionError: Called inside another transaction of this writer.
            ConcurrentUseError: Another thread is using the writer.
            UsageError: An event loop runs in the thread, which the block would keep waiting: use `dualwrite.aio`.
            WriterClosedError: The writer is closed, or was never opened.
        """
        check_may_block("transaction()", "a pool's `async with pool.transaction() as tx`")
        return self._transaction_of(_traced)

    def checked_transaction(self) -> AbstractContextManager[Transaction[H]]:
        """Like `transaction`, for a pool: if the writer is fenced, the block does not begin."""
        return self._transaction_of(_traced, at_once=True)

    def untraced_transaction(self) -> AbstractContextManager[OpenTransaction]:
        """Like `transaction`, for a pool or a relay; without a trace: units have theirs, and rows that of their headers."""
        return self._transaction_of(lambda begun: begun)

    def joined_transaction(self, on: Any) -> AbstractContextManager[OpenTransaction]:
        """Like `transaction`, for a pool: a transaction that the user has begun on this connection; see `Lane.begin`."""
        return self._transaction_of(lambda begun: begun, on=on)

    @contextmanager
    def _transaction_of(
        self, handed_out: Callable[[OpenTransaction], T], *, at_once: bool = False, on: Any = None
    ) -> Iterator[T]:
        with self._exclusively("transaction()"):
            lane = self._lanes.next()
            trace = tracing.NO_TRACE
            try:
                transaction = lane.begin(at_once=at_once, on=on)
                begun = handed_out(transaction)
                trace = transaction.trace
                with trace.current():
                    yield begun
                process.check_not_forked("the end of transaction()", self._pid, self._id)
                lane.commit(transaction)
            except BaseException as error:  # KeyboardInterrupt too must leave neither side open
                if process.pid != self._pid:
                    raise  # a forked child: the connections belong to its parent, which is in the middle of the transaction
                with tracing.ending(trace):
                    lane.handle_error(error)
            finally:
                if process.pid == self._pid:
                    self._lanes.forget_transaction()
            trace.end(None)
            if (failed := transaction.store_transaction.after_commit_error) is not None:
                raise_after_commit_error(failed, self._id)

    @overload
    def transactional(self, function: Callable[Concatenate[Transaction[H], P], T], /) -> Callable[P, T]: ...

    @overload
    def transactional(self, /, *, attempts: int) -> Callable[[Callable[Concatenate[Transaction[H], P], T]], Callable[P, T]]: ...

    def transactional(
        self, function: Callable[Concatenate[Transaction[H], P], T] | None = None, /, *, attempts: int = 1
    ) -> Callable[P, T] | Callable[[Callable[Concatenate[Transaction[H], P], T]], Callable[P, T]]:
        """Run every call of a function in a transaction; the function receives the Transaction as its first argument.

        Use it as `@writer.transactional` or `@writer.transactional(attempts=3)`. The latter runs the whole function again, with
        backoff, after a retriable error (such as a serialization failure), which has rolled back both sides.
        """
        decorate = transactional(self.transaction, attempts=attempts, is_retriable=self._is_retriable)
        return decorate if function is None else decorate(function)

    def _is_retriable(self, error: BaseException) -> bool:
        """Whether the transaction was rolled back and may succeed if retried. A conflict may also come from the user's SQL."""
        return error.retriable if isinstance(error, DualWriteError) else self._store.passes(error)

    # --- one thread, one process --------------------------------------------------------------------------------------------

    @contextmanager
    def _exclusively(self, what: str) -> Iterator[None]:
        """The writer is this thread's in the block, which begins with no transaction."""
        me = [threading.get_ident()]
        process.check_not_forked(what, self._pid, self._id)
        with self._mutex:
            if self._user == me and self._lanes.in_transaction:
                raise NestedTransactionError(
                    f"{what} inside a transaction of the same writer.",
                    transactional_id=self._id,
                    next_step="for a part that may fail on its own, use a savepoint: tx.db.begin_nested()"
                    if what == "transaction()"
                    else f"leave the block first: call {what} between transactions",
                )
            if self._user not in (None, me):
                raise ConcurrentUseError(
                    f"{what} was called while another thread is using the writer.",
                    transactional_id=self._id,
                    next_step="open one writer per thread, each with its own transactional id",
                )
            self._user = me
        try:
            self._lanes.forget_transaction()  # in case an interrupt kept an earlier call from doing so
            yield
        except DualWriteError as error:
            name_lane(error, self._id)
            raise
        finally:
            try:
                self._ask_for_recovery()
            finally:
                if self._user is me:  # this use may have been interrupted, and end only when its traceback does, during another
                    self._user = None

    def _ask_for_recovery(self) -> None:
        """If a lane must be recovered, have the thread of `recipe.idle` do so soon, unless a transaction does so before."""
        if self._lanes.must_recover:
            idle.IDLE.call_within(self, self._recovery_pause)
        else:
            self._recovery_pause = idle.RECOVER_AFTER

    def _clear_if_idle(self) -> float:
        """Recover lanes, or else clear the stored states of idle ones, if no thread uses the writer.

        Called by the thread of `recipe.idle`. It holds the mutex, so `_exclusively` waits for it instead of raising an error.

        Returns:
            Seconds until the next call.
        """
        if not self._mutex.acquire(blocking=False):
            return self._next_look
        try:
            if self._user is not None or (self._journal is not None and self._journal.is_lost):
                return self._next_look  # an attempt would only delay the transactions that go on without Kafka
            self._lanes.forget_transaction()  # as in `_exclusively`
            if self._lanes.must_recover:
                return self._recover_if_idle()
            return self._lanes.clear_if_idle(idle.CLEAR_AFTER)
        finally:
            self._mutex.release()

    @property
    def _next_look(self) -> float:
        """Seconds until the next call while the writer is in use; its user may have asked for a recovery already."""
        return self._recovery_pause if self._lanes.must_recover else idle.CLEAR_AFTER

    def _recover_if_idle(self) -> float:
        try:
            self._lanes.recover(idle.RECOVER_LIMIT)
        except DualWriteError as error:
            log.info("what the last transaction has left could not be resolved yet: %s", error, transactional_id=self._id)
            pause = self._recovery_pause = min(self._recovery_pause * 2, idle.RECOVER_PAUSE)
            return pause
        self._recovery_pause = idle.RECOVER_AFTER
        return idle.CLEAR_AFTER


class JournaledWriter(DualWriter[H]):
    """A writer whose transactions commit their messages with their data, in the journal (`acknowledge="journaled"`).

    It has no transactional id of its own at Kafka, and claims nothing: any number of them write under one name, each in one
    thread at a time.

    Args:
        store: The database; closed with the writer if `owns_store`.
        journal: The journal.
        timeouts: Time limits.
        owns_store: Whether `close` closes the store.
        keeper: Publishes the journal, if it is the writer's own: started by `open`, stopped by `close`.
    """

    def __init__(
        self,
        store: TxnStateStore,
        journal: Journal,
        *,
        timeouts: Timeouts,
        owns_store: bool = False,
        keeper: Keeper | None = None,
    ) -> None:
        lane = UnclaimedLane(store, journal, timeouts)
        self._set_up(store, journal.prefix, lane, journal, keeper, owns_store=owns_store)

    @property
    def is_two_phase(self) -> bool:
        """True: Kafka can't abort what the database has committed, since the publisher tries again until it is published."""
        return True

    def _acquire(self) -> None:
        self._lanes.open(on_lost=self._on_lost)


def _traced(begun: OpenTransaction) -> Transaction[Any]:
    """What the block gets, whose trace begins."""
    if tracing.tracer is not None:
        begun.trace = tracing.unit_trace("transaction", begun.transactional_id, begun.number)
    return Transaction(begun)
