"""What a database and Kafka's coordinators know of the transactional ids: rows, leases, open transactions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby

from dualwrite.diagnosis.needs import Attention, needed
from dualwrite.kafka.base import TransactionCoordinator
from dualwrite.recovery.recoverer import ids_with_lanes
from dualwrite.recovery.resolve import found_in_log
from dualwrite.relay.journal_state import JournalState, open_journals
from dualwrite.state import TransactionDescription, TransactionStatus
from dualwrite.stores.base import LostTransaction, StateRow, TxnStateStore
from dualwrite.stores.leases import Lease
from dualwrite.stores.rows import proven_lost
from dualwrite.texts import in_natural_order, now_ms
from dualwrite.transactional_id import TransactionalId


@dataclass
class FoundIds:
    """What was read.

    Args:
        description: The database.
        rows: The rows of the ids, in natural order.
        leases: The leases of pools, by logical id.
        journals: Those whose gate is open, or that have entries.
        other_ids: How many ids begin otherwise, if none begins with the prefix.
        cluster_id: Kafka's `cluster.id`; None if Kafka was not asked.
        seen: What the coordinators report; without ids that are on another cluster (rule CL).
        of_other_databases: Open transactions of other databases with the same ids, by their Kafka ids; None if not read.
        gone: The lost transactions, with the ids of their rows, of which Kafka's log does not have all messages any more.
        unread: What could not be read from Kafka; None if Kafka was not asked.
    """

    description: str
    rows: list[StateRow]
    leases: dict[str, Lease]
    other_ids: int = 0
    journals: tuple[JournalState, ...] = ()
    cluster_id: str | None = None
    seen: dict[str, dict[int, TransactionDescription | None]] = field(default_factory=dict)
    of_other_databases: list[str] | None = None
    gone: list[tuple[str, LostTransaction]] = field(default_factory=list)
    unread: list[str] | None = None

    @property
    def elsewhere(self) -> list[StateRow]:
        """The rows of ids on another Kafka cluster than the one that was asked."""
        return [row for row in self.rows if self.is_elsewhere(row)]

    def is_elsewhere(self, row: StateRow) -> bool:
        """Whether an id is on another Kafka cluster than the one that was asked."""
        return self.cluster_id is not None and row.cluster_id not in ("", self.cluster_id)

    @property
    def by_id(self) -> dict[str, list[StateRow]]:
        """The rows by logical id; lane 0 comes first, if it is among them."""
        return {name: list(lanes) for name, lanes in groupby(self.rows, logical)}

    @property
    def used(self) -> set[str]:
        """The logical ids that a pool has leased, or on which a writer is open, or was when it crashed."""
        leased = {name for name, lease in self.leases.items() if not lease.has_ended}
        return leased | {logical(row) for row in self.rows if row.unresolved_generations}

    @property
    def idle(self) -> set[str]:
        """The logical ids that nobody uses, and on which nothing is unresolved or lost."""
        left = {logical(row) for row in self.rows if row.lost or self.is_elsewhere(row)}
        return {*map(logical, self.rows), *self.leases} - self.used - left

    def needs(self, *, longer_than: float) -> list[Attention]:
        """What of them needs somebody now; a transaction only if it has been open for so many seconds."""
        return needed(self.rows, self.leases, self.seen, now_ms(), longer_than=longer_than, gone=self.gone)

    def ask(self, coordinator: TransactionCoordinator, *, resolved: bool = True) -> None:
        """Ask the coordinators for the generations that are not resolved, and if `resolved` for the newest of other ids.

        Raises:
            BrokerError: Kafka did not answer.
        """
        if not self.rows:
            return
        self.cluster_id = coordinator.cluster_id()
        for row in (row for row in self.rows if not self.is_elsewhere(row)):
            generations = row.unresolved_generations or ((row.generation,) if resolved else ())
            if generations:
                self.seen[row.transactional_id] = {at: coordinator.describe(row.kafka_id(at)) for at in generations}
            for entry in proven_lost(row.lost):
                if entry.cluster_id in ("", self.cluster_id) and found_in_log(coordinator, entry, self.cluster_id).missing:
                    self.gone.append((row.transactional_id, entry))


def logical(row: StateRow) -> str:
    """The id of which the row is a lane."""
    return TransactionalId.of_row(row.transactional_id).logical


def read_ids(store: TxnStateStore, prefix: str = "") -> FoundIds:
    """What the database contains of the ids, leases and open journals that begin with the prefix.

    Raises:
        StoreError: The database's own errors, translated.
    """
    rows = [row for row in map(store.read, ids_with_lanes(store, prefix=prefix)) if row is not None]
    rows.sort(key=lambda row: (in_natural_order(logical(row)), TransactionalId.of_row(row.transactional_id).lane))
    leases = [] if store.leases is None else store.leases.entries(prefix)
    leases.sort(key=lambda lease: in_natural_order(lease.transactional_id))
    others = 0 if rows or not prefix else len({TransactionalId.of_row(name).logical for name in store.list()})
    by_id = {each.transactional_id: each for each in leases}
    return FoundIds(store.description, rows, by_id, others, open_journals(store, prefix))


def open_in_other_databases(rows: Sequence[StateRow], coordinator: TransactionCoordinator) -> list[str]:
    """The Kafka ids of open transactions that have our transactional ids, but the store id of another database.

    Raises:
        BrokerError: Kafka did not answer.
    """
    logical_ids = set(map(logical, rows))
    stores = {row.store_id for row in rows}
    listed = [one for one in coordinator.list_transactions() if one.status is TransactionStatus.ONGOING]
    found = [(one.kafka_transactional_id, TransactionalId.of_kafka(one.kafka_transactional_id)) for one in listed]
    return [
        text for text, named in found if named is not None and named.logical in logical_ids and named.store_id not in stores
    ]
