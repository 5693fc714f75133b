"""The page of one id: its rows, what happened on it, and what recovery would do; or of a transaction of another database."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime

from dualwrite.admin import DescribedTransaction
from dualwrite.console.recent import Happened, Recent
from dualwrite.console.subject import Subject
from dualwrite.errors import BrokerError, DualWriteError
from dualwrite.recovery.plan import IdPlan
from dualwrite.recovery.recoverer import ids_with_lanes
from dualwrite.stores.base import LostKind, LostTransaction, StateRow
from dualwrite.stores.leases import Lease
from dualwrite.transactional_id import TransactionalId


@dataclass(frozen=True)
class Moment:
    """Something that happened on an id, in the order of time."""

    at: float
    text: str
    happened: Happened | None = None


@dataclass(frozen=True)
class Detail:
    """What is known of one id.

    Args:
        name: The logical id; of a transaction of another database, the id as Kafka sees it.
        rows: Its lanes; empty if the database does not have it.
        lease: Its lease.
        plans: What recovery would do with each lane.
        described: The coordinator's description, of an id that the database does not have.
        moments: What happened on it.
        problem: What could not be read.
    """

    name: str
    rows: list[StateRow]
    lease: Lease | None
    plans: list[IdPlan]
    described: DescribedTransaction | None
    moments: list[Moment]
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
        return any(each.happened is not None and each.happened.steps is not None for each in self.moments)

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
    moments = sorted(_moments(rows, plans, recent, named.logical), key=lambda each: -each.at)
    return Detail(named.logical, rows, lease, plans, None, moments, problem)


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
        return [], str(error)


def _of_others(subject: Subject, name: str) -> Detail:
    if not subject.has_kafka:
        return Detail(name, [], None, [], None, [])
    try:
        with subject.admin() as admin:
            (described,) = admin.describe([name])
    except BrokerError as error:
        return Detail(name, [], None, [], None, [], str(error))
    found = described.description
    begun = [] if found is None or found.start_time_ms < 0 else [Moment(found.start_time_ms / 1000, "The transaction began.")]
    return Detail(name, [], None, [], described, begun)


def _moments(rows: list[StateRow], plans: list[IdPlan], recent: Recent | None, logical: str) -> Iterator[Moment]:
    for row in rows:
        yield Moment(_seconds(row.updated_at), f"{row.transactional_id}: the row was last written, by {row.owner}.")
        if row.delivery is not None:
            yield Moment(_seconds(row.delivery.prepared_at), f"{row.transactional_id}: prepared {row.delivery}.")
        for entry in row.lost:
            yield Moment(
                _seconds(entry.recorded_at), f"{row.transactional_id}: recovery found {entry.state} {entry.kind.value}."
            )
    for plan in plans:
        for one in plan.generations:
            if one.described is not None and one.described.start_time_ms >= 0:
                text = f"{one.kafka_transactional_id}: began at Kafka, as {one.described.producer_id}:{one.described.epoch}."
                yield Moment(one.described.start_time_ms / 1000, text)
    for each in () if recent is None else recent.of_id(logical):
        yield Moment(each.at, f"{each.transactional_id}: {each.what}", each)


def _seconds(at: datetime) -> float:
    return at.timestamp()
