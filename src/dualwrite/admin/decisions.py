"""What the database knows about what Kafka shows: the decision about an id, what recovery would do, groups' positions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final, Self

from dualwrite.errors import DualWriteError, StateTableMissingError, StoreUnavailableError
from dualwrite.kafka.admin.facts import DescribedTransaction
from dualwrite.recovery.plan import GenerationPlan, IdPlan
from dualwrite.recovery.recoverer import Recoverer, ids_with_lanes
from dualwrite.recovery.report import RecoveryReport
from dualwrite.state import PreparedTxnState
from dualwrite.stores.base import StateRow, TxnStateStore
from dualwrite.stores.positions import Partition
from dualwrite.transactional_id import TransactionalId

NOT_OURS: Final = "the database has no such id"
OTHER_DATABASE: Final = "the id of this name belongs to another database"
NOT_READ: Final = "the database gave no answer"
RESOLVED: Final = "the generation is resolved: whatever was open on it has been resolved"
NEWER: Final = "the database does not know this generation: it may have been restored from a backup"


@dataclass(frozen=True, slots=True)
class Decided:
    """The database's side of one id, as Kafka sees it.

    Args:
        row: The state row; None if the id is not one of this database's.
        generation: The id's generation.
        plan: What recovery would do with the generation, if it would do something.
        why: The reason; or why there is no row or no plan.
        error: What the database or Kafka answered instead.
        row_plan: What recovery would do with the whole row; None if the database has not planned anything for the id.
    """

    row: StateRow | None
    generation: int | None
    plan: GenerationPlan | None
    why: str
    error: DualWriteError | None = None
    row_plan: IdPlan | None = None

    @property
    def state(self) -> PreparedTxnState | None:
        """The prepared state that the row has for the generation: the database has committed this transaction."""
        if self.row is None or self.row.prepared_generation != self.generation:
            return None
        return self.row.prepared_state

    @property
    def is_out_of_reach(self) -> bool:
        """Whether the database, or its table, is not there to be asked."""
        return isinstance(self.error, StoreUnavailableError | StateTableMissingError)

    def seen(self, described: DescribedTransaction) -> DescribedTransaction:
        """The description that the plan was made from, so that what is shown is what is planned."""
        if self.plan is None:
            return described
        return replace(described, description=self.plan.described, problem=None)


class Decisions:
    """Looks ids up in a database; to be closed by `with`.

    Args:
        store: The database; closed by `close`.
        recoverer: Recovers its ids; closed by `close`.
    """

    def __init__(self, store: TxnStateStore, recoverer: Recoverer) -> None:
        self._store = store
        self._recoverer = recoverer
        self._unavailable: StoreUnavailableError | None = None

    @property
    def store(self) -> TxnStateStore:
        """The database."""
        return self._store

    def kafka_ids(self, given: str) -> list[str]:
        """The ids to ask Kafka for.

        Of a row's id, those that recovery would look at, or its newest; a logical id includes its lanes. Else the id itself.
        """
        try:
            rows = [row for name in self._with_lanes(given) if (row := self._read(name)) is not None]
        except DualWriteError:  # reported for each id, next to Kafka's answer
            return [given]
        return [name for row in rows for name in _names_at_kafka(row)] or [given]

    def affected(self, given: str) -> list[str]:
        """As `kafka_ids`, and of an id as Kafka sees it also the others that recovery of its row ends."""
        names = self.kafka_ids(given)
        named = TransactionalId.of_kafka(given)
        if names != [given] or named is None:
            return names
        try:
            row = self._read(named.row)
        except DualWriteError:
            return names
        if row is None or row.kafka_id(named.generation or 0) != given:
            return names
        return list(dict.fromkeys([given, *map(row.kafka_id, row.generations_to_recover)]))

    def of(self, kafka_id: str) -> Decided:
        """The database's side of an id, as Kafka sees it."""
        return self.of_each([kafka_id])[kafka_id]

    def of_each(self, kafka_ids: Iterable[str]) -> dict[str, Decided]:
        """The database's side of each id, by one look at Kafka for all of them, and one at each row."""
        found: dict[str, Decided] = {}
        rows: dict[str, tuple[StateRow, int]] = {}
        for kafka_id in kafka_ids:
            named = TransactionalId.of_kafka(kafka_id)
            try:
                row = None if named is None else self._read(named.row)
            except DualWriteError as error:
                found[kafka_id] = Decided(None, None, None, NOT_READ, error)
                continue
            if named is None or row is None:
                found[kafka_id] = Decided(None, None, None, NOT_OURS)
            elif row.kafka_id(named.generation or 0) != kafka_id:
                found[kafka_id] = Decided(None, None, None, OTHER_DATABASE)
            else:
                found[kafka_id] = Decided(row, named.generation or 0, None, RESOLVED)  # in the order of the ids
                rows[kafka_id] = row, named.generation or 0
        names = dict.fromkeys(row.transactional_id for row, _ in rows.values())
        plans = {plan.transactional_id: plan for plan in self._recoverer.plan_lanes(names).ids}
        for kafka_id, (row, generation) in rows.items():
            found[kafka_id] = _decided(row, generation, plans[row.transactional_id])
        return found

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

        Raises:
            StoreError: The rows can't be read.
        """
        for name in self._store.list():
            row = self._read(name)
            if row is None:
                continue
            states = (row.prepared_state, *(entry.state for entry in row.lost))
            if any(state is not None and (state.producer_id, state.epoch) == (producer_id, epoch) for state in states):
                return row
        return None

    def carry_out(self, decided: Iterable[Decided]) -> RecoveryReport:
        """End what is open on the rows, as decided; only if they are as they were (`Recoverer.carry_out`)."""
        plans = {plan.transactional_id: plan for one in decided if (plan := one.row_plan) is not None}
        return self._recoverer.carry_out(plans.values())

    def _with_lanes(self, given: str) -> list[str]:
        if self._unavailable is not None:
            raise self._unavailable
        try:
            return ids_with_lanes(self._store, [given])
        except StoreUnavailableError as error:
            self._unavailable = error
            raise

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


def _names_at_kafka(row: StateRow) -> list[str]:
    return [row.kafka_id(generation) for generation in row.generations_to_recover or (row.generation,)]


def _decided(row: StateRow, generation: int, found: IdPlan) -> Decided:
    row = found.row or row
    if found.error is not None:
        return Decided(row, generation, None, "recovery could do nothing", found.error)
    plan = next((one for one in found.generations if one.generation == generation), None)
    why = plan.why if plan is not None else NEWER if generation > row.generation else RESOLVED
    return Decided(row, generation, plan, why, row_plan=found)
