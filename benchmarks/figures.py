"""Figures of one measurement, and of several rounds of it: pure arithmetic."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Self

from alternatives import Name


def percentile(values: Sequence[float], share: float) -> float | None:
    """The value that `share` of the values are not above (nearest rank); None of no values."""
    if not values:
        return None
    ranked = sorted(values)
    return ranked[min(len(ranked) - 1, int(share * len(ranked)))]


@dataclass(frozen=True)
class Latency:
    """Seconds."""

    p50: float | None
    p99: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> Self:
        """Of all values."""
        return cls(percentile(values, 0.5), percentile(values, 0.99))


@dataclass(frozen=True)
class Figures:
    """One measurement of one alternative.

    Args:
        alternative: Which.
        writers: How many.
        units: Units of work measured.
        seconds: From the first one's begin to the last one's end.
        call: How long one unit's call took its writer.
        visible: From a unit's begin until a `read_committed` consumer had its message.
        after_call: From the call's return until then; below 0 where the consumer was faster.
        delivered: Messages visible by second, until the last one was.
        backlog: Rows that waited in the outbox when the writers stopped.
        drained: Seconds that the relay took for them.
        transactions: Database transactions for each unit, with those of the relay.
        rows: Rows inserted, updated and deleted for each unit.
        log: Bytes of write-ahead log for each unit.
        cpu_writers: Processor seconds for each unit; likewise the others. None where not known.
        verified: Messages that were compared with the rows, and agreed.
    """

    alternative: Name
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

    @property
    def rate(self) -> float:
        """Units by second."""
        return self.units / self.seconds


@dataclass(frozen=True)
class Spread:
    """Median, least and greatest of the rounds."""

    median: float
    least: float
    greatest: float


class Rounds:
    """All rounds of one alternative with one number of writers."""

    def __init__(self, figures: Iterable[Figures]) -> None:
        self.figures = list(figures)

    @property
    def alternative(self) -> Name:
        """Which."""
        return self.figures[0].alternative

    @property
    def writers(self) -> int:
        """How many."""
        return self.figures[0].writers

    def spread(self, what: Callable[[Figures], float | None]) -> Spread | None:
        """Of one figure; None where no round has it."""
        values = [value for value in map(what, self.figures) if value is not None]
        if not values:
            return None
        return Spread(statistics.median(values), min(values), max(values))

    def ratio(self, other: Rounds) -> Spread | None:
        """Of the rates, round by round: each round's pair was measured side by side."""
        pairs = zip(self.figures, other.figures, strict=False)
        ratios = [ours.rate / theirs.rate for ours, theirs in pairs if theirs.rate]
        return Spread(statistics.median(ratios), min(ratios), max(ratios)) if ratios else None
