"""One open RocksDB database, shared by all stores of this process: its handle, its column families, writing and closing."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias
from weakref import WeakSet

from rocksdict import DbClosedError, Options, Rdict, WriteBatch, WriteOptions

from dualwrite.errors import DualWriteError, StateTableMissingError, UsageError
from dualwrite.stores.rocksdb.encoding import Key, Pickled
from dualwrite.stores.rocksdb.locks import LeaseTable, LockTable
from dualwrite.stores.rocksdb.opening import (
    STATE_FAMILY,
    Opener,
    call_failed,
    forked,
    is_closed,
    is_read_only,
    sentence,
    wal_recovery_mode,
)

Changes: TypeAlias = Mapping[str, Iterable[tuple[Key, Key | Pickled | None]]]
"""By column family: keys and their new values, None to delete."""


@dataclass(frozen=True, slots=True)
class Handle:
    """The open database; a new Handle is made each time it is opened.

    Handles of the column families used so far are kept because rocksdict flushes a column family to disk whenever a handle
    of it is dropped.
    """

    rdict: Rdict
    raw: bool
    families: dict[str, Rdict] = field(default_factory=dict)

    def has(self, family: str) -> bool:
        """Whether there is such a column family.

        Raises:
            DbClosedError: The database is closed.
        """
        try:
            self.rdict.get_column_family_handle(family)
        except DbClosedError:
            raise
        except Exception:  # noqa: BLE001  (rocksdict has no specific error for it, and no list of an open database's families)
            return False
        return True

    def text(self, text: str) -> Any:
        """A key or value of ours: in raw mode UTF-8; otherwise the str, which rocksdict stores as UTF-8 after a byte 2."""
        return text.encode() if self.raw else text


class OpenDatabase:
    """A RocksDB database, opened when it is first needed, and again after an I/O error if we opened it.

    Its source is how it is opened, or the user's open Rdict.
    """

    def __init__(self, path: str, source: Opener | Rdict) -> None:
        self.path = path
        self.where = f"rocksdb:///{path}"
        self.locks = LockTable()
        self.leases = LeaseTable()
        self._source = source
        self._handle: Handle | None = None
        self._broken = False
        self._closed = False
        self._changing = threading.RLock()

    @property
    def is_ours(self) -> bool:
        """Whether we open and close it."""
        return isinstance(self._source, Opener)

    @property
    def is_usable(self) -> bool:
        """Whether it was not closed yet, by us or by the owner of the Rdict."""
        if self._closed or isinstance(self._source, Opener):
            return not self._closed
        with suppress(Exception):
            self._source.path()
            return True
        return False

    @property
    def is_unopened(self) -> bool:
        """Whether we have not opened it yet, perhaps because the user has it open."""
        return self.is_ours and self._handle is None

    @property
    def is_broken(self) -> bool:
        """Whether it refuses writes until it is opened again, which the next call of `handle` does."""
        return self._broken and self.is_ours

    def handle(self) -> Handle:
        """The open database.

        Raises:
            StoreUnavailableError: The database can't be opened, or was closed.
            StateTableMissingError: Our column family is missing, and the database is read-only.
            UsageError: This process was forked from the one that has it open.
        """
        databases.check_process()
        handle = self._handle
        if handle is not None and not self._closed and not self.is_broken:
            return handle
        with self._changing:
            if self._closed:
                raise call_failed(self.where, "using it", DbClosedError("closed"))
            if self.is_broken:
                self._drop_handle()
            if self._handle is None:
                self._handle = self._opened()
                self._broken = False
            return self._handle

    def _opened(self) -> Handle:
        rdict = self._source.open() if isinstance(self._source, Opener) else self._source
        doing = "opening it"
        try:
            handle = Handle(rdict, _is_raw(rdict))
            doing = f"creating the column family {STATE_FAMILY}"
            if not handle.has(STATE_FAMILY):
                # The empty batch comes first: rocksdict creates a column family through a read-only handle too, and then the
                # database's owner can't open the database any more.
                rdict.write(WriteBatch(raw_mode=handle.raw))
                rdict.create_column_family(STATE_FAMILY, Options(raw_mode=handle.raw))
        except Exception as error:  # all that rocksdict raises
            if self.is_ours:
                _close(rdict)
            if is_read_only(error):
                raise StateTableMissingError(
                    f"The column family {STATE_FAMILY} is missing in {self.where}, which is open read-only.",
                    cause=sentence(error),
                    next_step="open it once with AccessType.read_write(), which creates the column family",
                ) from error
            raise call_failed(self.where, doing, error) from error
        return handle

    # --- column families --------------------------------------------------------------------------------------------------

    def family(self, name: str) -> Rdict:
        """The handle of a column family.

        Raises:
            UsageError: There is no such column family.
            StoreUnavailableError: The database can't be opened, or was closed.
        """
        handle = self.handle()
        try:
            if handle.has(name):
                with self._changing:
                    if name not in handle.families:
                        handle.families[name] = handle.rdict.get_column_family(name)
                    return handle.families[name]
        except Exception as error:  # all that rocksdict raises
            raise self.failed(f"using the column family {name!r}", error) from error
        raise self._unknown_family(name)

    def make_family(self, name: str, options: Options | None = None) -> None:
        """Create a column family if it is missing."""
        handle = self.handle()
        try:
            with self._changing:
                if not handle.has(name):
                    handle.rdict.create_column_family(name, options or Options(raw_mode=handle.raw))
        except Exception as error:  # all that rocksdict raises
            raise self.failed(f"creating the column family {name!r}", error) from error

    def _unknown_family(self, name: str) -> UsageError:
        known = ""
        with suppress(Exception):  # a database in memory has no files to list them from
            names = sorted(set(Rdict.list_cf(self.path)) - {STATE_FAMILY})
            known = f" It has: {', '.join(names)}."
        return UsageError(
            f"The database {self.where} has no column family {name!r}.{known}",
            next_step=f"create it before the transaction: store.create_column_family({name!r}), or "
            f"RocksDBStore(…, column_families={{{name!r}: None}})",
        )

    # --- writing ----------------------------------------------------------------------------------------------------------

    def write(self, changes: Changes, doing: str, transactional_id: str | None = None) -> None:
        """Write changes in one synced batch.

        Raises:
            DualWriteError: RocksDB's error, translated; after an I/O error the batch may or may not be in the log.
        """
        handle = self.handle()
        try:
            self.write_batch(handle, self.batch(handle, changes))
        except DualWriteError:
            raise
        except Exception as error:  # all that rocksdict raises
            raise self.failed(doing, error, transactional_id) from error

    def batch(self, handle: Handle, changes: Changes) -> WriteBatch:
        """A batch of changes, with current handles of the column families; rocksdict's errors are raised unchanged.

        After a batch with a column family that was dropped meanwhile, RocksDB would refuse all writes.

        Raises:
            UsageError: A column family does not exist any more.
        """
        batch = WriteBatch(raw_mode=handle.raw)
        batch.set_dumps(_data_of)
        for name, operations in changes.items():
            if not handle.has(name):
                raise self._unknown_family(name)
            family = handle.rdict.get_column_family_handle(name)
            for key, value in operations:
                if value is None:
                    batch.delete(key, family)
                else:
                    batch.put(key, value, family)
        return batch

    def write_batch(self, handle: Handle, batch: WriteBatch) -> None:
        """Write a batch, synced; rocksdict's errors are raised unchanged. After an I/O error RocksDB refuses all later writes.

        The options are ours, not the Rdict's, which may disable the log (rocksdict's default enables it) or its sync.
        """
        options = WriteOptions()
        options.sync = True
        try:
            handle.rdict.write(batch, options)
        except Exception as error:
            self._broken = self._broken or not (is_closed(error) or is_read_only(error))
            raise

    def failed(self, doing: str, error: BaseException, transactional_id: str | None = None) -> DualWriteError:
        """Our error for rocksdict's. If the owner closed the Rdict, our handles are closed too: they would keep LOCK held."""
        if is_closed(error) and not self.is_usable:
            self.close()
        return call_failed(self.where, doing, error, transactional_id)

    def durability(self) -> dict[str, str]:
        """The settings that decide whether an acknowledged commit is durable."""
        self.handle()
        # those of our own writes, whatever WriteOptions the Rdict has
        settings = {"sync": "true", "disable_wal": "false"}
        with suppress(OSError):
            if not (Path(self.path) / "CURRENT").exists():
                settings["env"] = "none of this file system"
            elif mode := wal_recovery_mode(self.path):
                settings["wal_recovery_mode"] = mode
        return settings

    # --- the end ----------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Close the database if we opened it, otherwise drop our handles. Open transactions fail from here on."""
        self._closed = True
        with self._changing:
            self._drop_handle()

    def _drop_handle(self) -> None:
        handle, self._handle = self._handle, None
        if handle is None:
            return
        try:
            while handle.families:
                _close(handle.families.popitem()[1])
        finally:
            if self.is_ours:
                _close(handle.rdict)

    def leak_handles(self) -> None:
        """In a forked child: keep RocksDB from running there, now or when the child ends.

        Its threads are gone, and its files belong to the parent: closing a handle would wait forever for a flush.
        """
        handles = [] if isinstance(self._source, Opener) else [self._source]
        if self._handle is not None:
            handles += [self._handle.rdict, *self._handle.families.values()]
        for rdict in handles:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(rdict))


def _is_raw(rdict: Rdict) -> bool:
    """Whether the database is in raw mode. rocksdict does not report it, but then refuses a key that is not bytes."""
    try:
        _ = "dualwrite" in rdict
    except KeyError:
        return True
    return False


def _data_of(value: Pickled) -> bytes:
    """The function that rocksdict calls for a value that has none of its own types."""
    return value.data


def _close(rdict: Rdict) -> None:
    with suppress(Exception):  # a flush that fails after an I/O error; it is closed anyway, and what was synced is kept
        rdict.close()


class Databases:
    """The databases of a process, by real path, with the stores that use each. There is one instance."""

    def __init__(self) -> None:
        self._changing = threading.RLock()
        self._open: dict[str, tuple[OpenDatabase, WeakSet[object]]] = {}
        self.is_used = False
        """Whether RocksDB may run in this process: so it is set, too, when the user passes an open Rdict."""
        self._forked = False

    def attach(self, user: object, made: OpenDatabase) -> OpenDatabase:
        """The database at the path of `made`, which is that for the path's first user. A user may attach twice."""
        with self._changing:
            self.is_used = True
            found = self._open.get(made.path)
            if found is None or not found[0].is_usable or (found[0].is_unopened and not made.is_ours):
                if found is not None:
                    found[0].close()
                found = self._open[made.path] = (made, WeakSet())
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
        if self.is_used:
            self._forked = True
            for database, _ in self._open.values():
                database.leak_handles()


databases = Databases()
os.register_at_fork(after_in_child=databases.after_fork)
