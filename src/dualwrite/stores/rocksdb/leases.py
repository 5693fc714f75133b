"""Leases in memory: only one process can open a RocksDB database, and its leases end with it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection

from dualwrite.stores.leases import Lease, LeaseStore
from dualwrite.stores.state_row import MAX_OWNER_LENGTH


class LeaseTable:
    """The leases of one open database, shared by all stores of the process on it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.entries: dict[str, tuple[str, float]] = {}
        """By id: the owner, and until when, by `time.monotonic`."""


class RocksDBLeases(LeaseStore):
    """The leases of a RocksDB database.

    Args:
        table: Returns the lease table of the open database.
        would_create: Whether there is no database yet: reading the leases must not create one at a mistyped path.
    """

    def __init__(self, table: Callable[[], LeaseTable], would_create: Callable[[], bool]) -> None:
        self._table = table
        self._would_create = would_create

    def acquire(self, ids: Collection[str], owner: str, *, seconds: float) -> frozenset[str]:
        """See LeaseStore."""
        table, owner = self._table(), owner[:MAX_OWNER_LENGTH]
        with table.lock:
            now = time.monotonic()
            free = [name for name in ids if _is_free(table.entries.get(name), owner, now)]
            table.entries.update(dict.fromkeys(free, (owner, now + seconds)))
        return frozenset(free)

    def renew(self, ids: Collection[str], owner: str, *, seconds: float) -> frozenset[str]:
        """See LeaseStore."""
        table, owner = self._table(), owner[:MAX_OWNER_LENGTH]
        with table.lock:
            ours = [name for name in ids if table.entries.get(name, ("", 0.0))[0] == owner]
            table.entries.update(dict.fromkeys(ours, (owner, time.monotonic() + seconds)))
        return frozenset(ours)

    def release(self, ids: Collection[str], owner: str) -> None:
        """See LeaseStore."""
        table, owner = self._table(), owner[:MAX_OWNER_LENGTH]
        with table.lock:
            for name in ids:
                if table.entries.get(name, ("", 0.0))[0] == owner:
                    del table.entries[name]

    def entries(self, prefix: str = "") -> list[Lease]:
        """See LeaseStore."""
        if self._would_create():
            return []
        table = self._table()
        with table.lock:
            now = time.monotonic()
            found = [(name, *entry) for name, entry in table.entries.items() if name.startswith(prefix)]
        return [Lease(name, owner, until - now) for name, owner, until in sorted(found)]


def _is_free(entry: tuple[str, float] | None, owner: str, now: float) -> bool:
    return entry is None or entry[0] == owner or entry[1] <= now
