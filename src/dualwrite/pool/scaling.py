"""Decides how many groups a pool runs side by side: as many as make calls faster.

While a group waits for the network, the processor is free for another one. So more groups side by side pay off as long as the
pool waits most of the time, and cost when the processor is the limit: each group pays for its own commits. How much they bring
depends on the network, the database, the locks that the units take, and everything else that the process does. So nothing of
that is modelled: the pool tries it, and compares how long its calls take.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic
from typing import Final

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
    """The number of groups that run side by side, for one pool. Not thread-safe.

    Args:
        most: The highest number. If it is below 3, groups run one after another.
        clock: Returns seconds.

    Attributes:
        groups: The number of groups now; `SERIAL`, or 3 and more.
    """

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
        """The number of groups that run side by side."""
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
