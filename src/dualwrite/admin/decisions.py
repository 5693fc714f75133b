"""What the database knows about Kafka's transactions: the decision about an id, what recovery would do, groups' positions."""

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
OTHER_DATABASE: Final = "the id belongs to another database"
NOT_READ: Final = "the database can't be read"
RESOLVED: Final = "the generation is resolved: its transactions have all been resolved"
NEWER: Final = "the database does not know this generation: it may have been restored from a backup"


@dataclass(frozen=True, slots=True)
class Decided:
    """What the database knows about one id, as Kafka sees it.

    Args:
        row: The state row; None if the id does not belong to this database.
        generation: The id's generation.
        plan: What recovery would do with the generation, if it would do something.
        why: The reason; or why there is no row or no plan.
        error: The error of the database or of Kafka, if a query failed.
        row_plan: What recovery would do with the whole row; None if nothing is planned for the id.
    """

    row: StateRow | None
    generation: int | None
    plan: GenerationPlan | None
    why: str
    error: DualWriteError | None = None
    row_plan: IdPlan | None = None

    @property
    def state(self) -> PreparedTxnState | None:
        """The prepared state of the generation in the row: the transaction that the database has committed."""
        if self.row is None or self.row.prepared_generation != self.generation:
            return None
        return self.row.prepared_state

    @property
    def is_out_of_reach(self) -> bool:
        """Whether the database can't be reached, or has no table."""
        return isinstance(self.error, StoreUnavailableError | StateTableMissingError)

    def seen(self, described: DescribedTransaction) -> DescribedTransaction:
        """The description that the plan is based on, so that what is shown agrees with the plan."""
        if self.plan is None:
            return described
        return replace(described, description=self.plan.described, problem=None)


class Decisions:
    """Looks up ids in a database. Use it in a `with` statement, or call `close()`.

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
        """The ids to query at Kafka.

        For an id in the database: those that recovery would examine, or else its newest; a logical id includes its lanes. For
        any other id: the id itself.
        """
        try:
            rows = [row for name in self._with_lanes(given) if (row := self._read(name)) is not None]
        except DualWriteError:  # reported for each id, together with Kafka's description
            return [given]
        return [name for row in rows for name in _names_at_kafka(row)] or [given]

    def affected(self, given: str) -> list[str]:
        """As `kafka_ids`. For an id as Kafka sees it, also the other ids whose transactions the recovery of its row ends."""
        names = self.kafka_ids(given)
        named = TransactionalId.of_kafka(given)
        if names != [given] or named is None:
            return names
        try:
            row = self._read(named.row)
        except DualWriteError:
            return names
        if row is None or row.kafka_id(named.generation) != given:
            return names
        return list(dict.fromkeys([given, *map(row.kafka_id, row.generations_to_recover)]))

    def of(self, kafka_id: str) -> Decided:
        """What the database knows about an id, as Kafka sees it."""
        return self.of_each([kafka_id])[kafka_id]

    def of_each(self, kafka_ids: Iterable[str]) -> dict[str, Decided]:
        """What the database knows about each id. Kafka is queried once for all of them, and each row is read once."""
        found: dict[str, Decided] = {}
        rows: dict[str, tuple[StateRow, int]] = {}
        for kafka_id in kafka_ids:
            named = TransactionalId.of_kafka(kafka_id) or TransactionalId.of_row(kafka_id)
            try:
                row = self._read(named.row)
            except DualWriteError as error:
                found[kafka_id] = Decided(None, None, None, NOT_READ, error)
                continue
            if row is None:
                found[kafka_id] = Decided(None, None, None, NOT_OURS)
            elif row.kafka_id(named.generation) != kafka_id:
                found[kafka_id] = Decided(None, None, None, OTHER_DATABASE)
            else:
                found[kafka_id] = Decided(row, named.generation, None, RESOLVED)  # in the order of the ids
                rows[kafka_id] = row, named.generation
        names = dict.fromkeys(row.transactional_id for row, _ in rows.values())
        plans = {plan.transactional_id: plan for plan in self._recoverer.plan_lanes(names).ids}
        for kafka_id, (row, generation) in rows.items():
            found[kafka_id] = _decided(row, generation, plans[row.transactional_id])
        return found

    def try_again(self) -> None:
        """Query the database again, even if it could not be reached before."""
        self._unavailable = None

    def positions(self, group: str) -> Mapping[Partition, int]:
        """The stored positions of a consumer group; empty if it has none here.

        Raises:
            StoreError: They can't be read.
        """
        stored = {} if self._store.positions is None else self._store.positions.read(group)
        return {key: one.offset for key, one in stored.items()}

    def committed(self, producer_id: int, epoch: int) -> StateRow | None:
        """The row that shows that the database has committed this producer's transaction; None if there is no such row.

        The row names the transaction as its prepared state, or as a transaction that is lost or unverified.

        Raises:
            StoreError: The rows can't be read.
        """
        for name in self._store.list():
            row = self._read(name)
            if row is not None and has_committed(row, producer_id, epoch):
                return row
        return None

    def carry_out(self, decided: Iterable[Decided]) -> RecoveryReport:
        """End the open transactions of the rows as planned, if the rows have not changed since (`Recoverer.carry_out`)."""
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
        if self._unavailable is not None:  # the next id would run into the same timeout
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


def has_committed(row: StateRow, producer_id: int, epoch: int) -> bool:
    """Whether a row names this producer's transaction as its prepared state, or as lost or unverified."""
    states = (row.prepared_state, *(entry.state for entry in row.lost))
    return any(state is not None and (state.producer_id, state.epoch) == (producer_id, epoch) for state in states)


def _names_at_kafka(row: StateRow) -> list[str]:
    return [row.kafka_id(generation) for generation in row.generations_to_recover or (row.generation,)]


def _decided(row: StateRow, generation: int, found: IdPlan) -> Decided:
    row = found.row or row
    if found.error is not None:
        return Decided(row, generation, None, "recovery would fail", found.error)
    plan = next((one for one in found.generations if one.generation == generation), None)
    why = plan.why if plan is not None else NEWER if generation > row.generation else RESOLVED
    return Decided(row, generation, plan, why, row_plan=found)
