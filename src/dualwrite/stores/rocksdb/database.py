"""One open RocksDB database, shared by all stores of this process: its handle, its column families, opening and closing."""

from __future__ import annotations

import ctypes
import os
import threading
import time
import weakref
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final
from weakref import WeakSet

from rocksdict import DbClosedError, Options, Rdict, WriteBatch, WriteOptions

from dualwrite.errors import ClaimTimeoutError, DualWriteError, StateTableMissingError, UsageError
from dualwrite.stores.leases import Lease, LeaseStore
from dualwrite.stores.rocksdb.opening import STATE_FAMILY, call_failed, forked, is_closed, is_read_only, last_options, sentence
from dualwrite.stores.row import MAX_OWNER_LENGTH

_SLICE: Final = 1.0
"""Seconds after which a waiter checks again by itself: an interrupted waiter may not have passed on the wake-up."""


class LockRequest:
    """A request for the lock of one id: waiting, granted, or released for good.

    Args:
        transactional_id: The id.
        owner: The claim's owner.
        doing: What is done under the lock, to complete "while <doing>".
    """

    __slots__ = ("__weakref__", "_is_released", "_since", "_thread", "doing", "gate", "owner", "transactional_id")

    def __init__(self, transactional_id: str, owner: str, doing: str) -> None:
        self.transactional_id = transactional_id
        self.owner = owner
        self.doing = doing
        self._thread = threading.current_thread().name
        self._since = 0.0
        self._is_released = False
        self.gate = threading.Lock()  # locked until the request is released; waiters pass through it one after the other
        self.gate.acquire()

    @property
    def is_released(self) -> bool:
        """Whether it was released."""
        return self._is_released

    def granted(self) -> None:
        """Note that it has the lock from now on."""
        self._thread = threading.current_thread().name
        self._since = time.monotonic()

    def release(self) -> None:
        """Release it, granted or not."""
        self._is_released = True
        with suppress(RuntimeError):  # released before
            self.gate.release()

    def __str__(self) -> str:
        owner = f" for {self.owner!r}" if self.owner else ""
        return f"thread {self._thread!r} of this process{owner}, {self.doing}, for {time.monotonic() - self._since:.1f} s now"


class LockTable:
    """The locks of all ids of one database."""

    def __init__(self) -> None:
        self._requests: dict[str, weakref.ref[LockRequest]] = {}
        self._changing = threading.Lock()

    def acquire(self, request: LockRequest, deadline: float) -> LockRequest | None:
        """Wait until `request` is granted, and return None; or return the current holder if the deadline passes.

        Args:
            request: The caller must release it, also if this raises (KeyboardInterrupt).
            deadline: By `time.monotonic`.
        """
        while True:
            with self._changing:
                found = self._requests.get(request.transactional_id)
                current = None if found is None else found()
                if current is None or current.is_released or current is request:
                    request.granted()
                    self._requests[request.transactional_id] = weakref.ref(request)
                    return None
            left = deadline - time.monotonic()
            if left <= 0:
                return current
            gate = current.gate
            del current  # a waiter must not keep it alive
            _pass_through(gate, min(left, _SLICE))


def lock_for(locks: LockTable, request: LockRequest, timeout: float) -> None:
    """Wait until `request` is granted.

    Args:
        locks: The database's locks.
        request: The caller must release it, also if this raises.
        timeout: Seconds to wait.

    Raises:
        ClaimTimeoutError: Another thread held it until then.
    """
    blocker = locks.acquire(request, time.monotonic() + timeout)
    if blocker is not None:
        raise ClaimTimeoutError(
            f"A lock was not released within {timeout:g} s while {request.doing}.",
            cause=f"the lock is held by {blocker}",
            next_step="let that thread commit or roll back its transaction, then try again",
            timeout=timeout,
            blocker=str(blocker),
        )


def _pass_through(gate: threading.Lock, timeout: float) -> None:
    if gate.acquire(timeout=timeout):
        with suppress(RuntimeError):
            gate.release()


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
        table, owner = self._table(), owner[:MAX_OWNER_LENGTH]
        with table.lock:
            now = time.monotonic()
            free = [name for name in ids if _is_free(table.entries.get(name), owner, now)]
            table.entries.update(dict.fromkeys(free, (owner, now + seconds)))
        return frozenset(free)

    def renew(self, ids: Collection[str], owner: str, *, seconds: float) -> frozenset[str]:
        table, owner = self._table(), owner[:MAX_OWNER_LENGTH]
        with table.lock:
            ours = [name for name in ids if table.entries.get(name, ("", 0.0))[0] == owner]
            table.entries.update(dict.fromkeys(ours, (owner, time.monotonic() + seconds)))
        return frozenset(ours)

    def release(self, ids: Collection[str], owner: str) -> None:
        table, owner = self._table(), owner[:MAX_OWNER_LENGTH]
        with table.lock:
            for name in ids:
                if table.entries.get(name, ("", 0.0))[0] == owner:
                    del table.entries[name]

    def entries(self, prefix: str = "") -> list[Lease]:
        if self._would_create():
            return []
        table = self._table()
        with table.lock:
            now = time.monotonic()
            found = [(name, *entry) for name, entry in table.entries.items() if name.startswith(prefix)]
        return [Lease(name, owner, until - now) for name, owner, until in sorted(found)]


def _is_free(entry: tuple[str, float] | None, owner: str, now: float) -> bool:
    return entry is None or entry[0] == owner or entry[1] <= now


@dataclass(frozen=True, slots=True)
class Handle:
    """The open database; a new Handle is made each time it is opened.

    Args:
        rdict: The database.
        raw: Whether it is in raw mode, which in rocksdict belongs to a whole database.
        families: Handles of the column families used so far. They are kept because rocksdict flushes a column family to disk
            whenever a handle of it is dropped.
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


class OpenDatabase:
    """A RocksDB database, opened when it is first needed, and again after an I/O error if we opened it.

    Args:
        path: Its folder.
        opener: Opens it; None if the user passed an Rdict.
        rdict: The user's open Rdict.
    """

    def __init__(self, path: str, *, opener: Callable[[], Rdict] | None = None, rdict: Rdict | None = None) -> None:
        self.path = path
        self.where = f"rocksdb:///{path}"
        self.locks = LockTable()
        self.leases = LeaseTable()
        self._opener = opener
        self._given = rdict
        self._handle: Handle | None = None
        self._broken = False
        self._closed = False
        self._process = os.getpid()
        self._changing = threading.RLock()

    @property
    def is_ours(self) -> bool:
        """Whether we open and close it."""
        return self._opener is not None

    @property
    def is_usable(self) -> bool:
        """Whether it was not closed yet, by us or by the owner of the Rdict."""
        if self._closed:
            return False
        if self._given is None:
            return True
        with suppress(Exception):
            self._given.path()
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

    def write_failed(self) -> None:
        """Note that a write met an I/O error: RocksDB refuses all later ones."""
        self._broken = True

    def handle(self) -> Handle:
        """The open database.

        Raises:
            StoreUnavailableError: The database can't be opened, or was closed.
            StateTableMissingError: Our column family is missing, and the database is read-only.
            UsageError: This process was forked from the one that has it open.
        """
        if os.getpid() != self._process:
            raise forked()
        handle = self._handle
        if handle is not None and not self._closed and not self.is_broken:
            return handle
        with self._changing:
            if self._closed:
                raise call_failed(self.where, "using it", DbClosedError("closed"))
            if self.is_broken:
                self._drop_handle()
            if self._handle is None:
                try:
                    self._handle = self._opened()
                    self._make_state_family(self._handle)
                    self._broken = False
                except BaseException:
                    self._drop_handle()
                    raise
            return self._handle

    def _opened(self) -> Handle:
        rdict = self._given if self._opener is None else self._opener()
        assert rdict is not None
        try:
            return Handle(rdict, _is_raw(rdict))
        except Exception as error:  # all that rocksdict raises
            raise call_failed(self.where, "opening it", error) from error

    def _make_state_family(self, handle: Handle) -> None:
        doing = f"creating the column family {STATE_FAMILY}"
        try:
            if handle.has(STATE_FAMILY):
                return
            # The empty batch comes first: rocksdict creates a column family through a read-only handle too, and then the
            # database's owner can't open the database any more.
            handle.rdict.write(WriteBatch(raw_mode=handle.raw))
            handle.rdict.create_column_family(STATE_FAMILY, Options(raw_mode=handle.raw))
        except Exception as error:  # all that rocksdict raises
            if is_read_only(error):
                raise StateTableMissingError(
                    f"The column family {STATE_FAMILY} is missing in {self.where}, which is open read-only.",
                    cause=sentence(error),
                    next_step="open it once with AccessType.read_write(), which creates the column family",
                ) from error
            raise call_failed(self.where, doing, error) from error

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
        raise self.unknown_family(name)

    def make_family(self, name: str, options: Options | None) -> None:
        """Create a column family if it is missing."""
        handle = self.handle()
        try:
            with self._changing:
                if not handle.has(name):
                    handle.rdict.create_column_family(name, options or Options(raw_mode=handle.raw))
        except Exception as error:  # all that rocksdict raises
            raise self.failed(f"creating the column family {name!r}", error) from error

    def write(self, family: str, changes: Mapping[bytes, bytes | None], doing: str) -> None:
        """Write keys of one column family in one synced batch; None deletes a key.

        Raises:
            DualWriteError: RocksDB's error, translated; after an I/O error the batch may or may not be in the log.
        """
        handle = self.handle()
        batch = WriteBatch(raw_mode=handle.raw)
        try:
            column_family = handle.rdict.get_column_family_handle(family)
            for key, value in changes.items():
                if value is None:
                    batch.delete(key, column_family)
                else:
                    batch.put(key, value, column_family)
            handle.rdict.write(batch, synced())
        except Exception as error:  # all that rocksdict raises
            if not is_closed(error) and not is_read_only(error):
                self.write_failed()
            raise self.failed(doing, error) from error

    def unknown_family(self, name: str) -> UsageError:
        """The error for an unknown column family."""
        known = ""
        with suppress(Exception):  # a database in memory has no files to list them from
            names = sorted(set(Rdict.list_cf(self.path)) - {STATE_FAMILY})
            known = f" It has: {', '.join(names)}."
        return UsageError(
            f"The database {self.where} has no column family {name!r}.{known}",
            next_step=f"create it before the transaction: store.create_column_family({name!r}), or "
            f"RocksDBStore(…, column_families={{{name!r}: None}})",
        )

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
                return {**settings, "env": "none of this file system"}
            options = last_options(self.path)
            return {**settings, **{name: options[name] for name in ("wal_recovery_mode",) if name in options}}
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
        handles = [] if self._given is None else [self._given]
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


def _close(rdict: Rdict) -> None:
    with suppress(Exception):  # a flush that fails after an I/O error; it is closed anyway, and what was synced is kept
        rdict.close()


def synced() -> WriteOptions:
    """Our own options, not the Rdict's, which may disable the log (rocksdict's default enables it) or its sync."""
    options = WriteOptions()
    options.sync = True
    return options


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
