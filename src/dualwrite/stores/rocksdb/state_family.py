"""The column family of the rows: read a row, change it under its lock, and commit it together with a user's changes."""

from __future__ import annotations

import time
from typing import Final

from dualwrite.errors import (
    DualWriteError,
    StoreCommitFailedError,
    StoreCommitUnknownError,
    StoredStateError,
    StoreUnavailableError,
)
from dualwrite.stores.identity import StoreIdentity
from dualwrite.stores.key_values import Attempts, RowChange
from dualwrite.stores.rocksdb.database import Changes, Handle, OpenDatabase
from dualwrite.stores.rocksdb.locks import LockRequest
from dualwrite.stores.rocksdb.opening import CLOSED, STATE_FAMILY, is_closed, is_read_only, is_undecodable, sentence
from dualwrite.stores.row import StateRow, document, parse_document

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
