"""The ids of a pool's writers: leased (`leases`), or, if the store has no leases, with fixed numbers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from itertools import count as numbers
from itertools import islice
from typing import ClassVar

from dualwrite.stores.leases import numbered


class Ids(ABC):
    """The ids that a pool uses. Thread-safe."""

    are_leased: ClassVar[bool]
    """Whether the pool can get a different id after another process has claimed one of its ids."""

    @abstractmethod
    def acquire(self, count: int) -> list[str]:
        """Acquire ids for `count` further writers, the lowest numbers first.

        Raises:
            StoreError: The ids could not be leased.
        """

    @abstractmethod
    def keeps(self, name: str) -> bool:
        """Whether the pool has owned an id without interruption; may query the database.

        Raises:
            StoreError: The database could not be read.
        """

    @abstractmethod
    def release(self, name: str) -> None:
        """Release an id whose writer is closed.

        Raises:
            StoreError: The lease could not be released; it will expire.
        """

    def avoid(self, name: str) -> None:
        """Release an id that can't be opened now, and don't acquire it again."""
        self.release(name)

    @abstractmethod
    def close(self) -> None:
        """Release all ids. Raises no error: leases that could not be released will expire."""


class FixedIds(Ids):
    """Ids with the lowest numbers, without leases: only one pool may use the prefix at a time.

    Args:
        prefix: The prefix of the ids.
    """

    are_leased = False

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._used: set[str] = set()

    def acquire(self, count: int) -> list[str]:
        """See Ids."""
        names = (numbered(self._prefix, number) for number in numbers(1))
        acquired = list(islice((name for name in names if name not in self._used), count))
        self._used.update(acquired)
        return acquired

    def keeps(self, name: str) -> bool:
        """See Ids."""
        return name in self._used

    def release(self, name: str) -> None:
        """See Ids."""
        self._used.discard(name)

    def close(self) -> None:
        """See Ids."""
        self._used.clear()
