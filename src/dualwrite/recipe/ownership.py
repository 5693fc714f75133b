"""What a writer holds while it has an id: the claim, the generation, the producer. Taking them, settling, letting go."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Final, cast

from dualwrite.deadline import Deadline
from dualwrite.errors import BrokerUnavailableError, DualWriteError, WriterClosedError
from dualwrite.failpoints import hit
from dualwrite.kafka.base import (
    EndTxnAnswer,
    ProducerFactory,
    TakeOverProducer,
    TransactionalProducer,
    TransactionCoordinator,
)
from dualwrite.recovery.clusters import check_cluster
from dualwrite.recovery.recoverer import describe_owner
from dualwrite.recovery.report import GenerationOutcome, IdReport, Outcome, RecoveryReport
from dualwrite.recovery.resolve import GenerationResolver, resolve_id
from dualwrite.settings import Timeouts
from dualwrite.state import LAST_EPOCH, PreparedTxnState
from dualwrite.stores.base import Claim, Settlement, TxnStateStore

log = logging.getLogger(__name__)

LOOK_AFTER: Final = 1.0
"""Seconds without use after which the next transaction looks first whether its coordinator still knows the id."""

LOOK_LIMIT: Final = 2.0
"""Seconds for that look at most: a transaction without messages needs no Kafka, and does not wait for it."""


class Ownership:
    """The id as one writer holds it. Knows nothing of transactions; the writer calls its steps in the recipe's order.

    Attributes:
        generation: The generation that it has taken, once it has.
        kafka_transactional_id: The id of that, as Kafka sees it.
        report: What the last settling found.

    Args:
        store: The database.
        coordinator: Kafka's side, for recovery.
        producers: Makes the producer for a Kafka transactional id, and says of which kind it is.
        transactional_id: The logical id.
        timeouts: Time limits.
    """

    def __init__(
        self,
        store: TxnStateStore,
        coordinator: TransactionCoordinator,
        producers: ProducerFactory,
        *,
        transactional_id: str,
        timeouts: Timeouts,
    ) -> None:
        self._store = store
        self._coordinator = coordinator
        self._producers = producers
        self._id = transactional_id
        self._timeouts = timeouts
        self._claim: Claim | None = None
        self._cluster_id = ""
        self._producer: TransactionalProducer | None = None
        self._committed: PreparedTxnState | None = None
        self._used_at = 0.0
        self.generation = 0
        self.kafka_transactional_id = transactional_id
        self.report = RecoveryReport()

    @property
    def claim(self) -> Claim:
        """The newest claim that we made.

        Raises:
            WriterClosedError: None was made.
        """
        if self._claim is None:
            raise WriterClosedError("The writer holds no claim.", transactional_id=self._id)
        return self._claim

    @property
    def producer(self) -> TransactionalProducer:
        """The producer of our generation.

        Raises:
            WriterClosedError: There is none.
        """
        if self._producer is None:
            raise WriterClosedError("The writer has no producer.", transactional_id=self._id)
        return self._producer

    @property
    def producer_must_be_replaced(self) -> bool:
        """Whether there is no producer, or one that must not begin another transaction (rule F9)."""
        return self._producer is None or self._producer.must_be_replaced

    def make_claim(self, *, only_if_ours: bool) -> None:
        """Claim the id; `only_if_ours`: only while nobody has claimed it after us (rule F8).

        First it is seen that Kafka answers, and is the cluster that the row speaks of: a claim takes the id from a writer that
        can reach it. One's own id is taken from nobody, and what the database says of it is wanted also while Kafka is down.

        Raises: as `check_cluster` and `TxnStateStore.claim`.
        """
        if not only_if_ours:
            limit = self._timeouts.kafka
            self._cluster_id = check_cluster(self._store, self._coordinator, [self._id], timeout=limit)
        expected = self.claim.fence if only_if_ours else None
        self._claim = self._store.claim(
            self._id, describe_owner("writer"), timeout=self._timeouts.claim, expected_fence=expected
        )
        hit("recover_after_claim")

    def adopt(self, claim: Claim) -> None:
        """Go on with a claim that the caller made, on a condition of its own."""
        self._cluster_id = self._coordinator.cluster_id(timeout=self._timeouts.kafka)
        self._claim = claim
        hit("recover_after_claim")

    def resolve(self) -> tuple[GenerationOutcome, ...]:
        """Settle every unsettled generation under our claim; what was found stands in `report`.

        Raises: as `resolve_id`.
        """
        self._clear_committed()
        report = resolve_id(self._store, self._coordinator, self.claim, timeout=self._timeouts.kafka)
        self.report = RecoveryReport((report,))
        for found in report.outcomes:
            if found.outcome is not Outcome.NOTHING:
                log.info("%s: recovered generation %d: %s", self._id, found.generation, found.outcome.value)
        return report.outcomes

    def start(self) -> None:
        """Take the id at Kafka, by a producer of our own, and see that the claim is still ours after it.

        Raises:
            FencedError: Somebody else has claimed the id; nothing was sent by the producer.
            DualWriteError: As `TxnStateStore.take_generation`, `resolve_id`, `TransactionalProducer.init_transactions`.
        """
        self.drop_producer()
        deadline = Deadline.after(self._timeouts.kafka)
        hit("before_take_over")
        if self._producers.kind.takes_over:
            generation, producer = self._taken_over(deadline)
        else:
            generation = self._store.take_generation(self.claim, self._producers.kind, cluster_id=self._cluster_id)
            producer = self._producers(self._store.read_claimed(self.claim).kafka_id(generation))
            with _closed_on_error(producer):
                if self._coordinator.describe(producer.kafka_transactional_id, timeout=deadline) is not None:
                    self._resolve_found(producer, generation, deadline)  # InitProducerId would abort it and not say so
                producer.init_transactions(timeout=deadline.left)
        with _closed_on_error(producer):
            hit("after_take_over")
            self._store.read_claimed(self.claim)
        self._producer, self.generation = producer, generation
        self.kafka_transactional_id = producer.kafka_transactional_id
        self._used_at = time.monotonic()

    def _taken_over(self, deadline: Deadline) -> tuple[int, TransactionalProducer]:
        """Go on with the newest generation by compare-and-set, or begin a new one where its timeout is another (rule F5)."""
        while True:
            generation = self._store.take_generation(
                self.claim, self._producers.kind, reuse=self._newest_is_fit(deadline), cluster_id=self._cluster_id
            )
            kafka_id = self._store.read_claimed(self.claim).kafka_id(generation)
            producer = cast("TakeOverProducer", self._producers(kafka_id))
            with _closed_on_error(producer):
                if self._took(producer, generation, deadline):
                    return generation, producer
            producer.close()
            if deadline.expired:
                raise BrokerUnavailableError(
                    f"The id could not be taken over at Kafka within {self._timeouts.kafka:g} s.",
                    transactional_id=self._id,
                    cause="somebody else keeps using it",
                    next_step="see `dualwrite status`, and open again",
                )

    def _newest_is_fit(self, deadline: Deadline) -> bool:
        """Whether the newest generation is of our kind, with our timeout and with epochs left, or unknown to Kafka."""
        row = self._store.read_claimed(self.claim)
        if row.generation_kind is not self._producers.kind:
            return False
        producer = cast("TakeOverProducer", self._producers(row.kafka_id(row.generation)))
        try:
            described = self._coordinator.describe(producer.kafka_transactional_id, timeout=deadline)
            return described is None or (described.timeout_ms == producer.wanted_timeout_ms and described.epoch <= LAST_EPOCH)
        finally:
            producer.close()

    def _took(self, producer: TakeOverProducer, generation: int, deadline: Deadline) -> bool:
        """Create the id, or raise the epoch of its earlier holders and go on with the one in the answer; False: look again.

        What is found on the generation is settled like everything else: a holder that was paused may have left something
        between our recovery and now.
        """
        described = self._coordinator.describe(producer.kafka_transactional_id, timeout=deadline)
        if described is None:
            return producer.create(timeout=deadline.left)
        if described.timeout_ms != producer.wanted_timeout_ms:
            return False
        raised = self._resolve_found(producer, generation, deadline)
        if raised is None or raised.epoch > LAST_EPOCH:  # the latter on brokers without KAFKA-20090
            return False
        producer.adopt(raised.producer_id, raised.epoch, timeout_ms=described.timeout_ms)
        return True

    # --- ids that their coordinator forgets ---------------------------------------------------------------------------------

    def has_committed(self, committed: PreparedTxnState) -> None:
        """Kafka's answer has proven that our transaction of this state is committed.

        The row keeps the state until the next transaction replaces it. Should the coordinator forget the id meanwhile, this is
        how the writer knows that nothing is in doubt.
        """
        self._used_at = time.monotonic()
        self._committed = committed

    def renew_if_forgotten(self) -> None:
        """After a pause, register the id anew if its coordinator has forgotten it (`transactional.id.expiration.ms`).

        Only while no transaction is open and the last one has ended with proof. Where Kafka does not answer, nothing is done:
        a transaction that needs Kafka meets that by itself.

        Raises:
            FencedError: Somebody else has claimed the id.
            DualWriteError: As `start`.
        """
        if time.monotonic() - self._used_at < LOOK_AFTER:
            return
        try:
            limit = min(LOOK_LIMIT, self._timeouts.kafka)
            described = self._coordinator.describe(self.kafka_transactional_id, timeout=limit)
        except BrokerUnavailableError as error:
            log.debug("%s: not looked at after a pause: %s", self._id, error)
            return
        finally:
            self._used_at = time.monotonic()
        if described is not None:
            return
        log.info("%s: the coordinator has forgotten %s; registering it anew", self._id, self.kafka_transactional_id)
        self._store.settle(self.claim, Settlement(clear_state=True, settled_generation=self.generation))
        self.start()

    def _clear_committed(self) -> None:
        """Take the stored state off the row if it is that of a transaction whose commit we know: it needs no evidence."""
        if self._committed is None:
            return
        row = self._store.read_claimed(self.claim)
        if (row.prepared_state, row.prepared_generation) == (self._committed, self.generation):
            self._store.settle(self.claim, Settlement(clear_state=True))
        self._committed = None

    def _resolve_found(self, producer: TransactionalProducer, generation: int, deadline: Deadline) -> EndTxnAnswer | None:
        """Settle what stands on a generation that is about to be ours, and add it to the report; with the raised epoch."""
        kafka_id = producer.kafka_transactional_id
        resolver = GenerationResolver(self._store, self._coordinator, self.claim, generation, kafka_id, deadline)
        found = tuple(each for each in resolver.resolve() if each.outcome is not Outcome.NOTHING)
        for each in found:
            log.warning("%s: taking over generation %d: %s", self._id, generation, each.outcome.value)
        if found:
            before = self.report.ids[0] if self.report.ids else IdReport(self._id)
            said = tuple(each for each in before.outcomes if (each.generation, each.outcome) != (generation, Outcome.NOTHING))
            lost = self._store.read_claimed(self.claim).lost
            self.report = RecoveryReport((replace(before, outcomes=(*said, *found), unacknowledged=lost),))
        return resolver.raised

    def recover(self) -> None:
        """Claim on the condition that the id is ours still, settle, start anew."""
        self.make_claim(only_if_ours=True)
        self.resolve()
        self.start()

    def drop_producer(self) -> None:
        """Close the producer, if there is one; no transaction is ended by it."""
        producer, self._producer = self._producer, None
        if producer is not None:
            producer.close()

    def clear_row(self) -> None:
        """After a clean end: nothing is prepared, nothing is open on our generation, and the row says so."""
        try:
            self._store.settle(self.claim, Settlement(clear_state=True, settled_generation=self.generation))
        except DualWriteError as error:
            log.info("%s: the row keeps its last, committed state: %s", self._id, error)


@contextmanager
def _closed_on_error(producer: TransactionalProducer) -> Iterator[None]:
    try:
        yield
    except BaseException:
        producer.close()
        raise
