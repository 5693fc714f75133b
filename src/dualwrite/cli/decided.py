"""What the database knows about what Kafka shows: the decision about an id, what recovery would do, groups' positions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Self

from dualwrite.api import open_recoverer
from dualwrite.cli.options import store_for
from dualwrite.errors import DualWriteError, StateTableMissingError, StoreUnavailableError
from dualwrite.recovery.plan import GenerationPlan
from dualwrite.recovery.recoverer import Recoverer
from dualwrite.recovery.report import RecoveryReport
from dualwrite.settings import Settings
from dualwrite.state import PreparedTxnState
from dualwrite.stores.base import StateRow, TxnStateStore
from dualwrite.stores.positions import Partition
from dualwrite.transactional_id import TransactionalId

NOT_OURS = "the database has no such id"
OTHER_DATABASE = "the id of this name belongs to another database"
NOT_READ = "the database gave no answer"
SETTLED = "the generation is settled: whatever was open on it has been resolved"


@dataclass(frozen=True, slots=True)
class Decided:
    """The database's side of one id, as Kafka sees it.

    Args:
        row: The state row; None if the id is not one of this database's.
        generation: The id's generation.
        plan: What recovery would do with the generation, if it would do something.
        why: The reason; or why there is no row or no plan.
        error: What the database or Kafka answered instead.
    """

    row: StateRow | None
    generation: int | None
    plan: GenerationPlan | None
    why: str
    error: DualWriteError | None = None

    @property
    def state(self) -> PreparedTxnState | None:
        """The prepared state that the row has for the generation: the database has committed this transaction."""
        if self.row is None or self.row.prepared_generation != self.generation:
            return None
        return self.row.prepared_state


class Decisions:
    """Looks ids up in a database; to be closed by `with`.

    Args:
        settings: The database and Kafka.
    """

    def __init__(self, settings: Settings) -> None:
        self._store: TxnStateStore = store_for(settings)
        self._recoverer: Recoverer = open_recoverer(self._store, settings=settings)
        self._unavailable: StoreUnavailableError | None = None

    def kafka_ids(self, given: str) -> list[str]:
        """The ids to ask Kafka for: of a row's id, those of its unsettled generations or its newest; else the id itself."""
        try:
            row = self._read(given)
        except DualWriteError:  # told for each id, beside what Kafka says
            return [given]
        if row is None:
            return [given]
        return [row.kafka_id(generation) for generation in row.unsettled_generations or (row.generation,)]

    def of(self, kafka_id: str) -> Decided:
        """The database's side of an id, as Kafka sees it."""
        named = TransactionalId.of_kafka(kafka_id)
        try:
            row = None if named is None else self._read(named.row)
        except DualWriteError as error:
            return Decided(None, None, None, NOT_READ, error)
        if named is None or row is None:
            return Decided(None, None, None, NOT_OURS)
        generation = named.generation or 0
        if row.kafka_id(generation) != kafka_id:
            return Decided(None, None, None, OTHER_DATABASE)
        plans = [plan for plan in self._recoverer.plan([named.row]).ids if plan.transactional_id == named.row]
        failed = next((plan.error for plan in plans if plan.error is not None), None)
        if failed is not None:
            return Decided(row, generation, None, "recovery could do nothing", failed)
        plan = next((found for one in plans for found in one.generations if found.generation == generation), None)
        return Decided(row, generation, plan, SETTLED if plan is None else plan.why)

    def try_again(self) -> None:
        """Ask the database again, if it was out of reach."""
        self._unavailable = None

    def positions(self, group: str) -> Mapping[Partition, int]:
        """The stored positions of a consumer group; empty if it has none here.

        Raises:
            StoreError: They can't be read.
        """
        try:
            stored = {} if self._store.positions is None else self._store.positions.read(group)
        except StateTableMissingError:  # of a release before positions
            return {}
        return {key: one.offset for key, one in stored.items()}

    def committed(self, producer_id: int, epoch: int) -> StateRow | None:
        """The row that says that the database has committed the transaction of this producer; None if none does.

        That is its prepared state, or an entry of a transaction that was recorded as lost or unverified.
        """
        for name in self._store.list():
            row = self._read(name)
            if row is None:
                continue
            states = (row.prepared_state, *(entry.state for entry in row.lost))
            if any(state is not None and (state.producer_id, state.epoch) == (producer_id, epoch) for state in states):
                return row
        return None

    def recover(self, kafka_ids: Iterable[str]) -> RecoveryReport:
        """Claim the rows of ids, as Kafka sees them, and end what is open on them as the database decided."""
        rows = dict.fromkeys(named.row for one in kafka_ids if (named := TransactionalId.of_kafka(one)) is not None)
        return self._recoverer.recover(list(rows))

    def _read(self, row_id: str) -> StateRow | None:
        if self._unavailable is not None:  # it would take as long again for the next id
            raise self._unavailable
        try:
            return self._store.read(row_id)
        except StoreUnavailableError as error:
            self._unavailable = error
            raise

    def close(self) -> None:
        """Close the connections."""
        self._recoverer.close()
        self._store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
