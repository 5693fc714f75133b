"""What a pool sees of its calls within a short while."""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import Final

from dualwrite.pool.call import Call
from dualwrite.pool.scaling import Seen

_SETTLING: Final = 0.1
"""Seconds after a change in which nothing is measured: calls from before it are still running."""

_LEAST_SECONDS: Final = 0.25
_MOST_SECONDS: Final = 2.0
_LEAST_GROUPS: Final = 8
_LEAST_TURNS: Final = 3
"""A measurement lasts for this long, and for this many groups, and for so many of each thread."""


class Window:
    """Adds up the calls of groups, from a moment after it was made on."""

    def __init__(self) -> None:
        self._begins = time.monotonic() + _SETTLING
        self._cpu: float | None = None
        self._calls = self._groups = self._waited = 0
        self._seconds = 0.0

    def add(self, calls: Collection[Call], now: float, *, was_waiting: bool) -> None:
        """Add a group that has ended.

        Args:
            calls: Its calls.
            now: The time, by `time.monotonic`.
            was_waiting: Whether its calls had waited for a thread.
        """
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
