"""The metrics of a process: their names, labels and buckets, and one table of what each event adds to them. No I/O.

The names follow Prometheus' rules; OpenTelemetry's are made from them (`Metric.otel_name`). Labels have few values: a
transaction counts for the prefix of its id, not for the id.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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


@dataclass(frozen=True, slots=True, eq=False)
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


def gauge(name: str, text: str, *labels: str) -> Metric:
    """A gauge, of this process or of the exporter."""
    return Metric(f"dualwrite_{name}", "gauge", text, labels)


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
FORGOTTEN: Final = _counter(
    "forgotten_transactions", "Committed transactions that the database has forgotten, at least.", "prefix"
)
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

COUNTED: Final = tuple(found for found in tuple(globals().values()) if isinstance(found, Metric))
"""The metrics that events change: all of the above."""

_LABELS_OF_READINGS: Final = {
    **dict.fromkeys(("pool", "journal"), ("prefix",)),
    **dict.fromkeys(("outage", "kafka"), ("side",)),
    "relay": ("relay",),
}
OF_PARTITION: Final = ("group", "topic", "partition")
"""The labels of what is about a partition as a group reads it."""

READ: Final = tuple(
    gauge(name, text, *(OF_PARTITION if "lag" in name else _LABELS_OF_READINGS.get(name.partition("_")[0], ("group",))))
    for name, text in READINGS.items()
)
"""The gauges, whose values are `current_readings()`."""

_BY_READING: Final = dict(zip(READINGS, READ, strict=True))
_ENDINGS_OF_LARGEST: Final = ("_seconds", "_open")


def takes_largest(metric: Metric) -> bool:
    """Whether the largest value counts if several objects, or processes, have readings of the same labels; else their sum."""
    return metric.name.endswith(_ENDINGS_OF_LARGEST)


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


def outcome_of(error: BaseException, otherwise: str) -> str:
    """The outcome that an error stands for: in_doubt, lost, or `otherwise`."""
    if isinstance(error, InDoubtTransactionError):
        return "in_doubt"
    return "lost" if isinstance(error, LostTransactionError | UnverifiedTransactionError) else otherwise


Entry = tuple[Metric, tuple[str, ...], float]
"""A metric, the values of its labels, and what is added to the counter or put into the histogram."""


_STEPS: Final = tuple((step,) for step in Steps._fields)


def _of_id(event: Any, *more: str) -> tuple[str, ...]:
    return prefix_of(event.transactional_id), *more


def _of_task(event: Any) -> tuple[str, ...]:
    return (prefix_of(prefix_of(event.transactional_id)),)  # without its attempt and its partition


_ENTRIES: Final[Mapping[type[Event], Callable[[Any], Sequence[Entry]]]] = {
    events.TransactionCommitted: lambda event: [
        (TRANSACTIONS, ((prefix := prefix_of(event.transactional_id)), event.outcome), 1),
        (TRANSACTION_SECONDS, (prefix,), event.seconds),
        (MESSAGES, (prefix,), event.messages),
        *[(STEP_SECONDS, step, seconds) for step, seconds in zip(_STEPS, event.steps, strict=True) if seconds],
    ],
    events.TransactionRolledBack: lambda event: [(TRANSACTIONS, _of_id(event, "rolled_back"), 1)],
    events.TransactionInDoubt: lambda event: [(TRANSACTIONS, _of_id(event, "in_doubt"), 1)],
    events.TransactionLost: lambda event: [(TRANSACTIONS, _of_id(event, "lost"), 1)],
    events.UnitEnded: lambda event: (
        (UNITS, (event.prefix, "committed" if event.error is None else outcome_of(event.error, "failed")), 1),
        (UNIT_SECONDS, (event.prefix,), event.seconds),
        (UNIT_WAITED_SECONDS, (event.prefix,), event.waited),
    ),
    events.GroupFormed: lambda event: [(GROUP_UNITS, _of_id(event), event.units)],
    events.LeaseTaken: lambda event: [(LEASES_TAKEN, (event.prefix,), 1)],
    events.LeaseLost: lambda event: [(LEASES_LOST, (event.prefix,), 1)],
    events.TransactionRecovered: lambda event: [(RECOVERIES, (event.outcome.lower(),), 1)],
    events.MessagesPublishedAgain: lambda event: [(PUBLISHED_AGAIN, _of_id(event), event.messages)],
    events.TransactionsForgotten: lambda event: [(FORGOTTEN, _of_id(event), event.transactions)],
    events.JournalOpened: lambda event: [(JOURNAL_OPENINGS, (event.prefix,), 1)],
    events.BatchProcessed: lambda event: [
        (BATCHES, (event.group_id, "processed"), 1),
        (BATCH_SECONDS, (event.group_id,), event.seconds),
        *((PROCESSED, (event.group_id, topic), messages) for topic, messages in event.messages.items()),
    ],
    events.BatchFailed: lambda event: [(BATCHES, (event.group_id, "failed"), 1)],
    events.DeadLettered: lambda event: [  # a relay's has no topic
        (DEAD_LETTERS, (event.source if event.topic else prefix_of(event.source),), 1)
    ],
    events.RowsRelayed: lambda event: [
        (RELAYED_ROWS, _of_id(event), event.rows),
        (RELAY_SECONDS, _of_id(event), event.seconds),
    ],
    events.TaskPrepared: lambda event: [(TASKS, _of_task(event), 1), (TASK_SECONDS, _of_task(event), event.seconds)],
    events.TaskFailed: lambda event: [(TASKS_FAILED, _of_task(event), 1)],
    events.JobAborted: lambda event: [(JOBS_ABORTED, (event.prefix,), 1)],
    events.JobCommitted: lambda event: [(JOBS, (), 1), (JOB_SECONDS, (), event.seconds)],
    events.OutageBegan: lambda event: [(OUTAGES, (side_of(event.side),), 1)],
    events.OutageEnded: lambda event: [(OUTAGE_SECONDS, (side_of(event.side),), event.seconds)],
}
"""What each event adds to which metrics. The others add nothing: the end of their transaction has what they say."""


def entries_of(event: Event) -> Sequence[Entry]:
    """What an event adds to the metrics."""
    entries = _ENTRIES.get(type(event))
    return () if entries is None else entries(event)


Change = Callable[[float], object]
"""Adds to a counter, or puts a value into a histogram."""


class MetricsObserver:
    """An observer that keeps metrics.

    Args:
        child: Returns the function that changes a metric with these values of its labels. It is called once for each.
    """

    def __init__(self, child: Callable[[Metric, tuple[str, ...]], Change]) -> None:
        self._child = child
        self._changes: dict[tuple[Metric, tuple[str, ...]], Change] = {}
        for step in _STEPS:
            self._change(STEP_SECONDS, step)

    def __call__(self, event: Event) -> None:
        """Count an event."""
        for metric, labels, value in entries_of(event):
            change = self._changes.get((metric, labels)) or self._change(metric, labels)
            change(value)

    def _change(self, metric: Metric, labels: tuple[str, ...]) -> Change:
        found = self._changes[metric, labels] = self._child(metric, labels)
        return found
