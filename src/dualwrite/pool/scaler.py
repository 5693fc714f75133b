"""Keeps a pool at the size that its load asks for: measures its calls, and adds and removes writers and groups side by side."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Final

from dualwrite.logs import SubjectLogger
from dualwrite.pool.call import Call
from dualwrite.pool.scaling import SERIAL, Scaling
from dualwrite.pool.upkeep import Upkeep
from dualwrite.pool.window import Window
from dualwrite.pool.writers import Writers

log = SubjectLogger(__name__)

LEAST: Final = 2
"""Writers of a pool without load: while one commits its group, the other runs the next."""

_QUIET: Final = 30.0
"""Seconds after which writers that were not needed are closed, or that could not be opened are tried again."""


class Scaler:
    """Decides how many writers and threads a pool has. Thread-safe.

    Args:
        size: The number of writers, or None: as many as the load asks for.
        most: The maximum number of writers, if it is up to the load.
        side_by_side: The maximum number of groups that run side by side.
        upkeep: Opens and closes writers.
        writers: The open ones.
        prefix: The pool's prefix, for messages.

    Attributes:
        on_changed: Called when the number of threads may have changed.
    """

    def __init__(
        self, size: int | None, *, most: int, side_by_side: int, upkeep: Upkeep, writers: Writers, prefix: str
    ) -> None:
        self.on_changed: Callable[[], None] = lambda: None
        self._most = max(1, min(most, max(side_by_side, LEAST)))
        self._side_by_side = side_by_side
        self._upkeep = upkeep
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
        upkeep.on_opened = self._opened
        upkeep.on_refused = self._refused

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

    def group_ended(self, calls: Collection[Call], *, was_waiting: bool) -> None:
        """Note the calls of a group that has ended, and whether they had waited for a thread."""
        if self._limit <= LEAST:
            return
        with self._lock:
            now = self._called_at = time.monotonic()
            groups = self._scaling.groups
            if self.side_by_side < groups:  # the writers are still being opened
                self._window = Window()
                return
            self._window.add(calls, now, was_waiting=was_waiting)
            if not self._window.is_over(now, groups):
                return
            seen, self._window = self._window.seen(now), Window()
            self._scaling.decide(seen)
            log.debug("groups side by side: %d, after %d: %s", self._scaling.groups, groups, seen, prefix=self._prefix)
            if groups == self._scaling.groups:
                return
            self._ask_for_writers()
        self.on_changed()

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
        self.on_changed()

    # --- writers ------------------------------------------------------------------------------------------------------------

    def _ask_for_writers(self, *, may_shrink: bool = False) -> None:
        if self._size is not None:
            return
        wanted = min(self._most, max(self.size, self._scaling.groups + max(self._most_own)))
        if (wanted > self._upkeep.wanted and not self._refused_until) or (wanted < self._upkeep.wanted and may_shrink):
            self._upkeep.want(wanted)

    def _opened(self) -> None:
        self.on_changed()

    def _refused(self) -> None:
        """Another writer could not be opened: the pool stays at what it has, for a while."""
        with self._lock:
            self._refused_until = time.monotonic() + _QUIET
            self._scaling.limit(min(self._limit, len(self._writers)))
        self.on_changed()  # others may have been opened
