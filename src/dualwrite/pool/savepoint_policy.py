"""Decides whether a group sets one savepoint for all of its units, or one for each."""

from __future__ import annotations

from typing import Final

_LONGEST: Final = 64


class SavepointPolicy:
    """After a group with a failed unit, the next groups set a savepoint for each unit: first one group, up to 64 later.

    The number of these groups doubles with each such failure, and each group that succeeds under one savepoint halves it again.
    So a service whose units rarely fail does not pay for savepoints, and one whose units often fail rarely has to run a group
    twice. Threads may share a policy without a lock: a lost update only delays its effect.
    """

    def __init__(self) -> None:
        self._groups_with_savepoints = 0
        self._next = 1

    def allow(self) -> bool:
        """Whether the next group may have one savepoint for all of its units."""
        return self._groups_with_savepoints == 0

    def note(self, *, has_failed: bool) -> None:
        """Note how a group of several units ended: whether one has failed."""
        if has_failed:
            self._groups_with_savepoints = self._next
            self._next = min(2 * self._next, _LONGEST)
        elif self._groups_with_savepoints:
            self._groups_with_savepoints -= 1
        else:
            self._next = max(1, self._next // 2)
