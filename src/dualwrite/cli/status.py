"""`dualwrite status`: the row of each transactional id, and its state at Kafka. Read-only."""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import typer
from rich.text import Text

from dualwrite.cli.dry_run import lost_json
from dualwrite.cli.jobs import job_json, jobs_of, show_jobs
from dualwrite.cli.leases import lease_json, leases_of, show_leases
from dualwrite.cli.options import AsJson, Kafka, KafkaSettings, Prefix, Schema, Url, say, settings_for, show_table, store_for
from dualwrite.cli.positions import Shown, groups_json, show_groups, shown_of, with_kafka
from dualwrite.cli.printable import printable
from dualwrite.errors import BrokerError
from dualwrite.jobs.lease import JobRow
from dualwrite.kafka.client.config import KafkaConfig
from dualwrite.kafka.client.coordinator import WireTransactionCoordinator
from dualwrite.recovery.recoverer import ids_with_lanes
from dualwrite.settings import Settings
from dualwrite.state import TransactionDescription, TransactionStatus, state_text
from dualwrite.stores.base import StateRow
from dualwrite.stores.leases import Lease
from dualwrite.transactional_id import LANE_MARK, TransactionalId

app = typer.Typer()


@dataclass(frozen=True)
class _Seen:
    """What the coordinator reports for one generation."""

    kafka_id: str
    description: TransactionDescription | None

    def __str__(self) -> str:
        if self.description is None:
            return f"{self.kafka_id}: unknown to Kafka"
        found = self.description
        return f"{self.kafka_id}: {found.status.value} {found.producer_id}:{found.epoch}@{found.start_time_ms}"

    def to_json(self) -> dict[str, Any]:
        found = self.description
        return {
            "kafka_transactional_id": self.kafka_id,
            "status": None if found is None else found.status.value,
            "producer_id": None if found is None else found.producer_id,
            "epoch": None if found is None else found.epoch,
            "start_time_ms": None if found is None else found.start_time_ms,
        }


@app.callback(invoke_without_command=True)
def status(
    *,
    url: Url = None,
    kafka: Kafka = None,
    kafka_config: KafkaSettings = None,
    schema: Schema = None,
    prefix: Prefix = "",
    as_json: AsJson = False,
) -> None:
    """Show the transactional ids: their owners, what is unresolved, what is lost. Changes nothing.

    The lanes of an id are shown below it. With Kafka's address it also shows what the coordinator reports for each generation
    that is not resolved, or else for the newest. Leases show which ids pools use now. Jobs (Spark) are listed by their prefix,
    consumer groups with positions in the database by their id; `dualwrite offsets list` shows each position.
    """
    settings = settings_for(url, kafka, kafka_config, schema)
    found = _in_database(settings, prefix)
    failure = _read_from_kafka(found, settings) if "bootstrap.servers" in settings.kafka else None
    if as_json:
        typer.echo(json.dumps(found.to_json(), indent=2))
    else:
        found.show()
    if failure is not None:
        typer.echo(f"Could not be read from Kafka: {', '.join(found.unread)}.", err=True)
        raise failure
    if found.elsewhere:
        names = ", ".join(row.transactional_id for row in found.elsewhere)
        say(f"Not on this Kafka cluster ({found.cluster_id}): {names}. Give the address of their cluster.", err=True)
        raise typer.Exit(1)


@dataclass
class _Found:
    """What the command shows.

    Args:
        description: The database.
        rows: The rows of the ids.
        leases: The leases of pools.
        jobs: The jobs.
        positions: The positions of consumer groups.
        cluster_id: Kafka's `cluster.id`; None if Kafka was not asked.
        seen: What the coordinators report, by id; without ids that are on another cluster (rule CL).
        others: Open transactions of other databases with the same ids, by their Kafka ids; None if Kafka was not asked.
        unread: What could not be read from Kafka.
    """

    description: str
    rows: list[StateRow]
    leases: list[Lease]
    jobs: list[JobRow]
    positions: list[Shown]
    cluster_id: str | None = None
    seen: dict[str, list[_Seen]] = field(default_factory=dict)
    others: list[str] | None = None
    unread: list[str] = field(default_factory=list)

    @property
    def elsewhere(self) -> list[StateRow]:
        """The rows of ids on another Kafka cluster than the one that was asked."""
        return [row for row in self.rows if self.cluster_id is not None and row.cluster_id not in ("", self.cluster_id)]

    def show(self) -> None:
        if self.rows:
            _show_ids(self)
        else:
            say(f"There is no transactional id in {self.description}.")
        if self.others:
            say(f"Open at Kafka with the same ids, from other databases: {', '.join(self.others)}.")
        if self.leases:
            show_leases(self.leases)
        if self.jobs:
            show_jobs(self.jobs)
        if self.positions:
            show_groups(self.positions)

    def to_json(self) -> dict[str, Any]:
        return {
            "ids": [_id_to_json(lanes, self.seen) for lanes in _by_id(self.rows)],
            "leases": [lease_json(each) for each in self.leases],
            "jobs": [job_json(row) for row in self.jobs],
            "groups": groups_json(self.positions),
            "of_other_databases": self.others,
        }


def _in_database(settings: Settings, prefix: str) -> _Found:
    with store_for(settings) as store:
        return _Found(
            store.description,
            [row for row in map(store.read, ids_with_lanes(store, prefix=prefix)) if row is not None],
            leases_of(store, prefix),
            jobs_of(store, prefix),
            shown_of(store, prefix),
        )


def _by_id(rows: list[StateRow]) -> list[list[StateRow]]:
    """The rows grouped by id; lane 0 comes first, if it is among them."""
    return [list(lanes) for _, lanes in groupby(rows, lambda row: TransactionalId.of_row(row.transactional_id).logical)]


def _read_from_kafka(found: _Found, settings: Settings) -> BrokerError | None:
    """Add what Kafka reports. The first error ends this, since each further step would wait for its whole time limit."""
    found.unread = ["states of ids", "ends of partitions", "transactions of other databases"]
    try:
        _describe(found, settings)
        del found.unread[0]
        found.positions = with_kafka(found.positions, settings) if found.positions else []
        del found.unread[0]
        found.others = _of_other_databases(found.rows, settings) if found.rows else []
    except BrokerError as error:
        return error
    found.unread.clear()
    return None


def _describe(found: _Found, settings: Settings) -> None:
    if not found.rows:
        return
    with closing(WireTransactionCoordinator(KafkaConfig.of(settings.kafka), timeout=settings.timeouts.kafka)) as coordinator:
        found.cluster_id = coordinator.cluster_id()
        elsewhere = found.elsewhere
        for row in (row for row in found.rows if row not in elsewhere):
            names = map(row.kafka_id, row.unresolved_generations or (row.generation,))
            found.seen[row.transactional_id] = [_Seen(name, coordinator.describe(name)) for name in names]


def _of_other_databases(rows: list[StateRow], settings: Settings) -> list[str]:
    """The Kafka ids of open transactions that have our transactional ids, but the store id of another database."""
    logical_ids = {TransactionalId.of_row(row.transactional_id).logical for row in rows}
    stores = {row.store_id for row in rows}
    with closing(WireTransactionCoordinator(KafkaConfig.of(settings.kafka), timeout=settings.timeouts.kafka)) as coordinator:
        listed = [one for one in coordinator.list_transactions() if one.status is TransactionStatus.ONGOING]
    found = [(one.kafka_transactional_id, TransactionalId.of_kafka(one.kafka_transactional_id)) for one in listed]
    return [
        text
        for text, named in found
        if named is not None and named.logical in logical_ids and named.store_id not in ("", *stores)
    ]


def _show_ids(found: _Found) -> None:
    headings = ("transactional id", "fencing token", "generation", "resolved", "state", "lost", "owner", "updated")
    table, elsewhere = [], found.elsewhere
    for row, is_first in ((row, row is lanes[0]) for lanes in _by_id(found.rows) for row in lanes):
        cells = (
            row.transactional_id if is_first else f"  {LANE_MARK}{TransactionalId.of_row(row.transactional_id).lane}",
            row.fence,
            row.generation,
            row.resolved_generation,
            row.prepared_state,
            len(row.lost) or None,
            row.owner,
            f"{row.updated_at:%Y-%m-%d %H:%M:%S%z}",
        )
        lines = list(map(str, found.seen.get(row.transactional_id, ())))
        if row in elsewhere:
            lines = [f"on Kafka cluster {row.cluster_id}"]
        kafka = Text("\n".join(map(printable, lines)))
        table.append(cells if found.cluster_id is None else (*cells, kafka))
    show_table(headings if found.cluster_id is None else (*headings, "Kafka"), table)


def _id_to_json(lanes: list[StateRow], seen: dict[str, list[_Seen]]) -> dict[str, Any]:
    first, *others = (_to_json(row, seen.get(row.transactional_id)) for row in lanes)
    return {**first, "lanes": others}


def _to_json(row: StateRow, seen: list[_Seen] | None) -> dict[str, Any]:
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
        "kafka": None if seen is None else [one.to_json() for one in seen],
    }
