"""Leases in memory: only one process can open a RocksDB database, and its leases end with it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection

from dualwrite.stores.leases import Lease, LeaseStore
from dualwrite.stores.state_row import MAX_OWNER_LENGTH


class LeaseBook:
    """The leases of one open database, shared by all stores of the process on it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.entries: dict[str, tuple[str, float]] = {}
        """By id: the owner, and until when, by `time.monotonic`."""


class RocksDBLeases(LeaseStore):
    """The leases of a RocksDB database.

    Args:
        book: Gives the book of the open database.
        is_to_be_made: Whether there is no database yet: reading the leases must not create one at a mistyped path.
    """

    def __init__(self, book: Callable[[], LeaseBook], is_to_be_made: Callable[[], bool]) -> None:
        self._book = book
        self._is_to_be_made = is_to_be_made

    def acquire(self, ids: Collection[str], owner: str, *, seconds: float) -> frozenset[str]:
        """See LeaseStore."""
        book, owner = self._book(), owner[:MAX_OWNER_LENGTH]
        with book.lock:
            now = time.monotonic()
            free = [name for name in ids if _is_free(book.entries.get(name), owner, now)]
            book.entries.update(dict.fromkeys(free, (owner, now + seconds)))
        return frozenset(free)

    def renew(self, ids: Collection[str], owner: str, *, seconds: float) -> frozenset[str]:
        """See LeaseStore."""
        book, owner = self._book(), owner[:MAX_OWNER_LENGTH]
        with book.lock:
            ours = [name for name in ids if book.entries.get(name, ("", 0.0))[0] == owner]
            book.entries.update(dict.fromkeys(ours, (owner, time.monotonic() + seconds)))
        return frozenset(ours)

    def release(self, ids: Collection[str], owner: str) -> None:
        """See LeaseStore."""
        book, owner = self._book(), owner[:MAX_OWNER_LENGTH]
        with book.lock:
            for name in ids:
                if book.entries.get(name, ("", 0.0))[0] == owner:
                    del book.entries[name]

    def entries(self, prefix: str = "") -> list[Lease]:
        """See LeaseStore."""
        if self._is_to_be_made():
            return []
        book = self._book()
        with book.lock:
            now = time.monotonic()
            found = [(name, *entry) for name, entry in book.entries.items() if name.startswith(prefix)]
        return [Lease(name, owner, until - now) for name, owner, until in sorted(found)]


def _is_free(entry: tuple[str, float] | None, owner: str, now: float) -> bool:
    return entry is None or entry[0] == owner or entry[1] <= now
