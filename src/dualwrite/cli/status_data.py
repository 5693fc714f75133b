"""What `dualwrite status` reads from the database and from Kafka, and its JSON."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

from dualwrite.cli.dry_run import lost_json
from dualwrite.cli.jobs import job_json, jobs_of
from dualwrite.cli.leases import lease_json, leases_of
from dualwrite.cli.natural_order import in_natural_order
from dualwrite.cli.options import store_for
from dualwrite.cli.positions import Shown, groups_json, shown_of, with_kafka
from dualwrite.errors import BrokerError
from dualwrite.jobs.rules import JobRow
from dualwrite.kafka.client.config import KafkaConfig
from dualwrite.kafka.client.coordinator import WireTransactionCoordinator
from dualwrite.recovery.recoverer import ids_with_lanes
from dualwrite.settings import Settings
from dualwrite.state import TransactionDescription, TransactionStatus, state_text
from dualwrite.stores.base import StateRow
from dualwrite.stores.leases import Lease
from dualwrite.transactional_id import TransactionalId

Seen = Mapping[str, Mapping[int, TransactionDescription | None]]
"""What the coordinators report, by the row's id and generation; None for an id that they do not know."""


@dataclass
class StatusData:
    """What was read.

    Args:
        description: The database.
        rows: The rows of the ids, in natural order.
        leases: The leases of pools, by logical id.
        jobs: The jobs.
        positions: The positions of consumer groups.
        other_ids: How many ids begin otherwise, if none begins with the prefix.
        cluster_id: Kafka's `cluster.id`; None if Kafka was not asked.
        seen: What the coordinators report; without ids that are on another cluster (rule CL).
        of_other_databases: Open transactions of other databases with the same ids, by their Kafka ids; None if not read.
        unread: What could not be read from Kafka; None if Kafka was not asked.
    """

    description: str
    rows: list[StateRow]
    leases: dict[str, Lease]
    jobs: list[JobRow]
    positions: list[Shown]
    other_ids: int = 0
    cluster_id: str | None = None
    seen: dict[str, dict[int, TransactionDescription | None]] = field(default_factory=dict)
    of_other_databases: list[str] | None = None
    unread: list[str] | None = None

    @property
    def elsewhere(self) -> list[StateRow]:
        """The rows of ids on another Kafka cluster than the one that was asked."""
        return [row for row in self.rows if self.cluster_id is not None and row.cluster_id not in ("", self.cluster_id)]

    @property
    def by_id(self) -> dict[str, list[StateRow]]:
        """The rows by logical id; lane 0 comes first, if it is among them."""
        return {name: list(lanes) for name, lanes in groupby(self.rows, logical)}

    def live_lease(self, transactional_id: str) -> Lease | None:
        """The lease of an id, if it has not ended."""
        lease = self.leases.get(transactional_id)
        return None if lease is None or lease.has_ended else lease

    @property
    def used(self) -> set[str]:
        """The logical ids that a pool has leased, or on which a writer is open, or was when it crashed."""
        leased = {name for name in self.leases if self.live_lease(name) is not None}
        return leased | {logical(row) for row in self.rows if row.unresolved_generations}

    def only(self, ids: set[str]) -> StatusData:
        """The same with these ids, and nothing but ids."""
        rows = [row for row in self.rows if logical(row) in ids]
        leases = {name: each for name, each in self.leases.items() if name in ids}
        return replace(self, rows=rows, leases=leases, jobs=[], positions=[])

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "ids": [_id_to_json(lanes, self.seen) for lanes in self.by_id.values()],
            "leases": [lease_json(each) for each in self.leases.values()],
            "jobs": [job_json(row) for row in self.jobs],
            "groups": groups_json(self.positions),
            "of_other_databases": self.of_other_databases,
        }


def logical(row: StateRow) -> str:
    """The id of which the row is a lane."""
    return TransactionalId.of_row(row.transactional_id).logical


def in_database(settings: Settings, prefix: str) -> StatusData:
    """What the database contains of the ids, leases, jobs and groups that begin with the prefix."""
    with store_for(settings) as store:
        rows = [row for row in map(store.read, ids_with_lanes(store, prefix=prefix)) if row is not None]
        rows.sort(key=lambda row: (in_natural_order(logical(row)), TransactionalId.of_row(row.transactional_id).lane))
        leases = sorted(leases_of(store, prefix), key=lambda lease: in_natural_order(lease.transactional_id))
        others = 0 if rows or not prefix else len({TransactionalId.of_row(name).logical for name in store.list()})
        return StatusData(
            store.description,
            rows,
            {each.transactional_id: each for each in leases},
            sorted(jobs_of(store, prefix), key=lambda job: in_natural_order(job.prefix)),
            shown_of(store, prefix),
            others,
        )


def read_from_kafka(found: StatusData, settings: Settings) -> BrokerError | None:
    """Add what Kafka reports. The first error ends this, since each further step would wait for its whole time limit."""
    found.unread = ["states of ids", "ends of partitions", "transactions of other databases"]
    try:
        _describe(found, settings)
        del found.unread[0]
        found.positions = with_kafka(found.positions, settings) if found.positions else []
        del found.unread[0]
        found.of_other_databases = _of_other_databases(found.rows, settings) if found.rows else []
    except BrokerError as error:
        return error
    found.unread.clear()
    return None


def _describe(found: StatusData, settings: Settings) -> None:
    if not found.rows:
        return
    with closing(WireTransactionCoordinator(KafkaConfig.of(settings.kafka), timeout=settings.timeouts.kafka)) as coordinator:
        found.cluster_id = coordinator.cluster_id()
        elsewhere = found.elsewhere
        for row in (row for row in found.rows if row not in elsewhere):
            generations = row.unresolved_generations or (row.generation,)
            found.seen[row.transactional_id] = {at: coordinator.describe(row.kafka_id(at)) for at in generations}


def _of_other_databases(rows: list[StateRow], settings: Settings) -> list[str]:
    """The Kafka ids of open transactions that have our transactional ids, but the store id of another database."""
    logical_ids = {TransactionalId.of_row(row.transactional_id).logical for row in rows}
    stores = {row.store_id for row in rows}
    with closing(WireTransactionCoordinator(KafkaConfig.of(settings.kafka), timeout=settings.timeouts.kafka)) as coordinator:
        listed = [one for one in coordinator.list_transactions() if one.status is TransactionStatus.ONGOING]
    found = [(one.kafka_transactional_id, TransactionalId.of_kafka(one.kafka_transactional_id)) for one in listed]
    return [
        text for text, named in found if named is not None and named.logical in logical_ids and named.store_id not in stores
    ]


def _id_to_json(lanes: list[StateRow], seen: Seen) -> dict[str, Any]:
    first, *others = (_to_json(row, seen.get(row.transactional_id)) for row in lanes)
    return {**first, "lanes": others}


def _to_json(row: StateRow, seen: Mapping[int, TransactionDescription | None] | None) -> dict[str, Any]:
    return {
        "transactional_id": row.transactional_id,
        "fence": row.fence,
        "cluster_id": row.cluster_id or None,
        "kafka_transactional_id": row.kafka_id(row.generation),
        "generation": row.generation,
        "resolved_generation": row.resolved_generation,
        "prepared_state": state_text(row.prepared_state) or None,
        "prepared_generation": row.prepared_generation,
        "lost": [lost_json(row.transactional_id, entry) for entry in row.lost],
        "owner": row.owner,
        "updated_at": row.updated_at.isoformat(),
        "kafka": None if seen is None else [_seen_to_json(row.kafka_id(at), found) for at, found in seen.items()],
    }


def _seen_to_json(kafka_id: str, found: TransactionDescription | None) -> dict[str, Any]:
    return {
        "kafka_transactional_id": kafka_id,
        "status": None if found is None else found.status.value,
        "producer_id": None if found is None else found.producer_id,
        "epoch": None if found is None else found.epoch,
        "start_time_ms": None if found is None else found.start_time_ms,
    }
