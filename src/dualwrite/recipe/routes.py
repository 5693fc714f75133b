"""The route of a lane's transactions: each step of the recipe that depends on where their messages go.

A lane knows nothing else of that side. Here is the route to Kafka, which every lane has; a lane with a journal has another one
besides it (`dualwrite.recipe.journaling`).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from enum import Enum
from typing import ClassVar

from dualwrite.errors import DualWriteError
from dualwrite.kafka.base import TransactionalProducer
from dualwrite.observability.logs import SubjectLogger
from dualwrite.observability.outages import is_no_answer, level_of
from dualwrite.recipe.idle import RECOVER_LIMIT
from dualwrite.recipe.ownership import Ownership
from dualwrite.recipe.phases import Change, Way
from dualwrite.recipe.remembered import RecordedTransaction
from dualwrite.recipe.republish import LostMessages
from dualwrite.recovery.report import GenerationOutcome
from dualwrite.state import PreparedTxnState, ProducerKind
from dualwrite.stores.base import Claim, StoreTransaction
from dualwrite.transaction import Outcome

log = SubjectLogger(__name__)


class Aborted(Enum):
    """What is known after an attempt to abort."""

    CLEAN = "nothing is open any more"
    UNCERTAIN = "something may be open: the id must be recovered"
    UNREACHABLE = "the same, and recovering the id would not get an answer now"


class Route(ABC):
    """Where the messages of a transaction go; the lane calls its steps in the recipe's order.

    Attributes:
        outcome: What a transaction is called that has committed on this route.
        committed: How a log says that a transaction has.
    """

    outcome: ClassVar[Outcome]
    committed: ClassVar[str]

    @property
    @abstractmethod
    def producer(self) -> TransactionalProducer:
        """Takes the messages of the transaction."""

    @abstractmethod
    def record(self, transaction: StoreTransaction, decided: RecordedTransaction) -> None:
        """Write in the database's transaction what decides about the messages. Raises: as `StoreTransaction.record`."""

    @abstractmethod
    def commit(self, state: PreparedTxnState | None) -> None:
        """Commit the messages of a transaction that the database has committed.

        Raises:
            DualWriteError: It is not known whether they are committed (rule KU).
        """

    @abstractmethod
    def leave(self) -> None:
        """Take another route, before anything was sent on this one."""

    @abstractmethod
    def abort(self) -> Aborted:
        """Abort what the transaction has sent. Takes seconds only: the caller waits, and `recipe.idle` does it as well."""

    @abstractmethod
    def resolve(self) -> tuple[GenerationOutcome, ...]:
        """Under a new claim, end what the transaction has left. Raises: as `Ownership.resolve`."""

    @abstractmethod
    def resume(self) -> Change:
        """After `resolve`, prepare for the next transaction; returns what has happened. Raises: as `Ownership.start`."""


class Choice(ABC):
    """Which route a transaction takes; that is known only once its fence is checked."""

    @property
    @abstractmethod
    def first_way(self) -> Way:
        """The way of a transaction that begins, as far as it is known."""

    @abstractmethod
    def way_of(self, transaction: StoreTransaction, way: Way) -> Way:
        """The way of a transaction that has taken this one, once its fence is checked.

        Raises:
            JournalSwitchedError: It can't go that way now.
        """

    @abstractmethod
    def route(self, way: Way) -> Route:
        """The route that leads this way."""


class KafkaRoute(Route):
    """To Kafka, on an id that the lane owns; the transaction is committed there after the database's commit.

    Args:
        ownership: That of the lane's id.
        lost: Publishes again what was found lost, before the next transaction (rule RO); None: nobody does.

    Attributes:
        publishes_lost: Whether somebody publishes again what was found lost.
        commit_limit: The maximum seconds that a commit waits for Kafka, even if the time limit is longer.
    """

    outcome = "published"
    committed = "committed on both sides"
    commit_limit: ClassVar[float] = math.inf

    def __init__(self, ownership: Ownership, lost: LostMessages | None) -> None:
        self._ownership = ownership
        self._parties = ownership.parties
        self._lost = lost
        self.publishes_lost = lost is not None

    # --- one transaction --------------------------------------------------------------------------------------------------

    @property
    def producer(self) -> TransactionalProducer:
        return self._ownership.producer

    def record(self, transaction: StoreTransaction, decided: RecordedTransaction) -> None:
        # without two-phase commit, the remaining time is checked between the record and the COMMIT
        is_two_phase = self._parties.producers.kind is ProducerKind.NATIVE_TWO_PHASE
        record = transaction.record_at_commit if is_two_phase else transaction.record
        number, delivery = decided.number, decided.delivery
        record(decided.state, generation=decided.generation, transaction_number=number, delivery=delivery)

    def commit(self, state: PreparedTxnState | None) -> None:
        self.producer.commit_transaction(timeout=min(self.commit_limit, self._parties.timeouts.kafka))
        if state is not None:
            self._ownership.has_committed(state)

    def leave(self) -> None:
        self.producer.abort_transaction(timeout=self._parties.timeouts.kafka)

    def abort(self) -> Aborted:
        if self.producer.must_be_replaced:
            return Aborted.UNCERTAIN
        try:
            self.producer.abort_transaction(timeout=min(self._parties.timeouts.kafka, RECOVER_LIMIT))
        except DualWriteError as aborting:
            log.log(
                level_of(aborting), "aborting Kafka's side: %s", aborting, transactional_id=self._ownership.transactional_id
            )
            return Aborted.UNREACHABLE if is_no_answer(aborting) else Aborted.UNCERTAIN
        return Aborted.CLEAN

    def resolve(self) -> tuple[GenerationOutcome, ...]:
        return self._ownership.resolve()

    def resume(self) -> Change:
        self._ownership.start()
        if self._lost is not None:
            self._lost.publish(self._ownership)  # rule RO: before the next transaction
        return Change.OPENED

    # --- between transactions ---------------------------------------------------------------------------------------------

    def renew(self) -> None:
        """After a pause, register the id again if it was forgotten; see `Ownership.renew_if_forgotten`."""
        self._ownership.renew_if_forgotten()

    @property
    def is_down(self) -> bool:
        """Whether Kafka did not answer when it was needed last, and transactions go on without it."""
        return False

    # --- the choice of a route --------------------------------------------------------------------------------------------

    choice: Choice | None = None
    """Who chooses the route of each transaction; None: it is always this one."""

    gate: str | None = None
    """The prefix whose gate is read with the fence, if somebody chooses."""

    def begin(self, claim: Claim, *, at_once: bool) -> StoreTransaction:
        """Begin the database's transaction; see `TxnStateStore.begin` for `at_once`, and `begin_soon`."""
        store = self._parties.store
        return store.begin(claim) if at_once else store.begin_soon(claim)

    def judged(self, error: BaseException) -> BaseException:
        """What to raise for an error of a transaction of which nothing was recorded."""
        return error
