"""The column family of the rows: read a row, change it under its lock, and commit it together with a user's changes."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from rocksdict import WriteBatch
from tenacity import Retrying, retry_if_exception, stop_after_delay, wait_exponential, wait_random

from dualwrite.errors import (
    ClaimTimeoutError,
    DualWriteError,
    StoreCommitFailedError,
    StoreCommitUnknownError,
    StoredStateError,
    StoreUnavailableError,
    UsageError,
)
from dualwrite.stores.identity import StoreIdentity
from dualwrite.stores.rocksdb.database import Handle, LockRequest, OpenDatabase, synced
from dualwrite.stores.rocksdb.opening import CLOSED, STATE_FAMILY, is_closed, is_read_only, is_undecodable, sentence
from dualwrite.stores.row import StateRow, document, parse_document

Key = bytes | str | int | float | bool
SortKey = tuple[int, bytes | int]
"""Compares as RocksDB's keys do."""

_BYTES, _STR, _INT, _FLOAT, _BOOL = range(1, 6)
_DOUBLE: Final = struct.Struct(">d")


@dataclass(frozen=True, slots=True)
class Pickled:
    """A value that rocksdict stores as a pickle, pickled at the `put`: later changes to the object have no effect.

    Args:
        data: The pickle.
    """

    data: bytes


@dataclass(frozen=True, slots=True)
class Encoding:
    """Which keys and values a database accepts, and how they are encoded.

    Args:
        raw: Whether it is in raw mode.
        dumps: Turns a value that rocksdict can't encode itself into bytes.
        loads: Turns these bytes into the value again.
    """

    raw: bool
    dumps: Callable[[Any], bytes]
    loads: Callable[[bytes], Any]

    def key(self, key: Any) -> tuple[Key, SortKey]:
        """The key as the database returns it, and its place in the order.

        Raises:
            UsageError: Its type can't be a key.
        """
        if self.raw:
            plain = self._bytes(key, "key")
            return plain, (_BYTES, plain)
        scalar = _scalar(key)
        match scalar:
            case None:
                raise UsageError(
                    f"A key of this database can't be a {type(key).__name__}.", next_step="use bytes, str, int, float or bool"
                )
            case bool():
                return scalar, (_BOOL, bytes([scalar]))
            case bytes():
                return scalar, (_BYTES, scalar)
            case str():
                return scalar, (_STR, _utf8(scalar))
            case int():
                return scalar, (_INT, scalar)
            case _:
                return scalar, (_FLOAT, _DOUBLE.pack(scalar))

    def value(self, value: Any) -> Key | Pickled:
        """The value as it is buffered until the commit.

        Raises:
            UsageError: Its type can't be a value.
            Exception: What `dumps` raises.
        """
        if self.raw:
            return self._bytes(value, "value")
        scalar = _scalar(value)
        if scalar is None:
            data = self.dumps(value)
            if not isinstance(data, bytes):
                raise UsageError(f"`dumps` returned a {type(data).__name__} for a value, not bytes.")
            return Pickled(data)
        if isinstance(scalar, str):
            _utf8(scalar)
        return scalar

    def loaded(self, value: Key | Pickled) -> Any:
        """What a read of a buffered value returns."""
        return self.loads(value.data) if isinstance(value, Pickled) else value

    def _bytes(self, given: Any, what: str) -> bytes:
        if isinstance(given, bytes):
            return given if type(given) is bytes else bytes(memoryview(given))
        raise UsageError(
            f"A {what} of this database must be bytes, not {type(given).__name__}: it is in rocksdict's raw mode.",
            next_step=f"encode the {what}; or create a new database with Options(raw_mode=False), which accepts Python types "
            "but can't be read by RocksDB clients in other languages",
        )


def _scalar(given: Any) -> Key | None:
    """The value, if rocksdict has a type for it: bool before int, and the plain value of a subclass; None if it has none."""
    if isinstance(given, bool):
        return given
    if isinstance(given, bytes):
        return given if type(given) is bytes else bytes(memoryview(given))
    for kind in (str, int, float):
        if isinstance(given, kind):
            plain: Key = given if type(given) is kind else getattr(kind, f"__{kind.__name__}__")(given)
            return plain
    return None


def _utf8(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"{text[:100]!r} can't be stored: it can't be encoded in UTF-8.", cause=str(error)) from error


Changes = Mapping[str, Iterable[tuple[Key, Key | Pickled | None]]]
"""By column family: keys and their new values, None to delete."""
RowChange = Callable[[StateRow | None], StateRow | None]

IDENTITY_KEY: Final = "#store"
"""Stored next to the rows: no transactional id has a `#`."""
_WAIT: Final = wait_exponential(multiplier=0.02, max=1.0) + wait_random(0, 0.02)


class StateFamily:
    """The rows of one database.

    Args:
        database: Where they are.
    """

    def __init__(self, database: OpenDatabase) -> None:
        self.database = database

    # --- reading ----------------------------------------------------------------------------------------------------------

    def row(self, transactional_id: str) -> StateRow | None:
        """The current row of an id."""
        family = self.database.family(STATE_FAMILY)
        try:
            text = family.get(self._key(self.database.handle(), transactional_id))
        except DualWriteError:
            raise
        except Exception as error:
            if is_undecodable(error):
                raise StoredStateError(
                    "The stored row can't be read.",
                    transactional_id=transactional_id,
                    cause=f"another program changed it ({sentence(error)})",
                    next_step="nothing was changed; restore the row",
                    text="",
                ) from error
            raise self.database.failed("reading the row", error, transactional_id) from error
        if text is None:
            return None
        return parse_document(transactional_id, text if isinstance(text, str | bytes) else repr(text))

    def identity(self) -> StoreIdentity | None:
        """The current identity of the database."""
        family = self.database.family(STATE_FAMILY)
        try:
            text = family.get(self._key(self.database.handle(), IDENTITY_KEY))
        except Exception as error:  # all that rocksdict raises
            raise self.database.failed("reading the database's id", error) from error
        return None if text is None else StoreIdentity.parse(text if isinstance(text, str | bytes) else repr(text))

    def set_identity(
        self, identity: StoreIdentity, expected: StoreIdentity | None, request: LockRequest, *, timeout: float
    ) -> bool:
        """Replace the identity if it is still the expected one, under its own lock, `request`; the caller releases it."""
        self.lock(request, time.monotonic() + timeout, timeout)
        if self.identity() != expected:
            return False
        try:
            handle = self.database.handle()
            batch = WriteBatch(raw_mode=handle.raw)
            text = str(identity)
            state = handle.rdict.get_column_family_handle(STATE_FAMILY)
            batch.put(self._key(handle, IDENTITY_KEY), text.encode() if handle.raw else text, state)
            handle.rdict.write(batch, synced())
        except Exception as error:  # all that rocksdict raises
            if not is_closed(error) and not is_read_only(error):
                self.database.write_failed()
            raise self.database.failed(request.doing, error) from error
        return True

    def ids(self, prefix: str) -> list[str]:
        """The ids whose row is not a tombstone, including those whose row can't be read: reading one raises the error."""
        family = self.database.family(STATE_FAMILY)
        start = self._key(self.database.handle(), prefix)
        try:
            keys = []
            for key in family.keys(from_key=start):
                if not isinstance(key, type(start)) or not key.startswith(start):
                    break
                keys.append(key if isinstance(key, str) else key.decode(errors="replace"))
        except Exception as error:  # all that rocksdict raises
            raise self.database.failed("listing the ids", error) from error
        return sorted(key for key in keys if key != IDENTITY_KEY and self._is_listed(key))

    def _is_listed(self, transactional_id: str) -> bool:
        try:
            row = self.row(transactional_id)
        except StoredStateError:
            return True
        return row is None or not row.forgotten

    # --- one row ----------------------------------------------------------------------------------------------------------

    def lock(self, request: LockRequest, deadline: float, timeout: float) -> None:
        """Acquire the lock of an id.

        Raises:
            ClaimTimeoutError: Another thread held it until the deadline.
        """
        blocker = self.database.locks.acquire(request, deadline)
        if blocker is not None:
            raise ClaimTimeoutError(
                f"The row of the id stayed locked for {timeout:g} s while {request.doing}.",
                transactional_id=request.transactional_id,
                cause=f"the lock is held by {blocker}",
                next_step="let that thread commit or roll back its transaction, then try again",
                timeout=timeout,
                blocker=str(blocker),
            )

    def change(self, request: LockRequest, change: RowChange, *, timeout: float) -> StateRow | None:
        """Change one row under the lock of its id, and return the resulting row.

        After an I/O error a database that we opened is opened again and `change` runs again, until the timeout.

        Args:
            request: For the lock of the id. The caller releases it.
            change: From the row to the row to write; the same row or None if there is nothing to write. It must return the
                same row if it finds its own change already made.
            timeout: Seconds to wait at most.

        Raises:
            ClaimTimeoutError: Another thread held the lock.
            StoreUnavailableError: The database could not be written.
        """
        deadline = time.monotonic() + timeout
        self.lock(request, deadline, timeout)
        retrying = Retrying(
            retry=retry_if_exception(lambda error: isinstance(error, StoreUnavailableError) and self.database.is_broken),
            stop=stop_after_delay(max(0.0, deadline - time.monotonic())),
            wait=_WAIT,
            reraise=True,
        )
        return retrying(self._changed, request, change)

    def _changed(self, request: LockRequest, change: RowChange) -> StateRow | None:
        before = self.row(request.transactional_id)
        after = change(before)
        if after is None or after is before:
            return before
        handle = self.database.handle()
        try:
            batch = self._batch(handle, {}, after)
        except Exception as error:  # the database was closed meanwhile
            raise self.database.failed(request.doing, error, request.transactional_id) from error
        try:
            handle.rdict.write(batch, synced())
        except Exception as error:  # all that rocksdict raises
            if not is_closed(error) and not is_read_only(error):
                self.database.write_failed()
            raise self.database.failed(request.doing, error, request.transactional_id) from error
        return after

    # --- transactions -----------------------------------------------------------------------------------------------------

    def commit(self, changes: Changes, row: StateRow, recorded_in: Handle) -> None:
        """Write a transaction's changes and its row, in one synced batch.

        Args:
            changes: The user's changes.
            row: The row as it was recorded, under the lock that is still held.
            recorded_in: The database handle at that time. If the database has been reopened since, another process may have
                written to it.

        Raises:
            StoreCommitFailedError: Nothing was written, and nothing will be.
            StoreCommitUnknownError: The write failed, and may or may not be in the log.
        """
        database = self.database
        try:
            handle = database.handle()
            batch = self._batch(handle, changes, row)
        except Exception as error:
            raise self._commit_failed(row.transactional_id, sentence(error)) from error
        if handle is not recorded_in:
            raise self._commit_failed(row.transactional_id, "it was reopened since the state was recorded")
        try:
            handle.rdict.write(batch, synced())
        except Exception as error:
            if is_closed(error) or is_read_only(error):
                cause = CLOSED if is_closed(error) else sentence(error)
                raise self._commit_failed(row.transactional_id, cause) from error
            database.write_failed()
            by = "which the next claim does" if database.is_ours else "by the owner of the Rdict"
            raise StoreCommitUnknownError(
                f"RocksDB failed while writing the batch to {database.where}; it may or may not be in the write-ahead log.",
                transactional_id=row.transactional_id,
                cause=sentence(error),
                next_step=f"RocksDB refuses writes until it is opened again, {by}: fix the disk, claim the id again with the "
                "same expected fence, and read the row",
            ) from error

    def _batch(self, handle: Handle, changes: Changes, row: StateRow) -> WriteBatch:
        """The batch, with current handles of the column families.

        After a batch with a column family that was dropped meanwhile, RocksDB refuses all writes.
        """
        batch = WriteBatch(raw_mode=handle.raw)
        batch.set_dumps(_data_of)
        for name, operations in changes.items():
            if not handle.has(name):
                raise self.database.unknown_family(name)
            family = handle.rdict.get_column_family_handle(name)
            for key, value in operations:
                if value is None:
                    batch.delete(key, family)
                else:
                    batch.put(key, value, family)
        text = document(row)
        state = handle.rdict.get_column_family_handle(STATE_FAMILY)
        batch.put(self._key(handle, row.transactional_id), text.encode() if handle.raw else text, state)
        return batch

    def _commit_failed(self, transactional_id: str, cause: str) -> StoreCommitFailedError:
        return StoreCommitFailedError(
            f"The database {self.database.where} did not commit; nothing of the transaction was written.",
            transactional_id=transactional_id,
            cause=cause,
            next_step="check that it is open for writing and has all column families that the transaction uses; then run the "
            "transaction again",
        )

    def _key(self, handle: Handle, transactional_id: str) -> Any:
        """In raw mode UTF-8; otherwise the str, which rocksdict stores as UTF-8 with a byte 2 before it."""
        return transactional_id.encode() if handle.raw else transactional_id


def _data_of(value: Pickled) -> bytes:
    """The function that rocksdict calls for a value that has none of its own types."""
    return value.data
