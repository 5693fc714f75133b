"""What `dualwrite metrics` shows: its metrics in one table, and their values from what was read. No I/O."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from dualwrite.admin import StuckPartition
from dualwrite.admin.facts import RUNNING
from dualwrite.cli.options import LONGER
from dualwrite.cli.status import StatusData
from dualwrite.diagnosis.needs import Need, needed
from dualwrite.observability.metrics import Metric, prefix_of
from dualwrite.outbox.journal_state import JournalState
from dualwrite.recovery.decision import decide
from dualwrite.state import TransactionDescription, TransactionStatus

Values = dict[Metric, dict[tuple[str, ...], float]]
"""The values of metrics, by the values of their labels."""

LATE: Final = 1200.0
"""KIP-664 calls a transaction late 5 minutes after its limit, which is at most 15 minutes by default."""


def _gauge(name: str, text: str, *labels: str) -> Metric:
    return Metric(f"dualwrite_{name}", "gauge", text, labels)


_OF_PARTITION: Final = ("group", "topic", "partition")

UP: Final = _gauge("up", "1 if a side answered within the limit, otherwise 0: database, kafka.", "side")
READ_SECONDS: Final = _gauge("read_seconds", "How long reading a side has taken.", "side")

IDS: Final = _gauge(
    "ids",
    "Transactional ids by state: leased (a pool or relay has it), expired (its lease has ended), open (a writer without "
    "leases is open on it, or was when it crashed), idle.",
    *("prefix", "state"),
)
EXPIRED_SECONDS: Final = _gauge("expired_lease_seconds", "Seconds since the lease of an unresolved id has ended.", "prefix")
TO_DO: Final = _gauge(
    "to_do", "What waits for somebody, as `dualwrite status` says: recover, publish, gone, acknowledge, markers.", "need"
)
LISTED: Final = _gauge("lost_transactions", "LOST and UNVERIFIED entries that are not acknowledged.", "prefix", "kind")
OPEN: Final = _gauge(
    "open_transactions",
    "Open transactions of our ids at Kafka, by what the database decided: commit (it has committed), abort (it has not), …",
    *("prefix", "decision"),
)
OPEN_SECONDS: Final = _gauge("open_transaction_seconds", "The age of the oldest of them.", "prefix", "decision")
GATE: Final = _gauge("journal_gate_open", "1 while messages of a prefix go into the journal.", "prefix")
GATE_SECONDS: Final = _gauge("journal_gate_open_seconds", "Seconds since then; 0 while it is closed.", "prefix")
ENTRIES: Final = _gauge("journal_entries", "Messages in the journal.", "prefix")
ENTRY_BYTES: Final = _gauge("journal_entries_bytes", "Bytes of their keys and values.", "prefix")
STORED_DEAD_LETTERS: Final = _gauge("stored_dead_letters", "Dead letters of relays in the database.", "relay")
POSITION_AGE: Final = _gauge(
    "group_position_age_seconds", "Seconds since a group's position in the database has moved.", *_OF_PARTITION
)

BEHIND: Final = _gauge(
    "group_behind_messages", "Offsets from a group's position in the database to the last stable offset.", *_OF_PARTITION
)
HELD_BACK: Final = _gauge(
    "group_held_back_messages", "Offsets after it, which the group can't read before a transaction has ended.", *_OF_PARTITION
)
ACTIVE: Final = _gauge("kafka_active_transactions", "Transactions of all clients that have not ended, by state.", "state")
OPEN_TIME_MAX: Final = _gauge(
    "kafka_active_transaction_open_time_max_seconds", "The age of the oldest of them (KIP-939's ActiveTransactionOpenTimeMax)."
)
STUCK: Final = _gauge(
    "kafka_stuck_partitions", f"Partitions where read_committed consumers wait for a transaction older than {LONGER:g} s."
)
STUCK_SECONDS: Final = _gauge("kafka_stuck_seconds", "The age of the oldest transaction for which consumers wait.")
STUCK_MESSAGES: Final = _gauge("kafka_stuck_messages", "Offsets that they can't read yet.")
LATE_PARTITIONS: Final = _gauge(
    "kafka_partitions_with_late_transactions",
    f"Partitions with a transaction older than {LATE:g} s (KIP-664's PartitionsWithLateTransactionsCount).",
)

OF_DATABASE: Final = (
    *(IDS, EXPIRED_SECONDS, TO_DO, LISTED, GATE, GATE_SECONDS, ENTRIES, ENTRY_BYTES, STORED_DEAD_LETTERS, POSITION_AGE),
)
OF_KAFKA: Final = (ACTIVE, OPEN_TIME_MAX, STUCK, STUCK_SECONDS, STUCK_MESSAGES, LATE_PARTITIONS)
OF_BOTH: Final = (OPEN, OPEN_SECONDS, BEHIND, HELD_BACK)
EXPORTED: Final = (UP, READ_SECONDS, *OF_DATABASE, *OF_KAFKA, *OF_BOTH)
"""All metrics of the exporter."""


@dataclass(frozen=True, slots=True)
class Stored:
    """What was read from the database.

    Args:
        status: As `dualwrite status` reads it.
        journals: All journals.
        dead_letters: The number of dead letters, by relay.
    """

    status: StatusData
    journals: tuple[JournalState, ...]
    dead_letters: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Cluster:
    """What was read from Kafka alone.

    Args:
        stuck: Where consumers wait.
        active: The transactions that have not ended.
    """

    stuck: tuple[StuckPartition, ...]
    active: tuple[TransactionDescription, ...]


def of_database(found: Stored, now: float) -> Values:
    """The metrics of the database; `now` in seconds since 1970."""
    status = found.status
    values: Values = {metric: {} for metric in OF_DATABASE}
    prefixes = _Prefixes(status)
    _count(values[IDS], ((prefixes.of(name), state) for name, state in _states(status)))
    for name, lease in status.leases.items():
        unresolved = any(row.unresolved_generations for row in status.by_id.get(name, ()))
        if lease.has_ended and lease.seconds_left is not None and unresolved:
            _raise(values[EXPIRED_SECONDS], (prefixes.of(name),), -lease.seconds_left)
    lost = ((prefixes.of(row.transactional_id), entry.kind.value.lower()) for row in status.rows for entry in row.lost)
    _count(values[LISTED], lost)
    values[TO_DO] = _to_do(status, now)
    for journal in found.journals:
        of_prefix = (journal.prefix,)
        values[GATE][of_prefix] = journal.gate.is_open
        values[GATE_SECONDS][of_prefix] = journal.age if journal.gate.is_open else 0.0
        values[ENTRIES][of_prefix] = journal.gate.entries or 0
        values[ENTRY_BYTES][of_prefix] = journal.gate.size or 0
    values[STORED_DEAD_LETTERS] = {(relay,): number for relay, number in found.dead_letters.items()}
    for shown in status.positions:
        at = shown.position.updated_at
        if at is not None:
            labels = (shown.group, shown.position.topic, str(shown.position.partition))
            values[POSITION_AGE][labels] = max(now - at.timestamp(), 0.0)
    return values


class _Prefixes:
    """The prefixes of ids: of pools, relays and jobs."""

    def __init__(self, status: StatusData) -> None:
        self._jobs = {job.prefix for job in status.jobs}

    def of(self, name: str) -> str:
        """The prefix of an id or of a lane."""
        prefix = prefix_of(name)
        of_job = prefix_of(prefix)  # without the partition and the attempt of a task
        return of_job if of_job in self._jobs else prefix


def _to_do(status: StatusData, now: float) -> dict[tuple[str, ...], float]:
    found = Counter(
        each.need
        for each in needed(status.rows, status.leases, status.seen, int(now * 1000), longer_than=LONGER, gone=status.gone)
    )
    return {(need.value,): found[need] for need in Need}


def _states(status: StatusData) -> Iterator[tuple[str, str]]:
    """Each logical id with its state."""
    ids = status.by_id
    for name in {*ids, *status.leases}:
        lease = status.leases.get(name)
        if lease is not None:
            yield name, "expired" if lease.has_ended else "leased"
        else:
            yield name, "open" if any(row.unresolved_generations for row in ids[name]) else "idle"


def of_kafka(found: Cluster, now: float, *, late: float) -> Values:
    """The metrics of Kafka alone; a transaction is late after so many seconds."""
    now_ms = int(now * 1000)
    ages = [(one.holder.age_ms(now_ms) or 0) / 1000 for one in found.stuck]
    states = Counter(one.status for one in found.active)
    oldest = min((one.start_time_ms for one in found.active if one.start_time_ms >= 0), default=now_ms)
    stuck = [one for one, age in zip(found.stuck, ages, strict=True) if age >= LONGER]
    return {
        ACTIVE: {(status.value,): states[status] for status in TransactionStatus if status in RUNNING},
        OPEN_TIME_MAX: {(): max(now_ms - oldest, 0) / 1000},
        STUCK: {(): len(stuck)},
        STUCK_SECONDS: {(): max(ages, default=0.0)},
        STUCK_MESSAGES: {(): sum(one.end.records_behind for one in stuck)},
        LATE_PARTITIONS: {(): sum(age >= late for age in ages)},
    }


def of_both(found: StatusData, now: float) -> Values:
    """The metrics of our ids and positions at Kafka."""
    values: Values = {TO_DO: _to_do(found, now), **{metric: {} for metric in OF_BOTH}}
    prefixes = _Prefixes(found)
    for row in found.rows:
        for generation, described in found.seen.get(row.transactional_id, {}).items():
            if described is None or described.status not in RUNNING:
                continue
            decision = decide(row.prepared_state if row.prepared_generation == generation else None, described)
            labels = prefixes.of(row.transactional_id), decision.value
            _count(values[OPEN], [labels])
            if described.start_time_ms >= 0:
                _raise(values[OPEN_SECONDS], labels, max(now - described.start_time_ms / 1000, 0.0))
    for shown in found.positions:
        if shown.behind is not None and shown.held_back is not None:
            of_partition = (shown.group, shown.position.topic, str(shown.position.partition))
            values[BEHIND][of_partition], values[HELD_BACK][of_partition] = shown.behind, shown.held_back
    return values


def _count(values: dict[tuple[str, ...], float], found: Iterable[tuple[str, ...]]) -> None:
    for labels in found:
        values[labels] = values.get(labels, 0) + 1


def _raise(values: dict[tuple[str, ...], float], labels: tuple[str, ...], value: float) -> None:
    values[labels] = max(values.get(labels, 0.0), value)


def of_sides(durations: Mapping[str, float | None]) -> Values:
    """Which side has answered, and how long that took; None: it has not."""
    answered: Iterable[tuple[str, float]] = ((side, took) for side, took in durations.items() if took is not None)
    return {
        UP: {(side,): took is not None for side, took in durations.items()},
        READ_SECONDS: {(side,): took for side, took in answered},
    }
