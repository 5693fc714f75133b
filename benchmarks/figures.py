"""The figures of one measurement and of several rounds: pure arithmetic."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Self

from machine import Conditions


def percentile(values: Sequence[float], share: float) -> float | None:
    """The nearest-rank percentile: the least value that `share` of the values don't exceed; None if there are no values."""
    if not values:
        return None
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


@dataclass(frozen=True)
class Latency:
    """Percentiles of durations, in seconds."""

    p50: float | None
    p99: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> Self:
        """The percentiles of all values."""
        return cls(percentile(values, 0.5), percentile(values, 0.99))


@dataclass(frozen=True)
class Figures:
    """One measurement of one alternative.

    Args:
        alternative: The alternative.
        writers: How many writers there were.
        units: How many units of work were measured.
        seconds: From the start of the first unit to the end of the last.
        call: Duration of one unit's call in the writer.
        visible: From a unit's start until a `read_committed` consumer received its message.
        after_call: From the return of the call until the consumer received the message; negative if the consumer was faster.
        delivered: Messages that became visible per second, until the last one.
        backlog: Rows in the outbox when the writers stopped.
        drained: Seconds that the relay took to publish them.
        transactions: Database transactions per unit, including those of the relay.
        rows: Rows inserted, updated and deleted per unit.
        log: Bytes of write-ahead log per unit.
        cpu_writers: Processor seconds per unit; likewise for the others. None if unknown.
        verified: How many messages were compared with the rows and matched.
        conditions: The state of the machine during the measurement.
    """

    alternative: str
    writers: int
    units: int
    seconds: float
    call: Latency
    visible: Latency
    after_call: Latency
    delivered: float | None
    backlog: int
    drained: float
    transactions: float
    rows: float
    log: float
    cpu_writers: float | None
    cpu_relay: float | None
    cpu_database: float | None
    cpu_kafka: float | None
    verified: int
    conditions: Conditions

    @property
    def rate(self) -> float:
        """Units per second."""
        return self.units / self.seconds


def processor_seconds(figures: Figures) -> float:
    """Processor seconds per unit of all participants but the consumer; unknown ones count as 0."""
    parts = (figures.cpu_writers, figures.cpu_relay, figures.cpu_database, figures.cpu_kafka)
    return sum(part or 0.0 for part in parts)


@dataclass(frozen=True)
class Spread:
    """Median, minimum and maximum of the rounds."""

    median: float
    least: float
    greatest: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Self | None:
        """The spread of some values; None if there are none."""
        found = list(values)
        return cls(statistics.median(found), min(found), max(found)) if found else None

    @classmethod
    def of_ratios(cls, ours: Iterable[float], theirs: Iterable[float]) -> Self | None:
        """The spread of the ratios, round by round; a round without the one or the other is left out."""
        return cls.of(our / their for our, their in zip(ours, theirs, strict=False) if their)


class Rounds:
    """All rounds of one alternative with one number of writers."""

    def __init__(self, figures: Iterable[Figures]) -> None:
        self.figures = list(figures)

    @property
    def alternative(self) -> str:
        """The alternative."""
        return self.figures[0].alternative

    @property
    def writers(self) -> int:
        """The number of writers."""
        return self.figures[0].writers

    def spread(self, what: Callable[[Figures], float | None]) -> Spread | None:
        """The spread of one figure; None if no round has it."""
        return Spread.of(value for value in map(what, self.figures) if value is not None)

    def ratio(self, other: Rounds, what: Callable[[Figures], float] = lambda figures: figures.rate) -> Spread | None:
        """The ratio of one figure, round by round; both figures of a round were measured right after one another."""
        return Spread.of_ratios(map(what, self.figures), map(what, other.figures))
