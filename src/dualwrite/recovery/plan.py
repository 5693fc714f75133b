"""What recovery would do with an id, and why: a read-only check of its row and of Kafka.

Recovery makes this check before it claims an id, so that the owner keeps an id whose coordinator does not answer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from types import MappingProxyType
from typing import Final

from dualwrite.deadline import Deadline, Limit
from dualwrite.errors import BrokerError, DualWriteError
from dualwrite.kafka.base import TransactionCoordinator
from dualwrite.recovery.decision import Decision
from dualwrite.recovery.resolve import decided, decision_by_log, found_in_log, proven_by_log
from dualwrite.state import FoundMessages, PreparedTxnState, TransactionDescription, TransactionStatus
from dualwrite.stores.base import LostKind, LostTransaction, StateRow, TxnStateStore
from dualwrite.stores.rows import on_cluster, proven_lost

REASONS: Final = MappingProxyType(
    {
        Decision.COMMIT: "the database committed the transaction, and Kafka has it prepared",
        Decision.ABORT: "the transaction is open at Kafka, and the database has not committed it",
        Decision.ALREADY_COMMITTED: "both sides have committed",
        Decision.LOST: "the database committed the transaction, but Kafka aborted it",
        Decision.PROVE: "the producer id has changed since: EndTxn with the stored one will show how the transaction ended",
        Decision.UNVERIFIED: "the database committed the transaction, but Kafka has no evidence of it",
        Decision.FORGOTTEN: "Kafka has committed a later transaction than the database knows, which has forgotten it",
        Decision.WAIT: "Kafka is ending the transaction: recovery would wait and check again",
        Decision.NOTHING: "nothing is open: earlier owners of the id would be fenced",
    }
)
"""The reason for each decision."""


@dataclass(frozen=True, slots=True)
class GenerationPlan:
    """What recovery would do with one generation.

    Args:
        transactional_id: The logical id, or the id of a lane.
        generation: The generation.
        kafka_transactional_id: The id that Kafka sees.
        decision: What recovery would do.
        state: The prepared state in the row for this generation, or None.
        described: The coordinator's description, or None if it does not know the id.
    """

    transactional_id: str
    generation: int
    kafka_transactional_id: str
    decision: Decision
    state: PreparedTxnState | None
    described: TransactionDescription | None

    @property
    def why(self) -> str:
        """The reason, as a sentence without the final period."""
        return REASONS[self.decision]

    def covers(self, now: GenerationPlan) -> bool:
        """Whether carrying out the later plan `now` ends only what this plan has shown.

        That is the case if nothing is ongoing any more, or the same transaction is still ongoing, with the same decision.
        """
        if now.described is None or now.described.status is not TransactionStatus.ONGOING:
            return True
        was = self.described
        if was is None or was.status is not TransactionStatus.ONGOING:
            return False
        pairs = ((found.producer_id, found.epoch, found.start_time_ms) for found in (was, now.described))
        return len(set(pairs)) == 1 and self.decision is now.decision


@dataclass(frozen=True, slots=True)
class IdPlan:
    """What recovery would do with one id.

    Args:
        transactional_id: The logical id, or the id of a lane.
        owner: The current owner, which would be fenced; None if the id would not be claimed.
        generations: One for each generation that recovery would resolve; empty if the id would not be claimed.
        unacknowledged: The lost and unverified transactions in the row.
        error: Why the id could not be examined, if so.
        row: The row that the plan was made from; None if it could not be read.
        found: If lost messages are to be published again: each lost transaction, also one that recovery would find lost, with
            what the log still has of it.
    """

    transactional_id: str
    owner: str | None = None
    generations: tuple[GenerationPlan, ...] = ()
    unacknowledged: tuple[LostTransaction, ...] = ()
    error: DualWriteError | None = None
    row: StateRow | None = None
    found: tuple[tuple[LostTransaction, FoundMessages], ...] = ()


@dataclass(frozen=True, slots=True, repr=False)
class RecoveryPlan:
    """What recovery would do, id by id. Iterating over it yields every generation."""

    ids: tuple[IdPlan, ...] = ()

    def __iter__(self) -> Iterator[GenerationPlan]:
        return (generation for plan in self.ids for generation in plan.generations)

    def __repr__(self) -> str:
        counts = Counter(found.decision.value for found in self)
        what = ", ".join(f"{count} {name}" for name, count in counts.items()) or "nothing open"
        return f"<{type(self).__name__} of {len(self.ids)} ids: {what}>"

    @property
    def failed(self) -> tuple[IdPlan, ...]:
        """The ids that could not be examined."""
        return tuple(plan for plan in self.ids if plan.error is not None)

    @property
    def unacknowledged(self) -> tuple[tuple[str, LostTransaction], ...]:
        """Every lost or unverified transaction that is not acknowledged, with its id."""
        return tuple((plan.transactional_id, lost) for plan in self.ids for lost in plan.unacknowledged)

    @property
    def lost_messages(self) -> tuple[tuple[IdPlan, LostTransaction, FoundMessages], ...]:
        """With `on_lost="republish"`: every lost transaction, and what would be published of it if nothing is missing."""
        return tuple((plan, entry, found) for plan in self.ids for entry, found in plan.found)

    @property
    def would_lose(self) -> tuple[GenerationPlan, ...]:
        """The generations that recovery would record as lost, unverified or forgotten."""
        return tuple(found for found in self if found.decision.name in LostKind.__members__)


class KafkaCheck:
    """Checks the database and Kafka for one call of recovery, or one opening. Claims nothing.

    If no broker answers, only one time limit is spent on finding that out, not one for each id.
    """

    def __init__(self, store: TxnStateStore, coordinator: TransactionCoordinator, *, timeout: float | None = None) -> None:
        self._store = store
        self._coordinator = coordinator
        self._timeout = timeout
        self._cluster_id: str | None = None
        self._unreachable: BrokerError | None = None

    def check(self) -> str:
        """Check that the database is the original and that Kafka answers; return Kafka's `cluster.id`.

        Raises:
            StoreCopiedError: The database is a copy, or has moved.
            BrokerError: Kafka does not answer.
        """
        if self._unreachable is not None:
            raise self._unreachable
        if self._cluster_id is None:
            self._store.check_original()
            try:
                self._cluster_id = self._coordinator.cluster_id(timeout=self._timeout)
            except BrokerError as error:
                self._unreachable = error
                raise
        return self._cluster_id

    def at(self, row: StateRow) -> tuple[GenerationPlan, ...]:
        """What recovery would do with each unresolved generation of an id, according to its coordinator.

        Raises:
            StoreCopiedError: As for `check`.
            ClusterMismatchError: The row names another cluster.
            BrokerError: Kafka, or the coordinator of a generation, does not answer.
        """
        on_cluster(row, self.check())
        limit = None if self._timeout is None else Deadline.after(self._timeout)
        plans = tuple(self._planned(row, generation, limit) for generation in row.generations_to_recover)
        idle = {plan.generation for plan in plans if plan.decision is Decision.NOTHING}
        again = [entry for entry in row.unverified if entry.generation in idle]
        for entry, decision in proven_by_log(self._coordinator, row, again, limit):
            proven = partial(replace, decision=decision, state=entry.state)
            plans = tuple(proven(plan) if plan.generation == entry.generation else plan for plan in plans)
        return plans

    def lost_messages(
        self, row: StateRow, plans: Iterable[GenerationPlan]
    ) -> tuple[tuple[LostTransaction, FoundMessages], ...]:
        """What the log has of the lost transactions in a row, and of those that recovery would find lost.

        Raises:
            BrokerError: Kafka does not answer.
        """
        cluster_id = self.check()
        now = datetime.now(UTC)
        found = list(proven_lost(row.lost))
        for plan in plans:
            if plan.decision is Decision.LOST and plan.state is not None:
                known = (entry.delivery for entry in row.lost if entry.state == plan.state)
                delivery = row.delivery if plan.state == row.prepared_state else next(known, None)
                found.append(LostTransaction(LostKind.LOST, plan.state, plan.generation, now, delivery, None, row.cluster_id))
        return tuple((entry, found_in_log(self._coordinator, entry, cluster_id, timeout=self._timeout)) for entry in found)

    def _planned(self, row: StateRow, generation: int, limit: Limit | None) -> GenerationPlan:
        kafka_id = row.kafka_id(generation)
        described = self._coordinator.describe(kafka_id, timeout=limit)
        stored, _, decision = decided(row, generation, described)
        if decision is Decision.UNVERIFIED and stored is not None:
            decision = decision_by_log(self._coordinator, stored, row.delivery, limit)
        if decision is Decision.FORGOTTEN and self._store.read(row.transactional_id) != row:  # a writer has gone on since
            decision = Decision.NOTHING
        return GenerationPlan(row.transactional_id, generation, kafka_id, decision, stored, described)
