"""One open RocksDB database, shared by all stores of this process: its handle, its column families, writing and closing."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import takewhile
from operator import attrgetter
from pathlib import Path
from typing import Any, Final, TypeAlias
from weakref import WeakSet

from rocksdict import DbClosedError, Options, Rdict, WriteBatch, WriteOptions

from dualwrite import process
from dualwrite.deadline import Deadline
from dualwrite.errors import DualWriteError, StateTableMissingError, UsageError
from dualwrite.stores.key_values import POSITIONS, ROWS, STORE, ConflictError, Found, Key, KeyValues, Write
from dualwrite.stores.rocksdb.opening import (
    Opener,
    call_failed,
    forked,
    is_closed,
    is_read_only,
    is_undecodable,
    sentence,
    wal_recovery_mode,
)

Scalar: TypeAlias = bytes | str | int | float | bool


@dataclass(frozen=True, slots=True)
class Pickled:
    """A value that rocksdict stores as a pickle, pickled at the `put`: later changes to the object have no effect."""

    data: bytes


Changes: TypeAlias = Mapping[str, Iterable[tuple[Scalar, Scalar | Pickled | None]]]
"""By column family: keys and their new values, None to delete."""

OUR_FAMILIES: Final = (ROWS, POSITIONS)
_STORE_KEY: Final = b"#store"
"""Stored next to the rows: no transactional id has a `#`."""
_SEPARATOR: Final = "\0"  # can't occur in a group's id or in a topic


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

    def make(self, family: str, options: Options | None = None) -> None:
        """Create a column family if it is missing.

        The empty batch comes first: rocksdict creates a column family through a read-only handle too, and then the database's
        owner can't open the database any more.
        """
        if not self.has(family):
            self.rdict.write(WriteBatch(raw_mode=self.raw))
            self.rdict.create_column_family(family, options or Options(raw_mode=self.raw))


class OpenDatabase(KeyValues):
    """A RocksDB database, opened when it is first needed, and again after an I/O error if we opened it.

    Only one process can open it, so a check of what was read and the write after it only need to keep out other threads.
    Keys and values of ours are bytes in either mode of rocksdict. Its source is how it is opened, or the user's open Rdict.
    """

    errors = (Exception,)

    def __init__(self, path: str, source: Opener | Rdict) -> None:
        self.path = path
        self.where = f"rocksdb:///{path}"
        self.writing = threading.Lock()
        """Held by whoever compares what was read, and writes."""
        self.leases: dict[str, tuple[str, float]] = {}
        """By id: the owner, and until when, by `time.monotonic`."""
        self._wanted: dict[str, Options | None] = {ROWS: None}
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
        name = ROWS
        try:
            handle = Handle(rdict, _is_raw(rdict))
            for name, options in self._wanted.items():
                handle.make(name, options)
        except Exception as error:  # all that rocksdict raises
            if self.is_ours:
                _close(rdict)
            if is_read_only(error):
                raise StateTableMissingError(
                    f"The column family {name} is missing in {self.where}, which is open read-only.",
                    cause=sentence(error),
                    next_step="open it once with AccessType.read_write(), which creates the column family",
                ) from error
            raise call_failed(self.where, f"creating the column family {name}", error) from error
        return handle

    # --- column families --------------------------------------------------------------------------------------------------

    def want(self, families: Mapping[str, Options | None]) -> None:
        """Have column families created: now if the database is open, otherwise when it is opened."""
        with self._changing:
            self._wanted = {**families, **self._wanted}
            for name, options in families.items() if self._handle is not None else ():
                self.make_family(name, options)

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
            raise self.translated(error, f"using the column family {name!r}") from error
        raise self._unknown_family(name)

    def make_family(self, name: str, options: Options | None = None) -> None:
        """Create a column family if it is missing."""
        handle = self.handle()
        try:
            with self._changing:
                handle.make(name, options)
        except Exception as error:  # all that rocksdict raises
            raise self.translated(error, f"creating the column family {name!r}") from error

    def _unknown_family(self, name: str) -> UsageError:
        known = ""
        with suppress(Exception):  # a database in memory has no files to list them from
            names = sorted(set(Rdict.list_cf(self.path)).difference(OUR_FAMILIES))
            known = f" It has: {', '.join(names)}."
        return UsageError(
            f"The database {self.where} has no column family {name!r}.{known}",
            next_step=f"create it before the transaction: store.create_column_family({name!r}), or "
            f"RocksDBStore(…, column_families={{{name!r}: None}})",
        )

    # --- the port ---------------------------------------------------------------------------------------------------------

    def read(self, keys: Sequence[Key], deadline: Deadline | None = None) -> list[Found | None]:
        del deadline
        return [self._found(*_place_of(key)) for key in keys]

    def _found(self, family: str, key: bytes) -> Found | None:
        """Reading from a mistyped path creates no database there; a value that can't be decoded is no text of ours."""
        if self._is_missing(family):
            return None
        stored = self.family(family)
        try:
            value = stored.get(key)
        except Exception as error:
            if not is_undecodable(error):
                raise
            value = sentence(error)
        return None if value is None else Found(value if isinstance(value, bytes) else str(value).encode())

    def children(self, key: Key, prefix: str = "") -> list[str]:
        folder, start = key[0], "".join(f"{name}{_SEPARATOR}" for name in key[1:])
        if self._is_missing(folder):
            return []
        first = (start + prefix).encode()
        stored: Iterator[Any] = self.family(folder).keys(from_key=first)
        names = takewhile(lambda each: isinstance(each, bytes) and each.startswith(first), stored)
        found = {each[len(start.encode()) :].decode(errors="replace").partition(_SEPARATOR)[0] for each in names}
        return list(found - {_STORE_KEY.decode()})

    def _is_missing(self, family: str) -> bool:
        if self._handle is None and isinstance(self._source, Opener) and self._source.would_create():
            return True
        return family != ROWS and not self.handle().has(family)

    def multi(self, writes: Sequence[Write], deadline: Deadline | None = None) -> None:
        del deadline
        with self.writing:
            self.write(*self.checked(writes, {}))

    def passes(self, error: Exception) -> bool:
        del error
        return self.is_broken

    def translated(self, error: BaseException, doing: str, transactional_id: str | None = None) -> DualWriteError:
        """If the owner closed the Rdict, our handles are closed too: they would keep LOCK held."""
        if isinstance(error, DualWriteError):
            return error
        if is_closed(error) and not self.is_usable:
            self.close()
        return call_failed(self.where, doing, error, transactional_id)

    # --- writing ----------------------------------------------------------------------------------------------------------

    def checked(self, writes: Iterable[Write], changes: Changes) -> tuple[Handle, WriteBatch]:
        """One batch of conditional writes and of other changes, for `write`. The caller has `writing`.

        After a batch with a column family that was dropped meanwhile, RocksDB would refuse all writes.

        Raises:
            ConflictError: A key is not as it was found.
            UsageError: A column family does not exist any more.
        """
        handle = self.handle()
        batch = WriteBatch(raw_mode=handle.raw)
        batch.set_dumps(attrgetter("data"))  # for a `Pickled`, which has none of rocksdict's own types
        for write in writes:
            family, key = _place_of(write.key)
            handle.make(family)
            if self._found(family, key) != write.found:
                raise ConflictError(write.key)
            _put(batch, handle, family, [(key, write.data)])
        for name, operations in changes.items():
            if not handle.has(name):
                raise self._unknown_family(name)
            _put(batch, handle, name, operations)
        return handle, batch

    def write(self, handle: Handle, batch: WriteBatch) -> None:
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


def _place_of(key: Key) -> tuple[str, bytes]:
    """The column family, and the key in it."""
    return (ROWS, _STORE_KEY) if key[0] == STORE else (key[0], _SEPARATOR.join(key[1:]).encode())


def _put(batch: WriteBatch, handle: Handle, family: str, operations: Iterable[tuple[Scalar, Scalar | Pickled | None]]) -> None:
    into = handle.rdict.get_column_family_handle(family)
    for key, value in operations:
        if value is None:
            batch.delete(key, into)
        else:
            batch.put(key, value, into)


def _is_raw(rdict: Rdict) -> bool:
    """Whether the database is in raw mode. rocksdict does not report it, but then refuses a key that is not bytes."""
    try:
        _ = "dualwrite" in rdict
    except KeyError:
        return True
    return False


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
process.call_in_child(databases.after_fork)
