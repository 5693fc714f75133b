"""The column families of dualwrite: the rows, changed under their locks, and the positions of consumer groups."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, Final

from dualwrite.errors import (
    DualWriteError,
    StoreCommitFailedError,
    StoreCommitUnknownError,
    StoredStateError,
    StoreUnavailableError,
)
from dualwrite.stores.identity import StoreIdentity
from dualwrite.stores.key_values import Attempts, RowChange
from dualwrite.stores.positions import (
    Move,
    Partition,
    Position,
    Positions,
    check_expected,
    in_order,
    parse_position,
    position_text,
)
from dualwrite.stores.rocksdb.database import Changes, Handle, OpenDatabase
from dualwrite.stores.rocksdb.locks import LockRequest
from dualwrite.stores.rocksdb.opening import CLOSED, STATE_FAMILY, is_closed, is_read_only, is_undecodable, sentence
from dualwrite.stores.rows import StateRow, document, parse_document
from dualwrite.stores.store_transaction import StoreTransaction

_IDENTITY_KEY: Final = "#store"
"""Stored next to the rows: no transactional id has a `#`."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.02, 1.0  # seconds


class StateFamily:
    """The rows of one database."""

    def __init__(self, database: OpenDatabase) -> None:
        self.database = database

    # --- reading ----------------------------------------------------------------------------------------------------------

    def row(self, transactional_id: str) -> StateRow | None:
        """The current row of an id."""
        text = self._text(transactional_id, "row", transactional_id)
        return None if text is None else parse_document(transactional_id, text)

    def identity(self) -> StoreIdentity | None:
        """The current identity of the database."""
        text = self._text(_IDENTITY_KEY, "id of the database", None)
        return None if text is None else StoreIdentity.parse(text)

    def _text(self, key: str, what: str, transactional_id: str | None) -> str | bytes | None:
        family = self.database.family(STATE_FAMILY)
        try:
            found = family.get(self.database.handle().text(key))
        except DualWriteError:
            raise
        except Exception as error:  # all that rocksdict raises
            if not is_undecodable(error):
                raise self.database.failed(f"reading the {what}", error, transactional_id) from error
            raise StoredStateError(
                f"The stored {what} can't be read.",
                transactional_id=transactional_id,
                cause=f"another program changed it ({sentence(error)})",
                next_step=f"nothing was changed; restore the {what}",
                text="",
            ) from error
        return found if found is None or isinstance(found, str | bytes) else repr(found)

    def ids(self, prefix: str) -> list[str]:
        """The ids whose row is not a tombstone, including those whose row can't be read: reading one raises the error."""
        family = self.database.family(STATE_FAMILY)
        start = self.database.handle().text(prefix)
        try:
            keys = []
            for key in family.keys(from_key=start):
                if not isinstance(key, type(start)) or not key.startswith(start):
                    break
                keys.append(key if isinstance(key, str) else key.decode(errors="replace"))
        except Exception as error:  # all that rocksdict raises
            raise self.database.failed("listing the ids", error) from error
        return sorted(key for key in keys if key != _IDENTITY_KEY and self._is_listed(key))

    def _is_listed(self, transactional_id: str) -> bool:
        try:
            row = self.row(transactional_id)
        except StoredStateError:
            return True
        return row is None or not row.forgotten

    # --- changing ---------------------------------------------------------------------------------------------------------

    def change(self, request: LockRequest, change: RowChange, timeout: float) -> Attempts:
        """Change one row under the lock of its id; see `KeyValueStore._change`.

        After an I/O error a database that we opened is opened again and `change` runs again, until the timeout.

        Raises:
            ClaimTimeoutError: Another thread held the lock.
            StoreUnavailableError: The database could not be written.
        """
        deadline = time.monotonic() + timeout
        attempts: list[tuple[StateRow | None, StateRow | None]] = []
        pause = _FIRST_PAUSE
        with self.database.locks.held(request, timeout):
            while True:
                try:
                    before = self.row(request.name)
                    after = change(before)
                    attempts.append((before, after))
                    if after is not None and after is not before:
                        self.database.write(self._stored(request.name, document(after)), request.doing, request.name)
                except StoreUnavailableError:
                    if not self.database.is_broken or time.monotonic() >= deadline:
                        raise
                else:
                    return attempts
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)

    def set_identity(self, identity: StoreIdentity, expected: StoreIdentity | None, timeout: float) -> bool:
        """Replace the identity if it is still the expected one, under a lock of its own."""
        request = LockRequest(_IDENTITY_KEY, "storing the database's id", is_id=False)
        with self.database.locks.held(request, timeout):
            if self.identity() != expected:
                return False
            self.database.write(self._stored(_IDENTITY_KEY, str(identity)), request.doing)
        return True

    def _stored(self, key: str, text: str) -> Changes:
        handle = self.database.handle()
        return {STATE_FAMILY: [(handle.text(key), handle.text(text))]}

    def commit(self, changes: Changes, row: StateRow, recorded_in: Handle) -> None:
        """Write a transaction's changes and its row, in one synced batch.

        `recorded_in` is the handle with which the row was recorded, under the lock that is still held. If the database has been
        reopened since, another process may have written to it.

        Raises:
            StoreCommitFailedError: Nothing was written, and nothing will be.
            StoreCommitUnknownError: The write failed, and may or may not be in the log.
        """
        database = self.database
        try:
            handle = database.handle()
            batch = database.batch(handle, {**changes, **self._stored(row.transactional_id, document(row))})
        except Exception as error:
            raise self._commit_failed(row.transactional_id, sentence(error)) from error
        if handle is not recorded_in:
            raise self._commit_failed(row.transactional_id, "it was reopened since the state was recorded")
        try:
            database.write_batch(handle, batch)
        except Exception as error:
            if is_closed(error) or is_read_only(error):
                cause = CLOSED if is_closed(error) else sentence(error)
                raise self._commit_failed(row.transactional_id, cause) from error
            by = "which the next claim does" if database.is_ours else "by the owner of the Rdict"
            raise StoreCommitUnknownError(
                f"RocksDB failed while writing the batch to {database.where}; it may or may not be in the write-ahead log.",
                transactional_id=row.transactional_id,
                cause=sentence(error),
                next_step=f"RocksDB refuses writes until it is opened again, {by}: fix the disk, claim the id again with the "
                "same expected fence, and read the row",
            ) from error

    def _commit_failed(self, transactional_id: str, cause: str) -> StoreCommitFailedError:
        return StoreCommitFailedError(
            f"The database {self.database.where} did not commit; nothing of the transaction was written.",
            transactional_id=transactional_id,
            cause=cause,
            next_step="check that it is open for writing and has all column families that the transaction uses; then run the "
            "transaction again",
        )


POSITION_FAMILY: Final = "kafka_consumed_offset"

_SEPARATOR: Final = b"\0"  # can't occur in a group's id or in a topic
_DIGITS: Final = 10
_LOCK_TIMEOUT: Final = 30.0  # seconds


class RocksDBPositions(Positions):
    """Only one process can open the database; its threads lock a position until their transaction has ended.

    Keys and values are bytes in either mode of rocksdict.

    `would_create` says that there is no database yet: reading must not create one at a mistyped path.
    """

    def __init__(self, database: Callable[[], OpenDatabase], would_create: Callable[[], bool]) -> None:
        self._database = database
        self._would_create = would_create

    def prepare(self) -> None:
        """Creates the column family."""
        self._database().make_family(POSITION_FAMILY)

    def read(self, group_id: str) -> Mapping[Partition, Position]:
        return {position.key: position for _, position in self._stored(group_id.encode() + _SEPARATOR)}

    def move(self, transaction: StoreTransaction, group_id: str, moves: Iterable[Move]) -> None:
        family = transaction.handle.column_family(POSITION_FAMILY)
        for one in in_order(moves):
            key = _key(group_id, one.key)
            transaction.handle.lock(_lock_name(key), f"moving the position {one.after}", _LOCK_TIMEOUT)
            check_expected(group_id, one, _found(one.key, family.get(key)))
            family.put(key, position_text(one.after))

    def reset(self, group_id: str, moves: Iterable[Move]) -> None:
        self.prepare()
        database, ordered = self._database(), in_order(moves)
        keys = [_key(group_id, one.key) for one in ordered]
        with _locked(database, keys, doing := "resetting positions"):
            for key, one in zip(keys, ordered, strict=True):
                check_expected(group_id, one, _found(one.key, database.family(POSITION_FAMILY).get(key)))
            texts = [position_text(one.after) for one in ordered]
            database.write({POSITION_FAMILY: zip(keys, texts, strict=True)}, doing)

    def forget(self, group_id: str) -> int:
        keys = sorted(key for key, _ in self._stored(group_id.encode() + _SEPARATOR))
        if keys:
            database = self._database()
            # a transaction that has moved one must have ended, or it would bring it back
            with _locked(database, keys, doing := "forgetting the positions of a group"):
                database.write({POSITION_FAMILY: [(key, None) for key in keys]}, doing)
        return len(keys)

    def groups(self, prefix: str = "") -> list[str]:
        return sorted({key.split(_SEPARATOR)[0].decode() for key, _ in self._stored(prefix.encode())})

    def _stored(self, start: bytes) -> Iterator[tuple[bytes, Position]]:
        if self._would_create():
            return
        self.prepare()
        database = self._database()
        try:
            for key, value in database.family(POSITION_FAMILY).items(from_key=start):
                if not isinstance(key, bytes) or not key.startswith(start):
                    break
                _, topic, partition = key.split(_SEPARATOR)
                yield key, parse_position((topic.decode(), int(partition)), value)
        except StoredStateError:
            raise
        except Exception as error:  # rocksdict has no exception class of its own
            raise database.failed("reading positions", error) from error


def _key(group_id: str, partition: Partition) -> bytes:
    return _SEPARATOR.join((group_id.encode(), partition[0].encode(), b"%0*d" % (_DIGITS, partition[1])))


@contextmanager
def _locked(database: OpenDatabase, keys: Iterable[bytes], doing: str) -> Iterator[None]:
    with ExitStack() as held:
        for key in keys:
            request = LockRequest(_lock_name(key), doing, is_id=False)
            held.enter_context(database.locks.held(request, _LOCK_TIMEOUT))
        yield


def _lock_name(key: bytes) -> str:
    """No transactional id begins with this character."""
    return _SEPARATOR.decode() + key.decode()


def _found(partition: Partition, value: Any) -> Position | None:
    return None if value is None else parse_position(partition, value)
