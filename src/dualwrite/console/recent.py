"""What this process has done in the last minutes, in bounded memory: an observer that counts, times, and remembers each id."""

from __future__ import annotations

import threading
import time
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass
from math import log2
from typing import Final

from dualwrite.errors import DualWriteError
from dualwrite.observability import (
    Event,
    MessagesPublishedAgain,
    Steps,
    TransactionCommitted,
    TransactionInDoubt,
    TransactionLost,
    TransactionRecovered,
    TransactionRolledBack,
)
from dualwrite.observability.metrics import (
    STEP_SECONDS,
    TRANSACTION_SECONDS,
    TRANSACTIONS,
    UNIT_SECONDS,
    UNITS,
    Metric,
    entries_of,
)
from dualwrite.transactional_id import TransactionalId

SPAN_SECONDS: Final = 10.0
"""Seconds of one point in a chart."""

POINTS: Final = 90
"""Points that are kept: 15 minutes."""

STEPS: Final[Mapping[str, str]] = {
    "block": "Your code, in the block",
    "delivery": "Delivery to Kafka",
    "record": "Recording the state",
    "database_commit": "Database commit",
    "kafka_commit": "Kafka commit",
}
"""The steps of a transaction, with their names for people."""

_UNIT: Final = "Unit of a pool, from call to result"
_TRANSACTION: Final = "Whole transaction"

_SHOWN: Final[Mapping[tuple[Metric, str], str]] = {
    **dict.fromkeys([(TRANSACTIONS, "published"), (TRANSACTIONS, "journaled")], "committed"),
    (TRANSACTIONS, "rolled_back"): "rolled back",
    (TRANSACTIONS, "in_doubt"): "in doubt",
    (TRANSACTIONS, "lost"): "lost",
    (UNITS, "committed"): "units",
    **dict.fromkeys([(UNITS, "failed"), (UNITS, "in_doubt"), (UNITS, "lost")], "failed units"),
    **{(STEP_SECONDS, step): text for step, text in STEPS.items()},
    (TRANSACTION_SECONDS, ""): _TRANSACTION,
    (UNIT_SECONDS, ""): _UNIT,
}
"""What the page shows of the metrics, by the outcome or the step in their labels; and its name there."""

_WITH_KIND: Final = {metric for metric, kind in _SHOWN if kind}
_MIN_SECONDS: Final = 1e-5
_PER_DOUBLING: Final = 8  # so a quantile is at most 4.5 % off
_MAX_CLASS: Final = 24 * _PER_DOUBLING
_MAX_IDS: Final = 200
_MAX_ENTRIES_OF_ID: Final = 20
_MAX_TEXT_LENGTH: Final = 300


def duration_class(seconds: float) -> int:
    """The class of a duration in a histogram with logarithmic classes."""
    if seconds <= _MIN_SECONDS:
        return 0
    return min(int(log2(seconds / _MIN_SECONDS) * _PER_DOUBLING) + 1, _MAX_CLASS)


def quantile(durations: Counter[int], part: float) -> float | None:
    """The duration in seconds below which this part of a histogram is; None if it is empty."""
    left = part * durations.total()
    for at, number in sorted(durations.items()):
        left -= number
        if left <= 0:
            return float(_MIN_SECONDS * 2.0 ** ((at - 0.5) / _PER_DOUBLING))
    return None


class _Point:
    """What happened in one span of time: counts, and histograms of durations."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.counts: Counter[str] = Counter()
        self.durations: defaultdict[str, Counter[int]] = defaultdict(Counter)

    def add(self, event: Event) -> None:
        for metric, labels, value in entries_of(event):
            name = _SHOWN.get((metric, labels[-1] if metric in _WITH_KIND else ""))
            if name is not None and metric.kind == "counter":
                self.counts[name] += int(value)
            elif name is not None:
                self.durations[name][duration_class(value)] += 1

    def milliseconds(self, part: float) -> float | None:
        """A quantile of the units, or of the transactions if there are no units."""
        found = quantile(self.durations[_UNIT] or self.durations[_TRANSACTION], part)
        return None if found is None else round(found * 1000, 3)


@dataclass(frozen=True)
class HistoryEntry:
    """Something that happened on an id: the end of a transaction, what recovery did, or what a row or Kafka says.

    Args:
        at: Seconds since 1970.
        text: What happened, in words.
        seconds: The duration, if known.
        messages: The number of messages, if known.
        steps: The durations of the steps, of a committed transaction.
    """

    at: float
    text: str
    seconds: float | None = None
    messages: int | None = None
    steps: Steps | None = None


@dataclass(frozen=True)
class StepTimes:
    """How long a step took: its name, how often it was timed, and quantiles in seconds."""

    name: str
    count: int
    half: float
    most: float


class Recent:
    """An observer (`dualwrite.observability.add_observer`) that keeps the last 15 minutes of the process. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._first = _number()
        self._points: deque[_Point] = deque(maxlen=POINTS)
        self._by_id: OrderedDict[str, deque[HistoryEntry]] = OrderedDict()

    def __call__(self, event: Event) -> None:
        """Take note of an event."""
        with self._lock:
            number = _number()
            if not self._points or self._points[-1].number < number:
                self._points.append(_Point(number))
            self._points[-1].add(event)
            self._keep(event)

    # --- reading ----------------------------------------------------------------------------------------------------------

    def of_id(self, logical: str) -> list[HistoryEntry]:
        """What happened last on an id and its lanes, the newest first."""
        with self._lock:
            found = [
                each for name, ones in self._by_id.items() if TransactionalId.of_row(name).logical == logical for each in ones
            ]
        return sorted(found, key=lambda each: -each.at)[:_MAX_ENTRIES_OF_ID]

    def counts(self) -> Counter[str]:
        """How often each outcome occurred."""
        with self._lock:
            return sum((point.counts for point in self._points), Counter())

    def times(self) -> list[StepTimes]:
        """How long the steps, the transactions and the units took; without those that did not occur."""
        with self._lock:
            found = {
                name: sum((point.durations[name] for point in self._points), Counter[int]())
                for name in (*STEPS.values(), _TRANSACTION, _UNIT)
            }
        return [
            StepTimes(name, times.total(), quantile(times, 0.5) or 0.0, quantile(times, 0.99) or 0.0)
            for name, times in found.items()
            if times
        ]

    def series(self) -> dict[str, list[float | None]]:
        """The points of the charts: times (seconds since 1970), transactions and units per second, p50 and p99 in ms."""
        now, current = time.time(), _number()
        with self._lock:
            known = {point.number: point for point in self._points}
            numbers = range(current - POINTS + 1, current)  # the current span is not complete
            points = [known.get(number) or _Point(number) for number in numbers]
            return {
                "time": [now - (current - point.number) * SPAN_SECONDS for point in points],
                "transactions": [self._rate(point, "committed") for point in points],
                "units": [self._rate(point, "units") for point in points],
                "p50": [point.milliseconds(0.5) for point in points],
                "p99": [point.milliseconds(0.99) for point in points],
            }

    def _rate(self, point: _Point, what: str) -> float | None:
        """How often something occurred per second; None before the first complete span."""
        return None if point.number <= self._first else point.counts[what] / SPAN_SECONDS

    # --- the history of ids, under the lock -------------------------------------------------------------------------------

    def _keep(self, event: Event) -> None:
        match event:
            case TransactionCommitted():
                text = "committed" if event.outcome == "published" else "committed; its messages are in the journal"
                self._add(event.lane, text, event.seconds, event.messages, event.steps)
            case TransactionRolledBack() | TransactionInDoubt() | TransactionLost():
                ((metric, (_, outcome), _),) = entries_of(event)
                self._add(event.lane, f"{_SHOWN[metric, outcome]}: {_why(event.error)}", event.seconds)
            case TransactionRecovered():
                self._add(event.transactional_id, f"recovered, generation {event.generation}: {event.outcome}")
            case MessagesPublishedAgain():
                self._add(event.transactional_id, "published again", messages=event.messages)

    def _add(
        self, lane: str, text: str, seconds: float | None = None, messages: int | None = None, steps: Steps | None = None
    ) -> None:
        known = self._by_id.setdefault(lane, deque(maxlen=_MAX_ENTRIES_OF_ID))
        known.append(HistoryEntry(time.time(), f"{lane}: {text}", seconds, messages, steps))
        self._by_id.move_to_end(lane)
        if len(self._by_id) > _MAX_IDS:
            self._by_id.popitem(last=False)


def _number() -> int:
    return int(time.monotonic() / SPAN_SECONDS)


def _why(error: BaseException) -> str:
    """What an error is; the text only of our own, since that of others may contain anything."""
    return f"{error}"[:_MAX_TEXT_LENGTH] if isinstance(error, DualWriteError) else type(error).__name__


class DatabaseRates:
    """How many transactions per second the rows show, which count them: for a console that has no process to observe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last: tuple[float, Mapping[str, tuple[int, int]]] | None = None
        self._rates: deque[tuple[float, float]] = deque(maxlen=int(POINTS * SPAN_SECONDS))

    def observe(self, numbers: Mapping[str, tuple[int, int]], now: float) -> None:
        """Note the fencing token and the number of the last transaction of each row, read at `now` (seconds since 1970)."""
        with self._lock:
            if self._last is not None and now > self._last[0]:
                at, before = self._last
                written = sum(_written(before.get(name), found) for name, found in numbers.items())
                self._rates.append((now, written / (now - at)))
            self._last = now, dict(numbers)

    def series(self) -> dict[str, list[float | None]]:
        """The points of the chart of the last 15 minutes, as of `Recent.series`."""
        with self._lock:
            kept = [(at, rate) for at, rate in self._rates if at > time.time() - POINTS * SPAN_SECONDS]
        return {"time": [at for at, _ in kept], "transactions": [rate for _, rate in kept]}


def _written(before: tuple[int, int] | None, now: tuple[int, int]) -> int:
    """How many transactions a row has recorded; each claim counts from 1 again."""
    if before is None:
        return 0
    return now[1] - before[1] if before[0] == now[0] else now[1]
