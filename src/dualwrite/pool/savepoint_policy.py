"""Whether a group has one savepoint for all of its units, or one for each."""

from __future__ import annotations

from typing import Final

_LONGEST: Final = 64


class SavepointPolicy:
    """After a group with a failed unit the next groups have a savepoint for each unit: twice as many as last time, up to 64.

    Each group that succeeds under one savepoint halves that number again. So a service whose units hardly ever fail pays for no
    savepoints, and one whose units often fail pays for few groups that run twice. Threads may share one: a lost update only
    delays it.
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
