"""Where the time of a pool's groups goes: timestamps at the failpoints that a group passes, and at the store's `begin`.

The library has these points for its tests; here they only record the time. Recorded measurements are separate from the others,
so that the figures of the others don't include the cost of the clocks.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import dualwrite
from dualwrite.stores.base import Claim, StoreTransaction
from dualwrite.stores.sql import SqlStateStore
from dualwrite.testing import failpoints

_BEGIN: Final = "store.begin"
_UNIT: Final = "group_after_unit"
_POINTS: Final = ("after_begin", _UNIT, "group_after_units", "after_prepare", "after_db_commit", "after_kafka_commit")

WAITING: Final = "waiting"
SQL: Final = "units: SQL"
PHASES: Final = {
    "BEGIN, fence": (_BEGIN, "after_begin"),
    SQL: ("after_begin", "group_after_units"),
    "Produce, prepare": ("group_after_units", "after_prepare"),
    "record, COMMIT": ("after_prepare", "after_db_commit"),
    "EndTxn": ("after_db_commit", "after_kafka_commit"),
}
"""Each phase of a group, with the points at which it begins and ends.

With two writers, only one group at a time is in the first two.
"""

IN_TURN: Final = ("BEGIN, fence", SQL)


@dataclass(frozen=True)
class Mark:
    """A thread has passed a point.

    Args:
        thread: The thread's identifier.
        point: The point's name.
        at: When, from `time.perf_counter()`.
    """

    thread: int
    point: str
    at: float


@dataclass(frozen=True)
class Group:
    """One group that has committed.

    Args:
        units: How many units it had.
        began: When it began.
        ended: When both sides were committed.
        seconds: The duration of each phase, and of `WAITING`: from the end of the thread's group before until this one began. A
            thread's first group has not waited.
    """

    units: int
    began: float
    ended: float
    seconds: dict[str, float]


@dataclass(frozen=True)
class Phases:
    """The means over all groups of a measurement.

    Args:
        groups: How many groups there were.
        units: Units per group.
        seconds: From the start of the first group to the end of the last.
        writers: How many writers the pool has.
        queued: Seconds from a unit's call until it ran.
        mean: Seconds per group in each phase, and in `WAITING`.
    """

    groups: int
    units: float
    seconds: float
    writers: int
    queued: float
    mean: dict[str, float]

    def share(self, phases: Iterable[str]) -> float:
        """The share of the time in which a group was in one of these phases; above 1 if several groups were."""
        return sum(self.mean[name] for name in phases) * self.groups / self.seconds

    @property
    def in_turn(self) -> float:
        """The share of the time in which a group was running its SQL; above 1 if several were."""
        return self.share(IN_TURN)

    @property
    def occupied(self) -> float:
        """The share of the writers' time in which they had a group."""
        return self.share(PHASES) / self.writers


class Recorder:
    """Records the marks of this process, and how long units waited."""

    def __init__(self) -> None:
        self._marks: list[Mark] = []
        self._waits: list[float] = []
        for point in _POINTS:
            failpoints.arm(point, partial(self.mark, point))

    def close(self) -> None:
        """Stop recording."""
        for point in _POINTS:
            failpoints.disarm(point)

    def clear(self) -> None:
        """Discard what was recorded during the warm-up."""
        self._marks.clear()
        self._waits.clear()

    def mark(self, point: str) -> None:
        """Record that this thread passes a point."""
        self._marks.append(Mark(threading.get_ident(), point, time.perf_counter()))

    def run(self, tx: dualwrite.Transaction, called: float, unit: Callable[..., None], *arguments: Any) -> None:
        """A unit that records how long it has waited since its call (`time.perf_counter()`), and then runs another unit."""
        self._waits.append(time.perf_counter() - called)
        unit(tx, *arguments)

    def phases(self, *, writers: int) -> Phases:
        """The means of what was recorded, for a pool with this many writers."""
        return means(list(groups_of(self._marks)), self._waits, writers=writers)


class ClockedStore(SqlStateStore):
    """A store that marks where its transactions begin, if it has a recorder."""

    recorder: Recorder | None = None

    def begin(self, claim: Claim) -> StoreTransaction:
        """See TxnStateStore."""
        self._mark()
        return super().begin(claim)

    def begin_group(self, claim: Claim) -> StoreTransaction:
        """See TxnStateStore."""
        self._mark()
        return super().begin_group(claim)

    def begin_soon(self, claim: Claim, *, is_group: bool = False) -> StoreTransaction:
        """See TxnStateStore."""
        self._mark()
        return super().begin_soon(claim, is_group=is_group)

    def _mark(self) -> None:
        if self.recorder is not None:
            self.recorder.mark(_BEGIN)


def groups_of(marks: Iterable[Mark]) -> Iterator[Group]:
    """The groups that committed, thread by thread; a group that failed, or whose start was not recorded, is left out."""
    by_thread: dict[int, list[Mark]] = defaultdict(list)
    for mark in marks:
        by_thread[mark.thread].append(mark)
    for own in by_thread.values():
        yield from _groups_of_thread(own)


def _groups_of_thread(marks: Sequence[Mark]) -> Iterator[Group]:
    times: dict[str, float] = {}
    units = 0
    before: float | None = None
    for mark in marks:
        if mark.point == _BEGIN:
            times, units = {}, 0
        elif mark.point == _UNIT:
            units += 1
        times[mark.point] = mark.at
        if mark.point == _POINTS[-1] and all(point in times for point in (_BEGIN, *_POINTS)):
            began = times[_BEGIN]
            seconds = {name: times[last] - times[first] for name, (first, last) in PHASES.items()}
            if before is not None:
                seconds[WAITING] = began - before
            yield Group(units, began, mark.at, seconds)
            before, times = mark.at, {}


def means(groups: Sequence[Group], waits: Sequence[float], *, writers: int) -> Phases:
    """The means over some groups.

    Args:
        groups: The groups.
        waits: How long each unit waited.
        writers: How many writers the pool has.

    Raises:
        ValueError: There is no group.
    """
    if not groups:
        raise ValueError("no group has committed in the measurement")
    return Phases(
        groups=len(groups),
        units=_mean([group.units for group in groups]),
        seconds=max(group.ended for group in groups) - min(group.began for group in groups),
        writers=writers,
        queued=_mean(waits),
        mean={name: _mean([group.seconds[name] for group in groups if name in group.seconds]) for name in (WAITING, *PHASES)},
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
