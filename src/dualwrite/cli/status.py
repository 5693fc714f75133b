"""`dualwrite status`: whether all is well or what to run next, the transactional ids, and their state at Kafka. Read-only.

Exit codes: 0 nothing is to be done, 1 a `DualWriteError`, or ids on another Kafka cluster, 2 usage error, 3 something is to be
done: a transaction waits for recovery, or a lost one for acknowledgement.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import groupby
from typing import Annotated, Any, Final

import typer

from dualwrite.cli.offsets import Shown, groups_json, show_groups, shown_of, with_kafka
from dualwrite.cli.options import (
    LONGER,
    AsJson,
    GivenOptions,
    JsonGroup,
    Kafka,
    KafkaSettings,
    Longer,
    Prefix,
    Schema,
    Url,
    Wide,
    counted,
    say,
    settings_for,
    store_for,
)
from dualwrite.cli.output import error_json, print_json, show_table, versioned
from dualwrite.cli.recover_jobs import job_json, jobs_of, show_jobs
from dualwrite.cli.recovery_output import lost_json
from dualwrite.cli.texts import description_words, in_natural_order, now_ms, state_words, time_text
from dualwrite.errors import BrokerError
from dualwrite.jobs.rules import JobRow
from dualwrite.kafka.client.config import KafkaConfig
from dualwrite.kafka.client.coordinator import WireTransactionCoordinator
from dualwrite.recovery.decision import Decision, decide
from dualwrite.recovery.recoverer import ids_with_lanes
from dualwrite.settings import Settings
from dualwrite.state import TransactionDescription, TransactionStatus, state_text
from dualwrite.stores.base import StateRow, TxnStateStore
from dualwrite.stores.leases import Lease
from dualwrite.transactional_id import LANE_MARK, TransactionalId


def leases_of(store: TxnStateStore, prefix: str = "") -> list[Lease]:
    """The leases of the ids that start with `prefix`; empty if the store has no leases."""
    return [] if store.leases is None else store.leases.entries(prefix)


def show_leases(leases: Iterable[Lease]) -> None:
    """Print the leases as a table."""
    show_table(("leased id", "by", "lease"), [(each.transactional_id, each.owner, time_left(each)) for each in leases])


def lease_json(lease: Lease) -> dict[str, Any]:
    """A lease, as JSON values."""
    seconds = lease.seconds_left
    return {
        "transactional_id": lease.transactional_id,
        "owner": lease.owner,
        "seconds_left": None if seconds is None else round(seconds, 3),
        "is_expired": lease.has_ended,
    }


def time_left(lease: Lease) -> str:
    """How long the lease lasts."""
    if lease.seconds_left is None:
        return "until its session ends"
    if lease.has_ended:
        return f"expired {-lease.seconds_left:.0f} s ago"
    return f"{lease.seconds_left:.0f} s left"


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


_FEW: Final = ("transactional id", "transaction", "used by")
_ALL: Final = (*_FEW, "fencing token", "generation", "resolved", "state", "updated", "Kafka")
_WORDS: Final = {
    TransactionStatus.PREPARE_COMMIT: "being committed",
    TransactionStatus.PREPARE_ABORT: "being aborted",
    TransactionStatus.PREPARE_EPOCH_FENCE: "being aborted",
}


def show_status(found: StatusData, *, wide: bool, everything: bool) -> None:
    """Print the tables.

    Args:
        found: What was read.
        wide: Whether to show all columns and lanes.
        everything: Whether to show also the ids that are resolved and that nobody uses.
    """
    ids = found.by_id
    shown = {name: rows for name, rows in ids.items() if everything or not _is_idle(found, name, rows)}
    rows = [_row(found, row, is_first=row is lanes[0], wide=wide) for lanes in shown.values() for row in lanes]
    if rows := [row for row in rows if row is not None]:
        show_table(_ALL if wide else _FEW, rows)
    if hidden := len(ids) - len(shown):
        say(f"{counted(hidden, 'resolved id')} that nobody uses: see --all.")
    if found.of_other_databases:
        say(f"Open at Kafka with the same ids, from other databases: {', '.join(found.of_other_databases)}.")
    if leases := [lease for name, lease in found.leases.items() if wide or (name not in shown and not lease.has_ended)]:
        show_leases(leases)
    if found.jobs:
        show_jobs(found.jobs)
    if found.positions:
        show_groups(found.positions)


def _is_idle(found: StatusData, name: str, rows: list[StateRow]) -> bool:
    unresolved = any(row.unresolved_generations or row.lost or row in found.elsewhere for row in rows)
    return not unresolved and found.live_lease(name) is None


def _row(found: StatusData, row: StateRow, *, is_first: bool, wide: bool) -> tuple[Any, ...] | None:
    """The cells; None for a lane on which nothing is open, unless all lanes are shown."""
    transactions = _transactions(found, row)
    if not (is_first or wide or transactions):
        return None
    name = row.transactional_id if is_first else f"  {LANE_MARK}{TransactionalId.of_row(row.transactional_id).lane}"
    few = (name, transactions or ("none open" if row.transactional_id in found.seen else None), _user(found, row, is_first))
    if not wide:
        return few
    seen = found.seen.get(row.transactional_id, {})
    kafka = tuple(f"{row.kafka_id(at)}: {description_words(one)}" for at, one in seen.items())
    state, updated = state_words(row.prepared_state), time_text(row.updated_at)
    return (*few, row.fence, row.generation, row.resolved_generation, state, updated, kafka or None)


def _transactions(found: StatusData, row: StateRow) -> tuple[str, ...]:
    """What is open or lost on a lane."""
    lines = [f"{len(row.lost)} lost or unverified"] if row.lost else []
    if row in found.elsewhere:
        lines.append(f"on Kafka cluster {row.cluster_id}")
    for one in found.seen.get(row.transactional_id, {}).values():
        if one is not None and one.status is TransactionStatus.ONGOING:
            lines.append(f"open since {time_text(one.start_time_ms)}")
        elif one is not None and one.status.is_ending:
            lines.append(_WORDS[one.status])
    return tuple(lines)


def _user(found: StatusData, row: StateRow, is_first: bool) -> str | None:
    lease = found.leases.get(logical(row))
    if lease is not None and is_first:
        return f"{lease.owner} ({time_left(lease)})"
    return row.owner if lease is None and row.unresolved_generations else None


_EXPIRED: Final = 60.0
"""Seconds after which the other pools of a prefix should have recovered the ids of a lease that has ended."""


class Need(Enum):
    """What somebody must do."""

    RECOVER = "recover"
    """A transaction waits for recovery, or the pool of an id is gone and no other recovers it."""

    ACKNOWLEDGE = "acknowledge"
    """A transaction is lost or unverified, and its messages must be dealt with."""

    MARKERS = "markers"
    """A decided transaction is not being ended: probably a partition has no leader."""


@dataclass(frozen=True)
class Attention:
    """One transaction that needs somebody.

    Args:
        need: What must be done.
        transactional_id: The logical id.
        kafka_id: The id as Kafka sees it.
    """

    need: Need
    transactional_id: str
    kafka_id: str

    def to_json(self, given: GivenOptions) -> dict[str, Any]:
        """As JSON values."""
        names = {"need": self.need.value, "transactional_id": self.transactional_id, "kafka_transactional_id": self.kafka_id}
        return {**names, "next_command": command_for(self.need, [self], given)}


def needed(
    rows: Iterable[StateRow],
    leases: Mapping[str, Lease],
    seen: Mapping[str, Mapping[int, TransactionDescription | None]],
    now_ms: int,
    *,
    longer_than: float,
) -> list[Attention]:
    """What needs somebody.

    Args:
        rows: The rows of the ids.
        leases: The leases of pools, by logical id.
        seen: What the coordinators report, by the row's id and generation; without ids that were not asked about.
        now_ms: Milliseconds since 1970.
        longer_than: Seconds for which a transaction must be open; younger ones are probably somebody's work.
    """
    found: list[Attention] = []
    for row in rows:
        name = TransactionalId.of_row(row.transactional_id).logical
        lease = leases.get(name)
        is_leased = lease is not None and not lease.has_ended
        found += [Attention(Need.ACKNOWLEDGE, name, row.kafka_id(entry.generation)) for entry in row.lost]
        described = seen.get(row.transactional_id, {})
        open_ones = [
            Attention(need, name, row.kafka_id(generation))
            for generation, description in described.items()
            if (need := _need(row, generation, description, now_ms - longer_than * 1000, is_leased=is_leased)) is not None
        ]
        if not open_ones and row.unresolved_generations and _is_abandoned(lease):
            open_ones.append(Attention(Need.RECOVER, name, row.kafka_id(row.generation)))
        found += open_ones
    return found


def _need(
    row: StateRow, generation: int, found: TransactionDescription | None, begun_before: float, *, is_leased: bool
) -> Need | None:
    if generation not in row.unresolved_generations:
        return None
    decision = decide(row.prepared_state if row.prepared_generation == generation else None, found)
    if decision is Decision.LOST or (decision is Decision.UNVERIFIED and not is_leased):
        return Need.RECOVER
    if found is None or not 0 <= found.start_time_ms < begun_before:
        return None
    if found.status.is_ending:
        return Need.MARKERS
    return Need.RECOVER if found.status is TransactionStatus.ONGOING and not is_leased else None


def _is_abandoned(lease: Lease | None) -> bool:
    return lease is not None and lease.seconds_left is not None and lease.seconds_left < -_EXPIRED


def verdict_lines(found: Iterable[Attention], given: GivenOptions) -> list[str]:
    """One line for each kind of need, with the command to run next; empty if there is none."""
    entries = list(found)
    lines = []
    for need, text in _TEXTS.items():
        ones = [each for each in entries if each.need is need]
        if ones:
            lines.append(f"{text(len(ones))}: {command_for(need, ones, given)}")
    return lines


def command_for(need: Need, entries: Iterable[Attention], given: GivenOptions) -> str:
    """The command that does what is needed."""
    ones = list(entries)
    if need is Need.MARKERS:
        return given.command("transactions", "describe", *dict.fromkeys(each.kafka_id for each in ones))
    ids = [word for name in dict.fromkeys(each.transactional_id for each in ones) for word in ("--id", name)]
    return given.command("recover", *ids, *(["--acknowledge"] if need is Need.ACKNOWLEDGE else []))


_TEXTS: Final[Mapping[Need, Callable[[int], str]]] = {
    Need.RECOVER: lambda count: f"{counted(count, 'transaction')} wait{'s' if count == 1 else ''}",
    Need.MARKERS: lambda count: f"{counted(count, 'transaction')} {'is' if count == 1 else 'are'} not being ended",
    Need.ACKNOWLEDGE: lambda count: (
        f"{counted(count, 'transaction')} lost or unverified, to acknowledge when the messages are dealt with"
    ),
}


TO_DO: Final = 3

app = typer.Typer(cls=JsonGroup)


@app.callback(invoke_without_command=True)
def status(
    *,
    url: Url = None,
    kafka: Kafka = None,
    kafka_config: KafkaSettings = None,
    schema: Schema = None,
    prefix: Prefix = "",
    problems: Annotated[bool, typer.Option("--problems", help="Show only ids for which something is to be done.")] = False,
    everything: Annotated[bool, typer.Option("--all", help="Also show resolved ids that nobody uses.")] = False,
    longer: Longer = LONGER,
    wide: Wide = False,
    as_json: AsJson = False,
) -> None:
    """Show whether all is well or what to run next, and the transactional ids with their owners. Changes nothing.

    The lanes of an id are shown below it. With Kafka's address it also shows what the coordinator reports for each generation
    that is not resolved, or else for the newest. Leases show which ids pools use now. Jobs (Spark) are listed by their prefix,
    consumer groups with positions in the database by their id; `dualwrite offsets list` shows each position.

    The exit code is 3 if something is to be done: for a transaction that has been open for longer than `--longer-than` on an id
    that no pool has leased, for an id whose pool is gone, or for a lost transaction that is not acknowledged.
    """
    settings = settings_for(url, kafka, kafka_config, schema)
    given = GivenOptions(url, schema, kafka, tuple(kafka_config or ()))
    found = in_database(settings, prefix)
    failure = read_from_kafka(found, settings) if "bootstrap.servers" in settings.kafka else None
    to_do = needed(found.rows, found.leases, found.seen, now_ms(), longer_than=longer)
    shown = found.only({each.transactional_id for each in to_do}) if problems else found
    if as_json:
        failed = None if failure is None else error_json(failure)
        print_json(versioned("status", {"to_do": [each.to_json(given) for each in to_do], **shown.to_json(), "error": failed}))
    else:
        for line in verdict_lines(to_do, given) or [_all_is_well(found, prefix)]:
            say(line)
        show_status(shown, wide=wide, everything=everything or problems)
    if failure is not None:
        typer.echo(f"Could not be read from Kafka: {', '.join(found.unread or ())}.", err=True)
        raise failure
    if found.elsewhere:
        names = ", ".join(row.transactional_id for row in found.elsewhere)
        say(f"Not on this Kafka cluster ({found.cluster_id}): {names}. Give the address of their cluster.", err=True)
        raise typer.Exit(1)
    if to_do:
        raise typer.Exit(TO_DO)


def _all_is_well(found: StatusData, prefix: str) -> str:
    """The first line if nothing is to be done, as far as that could be seen."""
    if not found.rows and not found.leases:
        begins = f" that begins with {prefix!r}" if prefix else ""
        others = f", but {counted(found.other_ids, 'other id')}" if found.other_ids else ""
        return f"There is no transactional id{begins} in {found.description}{others}."
    used = f"{counted(len(found.used), 'id')} in use"
    if found.unread is None:
        return f"{used}, nothing known to recover. Kafka was not asked for open transactions: use --kafka."
    if found.unread or found.elsewhere:
        return f"{used}. Whether there is something to recover could not be read completely."
    return f"{used}, nothing to recover."
