"""The metrics of a process: names, labels and buckets in one table, and what each event adds to them. No I/O.

The names follow Prometheus' rules; OpenTelemetry's are made from them (`Metric.otel_name`). Labels have few values: a
transaction counts for the prefix of its id, not for the id.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, Literal

from dualwrite.errors import InDoubtTransactionError, LostTransactionError, UnverifiedTransactionError
from dualwrite.observability import events
from dualwrite.observability.events import Event, Steps
from dualwrite.observability.readings import READINGS, current_readings, side_of
from dualwrite.transactional_id import TransactionalId

Kind = Literal["counter", "histogram", "gauge"]

_SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_UNITS: Final = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0)


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric.

    Args:
        name: Its name in Prometheus; that of a counter ends with `_total`, a duration is in seconds.
        kind: What it is.
        help: What it means.
        labels: The names of its labels.
        buckets: The upper limits of a histogram's buckets.
    """

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()

    @property
    def otel_name(self) -> str:
        """The name for OpenTelemetry, without what its exporter to Prometheus adds: `dualwrite.step`, `dualwrite.units`."""
        return self.name.removesuffix("_total").removesuffix("_seconds").replace("_", ".", 1)

    @property
    def unit(self) -> str:
        """The unit for OpenTelemetry: "s", or empty for a count."""
        return "s" if self.name.removesuffix("_total").endswith("_seconds") else ""


def _counter(name: str, text: str, *labels: str) -> Metric:
    return Metric(f"dualwrite_{name}_total", "counter", text, labels)


def _seconds(name: str, text: str, *labels: str) -> Metric:
    return Metric(f"dualwrite_{name}_seconds", "histogram", text, labels, _SECONDS)


TRANSACTIONS: Final = _counter(
    "transactions",
    "Transactions by outcome: published, journaled, rolled_back, in_doubt (writer or recovery resolve it), lost.",
    *("prefix", "outcome"),
)
TRANSACTION_SECONDS: Final = _seconds("transaction", "Duration of the transactions that have committed.", "prefix")
STEP_SECONDS: Final = _seconds(
    "step",
    "Duration of the steps of committed transactions: block, delivery, record, database_commit, kafka_commit.",
    "step",
)
MESSAGES: Final = _counter("messages", "Messages of the transactions that have committed.", "prefix")
UNITS: Final = _counter("units", "Units of pools by outcome: committed, failed, in_doubt, lost.", "prefix", "outcome")
UNIT_SECONDS: Final = _seconds("unit", "Time from the call of a unit to its outcome.", "prefix")
UNIT_WAITED_SECONDS: Final = _seconds("unit_waited", "Time from the call of a unit until it began to run.", "prefix")
GROUP_UNITS: Final = Metric(
    "dualwrite_group_units", "histogram", "Units that shared one transaction of a pool.", ("prefix",), _UNITS
)
LEASES_TAKEN: Final = _counter("leases_taken", "Ids that pools and relays have leased.", "prefix")
LEASES_LOST: Final = _counter("leases_lost", "Ids of pools and relays that another process has leased.", "prefix")
RECOVERIES: Final = _counter(
    "recoveries",
    "Generations of ids that recovery, or a writer that opened, has resolved, by outcome: committed, lost, …",
    "outcome",
)
PUBLISHED_AGAIN: Final = _counter("messages_published_again", "Messages of lost transactions published again.", "prefix")
JOURNAL_OPENINGS: Final = _counter("journal_openings", "How often messages began to go into the journal.", "prefix")
BATCHES: Final = _counter("batches", "Attempts of processors at a batch, by outcome: processed, failed.", "group", "outcome")
BATCH_SECONDS: Final = _seconds("batch", "Time from the first attempt at a batch to its commit.", "group")
PROCESSED: Final = _counter("messages_processed", "Messages that processors have processed.", "group", "topic")
DEAD_LETTERS: Final = _counter("dead_letters", "Messages and rows put aside, by consumer group or relay.", "source")
RELAYED_ROWS: Final = _counter("relayed_rows", "Rows of outboxes, and entries of journals, that were published.", "prefix")
RELAY_SECONDS: Final = _seconds("relay", "Duration of the transactions of relays and of journals.", "prefix")
TASKS: Final = _counter("job_tasks", "Tasks of jobs that were prepared, counted on executors.", "prefix")
TASK_SECONDS: Final = _seconds("job_task", "Duration of the tasks of jobs.", "prefix")
TASKS_FAILED: Final = _counter("job_tasks_failed", "Attempts of jobs' tasks that have failed, counted on executors.", "prefix")
JOBS: Final = _counter("jobs", "Batches of jobs that were committed, counted on drivers.")
JOBS_ABORTED: Final = _counter("jobs_aborted", "Runs of jobs that were aborted, counted on drivers.", "prefix")
JOB_SECONDS: Final = _seconds("job_commit", "Duration of the commits of jobs.")
OUTAGES: Final = _counter("outages", "Times that a side did not answer: kafka or database.", "side")
OUTAGE_SECONDS: Final = _counter("outage_seconds", "Seconds in which a side did not answer, counted at their end.", "side")

COUNTED: Final = (
    *(TRANSACTIONS, TRANSACTION_SECONDS, STEP_SECONDS, MESSAGES, UNITS, UNIT_SECONDS, UNIT_WAITED_SECONDS, GROUP_UNITS),
    *(LEASES_TAKEN, LEASES_LOST, RECOVERIES, PUBLISHED_AGAIN, JOURNAL_OPENINGS, BATCHES, BATCH_SECONDS, PROCESSED),
    *(DEAD_LETTERS, RELAYED_ROWS, RELAY_SECONDS, TASKS, TASK_SECONDS, TASKS_FAILED, JOBS),
    *(JOBS_ABORTED, JOB_SECONDS, OUTAGES, OUTAGE_SECONDS),
)
"""The metrics that events change."""

_LABELS_OF_READINGS: Final = {"pool": ("prefix",), "journal": ("prefix",), "relay": ("relay",), "outage": ("side",)}
_OF_PARTITION: Final = ("group", "topic", "partition")

READ: Final = tuple(
    Metric(
        f"dualwrite_{name}",
        "gauge",
        text,
        _OF_PARTITION if "lag" in name else _LABELS_OF_READINGS.get(name.partition("_")[0], ("group",)),
    )
    for name, text in READINGS.items()
)
"""The gauges, whose values are `current_readings()`."""

_BY_READING: Final = dict(zip(READINGS, READ, strict=True))
_LARGEST: Final = ("_seconds", "_open")


def takes_largest(metric: Metric) -> bool:
    """Whether the largest value counts if several objects, or processes, have readings of the same labels; else their sum."""
    return metric.name.endswith(_LARGEST)


def read_gauges() -> dict[Metric, dict[tuple[str, ...], float]]:
    """The values of the gauges now, by the values of their labels."""
    found: dict[Metric, dict[tuple[str, ...], float]] = {metric: {} for metric in READ}
    for reading in current_readings():
        metric = _BY_READING[reading.name]
        values = found[metric]
        labels = tuple(reading.labels[name] for name in metric.labels)
        before = values.get(labels)
        if before is None:
            values[labels] = reading.value
        else:
            values[labels] = max(before, reading.value) if takes_largest(metric) else before + reading.value
    return found


@lru_cache(maxsize=4096)
def prefix_of(transactional_id: str) -> str:
    """The prefix of the id of a pool or relay: `shop` of `shop.3` and of its lane `shop.3~1`; otherwise the id itself."""
    name = TransactionalId.of_row(transactional_id).logical
    prefix, _, number = name.rpartition(".")
    return prefix if prefix and number.isascii() and number.isdecimal() else name


Change = Callable[[float], object]
"""Adds to a counter, or puts a value into a histogram."""


class MetricsObserver:
    """An observer that keeps metrics.

    Args:
        child: Returns the function that changes a metric with these values of its labels. It is called once for each.
    """

    def __init__(self, child: Callable[[Metric, tuple[str, ...]], Change]) -> None:
        self._child = child
        self._children: dict[tuple[Metric, tuple[str, ...]], Change] = {}
        self._units: dict[tuple[str, str], tuple[Change, Change, Change]] = {}
        self._changes: Final[dict[type[Event], Callable[[Any], None]]] = {
            events.UnitEnded: self._unit_ended,
            events.TransactionCommitted: self._committed,
            events.TransactionRolledBack: self._not_committed,
            events.TransactionInDoubt: self._not_committed,
            events.TransactionLost: self._not_committed,
            events.GroupFormed: self._group_formed,
            events.LeaseTaken: self._lease_taken,
            events.LeaseLost: self._lease_lost,
            events.TransactionRecovered: self._recovered,
            events.MessagesPublishedAgain: self._published_again,
            events.JournalOpened: self._journal_opened,
            events.BatchProcessed: self._batch_processed,
            events.BatchFailed: self._batch_failed,
            events.DeadLettered: self._dead_lettered,
            events.RowsRelayed: self._relayed,
            events.TaskPrepared: self._task_prepared,
            events.TaskFailed: self._task_failed,
            events.JobCommitted: self._job_committed,
            events.JobAborted: self._job_aborted,
            events.OutageBegan: self._outage_began,
            events.OutageEnded: self._outage_ended,
        }
        self._steps = tuple(self._change(STEP_SECONDS, step) for step in Steps._fields)

    def __call__(self, event: Event) -> None:
        """Count an event."""
        change = self._changes.get(type(event))
        if change is not None:
            change(event)

    def _change(self, metric: Metric, *labels: str) -> Change:
        key = metric, labels
        found = self._children.get(key)
        if found is None:
            found = self._children[key] = self._child(metric, labels)
        return found

    # --- one method for each event ----------------------------------------------------------------------------------------

    def _unit_ended(self, event: events.UnitEnded) -> None:
        key = event.prefix, "committed" if event.error is None else _failure(event.error, "failed")
        changes = self._units.get(key)
        if changes is None:
            seconds, waited = (self._change(metric, event.prefix) for metric in (UNIT_SECONDS, UNIT_WAITED_SECONDS))
            changes = self._units[key] = self._change(UNITS, *key), seconds, waited
        count, seconds, waited = changes
        count(1)
        seconds(event.seconds)
        waited(event.waited)

    def _committed(self, event: events.TransactionCommitted) -> None:
        prefix = prefix_of(event.transactional_id)
        self._change(TRANSACTIONS, prefix, event.outcome)(1)
        self._change(TRANSACTION_SECONDS, prefix)(event.seconds)
        self._change(MESSAGES, prefix)(event.messages)
        for change, seconds in zip(self._steps, event.steps, strict=True):
            if seconds:
                change(seconds)

    def _not_committed(self, event: events.TransactionRolledBack | events.TransactionInDoubt | events.TransactionLost) -> None:
        self._change(TRANSACTIONS, prefix_of(event.transactional_id), _failure(event.error, "rolled_back"))(1)

    def _group_formed(self, event: events.GroupFormed) -> None:
        self._change(GROUP_UNITS, prefix_of(event.transactional_id))(event.units)

    def _lease_taken(self, event: events.LeaseTaken) -> None:
        self._change(LEASES_TAKEN, event.prefix)(1)

    def _lease_lost(self, event: events.LeaseLost) -> None:
        self._change(LEASES_LOST, event.prefix)(1)

    def _recovered(self, event: events.TransactionRecovered) -> None:
        self._change(RECOVERIES, event.outcome.lower())(1)

    def _published_again(self, event: events.MessagesPublishedAgain) -> None:
        self._change(PUBLISHED_AGAIN, prefix_of(event.transactional_id))(event.messages)

    def _journal_opened(self, event: events.JournalOpened) -> None:
        self._change(JOURNAL_OPENINGS, event.prefix)(1)

    def _batch_processed(self, event: events.BatchProcessed) -> None:
        self._change(BATCHES, event.group_id, "processed")(1)
        self._change(BATCH_SECONDS, event.group_id)(event.seconds)
        for topic, messages in event.messages.items():
            self._change(PROCESSED, event.group_id, topic)(messages)

    def _batch_failed(self, event: events.BatchFailed) -> None:
        self._change(BATCHES, event.group_id, "failed")(1)

    def _dead_lettered(self, event: events.DeadLettered) -> None:
        is_of_processor = bool(event.topic)
        self._change(DEAD_LETTERS, event.source if is_of_processor else prefix_of(event.source))(1)

    def _relayed(self, event: events.RowsRelayed) -> None:
        prefix = prefix_of(event.transactional_id)
        self._change(RELAYED_ROWS, prefix)(event.rows)
        self._change(RELAY_SECONDS, prefix)(event.seconds)

    def _task_prepared(self, event: events.TaskPrepared) -> None:
        prefix = prefix_of(prefix_of(event.transactional_id))  # without its attempt and its partition
        self._change(TASKS, prefix)(1)
        self._change(TASK_SECONDS, prefix)(event.seconds)

    def _task_failed(self, event: events.TaskFailed) -> None:
        self._change(TASKS_FAILED, prefix_of(prefix_of(event.transactional_id)))(1)

    def _job_aborted(self, event: events.JobAborted) -> None:
        self._change(JOBS_ABORTED, event.prefix)(1)

    def _job_committed(self, event: events.JobCommitted) -> None:
        self._change(JOBS)(1)
        self._change(JOB_SECONDS)(event.seconds)

    def _outage_began(self, event: events.OutageBegan) -> None:
        self._change(OUTAGES, side_of(event.side))(1)

    def _outage_ended(self, event: events.OutageEnded) -> None:
        self._change(OUTAGE_SECONDS, side_of(event.side))(event.seconds)


def _failure(error: BaseException, otherwise: str) -> str:
    if isinstance(error, InDoubtTransactionError):
        return "in_doubt"
    return "lost" if isinstance(error, LostTransactionError | UnverifiedTransactionError) else otherwise
