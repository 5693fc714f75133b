"""The options of a pool, and how many groups it runs side by side: as many as keep a processor busy.

While a group waits for the network, the processor is free for another one. So more groups side by side pay off as long as the
pool waits most of the time, and cost when the processor is the limit: each group pays for its own commits. The rule: as many
groups as would keep a processor busy if each costs what it costs now, but no more than callers, and at least one for every
`_MAX_CALLERS` of them. If more groups do not make calls faster, or the database rolls back a unit because of another one, the
pool goes back, and stays there for a while. `python benchmarks/pool.py` compares it.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from time import monotonic
from typing import Final

from dualwrite.errors import UsageError
from dualwrite.observability.logs import SubjectLogger
from dualwrite.pool.calls import UnitCall
from dualwrite.pool.declared import Local, check_function
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

_LEVELS: Final = (SERIAL, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64)
"""The numbers of groups that are chosen: a little more or less load does not start and stop threads."""

_BUSY: Final = 0.97
"""Processors' worth of work that this process aims at: Python runs in one thread at a time, and 1.0 would never be too much."""

_MAX_CALLERS: Final = 32
"""Callers for each group, on average: with more, the first unit of a group waits too long for the last one."""

_GAIN: Final = 0.95
"""More groups are kept if calls take at most this share of the time that they took before."""

_PAUSE_SECONDS: Final = 1.0
_MAX_PAUSE_SECONDS: Final = 60.0
"""For how long there are no more groups after the pool went back; doubled if the next time comes soon after."""

_SOON_SECONDS: Final = 10.0

_SETTLING_SECONDS: Final = 0.1
"""How long after a change nothing is measured: calls from before it are still running."""

_WINDOW_SECONDS: Final = 0.5
"""How long it is measured at least."""

LEAST: Final = 2
"""Writers of a pool without load: while one commits its group, the other runs the next."""

_QUIET: Final = 30.0
"""Seconds after which writers that were not needed are closed, or that could not be opened are tried again."""


@dataclass(frozen=True, slots=True)
class PoolOptions:
    """How a pool groups units, when its calls return, and for how long it leases its ids.

    Args:
        acknowledge: When a call returns: "visible" means after Kafka's commit, when consumers can read the messages;
            "journaled" after the database's commit, which has the messages as rows; a thread of the pool publishes them at
            once. Its units commit side by side, each by itself, and none waits for Kafka (docs/guides/journaled.md). Only for
            SQL databases.
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
            (docs/guides/kafka-down.md). The pool then opens while Kafka is down, too. Only for SQL databases. A broker that
            refuses the pool (BrokerAuthorizationError) is not down: that is raised in either case.
        journal: How much that table may contain; then units fail.
        alone: Run each unit in a transaction of its own. Needed only for units that change settings of the session in a way
            that can't be seen (docs/guides/pool-rules.md); `with_options(alone=True)` does it for single units.
        local: Called without arguments for each call of `run`, `submit` and `transaction()`, in the caller's context, so it may
            read a ContextVar. It returns the settings of PostgreSQL that the call's statements shall see, such as
            `{"app.tenant": "acme"}` for row-level security (docs/guides/pool-rules.md). Units with different settings share a
            commit. Not for transactions on connections of yours.

    Raises:
        ConfigurationError: A value is out of range, or `local` is not a function.
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
    local: Callable[[], Local] | None = None

    def __post_init__(self) -> None:
        if validate_acknowledge(self.acknowledge) == "journaled":
            object.__setattr__(self, "when_kafka_is_down", "journal")  # that is part of it
        for name in ("group_units", "group_bytes", "max_size"):
            check_count(name, getattr(self, name))
        for name in ("timeout", "lease"):
            check_seconds(name, getattr(self, name))
        validate_when_kafka_is_down(self.when_kafka_is_down)
        check_function(self.local)

    @property
    def is_journaled(self) -> bool:
        """Whether messages go into the journal always."""
        return self.acknowledge == "journaled"

    def check_size(self, size: int) -> None:
        """Check a number of writers.

        Raises:
            ConfigurationError: It is not from 1 to `max_size`.
        """
        limit = "each writer has a connection to the database and producers; PoolOptions(max_size=…) sets the limit"
        check_count("size", size, most=self.max_size, next_step=limit)


@dataclass(frozen=True, slots=True)
class Measured:
    """What a pool has measured within a while.

    Args:
        callers: How many calls there were at once, on average.
        seconds: How long a call took on average, from its beginning in the caller's thread to its outcome.
        cpu: Processors' worth of work of the process: 1.0 is one processor all the time.
    """

    callers: float
    seconds: float
    cpu: float


class Sizing(ABC):
    """Decides how many writers and threads a pool has. Thread-safe.

    Attributes:
        wanted: The number of writers that the pool should have now.
        size: The number of writers that the pool always has.
        side_by_side: How many groups run side by side, as far as there are writers for them; `SERIAL`: one after another.
        threads: How many threads run groups.
    """

    wanted: int
    size: int
    side_by_side: int
    threads: int

    @abstractmethod
    def resize(self, size: int | None) -> None:
        """From now on the pool has this many writers; None: as many as the load asks for."""

    def called(self, unfinished: int) -> bool:
        """Note that a call was put into the queue, and how many are not finished; whether the number of threads has changed."""
        del unfinished
        return False

    def group_ended(self, calls: Collection[UnitCall]) -> bool:
        """Note the calls of a group that has ended; whether the number of threads may have changed."""
        del calls
        return False

    def conflicted(self) -> None:  # noqa: B027  (only the load's)
        """Note that the database has rolled back a unit because of another transaction."""

    def own_transaction(self) -> AbstractContextManager[None]:
        """A transaction of its own, from the wait for its writer on: there should be a writer for each."""
        return nullcontext()

    def rest(self) -> None:  # noqa: B027  (as above)
        """Called every few seconds: writers that were not needed for a while are closed."""

    def stay(self) -> None:  # noqa: B027  (as above)
        """Another writer could not be opened: the pool stays at what it has, for a while."""


class OneEach(Sizing):
    """For units that all run side by side: a thread for each call that waits, up to a limit; the threads stay."""

    def __init__(self, most: int) -> None:
        self.wanted = self.size = self.side_by_side = most
        self.threads = 0

    def called(self, unfinished: int) -> bool:
        before, self.threads = self.threads, max(self.threads, min(unfinished, self.size))
        return self.threads > before

    def resize(self, size: int | None) -> None:
        del size
        raise UsageError(
            'With acknowledge="journaled" a pool has no writers that could be more or fewer.',
            next_step="pass size=… when you create it, which limits how many units run side by side",
        )


class Scaling:
    """The number of groups that run side by side, for one pool: at most `limit`. Not thread-safe.

    Attributes:
        groups: The number of groups that run side by side: `SERIAL`, or 3 and more.
    """

    def __init__(self, limit: int, clock: Callable[[], float] = monotonic) -> None:
        self.groups = SERIAL
        self._limit = limit
        self._clock = clock
        self._before: tuple[int, Measured] | None = None  # the number before there were more, and what was measured there
        self._pause = _PAUSE_SECONDS
        self._pauses_until = -_SOON_SECONDS

    def limit(self, limit: int) -> None:
        """Change the highest number."""
        self._limit = limit
        self.groups, self._before = _level(min(self.groups, limit)), None

    def decide(self, seen: Measured) -> None:
        """Choose `groups`."""
        if self._before is not None:
            (groups, before), self._before = self._before, None
            if seen.seconds > _GAIN * before.seconds * max(1.0, seen.callers / before.callers):
                self._go_back(groups)
                return
        busy = self.groups * _BUSY / max(seen.cpu, 0.01)
        groups = _level(min(self._limit, max(seen.callers / _MAX_CALLERS, min(seen.callers, busy))))
        if groups > self.groups:
            if self._clock() < self._pauses_until:
                return
            self._before = self.groups, seen
        self.groups = groups

    def rest(self) -> None:
        """Return to one group after another: no call has come for a while."""
        self.groups, self._before = SERIAL, None

    def conflicted(self) -> None:
        """Note that the database has rolled back a unit because of another transaction, such as one of another group.

        Groups run one after another for a while: then none of them waits for a lock of another, with which it could be in a
        deadlock.
        """
        if self.groups != SERIAL:
            self._before = None
            self._go_back(SERIAL)

    def _go_back(self, groups: int) -> None:
        now = self._clock()
        self._pause = min(2 * self._pause, _MAX_PAUSE_SECONDS) if now - self._pauses_until < _SOON_SECONDS else _PAUSE_SECONDS
        self._pauses_until = now + self._pause
        self.groups = groups


def _level(groups: float) -> int:
    return max(level for level in _LEVELS if level <= max(groups, SERIAL))


class Window:
    """Adds up the calls of groups, from a moment after it was made on."""

    def __init__(self) -> None:
        self._begins = time.monotonic() + _SETTLING_SECONDS
        self._cpu: float | None = None
        self._calls = 0
        self._seconds = 0.0

    def add(self, calls: Collection[UnitCall], now: float) -> None:
        """Add a group that has ended."""
        if self._cpu is not None:
            self._calls += len(calls)
            self._seconds += sum(now - call.created for call in calls)
        elif now >= self._begins:
            self._begins, self._cpu = now, time.process_time()

    def measured(self, now: float) -> Measured | None:
        """What was measured until now; None: it is too early, or no call has ended."""
        lasted = now - self._begins
        if self._cpu is None or lasted < _WINDOW_SECONDS or not self._calls:
            return None
        return Measured(self._seconds / lasted, self._seconds / self._calls, (time.process_time() - self._cpu) / lasted)


class Scaler(Sizing):
    """Sizing by the load.

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
    def size(self) -> int:  # type: ignore[override]  # a plain attribute of the other
        return min(LEAST, self._most) if self._size is None else self._size

    @property
    def side_by_side(self) -> int:  # type: ignore[override]  # as above
        groups = min(self._scaling.groups, len(self._writers))
        return groups if groups > LEAST else SERIAL

    @property
    def threads(self) -> int:  # type: ignore[override]  # as above
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

    def group_ended(self, calls: Collection[UnitCall]) -> bool:
        """Note the calls of a group that has ended.

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
            self._window.add(calls, now)
            if (measured := self._window.measured(now)) is None:
                return False
            self._window = Window()
            self._scaling.decide(measured)
            log.debug("groups side by side: %d, after %d: %s", self._scaling.groups, groups, measured, prefix=self._prefix)
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
