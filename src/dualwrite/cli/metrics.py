"""`dualwrite metrics`: what the database and Kafka know about transactions, for Prometheus. Read-only; needs no service.

Exit codes: 0 printed, or stopped; 1 a `DualWriteError`, or with `--once` a side did not answer; 2 usage error.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import replace
from functools import partial
from typing import Annotated, Final, TypeVar

import typer
from prometheus_client import CollectorRegistry, generate_latest, start_http_server
from prometheus_client.core import GaugeMetricFamily

from dualwrite.admin import TransactionAdmin
from dualwrite.admin.facts import RUNNING
from dualwrite.cli.options import Target, coordinator_for, grouped, refuse, store_for
from dualwrite.cli.output import say
from dualwrite.cli.status import StatusData, in_store
from dualwrite.deadline import Deadline
from dualwrite.diagnosis.needs import LONGER_SECONDS, Need
from dualwrite.diagnosis.positions import with_kafka
from dualwrite.errors import DualWriteError, StateTableMissingError
from dualwrite.observability.health import InThread
from dualwrite.observability.metrics import OF_PARTITION, Metric, gauge, prefix_of
from dualwrite.observability.prometheus import families
from dualwrite.process import StopFlag, stopped_by_sigterm
from dualwrite.recovery.decision import decide
from dualwrite.relay.dead_letters import letters_by_relay
from dualwrite.relay.journal_state import JournalState, read_journals
from dualwrite.settings import Settings
from dualwrite.state import TransactionStatus
from dualwrite.stores.base import TxnStateStore
from dualwrite.stores.sql import SqlStateStore
from dualwrite.texts import error_text, now_ms

_WAIT_SECONDS: Final = 3600.0
_MAX_PORT: Final = 65535

T = TypeVar("T")

LATE_SECONDS: Final = 1200.0
"""KIP-664 calls a transaction late 5 minutes after its limit, which is at most 15 minutes by default."""

app = typer.Typer()


@app.callback(invoke_without_command=True)
@grouped
def metrics(
    *,
    target: Target,
    listen: Annotated[
        str, typer.Option("--listen", metavar="HOST:PORT", help="Where to serve /metrics; it has no login.")
    ] = "127.0.0.1:9464",
    once: Annotated[bool, typer.Option("--once", help="Print the metrics once, and end.")] = False,
    limit: Annotated[
        float, typer.Option("--limit", metavar="SECONDS", min=0.1, help="The time within which a scrape is answered.")
    ] = 8.0,
    late: Annotated[
        float, typer.Option("--late", metavar="SECONDS", min=0, help="After which an open transaction is late (KIP-664).")
    ] = LATE_SECONDS,
) -> None:
    """Serve metrics of the database and of Kafka for Prometheus, or print them once. Changes nothing, and needs no service.

    With only a database or only Kafka's address it shows what that side knows. If a side does not answer within the limit,
    `dualwrite_up` of it is 0, its other metrics are missing, and the scrape is answered all the same.
    """
    settings = target.settings()
    sides = ["database"] if settings.database_url is not None else []
    sides += ["kafka"] if "bootstrap.servers" in settings.kafka else []
    if not sides:
        refuse("Neither a database nor Kafka is given: use --url, --kafka, or their environment variables.")
    exporter = Exporter(settings, sides, limit=limit, late=late)
    registry = CollectorRegistry()
    registry.register(exporter)
    if once:
        typer.echo(generate_latest(registry).decode(), nl=False)
        raise typer.Exit(0 if exporter.is_complete else 1)
    host, port = _address(listen)
    stopped = StopFlag()
    try:
        server, thread = start_http_server(port, host, registry)
    except OSError as error:
        refuse(f"{listen} can't be used: {error.strerror or error}.")
    say(f"Serving http://{host}:{server.server_port}/metrics", err=True)
    try:
        with stopped_by_sigterm(stopped.set):
            while not stopped.is_set():
                stopped.wait(_WAIT_SECONDS)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _address(text: str) -> tuple[str, int]:
    host, separator, port = text.rpartition(":")
    if not (separator and host and port.isascii() and port.isdecimal() and int(port) <= _MAX_PORT):
        raise typer.BadParameter(f"{text!r} is not of the form HOST:PORT.", param_hint="--listen")
    return host.strip("[]"), int(port)


class Exporter:
    """A collector of prometheus_client that reads both sides, each within the limit.

    Args:
        settings: Database and Kafka.
        sides: Which of them are given: "database", "kafka".
        limit: Seconds within which a collection ends.
        late: Seconds after which an open transaction is late.
    """

    def __init__(self, settings: Settings, sides: list[str], *, limit: float, late: float) -> None:
        self._settings = settings
        self._sides = sides
        self._limit = limit
        self._late = late
        self._database: InThread[tuple[StatusData, Values]] = InThread("dualwrite metrics")
        self._kafka: InThread[Values] = InThread("dualwrite metrics")
        self._both: InThread[Values] = InThread("dualwrite metrics")
        self._lock = threading.Lock()
        self._values: Values = {}
        self._read_at = 0.0
        self._problems: dict[str, str] = {}

    @property
    def is_complete(self) -> bool:
        """Whether both sides have answered the last time."""
        return not self._problems

    def describe(self) -> Iterator[GaugeMetricFamily]:
        """Nothing is read when it is registered."""
        return iter(())

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """The metrics now; of two collections at the same time, the second one gets the result of the first."""
        asked = time.monotonic()
        with self._lock:
            if self._read_at < asked:
                self._values = self._read()
                self._read_at = time.monotonic()
            values = self._values
        return families(values)

    def _read(self) -> Values:
        deadline, settings = Deadline.after(self._limit), self._settings
        durations: dict[str, float | None] = dict.fromkeys(self._sides)
        if "database" in durations:
            self._database.start(lambda: read_database(settings))
        if "kafka" in durations:
            self._kafka.start(lambda: read_cluster(settings, self._limit, self._late))
        stored, cluster = (self._result("database", self._database, deadline), self._result("kafka", self._kafka, deadline))
        both: Values | None = None
        if stored is not None and cluster is not None:
            status = stored[0]
            self._both.start(lambda: read_both(status, settings))
            both = self._result("kafka", self._both, deadline)
        if stored is not None:
            durations["database"] = self._database.seconds
        if cluster is not None and (stored is None or both is not None):
            durations["kafka"] = self._kafka.seconds + (0.0 if both is None else self._both.seconds)
        return {
            UP: {(side,): took is not None for side, took in durations.items()},
            READ_SECONDS: {(side,): took for side, took in durations.items() if took is not None},
            **(stored[1] if stored is not None else {}),
            **(cluster or {}),
            **(both or {}),
        }

    def _result(self, side: str, reading: InThread[T], deadline: Deadline) -> T | None:
        """What was read; None if there is nothing, and the reason on stderr if it is a new one."""
        if side not in self._sides:
            return None
        try:
            found = reading.result(deadline)
        except DualWriteError as error:
            self._note(side, error_text(error))
            return None
        except TimeoutError:
            self._note(side, f"The {side} did not answer within {self._limit:g} s.")
            return None
        if self._problems.pop(side, None) is not None:
            say(f"The {side} answers again.", err=True)
        return found

    def _note(self, side: str, text: str) -> None:
        if self._problems.get(side) != text:
            self._problems[side] = text
            typer.echo(text, err=True)


# --- the metrics, and their values from what was read -------------------------------------------------------------------------

Values = dict[Metric, dict[tuple[str, ...], float]]
"""The values of metrics, by the values of their labels."""


UP: Final = gauge("up", "1 if a side answered within the limit, otherwise 0: database, kafka.", "side")
READ_SECONDS: Final = gauge("read_seconds", "How long reading a side has taken.", "side")

IDS: Final = gauge(
    "ids",
    "Transactional ids by state: leased (a pool or relay has it), expired (its lease has ended), open (a writer without "
    "leases is open on it, or was when it crashed), idle.",
    *("prefix", "state"),
)
EXPIRED_SECONDS: Final = gauge("expired_lease_seconds", "Seconds since the lease of an unresolved id has ended.", "prefix")
TO_DO: Final = gauge(
    "to_do", "What waits for somebody, as `dualwrite status` says: recover, publish, gone, acknowledge, markers.", "need"
)
LISTED: Final = gauge("lost_transactions", "LOST and UNVERIFIED entries that are not acknowledged.", "prefix", "kind")
OPEN: Final = gauge(
    "open_transactions",
    "Open transactions of our ids at Kafka, by what the database decided: commit (it has committed), abort (it has not), …",
    *("prefix", "decision"),
)
OPEN_SECONDS: Final = gauge("open_transaction_seconds", "The age of the oldest of them.", "prefix", "decision")
GATE: Final = gauge("journal_gate_open", "1 while messages of a prefix go into the journal.", "prefix")
GATE_KEPT: Final = gauge("journal_gate_kept_open", 'Processes for which it is open always: acknowledge="journaled".', "prefix")
ENTRIES: Final = gauge("journal_entries", "Messages to be published from the journal.", "prefix")
ENTRY_BYTES: Final = gauge("journal_entries_bytes", "Bytes of their keys and values.", "prefix")
ENTRY_SECONDS: Final = gauge("journal_entries_age_seconds", "Seconds for which the oldest of them has waited.", "prefix")
LATER: Final = gauge("journal_later_entries", "Messages that wait for their time.", "prefix")
LIMIT_USED: Final = gauge(
    "journal_limit_used_ratio",
    "The part of a limit of the journal that is used: entries, size, age; from 1 on units fail. Absent while it is closed.",
    *("prefix", "limit"),
)
STORED_DEAD_LETTERS: Final = gauge("stored_dead_letters", "Dead letters of relays in the database.", "relay")
POSITION_AGE: Final = gauge(
    "group_position_age_seconds", "Seconds since a group's position in the database has moved.", *OF_PARTITION
)

BEHIND: Final = gauge(
    "group_behind_messages", "Offsets from a group's position in the database to the last stable offset.", *OF_PARTITION
)
HELD_BACK: Final = gauge(
    "group_held_back_messages", "Offsets after it, which the group can't read before a transaction has ended.", *OF_PARTITION
)
ACTIVE: Final = gauge("kafka_active_transactions", "Transactions of all clients that have not ended, by state.", "state")
OPEN_TIME_MAX: Final = gauge(
    "kafka_active_transaction_open_time_max_seconds", "The age of the oldest of them (KIP-939's ActiveTransactionOpenTimeMax)."
)
STUCK: Final = gauge(
    "kafka_stuck_partitions",
    f"Partitions where read_committed consumers wait for a transaction older than {LONGER_SECONDS:g} s.",
)
STUCK_SECONDS: Final = gauge("kafka_stuck_seconds", "The age of the oldest transaction for which consumers wait.")
STUCK_MESSAGES: Final = gauge("kafka_stuck_messages", "Offsets that they can't read yet.")
LATE_PARTITIONS: Final = gauge(
    "kafka_partitions_with_late_transactions",
    f"Partitions with a transaction older than {LATE_SECONDS:g} s (KIP-664's PartitionsWithLateTransactionsCount).",
)

OF_DATABASE: Final = (
    *(IDS, EXPIRED_SECONDS, TO_DO, LISTED, GATE, GATE_KEPT, ENTRIES, ENTRY_BYTES, ENTRY_SECONDS, LATER, LIMIT_USED),
    *(STORED_DEAD_LETTERS, POSITION_AGE),
)
OF_KAFKA: Final = (ACTIVE, OPEN_TIME_MAX, STUCK, STUCK_SECONDS, STUCK_MESSAGES, LATE_PARTITIONS)
OF_BOTH: Final = (OPEN, OPEN_SECONDS, BEHIND, HELD_BACK)
EXPORTED: Final = (UP, READ_SECONDS, *OF_DATABASE, *OF_KAFKA, *OF_BOTH)
"""All metrics of the exporter."""


# --- reading, and the values of what was read ---------------------------------------------------------------------------------


def read_database(settings: Settings) -> tuple[StatusData, Values]:
    """What the database knows: as `dualwrite status` reads it, and the metrics of it.

    Raises:
        DualWriteError: As for the store's methods.
    """
    with store_for(settings) as store:
        status, journals, letters = in_store(store), _journals(store), _dead_letters(store)
    now = time.time()
    values: Values = {metric: {} for metric in OF_DATABASE}
    prefix = partial(_prefix, {job.prefix for job in status.jobs})
    values[IDS] = dict(Counter((prefix(name), state) for name, state in _states(status)))
    by_id = status.by_id
    for name, lease in status.leases.items():
        unresolved = any(row.unresolved_generations for row in by_id.get(name, ()))
        if lease.has_ended and lease.seconds_left is not None and unresolved:
            _raise(values[EXPIRED_SECONDS], (prefix(name),), max(0.0, -lease.seconds_left))
    lost = ((prefix(row.transactional_id), entry.kind.value.lower()) for row in status.rows for entry in row.lost)
    values[LISTED] = dict(Counter(lost))
    values[TO_DO] = _to_do(status)
    for journal in journals:
        of_prefix = (journal.prefix,)
        values[GATE][of_prefix] = journal.gate.is_open
        values[GATE_KEPT][of_prefix] = len(journal.kept_by)
        values[ENTRIES][of_prefix] = journal.gate.entries or 0
        values[ENTRY_BYTES][of_prefix] = journal.gate.size or 0
        values[ENTRY_SECONDS][of_prefix] = journal.age
        values[LATER][of_prefix] = journal.gate.later or 0
        values[LIMIT_USED] |= {(journal.prefix, limit): used for limit, used in journal.fractions.items()}
    values[STORED_DEAD_LETTERS] = {(relay,): number for relay, number in letters.items()}
    for shown in status.positions:
        if (at := shown.position.updated_at) is not None:
            values[POSITION_AGE][shown.labels] = max(now - at.timestamp(), 0.0)
    return status, values


def _journals(store: TxnStateStore) -> list[JournalState]:
    try:
        return read_journals(store)
    except StateTableMissingError:  # the user's own migrations, for writers without a journal
        return []


def _dead_letters(store: TxnStateStore) -> dict[str, int]:
    try:
        return letters_by_relay(store) if isinstance(store, SqlStateStore) else {}
    except StateTableMissingError:  # the user's own migrations, without a relay
        return {}


def _prefix(jobs: Collection[str], name: str) -> str:
    """The prefix of an id or of a lane: of a pool, a relay or one of the jobs."""
    prefix = prefix_of(name)
    of_job = prefix_of(prefix)  # without the partition and the attempt of a task
    return of_job if of_job in jobs else prefix


def _to_do(status: StatusData) -> dict[tuple[str, ...], float]:
    found = Counter(each.need for each in status.needs(longer_than=LONGER_SECONDS))
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


def read_cluster(settings: Settings, timeout: float, late: float) -> Values:
    """The metrics of the transactions of all clients, as far as the principal may see them.

    Raises:
        DualWriteError: As for TransactionAdmin's methods.
    """
    with TransactionAdmin(settings=settings, timeout=timeout) as admin:
        partitions = admin.stuck().partitions
        running = [one.transactional_id for one in admin.list(states=RUNNING)]
        described = [one.description for one in admin.describe(running)]
    active = [one for one in described if one is not None and one.status in RUNNING]
    now = now_ms()
    ages = [(one.holder.age_ms(now) or 0) / 1000 for one in partitions]
    states = Counter(one.status for one in active)
    oldest = min((one.start_time_ms for one in active if one.start_time_ms >= 0), default=now)
    stuck = [one for one, age in zip(partitions, ages, strict=True) if age >= LONGER_SECONDS]
    return {
        ACTIVE: {(status.value,): states[status] for status in TransactionStatus if status in RUNNING},
        OPEN_TIME_MAX: {(): max(now - oldest, 0) / 1000},
        STUCK: {(): len(stuck)},
        STUCK_SECONDS: {(): max(ages, default=0.0)},
        STUCK_MESSAGES: {(): sum(one.end.records_behind for one in stuck)},
        LATE_PARTITIONS: {(): sum(age >= late for age in ages)},
    }


def read_both(found: StatusData, settings: Settings) -> Values:
    """The metrics of the ids and positions in the database, as Kafka knows them.

    Raises:
        DualWriteError: Kafka does not respond.
    """
    known = replace(found, seen={}, gone=[])  # the caller may go on without it
    with coordinator_for(settings) as coordinator:
        known.ask(coordinator)
    positions = with_kafka(found.positions, settings) if found.positions else []
    now = time.time()
    values: Values = {TO_DO: _to_do(known), **{metric: {} for metric in OF_BOTH}}
    prefix = partial(_prefix, {job.prefix for job in known.jobs})
    for row in known.rows:
        for generation, described in known.seen.get(row.transactional_id, {}).items():
            if described is None or described.status not in RUNNING:
                continue
            decision = decide(row.prepared_state if row.prepared_generation == generation else None, described)
            labels = prefix(row.transactional_id), decision.value
            values[OPEN][labels] = values[OPEN].get(labels, 0) + 1
            if described.start_time_ms >= 0:
                _raise(values[OPEN_SECONDS], labels, max(now - described.start_time_ms / 1000, 0.0))
    for shown in positions:
        if shown.behind is not None and shown.held_back is not None:
            values[BEHIND][shown.labels], values[HELD_BACK][shown.labels] = shown.behind, shown.held_back
    return values


def _raise(values: dict[tuple[str, ...], float], labels: tuple[str, ...], value: float) -> None:
    values[labels] = max(values.get(labels, 0.0), value)
