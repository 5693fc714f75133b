"""What a writer owns with an id: the claim, the generation, the producer; acquiring them, resolving the id, releasing them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Final, TypeVar, cast

from dualwrite.deadline import Deadline, Pauses
from dualwrite.errors import (
    BrokerUnavailableError,
    CommittedTransactionsForgottenError,
    DualWriteError,
    FencedError,
    WriterClosedError,
)
from dualwrite.failpoints import hit
from dualwrite.kafka.base import EndTxnResult, Producers, TakeOverProducer, TransactionalProducer, TransactionCoordinator
from dualwrite.observability.logs import SubjectLogger, closed_on_error
from dualwrite.observability.outages import DATABASE, database_at
from dualwrite.recipe.remembered import RecordedTransaction, Remembered, entry_of
from dualwrite.recovery.recoverer import describe_owner
from dualwrite.recovery.report import GenerationOutcome, IdReport, NotPublished, Outcome, RecoveryReport, lost_error
from dualwrite.recovery.resolve import Described, GenerationResolver, described_now, report_forgotten, resolving
from dualwrite.recovery.side_by_side import SideBySide, Steps, acquire, call, create, describe, pause, read, record
from dualwrite.settings import Timeouts
from dualwrite.state import LAST_EPOCH, PreparedTxnState, TransactionDescription
from dualwrite.stores.base import Acquiring, Claim, LostTransaction, Resolution, StateRow, TxnStateStore
from dualwrite.stores.rows import has_entry, new_token, on_cluster

log = SubjectLogger(__name__)

T = TypeVar("T")

CHECK_AFTER: Final = 1.0
"""Seconds without use after which the next transaction first checks whether the coordinator still knows the id."""

_PAUSE: Final = 0.01

CHECK_LIMIT: Final = 2.0
"""The maximum seconds for this check: a transaction without messages does not need Kafka and should not wait for it."""


class Parties:
    """Who takes part in the transactions of an id: the database, Kafka's coordinators, producers; and for how long we wait.

    Attributes:
        database: Gets the reports of calls to the database.
        timeouts: The time limits that apply now; see `limited`.
    """

    def __init__(
        self, store: TxnStateStore, coordinator: TransactionCoordinator, producers: Producers, timeouts: Timeouts
    ) -> None:
        self.store = store
        self.coordinator = coordinator
        self.producers = producers
        self.timeouts = timeouts
        self.database = database_at(store.description, is_local=store.is_local)

    @contextmanager
    def limited(self, seconds: float) -> Iterator[None]:
        """In the block, no claim and no step at Kafka takes longer than this, even if the time limits are longer."""
        given = self.timeouts
        self.timeouts = replace(given, claim=min(given.claim, seconds), kafka=min(given.kafka, seconds))
        try:
            yield
        finally:
            self.timeouts = given

    def run(self, *several: Callable[[Deadline], Steps[T]]) -> list[T]:
        """Run steps side by side, before one deadline; see `SideBySide.run`."""
        deadline = Deadline.after(self.timeouts.kafka)
        return SideBySide(self.store, self.coordinator, deadline).run([steps(deadline) for steps in several])


class Ownership:
    """One writer's ownership of an id. It does not handle transactions; the writer calls its steps in the recipe's order.

    Attributes:
        transactional_id: The logical id, or the id of the lane.
        generation: The generation that it has acquired; 0 before that.
        kafka_transactional_id: The id of the generation, as Kafka sees it.
        cluster_id: Kafka's `cluster.id`, as it was when the id was claimed.
        report: What was found when the id was last resolved.
        remembered: What the database has committed, as this process knows.
        forgotten: What of it the database has forgotten, if that was reported and is not raised yet.
    """

    def __init__(self, parties: Parties, transactional_id: str) -> None:
        self.parties = parties
        self.transactional_id = self._id = transactional_id
        self._store = parties.store
        self._coordinator = parties.coordinator
        self._producers = parties.producers
        self._claim: Claim | None = None
        self._intended: str | None = None  # the token of a claim that is not known to have succeeded yet
        self._row: StateRow | None = None  # as claimed, until it is changed
        self._has_generation = False
        self._is_new = False  # the generation: nobody else registers its id (rule NG)
        self._producer: TransactionalProducer | None = None
        self._committed: PreparedTxnState | None = None
        self._missing: tuple[RecordedTransaction, ...] = ()
        self._used_at = 0.0
        self.cluster_id = ""
        self.remembered = Remembered()
        self.forgotten: CommittedTransactionsForgottenError | None = None
        self.generation = 0
        self.kafka_transactional_id = transactional_id
        self.report = IdReport(transactional_id)

    @property
    def claim(self) -> Claim:
        """The newest claim that we made.

        Raises:
            WriterClosedError: No claim was made.
        """
        if self._claim is None:
            raise WriterClosedError("The writer has not claimed its id.", transactional_id=self._id)
        return self._claim

    @property
    def producer(self) -> TransactionalProducer:
        """The producer of our generation.

        Raises:
            WriterClosedError: There is no producer.
        """
        if self._producer is None:
            raise WriterClosedError("The writer has no producer.", transactional_id=self._id)
        return self._producer

    @property
    def producer_must_be_replaced(self) -> bool:
        """Whether there is no producer, or one that must not begin another transaction (rule F9)."""
        return self._producer is None or self._producer.must_be_replaced

    def make_claim(self) -> None:
        """Claim the id again, if it was not claimed after our last claim (rule F8).

        The id is taken from no other writer, so Kafka is not asked before: the database's outcome is needed even while Kafka is
        down.

        If it is not known whether a claim has succeeded, the next call repeats it under the same token: it may be in the row,
        and must not be taken for another process's.

        Raises: as for `TxnStateStore.claim`.
        """
        self._intended = self._intended or new_token()
        with self.parties.database.call(DATABASE, may_wait=True):  # for the row's lock
            claim = self._store.claim(
                self._id,
                describe_owner("writer"),
                timeout=self.parties.timeouts.claim,
                expected_fence=self.claim.fence,
                token=self._intended,
            )
        self._intended = None
        self._has_claimed(claim)

    def adopt(
        self,
        claim: Claim,
        cluster_id: str = "",
        *,
        row: StateRow | None = None,
        has_generation: bool = False,
        is_new: bool = False,
    ) -> None:
        """Continue with a claim that the caller has made, on the Kafka cluster that it was compared with.

        Without a cluster Kafka was not asked: the next `resolve` compares the row with it. `row`: as claimed.
        `has_generation`: the generation in the row was acquired for us; `is_new`: and it is a new one.
        """
        self.cluster_id = cluster_id or self.cluster_id
        number = 0 if row is None else row.transaction_number
        self.remembered.start(claim.fence, number)  # first: an interrupt must not lead to a false alarm
        self._has_claimed(claim, row, has_generation=has_generation)
        self._is_new = is_new

    def _has_claimed(self, claim: Claim, row: StateRow | None = None, *, has_generation: bool = False) -> None:
        self._claim, self._row, self._has_generation = claim, row, has_generation
        hit("recover_after_claim")

    def resolve(self) -> tuple[GenerationOutcome, ...]:
        """Resolve every unresolved generation under our claim; what was found is in `report`.

        Raises: as for `resolve_id`.
        """
        (outcomes,) = self.parties.run(self.resolving)
        return outcomes

    def resolving(self, deadline: Deadline) -> Steps[tuple[GenerationOutcome, ...]]:
        """The steps of `resolve`."""
        if self._committed is not None:
            yield from record(self.claim, Resolution(clear_only=self._committed))
            self._committed = None
            self._row = None
        row = self._row
        if row is None:
            row = yield from read(self.claim)
            cluster_id = yield from call(lambda limit: self._coordinator.cluster_id(timeout=limit))
            on_cluster(row, cluster_id)
            self.cluster_id = cluster_id
            self.compare(row)
        yield from self._record_forgotten(row)
        if not self._has_generation:
            self.report = yield from resolving(self._coordinator, self.claim, row, deadline)
        else:  # it was acquired because there was nothing to resolve
            self.report = IdReport(self._id, unacknowledged=row.lost)
        return self.report.outcomes

    def start(self) -> None:
        """Take the id over at Kafka with a new producer, and check afterwards that the claim is still ours.

        Raises:
            FencedError: Another writer or recoverer has claimed the id; the producer has sent no messages.
            DualWriteError: As for `TxnStateStore.acquire_generation`, `resolve_id`, `TransactionalProducer.init_transactions`.
        """
        self.parties.run(self.starting)

    def restart(self) -> None:
        """Resolve our generations under our claim, as a producer may have left a transaction open, and start a new producer.

        The report keeps what it says of lost transactions.

        Raises: as for `resolve_id` and `start`.
        """
        self.drop_producer()
        before = self.report
        self.resolve()
        self.report = replace(self.report, outcomes=before.outcomes, not_published=before.not_published)
        self.start()

    def starting(self, deadline: Deadline) -> Steps[None]:
        """The steps of `start`."""
        self.drop_producer()
        hit("before_take_over")
        if self._producers.kind.takes_over:
            producer = yield from self._take_over(deadline)
        else:
            row = yield from self._acquired(reuse=False)
            producer = self._producers(row.kafka_id(row.generation))
            with closed_on_error(producer):
                found = yield from described_now(producer.kafka_transactional_id)
                if found.transaction is not None:  # InitProducerId would abort a transaction silently
                    yield from self._resolve_found(producer, row.generation, deadline, found)
                yield from call(lambda limit: producer.init_transactions(timeout=limit))
            self.generation = row.generation
        with closed_on_error(producer):
            hit("after_take_over")
            yield from read(self.claim)
        self._producer = producer
        self.kafka_transactional_id = producer.kafka_transactional_id
        self._used_at = time.monotonic()

    def _acquired(self, *, reuse: bool) -> Steps[StateRow]:
        """The row with the generation that was acquired with the claim, or now."""
        row, has_generation = self._row, self._has_generation
        self._row, self._has_generation = None, False
        if row is not None and has_generation:
            return row
        self._is_new = not reuse
        only = frozenset({self._id})
        acquiring = Acquiring(self._producers.kind, only, only if reuse else frozenset(), self.cluster_id)
        return (yield from acquire(self.claim, acquiring))

    def _take_over(self, deadline: Deadline) -> Steps[TransactionalProducer]:
        """Continue the newest generation by compare-and-set, or begin a new one if Kafka does not know it (rules F5, NG).

        Or if its timeout differs. A generation whose registration was not answered is continued if it turns out to be known.
        """
        pauses = Pauses(_PAUSE)
        while not deadline.expired:
            reuse = False if self._has_generation else (yield from self._can_reuse_newest(deadline))
            row = yield from self._acquired(reuse=reuse)
            producer = cast("TakeOverProducer", self._producers(row.kafka_id(row.generation)))
            with closed_on_error(producer):
                if (yield from self._try_to_take_over(producer, row.generation, deadline)):
                    self.generation = row.generation
                    return producer
            producer.close()
            yield from pause(next(pauses))
        raise BrokerUnavailableError(
            f"The id could not be taken over at Kafka within {self.parties.timeouts.kafka:g} s.",
            transactional_id=self._id,
            cause="its coordinator does not answer InitProducerId, or another process keeps using the id",
            next_step="check the brokers; find the id's owner with `dualwrite status`, and open again",
        )

    def _can_reuse_newest(self, deadline: Deadline) -> Steps[bool]:
        row = yield from read(self.claim)
        if row.generation_kind is not self._producers.kind:
            return False
        described = yield from describe(row.kafka_id(row.generation))
        return self.can_reuse(row, described, deadline)

    def can_reuse(self, row: StateRow, described: TransactionDescription | None, deadline: Deadline) -> bool:
        """Whether our producer can continue the newest generation: known to Kafka, same kind and timeout, epochs left.

        `described` is how the coordinator describes that generation; taking it over describes it again.
        """
        if not self._producers.kind.takes_over or row.generation_kind is not self._producers.kind:
            return False
        if described is None:  # rule NG
            return False
        producer = cast("TakeOverProducer", self._producers(row.kafka_id(row.generation)))
        try:
            has_epochs_left = described.epoch <= LAST_EPOCH or described.status.is_ending
            return described.timeout_ms == producer.wanted_timeout_ms(timeout=deadline) and has_epochs_left
        finally:
            producer.close()

    def _try_to_take_over(self, producer: TakeOverProducer, generation: int, deadline: Deadline) -> Steps[bool]:
        """Register the id, or raise the epoch above its earlier owners' and adopt the epoch in the answer; False: try again.

        Anything found on the generation is resolved as usual: a paused owner may have left a transaction after our recovery.
        """
        found = yield from described_now(producer.kafka_transactional_id)
        if found.transaction is None:
            if not self._is_new:
                return False
            self._is_new = False
            answer = yield from create(producer.creation(timeout=deadline))
            return producer.created(answer, timeout=deadline)
        if found.transaction.timeout_ms != producer.wanted_timeout_ms(timeout=deadline):
            return False
        raised = yield from self._resolve_found(producer, generation, deadline, found)
        if raised is None or raised.epoch > LAST_EPOCH:  # too high an epoch: only on brokers without KAFKA-20090
            return False
        producer.adopt(raised.producer_id, raised.epoch, timeout_ms=found.transaction.timeout_ms)
        return True

    # --- lost transactions --------------------------------------------------------------------------------------------------

    def note(self, entry: LostTransaction, found: GenerationOutcome | NotPublished | None = None) -> None:
        """Note in the report what has become of an entry: it was published again, or can't be; by default, it is gone."""
        of_id = self.report
        if isinstance(found, NotPublished):
            self.report = replace(of_id, not_published=(*of_id.not_published, found))
            return
        outcomes = of_id.outcomes if found is None else (*of_id.outcomes, found)
        left = tuple(each for each in of_id.unacknowledged if each != entry)
        self.report = replace(of_id, outcomes=outcomes, unacknowledged=left)

    def lost_error(self, found: Iterable[GenerationOutcome]) -> DualWriteError | None:
        """The error for the transactions that were found lost, except those that were published again since (rule RW)."""
        again = RecoveryReport((self.report,)).published_again
        left = (each for each in found if (each.transactional_id, each.generation, each.state) not in again)
        return lost_error(
            ((each.transactional_id, each.lost) for each in left if each.lost is not None), self.report.not_published
        )

    # --- what the database forgets ------------------------------------------------------------------------------------------

    def compare(self, row: StateRow | None) -> None:
        """Find out what of that which the database had committed under our claim the row has forgotten."""
        if self._claim is not None and not self._missing:
            self._missing = self.remembered.missing_in(row, self.claim.fence)

    def take_forgotten(self) -> CommittedTransactionsForgottenError | None:
        """The error to raise for what was reported, once."""
        error, self.forgotten = self.forgotten, None
        return error

    def note_forgotten(self) -> None:
        """After a row was read that is behind: record in it what it has forgotten, and report that once (`forgotten`).

        Nothing is reported if what was read was not the newest row, or if nothing of it was sent to Kafka.

        Raises:
            DualWriteError: The row can't be read or written now; the next transaction finds it again.
        """
        row = self._store.read(self._id)
        self.compare(row)
        self.parties.run(lambda _: self._record_forgotten(row))
        if row is not None and row.fence == self.claim.fence:
            self.remembered.number = min(self.remembered.number, row.transaction_number)

    def _record_forgotten(self, row: StateRow | None) -> Steps[None]:
        missing = self._missing
        if not missing:
            return
        entry = entry_of(missing, self._producers.kind, self.cluster_id)
        if row is not None and entry is not None:
            behind = missing[-1].number if row.fence == self.claim.fence else None
            yield from record(row.claim, Resolution(lost=entry, behind=behind))
            row = yield from call(lambda _: self._store.read(self._id))
            if row is not None and not has_entry(row, entry):
                entry = None
        self._missing = ()
        self.remembered.start(self.claim.fence, 0 if row is None else row.transaction_number)
        if entry is not None:
            error = lost_error([(self._id, entry)])
            assert isinstance(error, CommittedTransactionsForgottenError)
            log.error("%s", error, transactional_id=self._id)
            report_forgotten(self._id, entry)
            self.forgotten = error

    # --- ids that the coordinator forgets -----------------------------------------------------------------------------------

    def has_committed(self, committed: PreparedTxnState) -> None:
        """Remember that Kafka's answer has proven the commit of our transaction with this state.

        The row keeps the state until the next transaction replaces it, or the lane is idle (`clear_if_idle`). If the
        coordinator forgets the id in the meantime, the writer still knows that nothing is in doubt.
        """
        self._used_at = time.monotonic()
        self._committed = committed

    @property
    def may_be_forgotten(self) -> bool:
        """Whether the id was unused for so long that its coordinator may have forgotten it: a check is worth its cost."""
        return time.monotonic() - self._used_at >= CHECK_AFTER

    def renew_if_forgotten(self) -> None:
        """After a pause, register the id again if its coordinator has forgotten it (`transactional.id.expiration.ms`).

        Called only while no transaction is open and the outcome of the last one is proven. If Kafka does not answer, it does
        nothing: a transaction that needs Kafka will fail with an error of its own.

        It is called only before a block. If the id is forgotten inside a block, before its first message, both sides are rolled
        back, since the block's database transaction can't continue under a new claim.

        Raises:
            FencedError: Another writer or recoverer has claimed the id.
            DualWriteError: As for `start`.
        """
        try:
            limit = min(CHECK_LIMIT, self.parties.timeouts.kafka)
            described = self._coordinator.describe(self.kafka_transactional_id, timeout=limit)
        except BrokerUnavailableError as error:
            log.debug(
                "could not check after a pause whether the coordinator knows the id: %s", error, transactional_id=self._id
            )
            return
        finally:
            self._used_at = time.monotonic()
        if described is not None:
            return
        log.info(
            "the coordinator has forgotten %s; registering it again", self.kafka_transactional_id, transactional_id=self._id
        )
        self._store.record_resolution(self.claim, Resolution(clear_state=True, resolved_generation=self.generation))
        self.start()

    def clear_if_idle(self, after: float) -> float:
        """Clear the stored state if the id was not used for `after` seconds; return the seconds to wait until the next call.

        Called only while no transaction is open and the outcome of the last one is proven. If the database refuses, or another
        process has claimed the id, the next transaction finds that out.
        """
        if self._committed is None:
            return after
        left = self._used_at + after - time.monotonic()
        if left > 0:
            return left
        try:
            if self._store.read_claimed(self.claim).prepared_state != self._committed:
                self.note_forgotten()
            self._store.record_resolution(self.claim, Resolution(clear_only=self._committed))
            self._committed = None
        except DualWriteError as error:
            log.debug(
                "the last transaction's state, which is committed, could not be cleared: %s", error, transactional_id=self._id
            )
        return after

    def _resolve_found(
        self, producer: TransactionalProducer, generation: int, deadline: Deadline, described: Described
    ) -> Steps[EndTxnResult | None]:
        """Resolve a generation that is about to be ours, add what was found to the report, and return the raised epoch."""
        kafka_id = producer.kafka_transactional_id
        resolver = GenerationResolver(self._coordinator, self.claim, generation, kafka_id, deadline)
        outcomes = yield from resolver.resolving(described)
        found = tuple(each for each in outcomes if each.outcome is not Outcome.NOTHING)
        for each in found:
            log.warning("taking over generation %d: %s", generation, each.outcome.in_words, transactional_id=self._id)
        if found:
            before = self.report.outcomes
            known = tuple(each for each in before if (each.generation, each.outcome) != (generation, Outcome.NOTHING))
            lost = (yield from read(self.claim)).lost
            self.report = replace(self.report, outcomes=(*known, *found), unacknowledged=lost)
        return resolver.raised

    def drop_producer(self) -> None:
        """Close the producer, if there is one; this does not end a transaction."""
        producer, self._producer = self._producer, None
        if producer is not None:
            producer.close()

    def clear_row(self) -> None:
        """After a clean end, record in the row that nothing is prepared and nothing is open on our generation.

        If the row has another state than our last one, the database has gone back: that stays, so that recovery sees it. If it
        has none, only this process knows what is forgotten, and reports it now (rule DF): afterwards, so that nothing is missed
        that is forgotten before we have looked.
        """
        last = self._committed
        ended = Resolution(clear_state=last is None, clear_only=last, resolved_generation=self.generation)
        try:
            with suppress(FencedError):  # also if the database has forgotten our claim
                self._store.record_resolution(self.claim, ended)
            if self.remembered.number:
                self.note_forgotten()
        except DualWriteError as error:
            log.info(
                "the last transaction's state, which is committed, could not be cleared: %s", error, transactional_id=self._id
            )
