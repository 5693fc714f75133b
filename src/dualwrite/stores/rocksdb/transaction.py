"""One business transaction on RocksDB: a batch, the lock of the id from `record` on, one synced write."""

from __future__ import annotations

import threading
import time

from dualwrite.delivery import Delivery
from dualwrite.errors import UsageError, WriterClosedError
from dualwrite.state import PreparedTxnState
from dualwrite.stores.rocksdb.batch import TransactionBatch
from dualwrite.stores.rocksdb.database import Handle
from dualwrite.stores.rocksdb.keys import Encoding
from dualwrite.stores.rocksdb.locks import LockRequest
from dualwrite.stores.rocksdb.state_family import StateFamily
from dualwrite.stores.rows import check_fence, recorded
from dualwrite.stores.state_row import Claim, StateRow
from dualwrite.stores.transaction import StoreTransaction


class RocksDBStoreTransaction(StoreTransaction):
    """See StoreTransaction. One that is dropped without commit or rollback releases the lock when it is garbage-collected.

    Args:
        rows: The database's rows.
        claim: The claim that it runs under.
        encoding: Which keys and values the database accepts.
        lock_timeout: Seconds to wait for the lock of the id.
    """

    def __init__(self, rows: StateFamily, claim: Claim, encoding: Encoding, *, lock_timeout: float) -> None:
        self._request = LockRequest(claim.transactional_id, claim.owner, "committing a transaction")
        self._rows = rows
        self._claim = claim
        self._batch = TransactionBatch(rows.database, encoding, claim.transactional_id)
        self._lock_timeout = lock_timeout
        self._recorded: tuple[StateRow, Handle] | None = None
        self._ending = threading.RLock()  # a rollback by another thread waits for a write that has begun
        self._ended = False

    @property
    def handle(self) -> TransactionBatch:
        """The batch that the user writes to."""
        self._check_open()
        return self._batch

    def begin_unit(self) -> None:
        """See StoreTransaction."""
        self.handle.begin_unit()

    def undo_unit(self, error: BaseException) -> None:
        """See StoreTransaction."""
        del error
        self.handle.undo_unit()

    def record(
        self,
        state: PreparedTxnState | None,
        *,
        generation: int,
        transaction_number: int,
        delivery: Delivery | None = None,
    ) -> None:
        """See StoreTransaction."""
        self._check_open()
        deadline = time.monotonic() + self._lock_timeout
        self._rows.lock(self._request, deadline, self._lock_timeout)
        self._check_open()  # another thread may have rolled back meanwhile: then nothing is held
        handle = self._rows.database.handle()
        row = check_fence(self._rows.row(self._claim.transactional_id), self._claim)
        row = recorded(row, state, generation=generation, transaction_number=transaction_number, delivery=delivery)
        self._recorded = (row, handle)

    def commit(self) -> None:
        """See StoreTransaction."""
        with self._ending:
            self._check_open()
            if self._recorded is None:
                raise UsageError(
                    "The transaction can't be committed before its state is recorded.",
                    transactional_id=self._claim.transactional_id,
                    next_step="call record() first: it checks the fence and acquires the lock of the id",
                )
            try:
                self._rows.commit(self._batch.changes(), *self._recorded)
            finally:
                self._end()

    def rollback(self) -> None:
        """See StoreTransaction."""
        with self._ending:
            self._end()

    def _end(self) -> None:
        self._ended = True
        self._batch.end()
        self._request.release()

    def _check_open(self) -> None:
        if self._ended:
            raise WriterClosedError("The transaction has ended.", transactional_id=self._claim.transactional_id)

    def __del__(self) -> None:
        request = getattr(self, "_request", None)
        if request is not None:
            request.release()
