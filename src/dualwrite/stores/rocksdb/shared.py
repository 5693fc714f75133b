"""Which databases this process has open, so that its stores share them: RocksDB allows one handle at a time.

It also handles forks: in the child an open database is unusable. RocksDB's threads are gone there, so a flush waits forever,
and what the child writes goes into the parent's files.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from weakref import WeakSet

from dualwrite.stores.rocksdb.database import OpenDatabase
from dualwrite.stores.rocksdb.errors import forked


class Databases:
    """The databases of a process, by real path, with the stores that use each. There is one instance."""

    def __init__(self) -> None:
        self._changing = threading.RLock()
        self._open: dict[str, tuple[OpenDatabase, WeakSet[object]]] = {}
        self._used = False
        self._forked = False

    def attach(self, user: object, path: str, make: Callable[[], OpenDatabase]) -> OpenDatabase:
        """The database at `path`; `make` makes it (without opening it) for its first user. A user may attach twice."""
        self.check_process()
        with self._changing:
            self._used = True
            found = self._open.get(path)
            made = make()
            if found is None or not found[0].is_usable or (found[0].is_unopened and not made.is_ours):
                if found is not None:
                    found[0].close()
                found = self._open[path] = (made, WeakSet())
            found[1].add(user)
            return found[0]

    def detach(self, user: object, database: OpenDatabase) -> None:
        """Remove a user of the database; after the last one it is closed."""
        if self._forked:
            return
        with self._changing:
            found = self._open.get(database.path)
            if found is None or found[0] is not database:
                return
            found[1].discard(user)
            if not found[1]:
                del self._open[database.path]
                database.close()

    def note_user_rdict(self) -> None:
        """Note that RocksDB runs in this process because the user opened an Rdict."""
        self._used = True

    def check_process(self) -> None:
        """Refuse a process that was forked from one in which RocksDB ran.

        Raises:
            UsageError: This process was forked from such a process.
        """
        if self._forked:
            raise forked()

    def after_fork(self) -> None:
        """Called in the child after a fork."""
        self._changing = threading.RLock()  # another thread of the parent may have held it
        if self._used:
            self._forked = True
            for database, _ in self._open.values():
                database.leak_handles()


databases = Databases()
os.register_at_fork(after_in_child=databases.after_fork)
