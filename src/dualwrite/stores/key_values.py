"""What the stores on key-value databases share: rows that are replaced as a whole, and transactions that are one batch.

A row is one text, and every change reads all of it and replaces it. A database adds how it reads a row, and one way to change
it with nothing in between: under a lock of its own (RocksDB), or on the condition of the version that was read (ZooKeeper).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Generic, NoReturn, TypeAlias, TypeVar

from dualwrite.errors import UsageError, WriterClosedError
from dualwrite.state import ProducerKind
from dualwrite.stores.base import TxnStateStore
from dualwrite.stores.rows import (
    Claim,
    LostTransaction,
    Resolution,
    StateRow,
    acknowledged,
    check_fence,
    claimed,
    forgotten,
    new_token,
    with_generation,
    with_resolution,
)
from dualwrite.stores.store_transaction import StoreTransaction, control_refused

RowChange: TypeAlias = Callable[[StateRow | None], StateRow | None]
Attempts: TypeAlias = Sequence[tuple[StateRow | None, StateRow | None]]


class KeyValueStore(TxnStateStore):
    """A store whose rows are texts by their ids; it implements all changes of rows by one method, `_change`."""

    undoes_units = True

    @abstractmethod
    def _change(
        self, transactional_id: str, change: RowChange, doing: str, *, owner: str = "", timeout: float | None = None
    ) -> Attempts:
        """Replace a row by what `change` makes of it, if it still is the row that `change` got; otherwise try again.

        Also tries again after a failure of the database, until the timeout.

        Args:
            transactional_id: The logical id.
            change: From the row to the one to write; if it returns the same row, or None, nothing is written. It must do so if
                it finds its own change already made.
            doing: What is done, to complete "while <doing>".
            owner: The claim's owner, for messages.
            timeout: Seconds to try at most; None: the store's own limit.

        Returns:
            The row before and after each attempt that was or may have been written; the last one certainly was.
        """

    def claim(
        self, transactional_id: str, owner: str, *, timeout: float, expected_fence: int | None = None, token: str | None = None
    ) -> Claim:
        change = partial(
            claimed,
            transactional_id=transactional_id,
            owner=owner,
            token=token or new_token(),  # recognizes the claim if it was written without an answer
            expected_fence=expected_fence,
        )
        return _last(self._change(transactional_id, change, "claiming the id", owner=owner, timeout=timeout)).claim

    def read_claimed(self, claim: Claim) -> StateRow:
        return check_fence(self.read(claim.transactional_id), claim)

    def record_resolution(self, claim: Claim, resolution: Resolution) -> None:
        def change(row: StateRow | None) -> StateRow:
            return with_resolution(check_fence(row, claim), resolution)

        self._change(claim.transactional_id, change, "resolving a transaction", owner=claim.owner)

    def acquire_generation(self, claim: Claim, kind: ProducerKind, *, reuse: bool = False, cluster_id: str = "") -> int:
        """A number that was written without an answer is skipped, which is harmless."""

        def change(row: StateRow | None) -> StateRow:
            store_id = self._own_identity().store_id  # read each time: it may have been replaced
            return with_generation(check_fence(row, claim), kind, reuse=reuse, store_id=store_id, cluster_id=cluster_id)

        attempts = self._change(claim.transactional_id, change, "acquiring a generation", owner=claim.owner)
        return _last(attempts).generation

    def acknowledge(
        self, transactional_id: str, *, only: Collection[LostTransaction] | None = None
    ) -> tuple[LostTransaction, ...]:
        def change(row: StateRow | None) -> StateRow | None:
            return acknowledged(row, only) if row is not None and row.lost else row

        removed: list[LostTransaction] = []
        for before, after in self._change(transactional_id, change, "acknowledging lost transactions"):
            if before is not None and after is not None:
                removed += [entry for entry in before.lost if entry not in (*after.lost, *removed)]
        return tuple(removed)

    def forget(self, transactional_id: str) -> None:
        self._change(transactional_id, lambda row: row and forgotten(row), "forgetting the id")


def _last(attempts: Attempts) -> StateRow:
    row = attempts[-1][1]
    assert row is not None  # no change of a claimed row returns None
    return row


class Batch(ABC):
    """What a user collects changes in, until the writer commits them with the row. Nothing is in the database before."""

    def __init__(self, transactional_id: str) -> None:
        self._transactional_id = transactional_id
        self._ended = False

    def check_open(self) -> None:
        """Raise WriterClosedError once the transaction has ended."""
        if self._ended:
            raise WriterClosedError(
                "The transaction that this batch belonged to has ended.", transactional_id=self._transactional_id
            )

    def end(self) -> None:
        """Accept no more changes. Called by the writer."""
        self._ended = True

    @abstractmethod
    def begin_unit(self) -> None:
        """Begin a unit: `undo_unit` does not undo the changes made so far."""

    @abstractmethod
    def undo_unit(self) -> None:
        """Undo the changes since `begin_unit`."""

    # --- what only the writer may do --------------------------------------------------------------------------------------

    def commit(self) -> NoReturn:
        """Refused."""
        self._refuse("commit()")

    def __enter__(self) -> NoReturn:
        self._refuse("`with` on the batch")

    def __exit__(self, *_: object) -> NoReturn:
        self._refuse("`with` on the batch")

    def _refuse(self, call: str) -> NoReturn:
        self.check_open()
        raise control_refused(call, self._transactional_id)


B = TypeVar("B", bound=Batch)


class BatchTransaction(StoreTransaction, Generic[B]):
    """A transaction whose changes are a batch."""

    def __init__(self, claim: Claim, batch: B) -> None:
        self._claim = claim
        self._batch = batch
        self._ended = False

    @property
    def handle(self) -> B:
        if self._ended:
            raise WriterClosedError("The transaction has ended.", transactional_id=self._claim.transactional_id)
        return self._batch

    def begin_unit(self) -> None:
        self.handle.begin_unit()

    def undo_unit(self, error: BaseException) -> None:
        del error
        self.handle.undo_unit()

    def rollback(self) -> None:
        self._ended = True
        self._batch.end()

    def _not_recorded(self) -> UsageError:
        return UsageError(
            "The transaction can't be committed: its state is not recorded yet.",
            transactional_id=self._claim.transactional_id,
            next_step="call record() first: it checks the fence",
        )
