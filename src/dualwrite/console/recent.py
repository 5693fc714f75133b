"""What this process has done in the last minutes, in bounded memory: an observer that counts, times, and remembers each id."""

from __future__ import annotations

import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
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
    UnitEnded,
)
from dualwrite.transactional_id import TransactionalId

SPAN: Final = 10.0
"""Seconds of one point in a chart."""

POINTS: Final = 90
"""Points that are kept: 15 minutes."""

STEPS: Final[Mapping[str, str]] = {
    "block": "Your code, in the block",
    "delivery": "Delivery to Kafka",
    "record": "Recording the state",
    "database_commit": "Database commit",
    "kafka_commit": "Kafka commit",
    "transaction": "Whole transaction",
    "unit": "Unit of a pool, from call to result",
}
"""What is timed, and its name for people."""

_LEAST: Final = 1e-5
_PER_DOUBLING: Final = 8  # so a quantile is at most 4.5 % off
_LARGEST: Final = 24 * _PER_DOUBLING
_MOST_IDS: Final = 200
_OF_EACH_ID: Final = 20
_LONGEST: Final = 300


class Durations:
    """A histogram of durations, with logarithmic classes."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()

    def add(self, seconds: float) -> None:
        """Count a duration."""
        self._counts[0 if seconds <= _LEAST else min(int(log2(seconds / _LEAST) * _PER_DOUBLING) + 1, _LARGEST)] += 1

    def merge(self, other: Durations) -> None:
        """Add those of another histogram."""
        self._counts.update(other._counts)

    @property
    def count(self) -> int:
        """How many there are."""
        return self._counts.total()

    def quantile(self, part: float) -> float | None:
        """The duration in seconds below which this part of them is; None if there are none."""
        left = part * self.count
        for at, number in sorted(self._counts.items()):
            left -= number
            if left <= 0:
                return float(_LEAST * 2.0 ** ((at - 0.5) / _PER_DOUBLING))
        return None


@dataclass
class _Point:
    """What happened in one span of time."""

    number: int
    counts: Counter[str] = field(default_factory=Counter)
    durations: dict[str, Durations] = field(default_factory=dict)

    def timed(self, name: str, seconds: float) -> None:
        self.durations.setdefault(name, Durations()).add(seconds)


@dataclass(frozen=True)
class Happened:
    """The end of a transaction, or what recovery did on an id.

    Args:
        at: Seconds since 1970.
        transactional_id: The id of the lane.
        what: The outcome, in words.
        seconds: The duration, if known.
        messages: The number of messages, if known.
        steps: The durations of the steps, of a committed transaction.
    """

    at: float
    transactional_id: str
    what: str
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
        self._by_id: OrderedDict[str, deque[Happened]] = OrderedDict()
        self._handlers: dict[type[Event], Callable[..., None]] = {
            TransactionCommitted: self._committed,
            TransactionRolledBack: self._rolled_back,
            TransactionInDoubt: self._in_doubt,
            TransactionLost: self._lost,
            TransactionRecovered: self._recovered,
            MessagesPublishedAgain: self._published_again,
            UnitEnded: self._unit_ended,
        }

    def __call__(self, event: Event) -> None:
        """Take note of an event."""
        handler = self._handlers.get(type(event))
        if handler is not None:
            with self._lock:
                handler(event, self._point())

    # --- reading ----------------------------------------------------------------------------------------------------------

    def of_id(self, logical: str) -> list[Happened]:
        """What happened last on an id and its lanes, the newest first."""
        with self._lock:
            found = [
                each for name, ones in self._by_id.items() if TransactionalId.of_row(name).logical == logical for each in ones
            ]
        return sorted(found, key=lambda each: -each.at)[:_OF_EACH_ID]

    def counts(self) -> Counter[str]:
        """How often each outcome occurred."""
        with self._lock:
            return sum((point.counts for point in self._points), Counter())

    def times(self) -> list[StepTimes]:
        """How long the steps took, in the order of `STEPS`; without those that did not occur."""
        together: dict[str, Durations] = {}
        with self._lock:
            for point in self._points:
                for name, durations in point.durations.items():
                    together.setdefault(name, Durations()).merge(durations)
        return [
            StepTimes(text, found.count, found.quantile(0.5) or 0.0, found.quantile(0.99) or 0.0)
            for name, text in STEPS.items()
            if (found := together.get(name)) is not None
        ]

    def series(self) -> dict[str, list[float | None]]:
        """The points of the charts: times (seconds since 1970), transactions and units per second, p50 and p99 in ms."""
        now = time.time()
        current = _number()
        with self._lock:
            points = {point.number: point for point in self._points}
            numbers = range(current - POINTS + 1, current)  # the current span is not complete
            known = [points.get(number) for number in numbers]
            measured = [
                None if point is None else point.durations.get("unit") or point.durations.get("transaction") for point in known
            ]
            return {
                "time": [now - (current - number) * SPAN for number in numbers],
                "transactions": [self._rate(number, points, "committed") for number in numbers],
                "units": [self._rate(number, points, "units") for number in numbers],
                "p50": [None if found is None else _milliseconds(found.quantile(0.5)) for found in measured],
                "p99": [None if found is None else _milliseconds(found.quantile(0.99)) for found in measured],
            }

    def _rate(self, number: int, points: Mapping[int, _Point], what: str) -> float | None:
        """How often something occurred per second; None before the first complete span."""
        if number <= self._first:
            return None
        return points[number].counts[what] / SPAN if number in points else 0.0

    # --- events, under the lock -------------------------------------------------------------------------------------------

    def _point(self) -> _Point:
        number = _number()
        if not self._points or self._points[-1].number < number:
            self._points.append(_Point(number))
        return self._points[-1]

    def _committed(self, event: TransactionCommitted, point: _Point) -> None:
        point.counts["committed"] += 1
        point.timed("transaction", event.seconds)
        for name, seconds in zip(Steps._fields, event.steps, strict=True):
            if seconds:
                point.timed(name, seconds)
        what = "committed" if event.outcome == "published" else "committed; its messages are in the journal"
        self._note(event.lane, what, event.seconds, event.messages, event.steps)

    def _rolled_back(self, event: TransactionRolledBack, point: _Point) -> None:
        point.counts["rolled back"] += 1
        self._note(event.lane, f"rolled back: {_why(event.error)}", event.seconds)

    def _in_doubt(self, event: TransactionInDoubt, point: _Point) -> None:
        point.counts["in doubt"] += 1
        self._note(event.lane, f"in doubt: {_why(event.error)}", event.seconds)

    def _lost(self, event: TransactionLost, point: _Point) -> None:
        point.counts["lost"] += 1
        self._note(event.lane, f"lost: {_why(event.error)}", event.seconds)

    def _recovered(self, event: TransactionRecovered, point: _Point) -> None:
        point.counts["recovered"] += 1
        self._note(event.transactional_id, f"recovered, generation {event.generation}: {event.outcome}")

    def _published_again(self, event: MessagesPublishedAgain, point: _Point) -> None:
        point.counts["published again"] += 1
        self._note(event.transactional_id, "published again", messages=event.messages)

    def _unit_ended(self, event: UnitEnded, point: _Point) -> None:
        point.counts["units" if event.error is None else "failed units"] += 1
        point.timed("unit", event.seconds)

    def _note(
        self, lane: str, what: str, seconds: float | None = None, messages: int | None = None, steps: Steps | None = None
    ) -> None:
        known = self._by_id.setdefault(lane, deque(maxlen=_OF_EACH_ID))
        known.append(Happened(time.time(), lane, what, seconds, messages, steps))
        self._by_id.move_to_end(lane)
        if len(self._by_id) > _MOST_IDS:
            self._by_id.popitem(last=False)


def _number() -> int:
    return int(time.monotonic() / SPAN)


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 3)


def _why(error: BaseException) -> str:
    """What an error is; the text only of our own, since that of others may contain anything."""
    return str(error)[:_LONGEST] if isinstance(error, DualWriteError) else type(error).__name__


class DatabaseRates:
    """How many transactions per second the rows show, which count them: for a console that has no process to observe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last: tuple[float, Mapping[str, tuple[int, int]]] | None = None
        self._rates: deque[tuple[float, float]] = deque(maxlen=int(POINTS * SPAN))

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
            kept = [(at, rate) for at, rate in self._rates if at > time.time() - POINTS * SPAN]
        return {"time": [at for at, _ in kept], "transactions": [rate for _, rate in kept]}


def _written(before: tuple[int, int] | None, now: tuple[int, int]) -> int:
    """How many transactions a row has recorded; each claim counts from 1 again."""
    if before is None:
        return 0
    return now[1] - before[1] if before[0] == now[0] else now[1]
