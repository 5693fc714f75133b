"""One lane of a writer: the recipe on one transactional id, and its error handling (docs/how-it-works/recipe.md)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NoReturn

from dualwrite.errors import (
    BrokerError,
    DualWriteError,
    FencedError,
    InDoubtTransactionError,
    ProducerFencedError,
    StoreCommitFailedError,
)
from dualwrite.failpoints import hit
from dualwrite.kafka.base import TransactionalProducer
from dualwrite.observability.logs import SubjectLogger
from dualwrite.observability.outages import BEGIN, DATABASE, is_no_answer, level_of
from dualwrite.recipe.idle import RECOVER_LIMIT
from dualwrite.recipe.outcomes import (
    explain_fencing,
    forgotten,
    has_committed_on_both_sides,
    in_doubt,
    not_published_yet,
    note_committed,
    raise_outcome,
    rolled_back,
)
from dualwrite.recipe.ownership import Ownership
from dualwrite.recipe.phases import BEFORE_COMMIT_POINT, IN_TRANSACTION, MUST_RECOVER, Change, Phase, Way, WriterState
from dualwrite.recipe.remembered import RecordedTransaction
from dualwrite.recipe.routes import Aborted, Choice, KafkaRoute, Route
from dualwrite.state import PreparedTxnState
from dualwrite.stores.base import Claim, StoreTransaction
from dualwrite.transaction import OpenTransaction

log = SubjectLogger(__name__)


class _RowBehindError(StoreCommitFailedError):
    """The row that a transaction has begun with is behind what the database had committed."""


class Lane(WriterState):
    """One of a writer's transactional ids: its phase, its ownership of the id, and at most one transaction.

    Transactions rotate over the lanes of a writer, which `Lanes` manages. Error handling depends only on the phase, because
    each phase is entered before its call is made. What depends on where the messages go is in the route of the transaction.

    Attributes:
        id: The lane's own id, which is that of its row: the logical id for lane 0.
        logical_id: The writer's id.
        ownership: The lane's ownership of its id.
        transaction: The current transaction.
    """

    def __init__(self, ownership: Ownership, kafka: KafkaRoute, *, logical_id: str) -> None:
        super().__init__()
        self.id = ownership.transactional_id
        self.logical_id = logical_id
        self.ownership = ownership
        self.transaction: OpenTransaction | None = None
        self._parties = ownership.parties
        self._kafka = kafka
        self._route: Route = kafka
        self._store_transaction: StoreTransaction | None = None

    # --- the recipe -------------------------------------------------------------------------------------------------------

    def begin(self, *, at_once: bool = False, on: Any = None) -> OpenTransaction:
        """Begin the transaction on both sides.

        `at_once`: check the fencing token here, and not only before the first message. `on`: the connection of a transaction
        that the user has begun (`TxnStateStore.begin_on`).
        """
        parties, kafka = self._parties, self._kafka
        with parties.database.call(BEGIN) as call:
            # checks the fencing token, or `OpenTransaction` does so before the first message: rule F2
            claim = self.ownership.claim
            self._store_transaction = (
                kafka.begin(claim, at_once=at_once) if on is None else parties.store.begin_on(on, claim, gate=kafka.gate)
            )
            call.has_answer = self._store_transaction.is_fence_checked
        if kafka.choice is not None:
            if self.phase is Phase.READY and kafka.choice.first_way is not self.way:
                self.advance(Change.SWITCHED)
            self._route = kafka.choice.route(self.way)
        producer = self._route.producer
        self.transaction = transaction = OpenTransaction(
            self.logical_id,
            self._store_transaction,
            producer,
            timeout=parties.timeouts.kafka,
            database=parties.database,
            divert=None if kafka.choice is None else partial(self._other_producer, kafka.choice),
        )
        self.advance(Change.BEGIN)
        producer.begin_transaction()
        hit("after_begin")
        return transaction

    def _other_producer(self, choice: Choice) -> TransactionalProducer | None:
        """Once the fence is checked: the transaction's producer, if its way is another one than was assumed at its beginning.

        Raises: as `Choice.way_of`.
        """
        assert self._store_transaction is not None
        way = choice.way_of(self._store_transaction, self.way)
        if way is self.way:
            return None
        self._route.leave()
        self.advance(Change.SWITCHED)
        self._route = choice.route(way)
        self._route.producer.begin_transaction()
        return self._route.producer

    def commit(self, transaction: OpenTransaction) -> None:
        """End the block; then prepare, record, and commit both sides."""
        store_transaction = self._store_transaction
        assert store_transaction is not None
        store_transaction.before_commit()  # may run the user's code, such as an ORM flush, while messages can still be sent
        if self._kafka.choice is not None or store_transaction.found_number is None:
            transaction.check_fence()
        self._check_row(store_transaction)
        route, producer = self._route, transaction.producer
        transaction.end()
        self.advance(Change.PREPARE)
        transaction.state = producer.prepare_transaction(timeout=self._parties.timeouts.for_delivery)
        transaction.delivery = producer.delivery
        self.advance(Change.PREPARED)
        hit("after_prepare")
        decided = self._decided(transaction.state)
        route.record(store_transaction, decided)
        self.advance(Change.RECORDED)
        hit("after_record")
        producer.check_time_left()
        hit("before_db_commit")
        self.advance(Change.COMMIT_SENT)
        with self._parties.database.call(DATABASE):
            store_transaction.commit()
        self.advance(Change.DATABASE_COMMITTED)
        self.ownership.remembered.add(decided)
        self._store_transaction = None
        hit("after_db_commit")
        transaction.outcome = route.outcome
        hit("before_kafka_commit")
        route.commit(transaction.state)
        self.advance(Change.KAFKA_COMMITTED)
        hit("after_kafka_commit")

    def _check_row(self, store_transaction: StoreTransaction) -> None:
        """Check that the row that the transaction has begun with is not behind what the database has committed (rule DF)."""
        found, known = store_transaction.found_number, self.ownership.remembered.number
        if found is not None and found < known:
            raise _RowBehindError(
                f"The row of the id has transaction {found}, and the database had committed transaction {known}.",
                transactional_id=self.id,
                cause="the database has gone back to an earlier state, or has not shown its newest",
                next_step="run the transaction again",
            )

    def _decided(self, state: PreparedTxnState | None) -> RecordedTransaction:
        delivery = None if self.transaction is None else self.transaction.delivery
        return RecordedTransaction(self.transaction_number, state, self.ownership.generation, delivery)

    def _note_forgotten(self, error: BaseException) -> BaseException:
        """If an error shows that the row is behind, or our claim forgotten: report it, once. The error to raise."""
        current = error.facts.get("current_fence", self.ownership.claim.fence) if isinstance(error, FencedError) else None
        is_fenced = self._means_fenced(error) and (current is None or current < self.ownership.claim.fence)
        if not is_fenced and not isinstance(error, _RowBehindError):
            return error
        try:
            self.ownership.note_forgotten()
        except DualWriteError as unwritten:
            return error if is_fenced else unwritten
        return error if is_fenced else self.ownership.take_forgotten() or error

    # --- between transactions ---------------------------------------------------------------------------------------------

    def claimed_without_kafka(self, claim: Claim) -> None:
        """Continue with a claim for which Kafka was not asked: the lane sends nothing to Kafka until it is recovered."""
        self.ownership.adopt(claim)
        self.advance(Change.CLAIMED)

    @property
    def goes_on_without_kafka(self) -> bool:
        """Whether `make_ready_without_kafka` would do nothing."""
        return self.phase is Phase.READY or (self.phase, self.way) == (Phase.NEEDS_RECOVERY, Way.DETOUR)

    def make_ready_without_kafka(self) -> None:
        """Before a transaction that will send nothing to Kafka, which is not asked.

        What an earlier transaction has left at Kafka stays there, and in the row, until the lane is recovered. Only its COMMIT
        in the database must have ended, which the claim waits for.

        Raises: as for `Ownership.make_claim`.
        """
        if self.goes_on_without_kafka:
            return
        with self._phase_tracks_errors():
            self.ownership.make_claim()
            self.advance(Change.CLAIMED)

    @property
    def is_ready(self) -> bool:
        """Whether `make_ready` would do nothing that takes long."""
        return self.phase is Phase.READY and not self.ownership.producer_must_be_replaced

    def make_ready(self) -> None:
        """Before the lane's next transaction: recover the id if that is necessary, which commits what the database has decided.

        After a pause, register the id again if the coordinator has forgotten it.

        Raises:
            FencedError: Another writer or recoverer has claimed the id; it commits the transaction.
            DualWriteError: The id could not be recovered.
        """
        if self.phase in MUST_RECOVER or self.ownership.producer_must_be_replaced:  # rule F9
            self.recover()
        if (forgotten := self.ownership.take_forgotten()) is not None:
            raise forgotten
        if self.ownership.may_be_forgotten:
            with self._phase_tracks_errors():
                self._kafka.renew()

    def forget_transaction(self) -> None:
        """Release the database connection and leave every phase of a transaction, even if an interrupt ended it."""
        if self.transaction is not None:
            self.transaction.end()
        if self.phase in IN_TRANSACTION:
            self.advance(Change.INTERRUPTED)
            interrupt = InterruptedError("an interrupt ended the transaction")
            self.ended(interrupt, is_in_doubt=self.phase is Phase.IN_DOUBT)
        if self._store_transaction is not None:
            self._store_transaction.rollback()
        self.transaction = self._store_transaction = None

    # --- errors -----------------------------------------------------------------------------------------------------------

    def handle_error(self, error: BaseException) -> None:
        """Return if the transaction has committed and `error` only said that the outcome was unknown; raise otherwise."""
        try:
            self._handle_error(error)
        except BaseException as raised:
            self.ended(raised, is_in_doubt=self.phase is Phase.IN_DOUBT)
            raise

    def _handle_error(self, error: BaseException) -> None:
        phase = self.phase
        if self.transaction is not None and (failed := self.transaction.store_transaction.after_commit_error) is not None:
            log.error("a listener of after_commit has failed", exc_info=failed, transactional_id=self.id)
        if phase in BEFORE_COMMIT_POINT:
            self.advance(Change.ABORT)
            assert self._store_transaction is not None
            self._store_transaction.rollback()
            error = self._note_forgotten(error)
            self._abort(self._kafka.judged(error))  # now: on SQLite the transaction has locked the whole database
        if phase is Phase.COMMITTING_DATABASE and self._is_surely_rolled_back(error):
            self.advance(Change.DATABASE_ROLLED_BACK)
            self._abort(error)
        if phase in (Phase.COMMITTING_DATABASE, Phase.COMMITTING_KAFKA):  # rule KU
            self.advance(Change.OUTCOME_UNKNOWN)
            self._resolve(error, database_committed=True if phase is Phase.COMMITTING_KAFKA else None)
            return
        if self._means_fenced(error):
            self._note_forgotten(error)
            self.advance(Change.FENCED)
        raise error

    def _abort(self, error: BaseException) -> NoReturn:
        """Abort our own epoch and raise `error`; if the abort may have failed, recover by a new claim."""
        aborted = self._route.abort()
        if isinstance(error, ProducerFencedError):
            error = self._told_by_row(error)
        if self._means_fenced(error):
            if aborted is not Aborted.CLEAN:
                log.warning("fenced; the new owner of the id ends this transaction", transactional_id=self.id)
            self.advance(Change.FENCED)
            raise error
        if aborted is Aborted.CLEAN:
            self.advance(Change.ABORTED)
            raise error
        self.advance(Change.BROKEN)
        if aborted is Aborted.UNCERTAIN and isinstance(error, Exception):  # not now after e.g. KeyboardInterrupt
            self._recover_after_abort(error)
        raise error

    def _told_by_row(self, error: ProducerFencedError) -> DualWriteError:
        """Why Kafka has fenced the producer: FencedError if another writer or recoverer has claimed the id in the row.

        `error` itself if nobody has, and the database's error if the row can't be read now.
        """
        try:
            self._parties.store.read_claimed(self.ownership.claim)
        except DualWriteError as found:
            found.__cause__ = found.__cause__ or error
            return found
        return error

    def _recover_after_abort(self, error: Exception) -> None:
        """Recover immediately, so that nothing stays open at Kafka.

        If that fails, `recipe.idle`, the next transaction or close() does it.
        """
        try:
            with self._parties.limited(RECOVER_LIMIT) if is_no_answer(error) else nullcontext():
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
        route, parties, state = self._route, self._parties, None if self.transaction is None else self.transaction.state
        decided, was_confirmed = self._decided(state), database_committed is True
        if self._store_transaction is not None:
            self._store_transaction.rollback()  # a connection whose COMMIT is unknown is closed; its row lock goes with it
        self._kafka.judged(error)
        try:
            self.ownership.make_claim()
            row = parties.store.read_claimed(self.ownership.claim)
            database_committed = row.transaction_number == decided.number
            if database_committed or not was_confirmed:  # otherwise the database has gone back: rule DF
                self.ownership.remembered.settle(decided, is_committed=database_committed)
            outcomes = route.resolve()
        except FencedError as fenced:
            self._note_forgotten(fenced)
            self.advance(Change.FENCED)
            kafka_id = self.ownership.kafka_transactional_id
            if not has_committed_on_both_sides(parties.coordinator, kafka_id, state, database_committed=database_committed):
                self._raise_outcome(error, in_doubt(self.id, state, fenced, database_committed=database_committed))
            self._has_committed(error, "committed on both sides; another writer or recoverer then claimed the id")
            return
        except DualWriteError as unresolved:
            self._raise_outcome(error, in_doubt(self.id, state, unresolved, database_committed=database_committed))
        postponed: DualWriteError | None = None
        try:
            self.advance(route.resume())
        except DualWriteError as starting:
            log.log(level_of(starting), "starting a new producer is postponed: %s", starting, transactional_id=self.id)
            postponed = starting
        ours = (outcome for outcome in outcomes if (outcome.generation, outcome.state) == (decided.generation, state))
        lost = self.ownership.lost_error(ours)
        if not database_committed:
            gone = lost or (self.ownership.take_forgotten() if was_confirmed else None)
            self._raise_outcome(error, rolled_back(self.id, error) if gone is None else forgotten(self.id, state, gone))
        if lost is not None:
            if self._kafka.publishes_lost and postponed is not None:  # it is not final
                self._raise_outcome(error, not_published_yet(self.id, state, postponed))
            self._raise_outcome(error, lost)
        self._has_committed(error, route.committed)

    def _raise_outcome(self, error: BaseException, outcome: DualWriteError) -> NoReturn:
        """Raise the outcome of a transaction whose end was unknown; see `raise_outcome`."""
        self.ended(outcome)
        raise_outcome(error, outcome)

    def _has_committed(self, error: BaseException, how: str) -> None:
        """The transaction has committed, despite the error; see `note_committed`."""
        self.ended(None)
        if self.transaction is not None:
            self.transaction.outcome = self._route.outcome
        lane = "" if self.id == self.logical_id else f" (lane {self.id!r})"
        note_committed(error, f"the transaction of {self.logical_id!r}{lane} {how}")

    def _is_surely_rolled_back(self, error: BaseException) -> bool:
        assert self._store_transaction is not None
        known = self._store_transaction.is_surely_rolled_back
        return known or isinstance(error, StoreCommitFailedError) or self._means_fenced(error)

    def _means_fenced(self, error: BaseException) -> bool:
        """Whether this lane was claimed: not another lane of ours, nor the id of another writer that the block uses."""
        return isinstance(error, FencedError) and error.transactional_id == self.id and "lane" not in error.facts

    # --- the id -----------------------------------------------------------------------------------------------------------

    def recover(self) -> None:
        """Resolve what is in doubt and start a new producer, by a claim that succeeds only while the fencing token is ours."""
        with self._phase_tracks_errors():
            self.ownership.make_claim()
            self._kafka.resolve()
            self.advance(self._kafka.resume())
        for outcome in self.ownership.report.outcomes:
            lost = self.ownership.lost_error([outcome])
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
        phase, uncertain = self.phase, self.ownership.producer_must_be_replaced
        try:
            self.ownership.drop_producer()
            if phase in MUST_RECOVER or (phase is Phase.READY and uncertain):
                if self._kafka.is_down:  # its callers know what became of their units
                    log.info("closing while Kafka is down; recovery resolves what is left", transactional_id=self.id)
                else:
                    with self._parties.limited(limit):
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
            self.advance(Change.CLOSE)

    def _resolve_before_closing(self) -> None:
        try:
            self.ownership.make_claim()
            self.ownership.resolve()
        except FencedError as fenced:
            self._note_forgotten(fenced)
            log.warning("closing: %s", fenced, transactional_id=self.id)
        except DualWriteError as error:
            raise InDoubtTransactionError(
                "The writer is closed, but its last transaction could not be resolved.",
                transactional_id=self.id,
                cause=f"{error}",
                next_step="open a writer on this id or run `dualwrite recover`: either resolves it",
                state="",
                database_committed=None,
            ) from error

    @contextmanager
    def _phase_tracks_errors(self) -> Iterator[None]:
        """After an error in the block, set the lane's phase: it is fenced, or needs recovery."""
        try:
            yield
        except FencedError as fenced:
            self._note_forgotten(fenced)
            self.advance(Change.FENCED)
            raise
        except BaseException:
            self.advance(Change.BROKEN)
            raise
