"""Whether units are likely to succeed, so that a group does without savepoints."""

from __future__ import annotations

from typing import Final

_LONGEST: Final = 64


class Hopes:
    """After a group with a failed unit the next groups are careful: twice as many as the last time, up to 64.

    Each hopeful group that succeeds halves that number again. So a service whose units hardly ever fail pays for no savepoints,
    and one whose units often fail pays for few groups that run twice. Threads may share one: a lost update only delays it.
    """

    def __init__(self) -> None:
        self._careful = 0
        self._next = 1

    def allow(self) -> bool:
        """Whether the next group may be hopeful."""
        return self._careful == 0

    def note(self, *, has_failed: bool) -> None:
        """Note how a group of several units ended: whether one has failed."""
        if has_failed:
            self._careful = self._next
            self._next = min(2 * self._next, _LONGEST)
        elif self._careful:
            self._careful -= 1
        else:
            self._next = max(1, self._next // 2)
