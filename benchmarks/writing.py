"""A writer in a measurement: performs units of work one after another and records their times."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from dataclasses import dataclass

from alternatives import Alternative, Target, make
from cases import Case
from workload import Unit, units


@dataclass(frozen=True)
class Samples:
    """What one writer measured; times are from `time.monotonic()`, which all processes of a machine share.

    Args:
        writer: The writer's number.
        first: The number of the first measured unit; earlier units were the warm-up.
        began: When each unit began.
        ended: When each unit's call returned.
    """

    writer: int
    first: int
    began: list[float]
    ended: list[float]

    @property
    def total(self) -> int:
        """How many units the writer did, including the warm-up."""
        return self.first + len(self.began)


class Writing:
    """One writer, used for all alternatives one after another.

    Args:
        writer: The writer's number.
    """

    def __init__(self, writer: int) -> None:
        self._number = writer
        self._alternative: Alternative | None = None
        self._units: Iterator[Unit] = units(writer)
        self._done = 0

    def open(self, case: Case, target: Target, warm_up: int) -> None:
        """Connect, and perform some units that are not measured."""
        self._units, self._done = units(self._number), 0
        self._alternative = make(case.alternative, target, self._number)
        for _ in range(warm_up):
            self._alternative.write(next(self._units))
            self._done += 1

    def run(self, begin_at: float, seconds: float) -> list[Samples]:
        """Perform units one after another, starting at `begin_at`."""
        assert self._alternative is not None
        samples = Samples(self._number, self._done, [], [])
        write, began, ended, clock = self._alternative.write, samples.began, samples.ended, time.monotonic
        gc.collect()
        time.sleep(max(0.0, begin_at - clock()))
        until = max(begin_at, clock()) + seconds  # a writer that wakes up late still measures for as long
        while (now := clock()) < until:
            write(next(self._units))
            ended.append(clock())
            began.append(now)
        return [samples]

    def close(self) -> None:
        """Disconnect."""
        alternative, self._alternative = self._alternative, None
        if alternative is not None:
            alternative.close()
