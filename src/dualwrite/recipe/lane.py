"""One lane of a writer: the recipe on one transactional id, and its error handling (docs/how-it-works/recipe.md)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Final, NoReturn, cast

from dualwrite.errors import (
    BrokerError,
    BrokerUnavailableError,
    DualWriteError,
    FencedError,
    InDoubtTransactionError,
    ProducerFencedError,
    StoreCommitFailedError,
)
from dualwrite.failpoints import hit
from dualwrite.kafka.base import Producers, TakeOverProducer, TransactionalProducer, TransactionCoordinator
from dualwrite.logs import SubjectLogger
from dualwrite.observability import observers, tracing
from dualwrite.outages import DATABASE, database_at, is_no_answer, level_of
from dualwrite.recipe.idle import RECOVER_LIMIT
from dualwrite.recipe.journaling import COMMIT_LIMIT, RENEWAL_LIMIT, Journal, JournalBuffer
from dualwrite.recipe.outcomes import (
    explain_fencing,
    has_committed_on_both_sides,
    in_doubt,
    not_published_yet,
    raise_outcome,
    report_committed,
    rolled_back,
)
from dualwrite.recipe.ownership import CHECK_LIMIT, Ownership
from dualwrite.recipe.phases import Event, Phase, WriterState
from dualwrite.recipe.republish import LostMessages
from dualwrite.recipe.transaction_report import TransactionReport
from dualwrite.recovery.report import GenerationOutcome, lost_error
from dualwrite.settings import SWITCH_AFTER, Acknowledge, Timeouts
from dualwrite.state import PreparedTxnState, ProducerKind
from dualwrite.stores.base import Claim, StoreTransaction, TxnStateStore
from dualwrite.stores.journal import JournaledTransaction, is_open
from dualwrite.transaction import OpenTransaction
from dualwrite.transactional_id import TransactionalId

log = SubjectLogger(__name__)

BEFORE_COMMIT_POINT: Final = frozenset({Phase.ACTIVE, Phase.PREPARING, Phase.PREPARED, Phase.RECORDED})
IN_TRANSACTION: Final = BEFORE_COMMIT_POINT | {Phase.COMMITTING_DATABASE, Phase.COMMITTING_KAFKA, Phase.ABORTING}
MUST_RECOVER: Final = frozenset({Phase.NEEDS_RECOVERY, Phase.IN_DOUBT})


class Lane(WriterState):
    """One of a writer's transactional ids: its phase, its ownership of the id, and at most one transaction.

    Transactions rotate over the lanes of a writer, which `Lanes` manages. Error handling depends only on the phase, because
    each phase is entered before its call is made. `id` is the lane's own id, which is that of its row: the logical id for lane
    0.
    """

    def __init__(
        self,
        store: TxnStateStore,
        coordinator: TransactionCoordinator,
        producers: Producers,
        *,
        transactional_id: str,
        number: int,
        timeouts: Timeouts,
        acknowledge: Acknowledge = "visible",
        journal: Journal | None = None,
        lost: LostMessages | None = None,
    ) -> None:
        super().__init__()
        self.report: TransactionReport | None = None
        self.id = TransactionalId(transactional_id, number).row
        self.ownership = Ownership(store, coordinator, producers, transactional_id=self.id, timeouts=timeouts)
        self._logical_id = transactional_id
        self._store = store
        self._database = database_at(store.description, is_local=store.is_local)
        self._coordinator = coordinator
        self._timeouts = timeouts
        self._producers = producers
        self._ends_with_decision = acknowledge == "decided"
        self._lost = lost
        self._requested: PreparedTxnState | None = None
        self._journal = journal
        self._buffer: JournalBuffer | None = None  # of the current transaction, if it writes into the journal
        self._only_journal = False  # Kafka's side must be recovered before anything is sent
        self._has_claimed_again = False
        self._store_transaction: StoreTransaction | None = None
        self._transaction: OpenTransaction | None = None

    # --- the recipe -------------------------------------------------------------------------------------------------------

    def begin(self, *, is_group: bool = False, at_once: bool = False) -> OpenTransaction:
        """Begin the transaction on both sides.

        `is_group`: it is that of a pool's group. `at_once`: check the fencing token here, and not only before the first
        message.
        """
        producer = self._chosen_producer()
        with self._database.call(DATABASE) as call:
            claim, journal = self.ownership.claim, self._journal
            # checks the fencing token, or `OpenTransaction` does so before the first message: rule F2
            if journal is not None:
                self._store_transaction = journal.store.begin(claim, journal.prefix, is_group=is_group, at_once=at_once)
            else:
                self._store_transaction = (
                    self._store.begin(claim) if at_once else self._store.begin_soon(claim, is_group=is_group)
                )
            call.has_answer = self._store_transaction.is_fence_checked
        if self._only_journal:
            self.advance(Event.OPENED)
        self.advance(Event.BEGIN)
        is_reported = observers.installed or tracing.tracer is not None
        self.report = TransactionReport(self._logical_id, self.id) if is_reported else None
        producer.begin_transaction()
        hit("after_begin")
        self._transaction = OpenTransaction(
            self._logical_id,
            self._store_transaction,
            producer,
            timeout=self._timeouts.kafka,
            database=self._database,
            divert=None if self._journal is None else self._divert,
            number=0 if self.report is None else self.report.number,
        )
        return self._transaction

    def commit(self, transaction: OpenTransaction) -> None:
        """End the block; then prepare, record, and commit both sides."""
        store_transaction = self._store_transaction
        assert store_transaction is not None
        store_transaction.before_commit()  # may run the user's code, such as an ORM flush, while messages can still be sent
        if self._journal is not None:
            transaction.check_fence()
        producer = self._current_producer
        transaction.end()
        self.advance(Event.PREPARE)
        transaction.state = producer.prepare_transaction(timeout=self._timeouts.for_delivery)
        if self.report is not None and producer.delivery is not None:
            self.report.messages = producer.delivery.messages
        self.advance(Event.PREPARED)
        hit("after_prepare")
        if self._buffer is not None:
            self._write_journal(self._buffer, store_transaction)
        else:
            # without two-phase commit, the remaining time is checked between the record and the COMMIT
            is_two_phase = self._producers.kind is ProducerKind.NATIVE_TWO_PHASE
            record = store_transaction.record_at_commit if is_two_phase else store_transaction.record
            record(
                transaction.state,
                generation=self.ownership.generation,
                transaction_number=self.transaction_number,
                delivery=producer.delivery,
            )
        self.advance(Event.RECORDED)
        hit("after_record")
        producer.check_time_left()
        hit("before_db_commit")
        self.advance(Event.COMMIT_SENT)
        with self._database.call(DATABASE):
            store_transaction.commit()
        self.advance(Event.DATABASE_COMMITTED)
        self._store_transaction = None
        hit("after_db_commit")
        transaction.outcome = "published" if self._buffer is None else "journaled"
        if transaction.on_decided is not None:
            transaction.on_decided()
        hit("before_kafka_commit")
        if self._ends_with_decision and self._buffer is None:
            self._request_commit(cast("TakeOverProducer", producer), transaction.state)
            return
        producer.commit_transaction(timeout=self._commit_limit)
        if transaction.state is not None:
            self.ownership.has_committed(transaction.state)
        self.advance(Event.KAFKA_COMMITTED)
        if self.report is not None:
            self.report.committed(transaction.outcome)
        self._end_journaled()
        hit("after_kafka_commit")

    # --- while Kafka is down (docs/how-it-works/journal.md) -----------------------------------------------------------------

    def claimed_without_kafka(self, claim: Claim) -> None:
        """Continue with a claim for which Kafka was not asked: the lane only writes into the journal until it is recovered."""
        self.ownership.adopt_without_kafka(claim)
        self.advance(Event.CLAIMED)
        self._has_claimed_again = True

    def make_ready_for_journal(self) -> None:
        """Before a transaction that will write into the journal: Kafka is not asked.

        What an earlier transaction has left at Kafka stays there, and in the row, until the lane is recovered. Only its COMMIT
        in the database must have ended.

        Raises: as for `Ownership.make_claim`.
        """
        self._only_journal = self.phase in MUST_RECOVER or self.phase is Phase.CONFIRMING
        if self.phase in MUST_RECOVER and not self._has_claimed_again:
            with self._phase_tracks_errors():
                self.ownership.make_claim()
            self._has_claimed_again = True

    def _chosen_producer(self) -> TransactionalProducer:
        self._buffer = None
        if self._journal is not None and (self._only_journal or self._journal.is_open):
            self._buffer = JournalBuffer(self._logical_id)
        return self._current_producer

    @property
    def _current_producer(self) -> TransactionalProducer:
        """The transaction's; a buffer while its messages go into the journal."""
        return self.ownership.producer if self._buffer is None else self._buffer

    def _divert(self) -> TransactionalProducer | None:
        """Once the gate is read: where the transaction's messages go, if not where it was assumed when it began.

        Raises:
            JournalSwitchedError: They would go to Kafka, but that is not possible yet.
        """
        assert self._journal is not None
        assert isinstance(self._store_transaction, JournaledTransaction)
        epoch = self._store_transaction.epoch
        self._journal.note(epoch)
        if not is_open(epoch) and self._buffer is not None:
            if self._only_journal or self.ownership.producer_must_be_replaced:
                raise self._journal.closed(self._logical_id)
            self._buffer = None
            self.ownership.producer.begin_transaction()
            return self.ownership.producer
        if is_open(epoch) and self._buffer is None:
            self.ownership.producer.abort_transaction(timeout=SWITCH_AFTER)  # it is empty: nothing is sent
            self._buffer = JournalBuffer(self._logical_id)
            return self._buffer
        return None

    def _write_journal(self, buffer: JournalBuffer, store_transaction: StoreTransaction) -> None:
        assert self._journal is not None
        assert isinstance(store_transaction, JournaledTransaction)
        if buffer.entries:
            self._journal.check_room(self._logical_id)
        store_transaction.write_journal(buffer.entries, self.transaction_number)
        hit("journal_after_entries")

    def _resolved_journaled(self, error: BaseException, *, database_committed: bool) -> None:
        """The outcome of a transaction without messages at Kafka is the database's."""
        self._has_claimed_again = True
        if not database_committed:
            self._raise_outcome(error, rolled_back(self.id, error))
        self._has_committed(error, f"the transaction of {self._name} committed, with its messages in the journal")
        if self._transaction is not None:
            self._transaction.outcome = "journaled"

    def _end_journaled(self) -> None:
        """After a transaction: if Kafka's side was to be recovered before it, that is still so."""
        self._buffer = None
        if self._only_journal:
            self._only_journal = False
            if self.phase is Phase.READY:
                self.advance(Event.BROKEN)

    @property
    def _commit_limit(self) -> float:
        return self._timeouts.kafka if self._journal is None else min(COMMIT_LIMIT, self._timeouts.kafka)

    def _request_commit(self, producer: TakeOverProducer, state: PreparedTxnState | None) -> None:
        """Request Kafka's commit, which the database has decided, without waiting for the response."""
        self._requested = state
        try:
            producer.request_commit(timeout=min(CHECK_LIMIT, self._timeouts.kafka))
        except BrokerUnavailableError as error:  # `confirm` requests it again
            log.info("Kafka's commit could not be requested yet: %s", error, transactional_id=self.id)
        self.advance(Event.COMMIT_REQUESTED)
        hit("decided_after_request")

    def confirm(self, *, timeout: float | None = None) -> None:
        """Read the response to the commit that the last transaction has requested, if it has not been read yet.

        The row names that transaction until then, and the lane begins no other one. So whatever happens in between, recovery
        commits it.

        Raises:
            BrokerUnavailableError: No response; the commit is requested again by the next call.
            DualWriteError: Any other response; the lane must be recovered.
        """
        if self.phase is not Phase.CONFIRMING:
            return
        try:
            self.ownership.producer.commit_transaction(timeout=self._timeouts.kafka if timeout is None else timeout)
        except BrokerUnavailableError:
            raise
        except BaseException:
            self.advance(Event.BROKEN)
            raise
        if self._requested is not None:
            self.ownership.has_committed(self._requested)
        self.advance(Event.KAFKA_COMMITTED)
        if self.report is not None:
            self.report.committed("published")

    @property
    def is_ready(self) -> bool:
        """Whether `make_ready` would do nothing that takes long."""
        return self.phase is Phase.READY and not self.ownership.producer_must_be_replaced

    def make_ready(self) -> None:
        """Before the lane's next transaction: `confirm`, or else recover the id, which commits what the database has decided.

        After a pause, register the id again if the coordinator has forgotten it.

        Raises:
            FencedError: Another writer or recoverer has claimed the id; it commits the transaction.
            DualWriteError: The id could not be recovered.
        """
        try:
            self.confirm()
        except DualWriteError as error:
            log.log(
                level_of(error),
                "recovering, since Kafka has not confirmed the last commit: %s",
                error,
                transactional_id=self.id,
            )
            if self.report is not None:
                self.report.failed(error, is_in_doubt=True)
            self.advance(Event.BROKEN)
        if self.phase in MUST_RECOVER or self.ownership.producer_must_be_replaced:  # rule F9
            self.recover()
        if self.ownership.may_be_forgotten:
            limit = nullcontext() if self._journal is None else self.ownership.limited(RENEWAL_LIMIT)
            with limit, self._phase_tracks_errors():
                self.ownership.renew_if_forgotten()

    def forget_transaction(self) -> None:
        """Release the database connection and leave every phase of a transaction, even if an interrupt ended it."""
        if self._transaction is not None:
            self._transaction.end()
        self._end_journaled()
        if self.phase in IN_TRANSACTION:
            past = self.phase in (Phase.COMMITTING_DATABASE, Phase.COMMITTING_KAFKA)
            self.advance(Event.OUTCOME_UNKNOWN if past else Event.BROKEN)
            if self.report is not None:
                self.report.failed(InterruptedError("an interrupt ended the transaction"), is_in_doubt=past)
        if self._store_transaction is not None:
            self._store_transaction.rollback()
        self._transaction = self._store_transaction = None

    # --- errors -----------------------------------------------------------------------------------------------------------

    def handle_error(self, error: BaseException) -> None:
        """Return if the transaction has committed and `error` only said that the outcome was unknown; raise otherwise."""
        try:
            self._handle_error(error)
        except BaseException as raised:
            if self.report is not None and self.phase is not Phase.CONFIRMING:  # then it has committed: `confirm` reports it
                self.report.failed(raised, is_in_doubt=self.phase is Phase.IN_DOUBT)
            raise

    def _handle_error(self, error: BaseException) -> None:
        phase = self.phase
        self._has_claimed_again = False
        if self._transaction is not None and (after_commit_error := self._transaction.after_commit_error) is not None:
            log.error("a listener of after_commit has failed", exc_info=after_commit_error, transactional_id=self.id)
        if phase in BEFORE_COMMIT_POINT:
            self.advance(Event.ABORT)
            assert self._store_transaction is not None
            self._store_transaction.rollback()
            if self._journal is not None:  # now: on SQLite the transaction has locked the whole database
                error = self._journal.judged(error, self._logical_id)
            self._abort_kafka(error)
        if phase is Phase.COMMITTING_DATABASE and self._is_surely_rolled_back(error):
            self.advance(Event.DATABASE_ROLLED_BACK)
            self._abort_kafka(error)
        if phase in (Phase.COMMITTING_DATABASE, Phase.COMMITTING_KAFKA):  # rule KU
            self.advance(Event.OUTCOME_UNKNOWN)
            self._resolve(error, database_committed=True if phase is Phase.COMMITTING_KAFKA else None)
            return
        if self._means_fenced(error):
            self.advance(Event.FENCED)
        raise error

    def _abort_kafka(self, error: BaseException) -> NoReturn:
        """Abort our own epoch and raise `error`; if the abort may have failed, recover by a new claim.

        The abort may take seconds only: the caller waits for it, and `recipe.idle` does it as well.
        """
        producer = self._current_producer
        clean, is_reachable = not producer.must_be_replaced, True
        if self._journal is not None and self._journal.is_lost and self._buffer is None:
            clean = is_reachable = False
        if clean:
            try:
                producer.abort_transaction(timeout=min(self._timeouts.kafka, RECOVER_LIMIT))
            except DualWriteError as aborting:
                log.log(level_of(aborting), "aborting Kafka's side: %s", aborting, transactional_id=self.id)
                clean, is_reachable = False, not is_no_answer(aborting)
        if isinstance(error, ProducerFencedError):
            error = self._told_by_row(error)
        if self._means_fenced(error):
            if not clean:
                log.warning("fenced; the new owner of the id ends this transaction", transactional_id=self.id)
            self.advance(Event.FENCED)
            raise error
        if clean:
            self.advance(Event.ABORTED)
            self._end_journaled()
            raise error
        self.advance(Event.BROKEN)
        if is_reachable and isinstance(error, Exception):  # later after e.g. KeyboardInterrupt, see `_recover_after_abort`
            self._recover_after_abort(error)
        raise error

    def _told_by_row(self, error: ProducerFencedError) -> DualWriteError:
        """Why Kafka has fenced the producer: FencedError if another writer or recoverer has claimed the id in the row.

        `error` itself if nobody has, and the database's error if the row can't be read now.
        """
        try:
            self._store.read_claimed(self.ownership.claim)
        except DualWriteError as found:
            found.__cause__ = found.__cause__ or error
            return found
        return error

    def _recover_after_abort(self, error: Exception) -> None:
        """Recover immediately, so that nothing stays open at Kafka.

        If that fails, `recipe.idle`, the next transaction or close() does it.
        """
        try:
            with self.ownership.limited(RECOVER_LIMIT) if is_no_answer(error) else nullcontext():
                self.recover()
            if isinstance(error, ProducerFencedError):
                explain_fencing(error)
        except FencedError as fenced:
            if isinstance(error, BrokerError):  # being fenced is why the broker refused
                raise fenced from error
        except DualWriteError as recovering:
            log.log(
                level_of(recovering),
                "recovery after an aborted transaction is postponed: %s",
                recovering,
                transactional_id=self.id,
            )

    def _resolve(self, error: BaseException, *, database_committed: bool | None) -> None:
        """Find out the outcome past the commit point, by a claim that requires our fencing token to be current (rule F8)."""
        number = self.transaction_number
        state = None if self._transaction is None else self._transaction.state
        if self._store_transaction is not None:
            self._store_transaction.rollback()  # a connection whose COMMIT is unknown is closed; its row lock goes with it
        self._note_outage(error)
        try:
            self.ownership.make_claim()
            database_committed = self._store.read_claimed(self.ownership.claim).transaction_number == number
            outcomes = self._resolved_at_kafka()
        except FencedError as fenced:
            self.advance(Event.FENCED)
            kafka_id = self.ownership.kafka_transactional_id
            if not has_committed_on_both_sides(self._coordinator, kafka_id, state, database_committed=database_committed):
                self._raise_outcome(error, in_doubt(self.id, state, fenced, database_committed=database_committed))
            outcome = (
                f"the transaction of {self._name} committed on both sides; another writer or recoverer then claimed the id"
            )
            self._has_committed(error, outcome)
            return
        except DualWriteError as unresolved:
            self._raise_outcome(error, in_doubt(self.id, state, unresolved, database_committed=database_committed))
        if self._buffer is not None:
            self._resolved_journaled(error, database_committed=database_committed)
            return
        generation = self.ownership.generation
        postponed: DualWriteError | None = None
        try:
            self.ownership.start()
            self._publish_lost()
            self.advance(Event.OPENED)
        except DualWriteError as starting:
            log.log(level_of(starting), "starting a new producer is postponed: %s", starting, transactional_id=self.id)
            postponed = starting
        if not database_committed:
            self._raise_outcome(error, rolled_back(self.id, error))
        lost = self._lost_error(outcome for outcome in outcomes if (outcome.generation, outcome.state) == (generation, state))
        if lost is not None:
            if self._lost is not None and postponed is not None:  # it is not final
                self._raise_outcome(error, not_published_yet(self.id, state, postponed))
            self._raise_outcome(error, lost)
        self._has_committed(error, f"the transaction of {self._name} committed on both sides")

    def _raise_outcome(self, error: BaseException, outcome: DualWriteError) -> NoReturn:
        """Report the outcome of a transaction whose end was unknown, and raise it; see `raise_outcome`."""
        if self.report is not None:
            self.report.failed(outcome)
        raise_outcome(error, outcome)

    def _has_committed(self, error: BaseException, what: str) -> None:
        """Report that the transaction has committed, despite the error; see `report_committed`."""
        if self.report is not None:
            self.report.committed("published" if self._buffer is None else "journaled", was_in_doubt=True)
        report_committed(error, what)

    def _note_outage(self, error: BaseException) -> None:
        """If Kafka does not answer, the next transactions go through the journal."""
        if self._journal is not None:
            self._journal.judged(error, self.id)

    def _resolved_at_kafka(self) -> tuple[GenerationOutcome, ...]:
        """What has become of our transaction at Kafka; nothing, if it has only written into the journal."""
        if self._buffer is not None:
            return ()
        with nullcontext() if self._journal is None else self.ownership.limited(COMMIT_LIMIT):
            return self.ownership.resolve()

    def _publish_lost(self) -> None:
        """Before the next transaction, publish again what was found lost, if that is wanted (rule RO)."""
        if self._lost is not None:
            self._lost.publish(self.ownership)

    def _lost_error(self, found: Iterable[GenerationOutcome]) -> DualWriteError | None:
        """The error for the transactions that were found lost, except those that were published again since (rule RW)."""
        report = self.ownership.report
        again = report.published_again
        left = (each for each in found if (each.transactional_id, each.generation, each.state) not in again)
        return lost_error(((each.transactional_id, each.lost) for each in left if each.lost is not None), report.not_published)

    def _is_surely_rolled_back(self, error: BaseException) -> bool:
        assert self._store_transaction is not None
        known = self._store_transaction.is_surely_rolled_back
        return known or isinstance(error, StoreCommitFailedError) or self._means_fenced(error)

    def _means_fenced(self, error: BaseException) -> bool:
        """Whether this lane was claimed: not another lane of ours, nor the id of another writer that the block uses."""
        return isinstance(error, FencedError) and error.transactional_id == self.id and "lane" not in error.facts

    @property
    def _name(self) -> str:
        lane = "" if self.id == self._logical_id else f" (lane {self.id!r})"
        return f"{self._logical_id!r}{lane}"

    # --- the id -----------------------------------------------------------------------------------------------------------

    def recover(self) -> None:
        """Resolve what is in doubt and start a new producer, by a claim that succeeds only while the fencing token is ours."""
        with self._phase_tracks_errors():
            self.ownership.recover()
            self._publish_lost()
            self.advance(Event.OPENED)
        for outcome in self.ownership.report:
            lost = self._lost_error([outcome])
            if lost is not None:  # nobody waits for it any more; the row has it as well
                log.error("%s", lost, transactional_id=self.id)

    def close(self, *, limit: float) -> None:
        """Resolve what is in doubt, clear the stored state, release the producer. May be called more than once.

        A claim, and each step at Kafka, takes at most `limit` seconds.

        Raises:
            InDoubtTransactionError: The last transaction is in doubt and could not be resolved now.
        """
        if self.phase is Phase.CLOSED:
            return
        try:
            self.confirm(timeout=min(limit, self._timeouts.kafka))
        except DualWriteError as error:
            log.info(
                "closing: resolving the last transaction, whose commit Kafka has not confirmed: %s",
                error,
                transactional_id=self.id,
            )
            if self.report is not None:
                self.report.failed(error, is_in_doubt=True)
            self.advance(Event.BROKEN)
        phase, uncertain = self.phase, self.ownership.producer_must_be_replaced
        try:
            self.ownership.drop_producer()
            if phase in MUST_RECOVER or (phase is Phase.READY and uncertain):
                if self._journal is not None and self._journal.is_lost:  # its callers know what became of their units
                    log.info("closing while Kafka is down; recovery resolves what is left", transactional_id=self.id)
                else:
                    with self.ownership.limited(limit):
                        self._resolve_before_closing()
            elif phase is Phase.READY:
                self.ownership.clear_row()
        finally:
            self.release()

    def release(self) -> None:
        """Release the producer without resolving anything. May be called more than once."""
        if self.phase is Phase.CLOSED:
            return
        try:
            self.ownership.drop_producer()
        finally:
            self.advance(Event.CLOSE)

    def _resolve_before_closing(self) -> None:
        try:
            self.ownership.make_claim()
            self.ownership.resolve()
        except FencedError as fenced:
            log.warning("closing: %s", fenced, transactional_id=self.id)
        except DualWriteError as error:
            raise InDoubtTransactionError(
                "The writer is closed, but its last transaction could not be resolved.",
                transactional_id=self.id,
                cause=str(error),
                next_step="open a writer on this id or run `dualwrite recover`: either resolves it",
                state="",
                database_committed=None,
            ) from error

    @contextmanager
    def _phase_tracks_errors(self) -> Iterator[None]:
        """After an error in the block, set the lane's phase: it is fenced, or needs recovery."""
        try:
            yield
        except FencedError:
            self.advance(Event.FENCED)
            raise
        except BaseException:
            self.advance(Event.BROKEN)
            raise
