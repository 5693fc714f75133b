"""The page of one id: its rows, what happened on it, and what recovery would do; or of a transaction of another database."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from dualwrite.admin import DescribedTransaction
from dualwrite.console.recent import HistoryEntry, Recent
from dualwrite.console.subject import Subject
from dualwrite.errors import BrokerError, DualWriteError
from dualwrite.recovery.plan import IdPlan
from dualwrite.recovery.recoverer import ids_with_lanes
from dualwrite.stores.base import LostKind, LostTransaction, StateRow
from dualwrite.stores.leases import Lease
from dualwrite.transactional_id import TransactionalId


@dataclass(frozen=True)
class Detail:
    """What is known of one id.

    Args:
        name: The logical id; of a transaction of another database, the id as Kafka sees it.
        rows: Its lanes; empty if the database does not have it.
        lease: Its lease.
        plans: What recovery would do with each lane.
        described: The coordinator's description, of an id that the database does not have.
        history: What happened on it, the newest first.
        problem: What could not be read.
    """

    name: str
    rows: list[StateRow] = field(default_factory=list)
    lease: Lease | None = None
    plans: list[IdPlan] = field(default_factory=list)
    described: DescribedTransaction | None = None
    history: list[HistoryEntry] = field(default_factory=list)
    problem: str | None = None

    @property
    def lost(self) -> list[tuple[str, LostTransaction]]:
        """The lost and unverified transactions, each with the id of its row."""
        return [(row.transactional_id, entry) for row in self.rows for entry in row.lost]

    @property
    def can_publish(self) -> bool:
        """Whether something is proven lost, or would be."""
        return any(entry.kind is LostKind.LOST for _, entry in self.lost) or any(plan.found for plan in self.plans)

    @property
    def can_recover(self) -> bool:
        """Whether recovery would do something."""
        return any(plan.generations for plan in self.plans)

    @property
    def has_steps(self) -> bool:
        """Whether the durations of a transaction's steps are known."""
        return any(each.steps is not None for each in self.history)

    @property
    def is_leased(self) -> bool:
        """Whether a pool uses the id, so that recovery would take it from a process that runs."""
        return self.lease is not None and not self.lease.has_ended


def read_detail(subject: Subject, recent: Recent | None, name: str) -> Detail:
    """Read what is known of an id: a logical one, that of a lane, or the id as Kafka sees it.

    Raises:
        DualWriteError: Neither the database nor Kafka could be asked.
    """
    named = TransactionalId.of_kafka(name) or TransactionalId.of_row(name)
    rows = _rows(subject, named) if subject.has_database else []
    if not rows:
        return _of_others(subject, name)
    leases = [] if subject.store.leases is None else subject.store.leases.entries(named.logical)
    lease = next((each for each in leases if each.transactional_id == named.logical), None)
    plans, problem = _plans(subject, named.logical, rows)
    known = [*_reported(rows, plans), *([] if recent is None else recent.of_id(named.logical))]
    return Detail(named.logical, rows, lease, plans, None, sorted(known, key=lambda each: -each.at), problem)


def _rows(subject: Subject, named: TransactionalId) -> list[StateRow]:
    names = ids_with_lanes(subject.store, [named.logical])
    rows = [row for each in names if (row := subject.store.read(each)) is not None]
    if named.generation and named.store_id not in {row.store_id for row in rows}:
        return []  # an id of another database, with the same name
    return rows


def _plans(subject: Subject, logical: str, rows: list[StateRow]) -> tuple[list[IdPlan], str | None]:
    if not subject.has_kafka:
        return [], "Kafka's address is not given, so it is not known what recovery would do."
    try:
        with subject.recoverer("republish" if any(row.lost for row in rows) else "report", subject.quick) as recoverer:
            return list(recoverer.plan([logical]).ids), None
    except DualWriteError as error:
        return [], f"{error}"


def _of_others(subject: Subject, name: str) -> Detail:
    if not subject.has_kafka:
        return Detail(name)
    try:
        with subject.admin() as admin:
            (described,) = admin.describe([name])
    except BrokerError as error:
        return Detail(name, problem=f"{error}")
    begun = None if described.description is None else described.description.start_time_ms / 1000
    history = [] if begun is None or begun < 0 else [HistoryEntry(begun, "The transaction began.")]
    return Detail(name, described=described, history=history)


def _reported(rows: list[StateRow], plans: list[IdPlan]) -> Iterator[HistoryEntry]:
    """What the rows and Kafka say."""
    for row in rows:
        yield HistoryEntry(row.updated_at.timestamp(), f"{row.transactional_id}: the row was last written, by {row.owner}.")
        if row.delivery is not None:
            yield HistoryEntry(row.delivery.prepared_at.timestamp(), f"{row.transactional_id}: prepared {row.delivery}.")
        for entry in row.lost:
            text = f"{row.transactional_id}: recovery found {entry.state} {entry.kind.value}."
            yield HistoryEntry(entry.recorded_at.timestamp(), text)
    for plan in plans:
        for one in plan.generations:
            if one.described is not None and one.described.start_time_ms >= 0:
                text = f"{one.kafka_transactional_id}: began at Kafka, as {one.described.producer_id}:{one.described.epoch}."
                yield HistoryEntry(one.described.start_time_ms / 1000, text)
