"""What the database knows about Kafka's transactions: the decision about an id, what recovery would do, groups' positions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final, Self, TypeVar

from dualwrite.admin.ending import Examined
from dualwrite.admin.facts import DescribedTransaction
from dualwrite.errors import DualWriteError, RepairRefusedError, StateTableMissingError, StoreUnavailableError, shell_word
from dualwrite.recovery.decision import Decision
from dualwrite.recovery.plan import GenerationPlan, IdPlan
from dualwrite.recovery.recoverer import Recoverer, ids_with_lanes
from dualwrite.recovery.report import RecoveryReport
from dualwrite.state import PreparedTxnState, TransactionStatus
from dualwrite.stores.base import StateRow, TxnStateStore
from dualwrite.stores.positions import Partition
from dualwrite.transactional_id import TransactionalId

T = TypeVar("T")

NOT_OURS: Final = "the database has no such id"
OTHER_DATABASE: Final = "the id belongs to another database"
NOT_READ: Final = "the database can't be read"
RESOLVED: Final = "the generation is resolved: its transactions have all been resolved"
NEWER: Final = "the database does not know this generation: it may have been restored from a backup"
_WAIVE: Final = "add --without-database"


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
        self.store = store
        """The database."""
        self._recoverer = recoverer
        self._unavailable: StoreUnavailableError | None = None

    def kafka_ids(self, given: str) -> list[str]:
        """The ids to query at Kafka.

        For an id in the database: those that recovery would examine, or else its newest; a logical id includes its lanes. For
        any other id: the id itself.
        """
        try:
            names = self._query(lambda: ids_with_lanes(self.store, [given]))
            rows = [row for name in names if (row := self._read(name)) is not None]
        except DualWriteError:  # reported for each id, together with Kafka's description
            return [given]
        names = [row.kafka_id(at) for row in rows for at in row.generations_to_recover or (row.generation,)]
        return names or [given]

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

    def positions(self, group: str) -> Mapping[Partition, int]:
        """The stored positions of a consumer group; empty if it has none here.

        Raises:
            StoreError: They can't be read.
        """
        stored = {} if self.store.positions is None else self.store.positions.read(group)
        return {key: one.offset for key, one in stored.items()}

    def committed(self, producer_id: int, epoch: int) -> StateRow | None:
        """The row that shows that the database has committed this producer's transaction; None if there is no such row.

        The row names the transaction as its prepared state, or as a transaction that is lost or unverified.

        Raises:
            StoreError: The rows can't be read.
        """
        for name in self.store.list():
            row = self._read(name)
            if row is not None and has_committed(row, producer_id, epoch):
                return row
        return None

    def carry_out(self, decided: Iterable[Decided]) -> RecoveryReport:
        """End the open transactions of the rows as planned, if the rows have not changed since (`Recoverer.carry_out`)."""
        plans = {plan.transactional_id: plan for one in decided if (plan := one.row_plan) is not None}
        return self._recoverer.carry_out(plans.values())

    def _read(self, row_id: str) -> StateRow | None:
        return self._query(lambda: self.store.read(row_id))

    def _query(self, query: Callable[[], T]) -> T:
        if self._unavailable is not None:  # the next query would run into the same timeout
            raise self._unavailable
        try:
            return query()
        except StoreUnavailableError as error:
            self._unavailable = error
            raise

    def close(self) -> None:
        """Close the connections."""
        self._recoverer.close()
        self.store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def has_committed(row: StateRow, producer_id: int, epoch: int) -> bool:
    """Whether a row names this producer's transaction as its prepared state, or as lost or unverified."""
    states = (row.prepared_state, *(entry.state for entry in row.lost))
    return any(state is not None and (state.producer_id, state.epoch) == (producer_id, epoch) for state in states)


def _decided(row: StateRow, generation: int, found: IdPlan) -> Decided:
    row = found.row or row
    if found.error is not None:
        return Decided(row, generation, None, "recovery would fail", found.error)
    plan = next((one for one in found.generations if one.generation == generation), None)
    why = plan.why if plan is not None else NEWER if generation > row.generation else RESOLVED
    return Decided(row, generation, plan, why, row_plan=found)


def is_made_by_dualwrite(transactional_id: str) -> bool:
    """Whether an id, as Kafka sees it, has the form of a dualwrite writer's id."""
    return TransactionalId.of_kafka(transactional_id) is not None


def is_open(one: DescribedTransaction) -> bool:
    """Whether the id has an open transaction that its coordinator has not begun to end."""
    return one.description is not None and one.description.status is TransactionStatus.ONGOING


def refusal_to_terminate(
    one: DescribedTransaction, found: Decided | None, *, without_database: bool = False
) -> DualWriteError | None:
    """The error if an open transaction must not be aborted; None if it may be aborted.

    If `found` has a plan, it may be aborted only by `Decisions.carry_out`, which claims the row; otherwise by
    `TransactionAdmin.force_terminate`.

    Args:
        one: The coordinator's description.
        found: What the database knows; None if no database was given.
        without_database: Whether it may be aborted although no database knows it.
    """
    if found is not None and found.plan is not None:
        return _refusal_of_plan(one, found)
    if found is not None and found.error is not None and not (without_database and found.is_out_of_reach):
        return found.error
    if found is not None and found.row is not None and not is_open(one):
        return one.problem  # if there is none, there is nothing to do
    if (row := _row_with(one, found)) is not None:  # without a plan: the database was lost since the row was read
        return refusal_of_committed(row)
    return None if without_database else _undecided(one.transactional_id, found)


def refusal_to_complete(one: DescribedTransaction, found: Decided) -> DualWriteError | None:
    """The error if an id can't be recovered as its database decided; None if it can, or if it has no open transaction.

    Args:
        one: The coordinator's description.
        found: What the database knows.
    """
    if found.error is not None:
        return found.error
    if found.row is not None and (found.plan is not None or not is_open(one)):
        return None if found.plan is not None else one.problem
    if found.row is not None:
        return _unknown_generation(one.transactional_id, found, _forced(one.transactional_id))
    if found.why == OTHER_DATABASE:
        return _other_database(one.transactional_id, _forced(one.transactional_id))
    return RepairRefusedError(
        "The database has no such id, so it decided nothing about it.",
        transactional_id=one.transactional_id,
        next_step="`dualwrite status` lists the ids of the database, `dualwrite transactions list` those of the cluster"
        if one.is_unknown
        else f"give the id's own database; or {_forced(one.transactional_id)}",
    )


def refusal_to_abort(
    examined: Examined, found: Decided | None, committed: StateRow | None, *, without_database: bool = False
) -> DualWriteError | None:
    """The error if a database forbids aborting a hanging transaction in its partition; None if not. See `Examined.refusal` too.

    Args:
        examined: The transaction.
        found: What the database knows about its transactional id; None if no database was given, or the id is not known.
        committed: The row that names the transaction (`Decisions.committed`); None if there is no such row.
        without_database: Whether it may be aborted although no database knows it.
    """
    if committed is not None:
        return _committed(committed, f"the transaction at {examined.opened.topic}-{examined.opened.partition}")
    if found is not None and found.error is not None and not (without_database and found.is_out_of_reach):
        return found.error
    name = examined.name_at_kafka
    is_known = found is not None and found.row is not None and (found.generation or 0) <= found.row.generation
    return None if name is None or without_database or is_known else _undecided(name, found)


def refusal_of_committed(row: StateRow | None) -> RepairRefusedError | None:
    """The error if a row names the transaction as prepared, lost or unverified; None if there is no such row."""
    return None if row is None else _committed(row, "the transaction")


def _row_with(one: DescribedTransaction, found: Decided | None) -> StateRow | None:
    """The id's row, if it was read and names the described transaction."""
    row, described = None if found is None else found.row, one.description
    is_named = row is not None and described is not None and has_committed(row, described.producer_id, described.epoch)
    return row if is_named else None


def _refusal_of_plan(one: DescribedTransaction, found: Decided) -> RepairRefusedError | None:
    assert found.plan is not None
    if found.plan.state is None or found.plan.decision in (Decision.ABORT, Decision.ALREADY_COMMITTED):
        return None  # the row's own transaction is not open: the open one is a different transaction
    name = shell_word(found.plan.transactional_id)
    return RepairRefusedError(
        f"The transaction is not aborted: {found.why}.",
        transactional_id=one.transactional_id,
        next_step=f"run `dualwrite recover --id {name}`, or `dualwrite transactions complete {name}`",
    )


def _committed(row: StateRow, what: str) -> RepairRefusedError:
    return RepairRefusedError(
        f"The database has committed {what}.",
        transactional_id=row.transactional_id,
        cause="its row names the transaction, as prepared, lost or unverified",
        next_step=f"resolve it with `dualwrite recover --id {shell_word(row.transactional_id)}`; "
        "if you still have to abort it, read its records first",
    )


def _undecided(transactional_id: str, found: Decided | None) -> RepairRefusedError | None:
    """The error if a database must decide about the id, and has not decided; None if no database has to."""
    if found is not None and found.row is not None:
        return _unknown_generation(transactional_id, found, _WAIVE)
    if found is not None and found.why == OTHER_DATABASE:
        return _other_database(transactional_id, _WAIVE)
    if not is_made_by_dualwrite(transactional_id):
        return None
    state = "its database was not given" if found is None else "the given database does not know it"
    return RepairRefusedError(
        f"This id belongs to a dualwrite writer, and {state}.",
        transactional_id=transactional_id,
        next_step=f"give its database with --url; if that is gone for good, {_WAIVE}",
    )


def _unknown_generation(transactional_id: str, found: Decided, waived: str) -> RepairRefusedError:
    assert found.row is not None
    knows = "does not know" if (found.generation or 0) > found.row.generation else "has resolved"
    return RepairRefusedError(
        f"The id has an open transaction, and the database {knows} generation {found.generation} of it "
        f"(newest: {found.row.generation}), so it is not known whether the transaction was committed.",
        transactional_id=transactional_id,
        cause="the database was restored from a backup, or is a copy or a lagging replica; or another program uses the id",
        next_step=f"give the database that the writers use with --url; if this is it, and no writer uses the id, {waived}",
    )


def _other_database(transactional_id: str, waived: str) -> RepairRefusedError:
    return RepairRefusedError(
        "This id belongs to another database, which decides about it.",
        transactional_id=transactional_id,
        next_step=f"give the other database with --url; if that is gone for good, {waived}",
    )


def _forced(transactional_id: str) -> str:
    flag = " --without-database" if is_made_by_dualwrite(transactional_id) else ""
    return f"abort it with `dualwrite transactions force-terminate {shell_word(transactional_id)}{flag}`"
