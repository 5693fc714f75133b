"""Where the time of a pool's groups goes: clocks at the failpoints that a group passes, and at the store's `begin`.

The library has these points for its tests; here they only record the time, in measurements of their own.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from dualwrite.stores.sql import SqlStateStore
from dualwrite.testing import failpoints

PHASES: Final = {
    "BEGIN, fence": "after_begin",
    "units: SQL": "group_after_units",
    "Produce, prepare": "after_prepare",
    "record, COMMIT": "after_db_commit",
    "EndTxn": "after_kafka_commit",
}
"""Each phase of a group, with the point at which it ends and the next one begins."""

_UNIT: Final = "group_after_unit"


class Recorder:
    """Records the groups of this process, thread by thread; one that fails, or whose start was not seen, is left out."""

    def __init__(self) -> None:
        self._group = threading.local()
        self._groups: list[dict[str, float]] = []
        self.clear = self._groups.clear
        for phase, point in PHASES.items():
            failpoints.arm(point, partial(self._end, phase))
        failpoints.arm(_UNIT, self._count)

    def watch(self, store: SqlStateStore) -> None:
        """Record where the store's transactions begin."""
        for name in ("begin", "begin_group", "begin_soon"):
            setattr(store, name, partial(self._begin, getattr(store, name)))

    def close(self) -> None:
        for point in (_UNIT, *PHASES.values()):
            failpoints.disarm(point)

    def means(self) -> dict[str, float]:
        """The number of units, and the seconds of each phase, of a group in the mean."""
        return {name: sum(each[name] for each in self._groups) / max(1, len(self._groups)) for name in ("units", *PHASES)}

    def _begin(self, begin: Callable[..., Any], *arguments: Any, **more: Any) -> Any:
        self._group.at, self._group.found = time.perf_counter(), {"units": 0.0}
        return begin(*arguments, **more)

    def _count(self) -> None:
        if (found := getattr(self._group, "found", None)) is not None:
            found["units"] += 1

    def _end(self, phase: str) -> None:
        if (found := getattr(self._group, "found", None)) is not None:
            found[phase], self._group.at = time.perf_counter() - self._group.at, time.perf_counter()
            if len(found) == len(PHASES) + 1:
                self._groups.append(found)
                self._group.found = None
