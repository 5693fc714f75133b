"""The ids of a pool's writers: by lease (`leases`), or, if the store has no leases, by fixed numbers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from itertools import count as numbers
from itertools import islice
from typing import ClassVar

from dualwrite.stores.leases import numbered


class Ids(ABC):
    """Which ids a pool uses. Thread-safe."""

    are_leased: ClassVar[bool]
    """Whether the pool can have another id in place of one that another process has claimed."""

    @abstractmethod
    def acquire(self, count: int) -> list[str]:
        """Ids for so many further writers, the lowest numbers first.

        Raises:
            StoreError: The ids could not be leased.
        """

    @abstractmethod
    def keeps(self, name: str) -> bool:
        """Whether an id has been this pool's without interruption; may query the database.

        Raises:
            StoreError: The database could not be read.
        """

    @abstractmethod
    def release(self, name: str) -> None:
        """Release an id whose writer is closed.

        Raises:
            StoreError: The lease could not be released; it expires.
        """

    def avoid(self, name: str) -> None:
        """Release an id that can't be opened now, and don't acquire it again."""
        self.release(name)

    @abstractmethod
    def close(self) -> None:
        """Release all ids. Raises nothing: leases that could not be released expire."""


class FixedIds(Ids):
    """The lowest numbers: only one pool may use the prefix at a time.

    Args:
        prefix: What the ids begin with.
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
