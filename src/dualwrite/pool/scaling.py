"""The options of a pool, and how many groups it runs side by side: as many as make calls faster.

While a group waits for the network, the processor is free for another one. So more groups side by side pay off as long as the
pool waits most of the time, and cost when the processor is the limit: each group pays for its own commits. How much they bring
depends on the network, the database, the locks that the units take, and everything else that the process does. So nothing of
that is modelled: the pool tries it, and compares how long its calls take.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import monotonic
from typing import Final

from dualwrite.logs import SubjectLogger
from dualwrite.pool.calls import Call
from dualwrite.pool.writers import Writers
from dualwrite.settings import (
    Acknowledge,
    WhenKafkaIsDown,
    check_count,
    check_seconds,
    validate_acknowledge,
    validate_when_kafka_is_down,
)
from dualwrite.stores.journal import JournalLimits

log = SubjectLogger(__name__)

MOST_UNITS: Final = 64
"""PostgreSQL caches 64 subtransactions per transaction; with more, reading the transaction's rows becomes slower."""

SERIAL: Final = 1
"""One group after another runs its SQL; only the commits of groups overlap."""

_LEVELS: Final = (SERIAL, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64)
"""The numbers of groups that are tried."""

_IDLE_CPU: Final = 0.8
_IDLE_CPU_IN_TURN: Final = 0.5
"""Processors' worth of work of this process, below which more groups are tried: Python runs in one thread at a time.

The second is for groups that run one after another: as their commits overlap, it is never much higher.
"""

_GAIN: Final = 0.95
"""More groups are kept if calls take at most this share of the time that they took before."""

_LOSS: Final = 1.02
"""Fewer groups are kept if calls take at most this much of the time that they took before."""

_LARGEST_STEP: Final = 2.0
"""By how much the number of groups is multiplied at once, at most."""

_FEWER: Final = 0.6
"""By how much it is multiplied if fewer are tried."""

_FIRST_PAUSE: Final = 2.0
_LONGEST_PAUSE: Final = 60.0
"""Seconds without a trial, after one that was in vain; doubled each time."""

_SHARED: Final = 1.5
"""Units of an average group from which on callers wait for each other."""

_FIRST_SERIAL: Final = 1.0
_LONGEST_SERIAL: Final = 300.0
"""Seconds for which groups run one after another because of a conflict; doubled if the next one comes soon after."""

_SOON: Final = 10.0

_SETTLING: Final = 0.1
"""Seconds after a change in which nothing is measured: calls from before it are still running."""

_LEAST_SECONDS: Final = 0.25
_MOST_SECONDS: Final = 2.0
_LEAST_GROUPS: Final = 8
_LEAST_TURNS: Final = 3
"""A measurement lasts for this long, and for this many groups, and for so many of each thread."""

LEAST: Final = 2
"""Writers of a pool without load: while one commits its group, the other runs the next."""

_QUIET: Final = 30.0
"""Seconds after which writers that were not needed are closed, or that could not be opened are tried again."""


@dataclass(frozen=True, slots=True)
class PoolOptions:
    """How a pool groups units, when its calls return, and for how long it leases its ids.

    Args:
        acknowledge: When a call returns: "visible" means after Kafka's commit, when consumers can read the messages; "decided"
            means after the database's commit, when neither side can be lost any more. "decided" requires two-phase commit.
        group_units: The maximum number of units in a group, including the savepoints that the units set themselves. Above 64,
            PostgreSQL's readers become slower.
        group_bytes: The total size of a group's messages, in bytes, at which the group accepts no more units.
        timeout: Seconds that `run` waits for its unit to start, or `transaction()` for a writer.
        lease: Seconds for which the pool leases its ids; it renews the leases at a third of that interval. If they are not
            renewed for that long, other pools with the prefix recover this pool's ids. In ZooKeeper the session timeout applies
            instead.
        max_size: The maximum number of writers.
        when_kafka_is_down: "fail" raises the error of Kafka. With "journal" messages are written into a table in the database
            transaction of their unit, and published later, in an order that keeps cause before effect
            (docs/guides/kafka-down.md). The pool then opens while Kafka is down, too. Only for SQL databases.
        journal: How much that table may contain; then units fail.
        alone: Run each unit in a transaction of its own. Needed only for units that change settings of the session in a way
            that can't be seen (docs/guides/pool.md); `with_options(alone=True)` does it for single units.

    Raises:
        ConfigurationError: A value is out of range.
    """

    acknowledge: Acknowledge = "visible"
    group_units: int = MOST_UNITS
    group_bytes: int = 1_000_000
    timeout: float = 30.0
    lease: float = 30.0
    max_size: int = 64
    alone: bool = False
    when_kafka_is_down: WhenKafkaIsDown = "fail"
    journal: JournalLimits = JournalLimits()  # noqa: RUF009  (it is immutable)

    def __post_init__(self) -> None:
        validate_acknowledge(self.acknowledge)
        for name in ("group_units", "group_bytes", "max_size"):
            check_count(name, getattr(self, name))
        for name in ("timeout", "lease"):
            check_seconds(name, getattr(self, name))
        validate_when_kafka_is_down(self.when_kafka_is_down)

    def check_size(self, size: int) -> None:
        """Check a number of writers.

        Raises:
            ConfigurationError: It is not from 1 to `max_size`.
        """
        limit = "each writer has a connection to the database and producers; PoolOptions(max_size=…) sets the limit"
        check_count("size", size, most=self.max_size, next_step=limit)


@dataclass(frozen=True, slots=True)
class Seen:
    """What a pool has seen within a while, at one number of groups.

    Args:
        calls: How many calls ended.
        groups: How many groups ended.
        seconds_a_call: How long a call took on average, from its beginning in the caller's thread to its outcome.
        cpu: Processors' worth of work of the process: 1.0 is one processor all the time.
        waited: The share of groups whose calls were already waiting when a thread became free for them.
    """

    calls: int
    groups: int
    seconds_a_call: float
    cpu: float
    waited: float

    @property
    def has_waiting_callers(self) -> bool:
        """Whether callers waited for the units of others."""
        return self.calls > self.groups * _SHARED or self.waited > 0.5  # noqa: PLR2004  (most of the groups)


class Scaling:
    """The number of groups that run side by side, for one pool: at most `most`. Not thread-safe."""

    def __init__(self, most: int, clock: Callable[[], float] = monotonic) -> None:
        self._levels = [level for level in _LEVELS if level <= most] or [SERIAL]
        self._clock = clock
        self._place = 0
        self._last: float | None = None  # how long a call took when it was last seen, at the present number
        self._before: tuple[int, float] | None = None  # in a trial: the level before it, and how long a call took there
        self._pauses = {True: _FIRST_PAUSE, False: _FIRST_PAUSE}  # after trials of more groups, and of fewer
        self._again_at = {True: 0.0, False: 0.0}
        self._tried_more = False
        self._serial = _FIRST_SERIAL
        self._serial_until = -_SOON

    @property
    def groups(self) -> int:
        """The number of groups that run side by side: `SERIAL`, or 3 and more."""
        return self._levels[self._place]

    def limit(self, most: int) -> None:
        """Change the highest number."""
        self._levels = [level for level in _LEVELS if level <= most] or [SERIAL]
        self._before = self._last = None
        self._place = min(self._place, len(self._levels) - 1)

    def decide(self, seen: Seen) -> None:
        """Choose `groups` by what was seen at the present one."""
        now = self._clock()
        if now < self._serial_until or not seen.calls:
            return
        if self._before is not None:
            self._judge(seen.seconds_a_call, *self._before, now=now)
        elif self._last is not None:  # the first moments are slow: everything is done for the first time
            self._try(seen, min(seen.seconds_a_call, self._last), now)
        self._last = seen.seconds_a_call if self._before is None else None

    def _judge(self, seconds: float, place: int, seconds_before: float, *, now: float) -> None:
        """End a trial: keep the number of groups, or return to the one before."""
        is_more, self._before = self._place > place, None
        if seconds <= seconds_before * (_GAIN if is_more else _LOSS):
            self._pauses[is_more] = _FIRST_PAUSE
            self._again_at[not is_more] = now + _FIRST_PAUSE
            return
        self._place = place
        self._again_at[is_more] = now + self._pauses[is_more]
        self._pauses[is_more] = min(2 * self._pauses[is_more], _LONGEST_PAUSE)

    def _try(self, seen: Seen, seconds: float, now: float) -> None:
        """Begin a trial of more groups if that may pay off, or of fewer: they are kept if they are as fast."""
        idle = _IDLE_CPU_IN_TURN if self.groups == SERIAL else _IDLE_CPU
        may_be_more = seen.cpu < idle and seen.has_waiting_callers
        places = {True: self._higher(seen.cpu) if may_be_more else self._place, False: self._lower()}
        due = [more for more, place in places.items() if place != self._place and now >= self._again_at[more]]
        if due:
            self._tried_more = not self._tried_more if len(due) > 1 else due[0]
            self._before = self._place, seconds
            self._place = places[self._tried_more]

    def _higher(self, cpu: float) -> int:
        """The level at which the processor would be busy if nothing else were the limit; one higher after a failed trial."""
        highest = len(self._levels) - 1
        if self._pauses[True] > _FIRST_PAUSE:
            return min(self._place + 1, highest)
        wanted = max(self.groups, 2) * min(_LARGEST_STEP, _IDLE_CPU / max(cpu, 0.01))
        return next((place for place in range(self._place + 1, highest) if self._levels[place] >= wanted), highest)

    def _lower(self) -> int:
        return max((place for place in range(self._place) if self._levels[place] <= self.groups * _FEWER), default=0)

    def rest(self) -> None:
        """Return to one group after another: no call has come for a while."""
        self._place, self._before, self._last = 0, None, None
        self._again_at = dict.fromkeys(self._again_at, 0.0)

    def conflicted(self) -> None:
        """Note that the database has rolled back a unit because of another transaction, such as one of another group.

        Groups run one after another for a while: then none of them waits for a lock of another, with which it could be in a
        deadlock.
        """
        now = self._clock()
        if self.groups == SERIAL or now < self._serial_until:
            return
        self._serial = min(2 * self._serial, _LONGEST_SERIAL) if now - self._serial_until < _SOON else _FIRST_SERIAL
        self._place, self._before, self._last = 0, None, None
        self._serial_until = now + self._serial


class Window:
    """Adds up the calls of groups, from a moment after it was made on."""

    def __init__(self) -> None:
        self._begins = time.monotonic() + _SETTLING
        self._cpu: float | None = None
        self._calls = self._groups = self._waited = 0
        self._seconds = 0.0

    def add(self, calls: Collection[Call], now: float, *, was_waiting: bool) -> None:
        """Add a group that has ended, and whether its calls had waited for a thread."""
        if self._cpu is None:
            if now >= self._begins:
                self._begins, self._cpu = now, time.process_time()
            return
        self._calls += len(calls)
        self._groups += 1
        self._waited += was_waiting
        self._seconds += sum(now - call.created for call in calls)

    def is_over(self, now: float, groups: int) -> bool:
        """Whether enough was seen, if so many groups run side by side."""
        seconds = now - self._begins
        enough = self._groups >= max(_LEAST_GROUPS, _LEAST_TURNS * groups)
        return self._calls > 0 and ((seconds >= _LEAST_SECONDS and enough) or seconds >= _MOST_SECONDS)

    def seen(self, now: float) -> Seen:
        """What was seen until now."""
        assert self._cpu is not None
        return Seen(
            calls=self._calls,
            groups=self._groups,
            seconds_a_call=self._seconds / self._calls,
            cpu=(time.process_time() - self._cpu) / (now - self._begins),
            waited=self._waited / self._groups,
        )


class Scaler:
    """Decides how many writers and threads a pool has. Thread-safe.

    Args:
        size: The number of writers, or None: as many as the load asks for.
        most: The maximum number of writers, if it is up to the load.
        side_by_side: The maximum number of groups that run side by side.

    Attributes:
        wanted: The number of writers that the pool should have now.
    """

    def __init__(self, size: int | None, *, most: int, side_by_side: int, writers: Writers, prefix: str) -> None:
        self._most = max(1, min(most, max(side_by_side, LEAST)))
        self._side_by_side = side_by_side
        self._writers = writers
        self._prefix = prefix
        self._lock = threading.Lock()
        self._size = size
        self._scaling = Scaling(self._limit)
        self._window = Window()
        self._own = 0  # transactions of their own, open or waiting for a writer
        self._most_own = (0, 0)  # the highest number of these, in this period and in the one before
        self._period_ends = 0.0
        self._called_at = time.monotonic()
        self._refused_until = 0.0
        self.wanted = self.size

    # --- what it has decided ------------------------------------------------------------------------------------------------

    @property
    def size(self) -> int:
        """The number of writers that the pool always has."""
        return min(LEAST, self._most) if self._size is None else self._size

    @property
    def side_by_side(self) -> int:
        """How many groups run side by side, as far as there are writers for them; `SERIAL`: one after another."""
        groups = min(self._scaling.groups, len(self._writers))
        return groups if groups > LEAST else SERIAL

    @property
    def threads(self) -> int:
        """How many threads run groups."""
        groups = self.side_by_side
        return self.size if groups == SERIAL else groups

    @property
    def _limit(self) -> int:
        return min(self._side_by_side, self._most if self._size is None else self._size)

    def resize(self, size: int | None) -> None:
        """From now on the pool has this many writers; None: as many as the load asks for."""
        with self._lock:
            self._size = size
            self._scaling.limit(self._limit)

    # --- what happens -------------------------------------------------------------------------------------------------------

    def group_ended(self, calls: Collection[Call], *, was_waiting: bool) -> bool:
        """Note the calls of a group that has ended, and whether they had waited for a thread.

        Returns whether the number of threads may have changed.
        """
        if self._limit <= LEAST:
            return False
        with self._lock:
            now = self._called_at = time.monotonic()
            groups = self._scaling.groups
            if self.side_by_side < groups:  # the writers are still being opened
                self._window = Window()
                return False
            self._window.add(calls, now, was_waiting=was_waiting)
            if not self._window.is_over(now, groups):
                return False
            seen, self._window = self._window.seen(now), Window()
            self._scaling.decide(seen)
            log.debug("groups side by side: %d, after %d: %s", self._scaling.groups, groups, seen, prefix=self._prefix)
            if groups == self._scaling.groups:
                return False
            self._ask_for_writers()
            return True

    def conflicted(self) -> None:
        """Note that the database has rolled back a unit because of another transaction."""
        with self._lock:
            self._scaling.conflicted()

    @contextmanager
    def own_transaction(self) -> Iterator[None]:
        """A transaction of its own, from the wait for its writer on: there should be a writer for each."""
        with self._lock:
            self._own += 1
            self._most_own = max(self._own, self._most_own[0]), self._most_own[1]
            self._ask_for_writers()
        try:
            yield
        finally:
            with self._lock:
                self._own -= 1

    def rest(self) -> None:
        """Called every few seconds: writers that were not needed for a while are closed."""
        with self._lock:
            now = time.monotonic()
            if now - self._called_at > _QUIET:
                self._scaling.rest()
            if now >= self._period_ends:
                self._most_own = self._own, self._most_own[0]
                self._period_ends = now + _QUIET
            if self._refused_until and now >= self._refused_until:
                self._refused_until = 0.0
                self._scaling.limit(self._limit)
            self._ask_for_writers(may_shrink=True)

    # --- writers ------------------------------------------------------------------------------------------------------------

    def _ask_for_writers(self, *, may_shrink: bool = False) -> None:
        if self._size is not None:
            return
        wanted = min(self._most, max(self.size, self._scaling.groups + max(self._most_own)))
        if (wanted > self.wanted and not self._refused_until) or (wanted < self.wanted and may_shrink):
            self.wanted = wanted
            self._writers.changed.set()

    def stay(self) -> None:
        """Another writer could not be opened: the pool stays at what it has, for a while."""
        with self._lock:
            self.wanted = len(self._writers)
            self._refused_until = time.monotonic() + _QUIET
            self._scaling.limit(min(self._limit, self.wanted))
