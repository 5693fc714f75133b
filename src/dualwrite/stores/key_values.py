"""The port to key-value databases: texts by key, written only where nothing has changed since they were read; and transactions.

A database adds how it reads a key, lists the names below one, and writes several at once (RocksDB, ZooKeeper). What is stored
there, and what a store does with it, is in `dualwrite.stores.key_value_store`, once for all of them. Nothing is locked: whoever
writes first wins, and the other one reads again. A transaction is a batch that is collected in the client, and written with the
row in the same way.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Generic, NoReturn, TypeAlias, TypeVar

from dualwrite.deadline import Deadline, Pauses
from dualwrite.errors import (
    ClaimTimeoutError,
    DualWriteError,
    FencedError,
    StoreCommitFailedError,
    StoreError,
    UsageError,
    WriterClosedError,
)
from dualwrite.state import Delivery, PreparedTxnState
from dualwrite.stores.rows import Claim, StateRow, check_fence, document, parse_document, recorded
from dualwrite.stores.store_transaction import StoreTransaction, control_refused, refused

T = TypeVar("T")

Key: TypeAlias = tuple[str, ...]
"""A folder, and names in it: `(ROWS, "shop-1")`, `(POSITIONS, "billing", "orders", "0")`."""

ROWS: Final = "kafka_transaction_state"
"""The folder of the rows; the name is KIP-939's."""

STORE: Final = "kafka_transaction_store"
"""The key of the database's id and marks (`StoreIdentity`)."""

POSITIONS: Final = "kafka_consumed_offset"
"""The folder of the positions of consumer groups: group, topic, partition."""

_PAUSES: Final = 0.01, 0.5  # seconds
_READ_AGAIN_AFTER: Final = 0.5  # seconds


@dataclass(frozen=True, slots=True)
class Found:
    """What is stored under a key.

    Args:
        data: The text.
        stat: What the database compares in a write; None: the text.
    """

    data: bytes
    stat: Any = None


@dataclass(frozen=True, slots=True)
class Write:
    """A write that takes effect only if the key is as it was found.

    Args:
        key: The key.
        found: What was read; None: there was nothing.
        data: The new text; None removes the key.
        ephemeral: It shall end with the client's session, in a database that has sessions.
    """

    key: Key
    found: Found | None
    data: bytes | None
    ephemeral: bool = False


class ConflictError(Exception):
    """Nothing was written, because a key is not as it was found any more.

    Args:
        key: The key.
    """

    def __init__(self, key: Key) -> None:
        super().__init__(f"{'/'.join(key)} was changed by another")
        self.key = key


class KeyValues(ABC):
    """A database of texts by key. Safe to use from several threads.

    `read`, `confirmed`, `children` and `multi` raise the client library's errors unchanged; `query` and `change` run them.
    """

    errors: ClassVar[tuple[type[Exception], ...]]
    """What the client library raises."""

    @abstractmethod
    def read(self, keys: Sequence[Key], deadline: Deadline | None = None) -> list[Found | None]:
        """What is stored under each of the keys, as of this call or later."""

    def get(self, key: Key, deadline: Deadline | None = None) -> Found | None:
        """As `read`, of one key."""
        return self.read([key], deadline)[0]

    def confirmed(self, key: Key) -> Found | None:
        """As `get`; and what it returns was still there after this call began, even if servers disagree."""
        return self.get(key)

    @abstractmethod
    def children(self, key: Key, prefix: str = "") -> list[str]:
        """The names right below a key that begin with `prefix`, in no particular order."""

    @abstractmethod
    def multi(self, writes: Sequence[Write], deadline: Deadline | None = None) -> None:
        """Write all or nothing; what lies above a key is created and removed as needed.

        Raises:
            ConflictError: A key is not as it was found.
            StoreError: They are too large for one request.
        """

    @abstractmethod
    def passes(self, error: Exception) -> bool:
        """Whether the same call may succeed if it is repeated after this error."""

    def passes_for_reads(self, error: Exception) -> bool:
        """The same for a read, which has no time limit but those of its requests."""
        return self.passes(error)

    @abstractmethod
    def translated(self, error: Exception, doing: str, transactional_id: str | None) -> DualWriteError:
        """Our error for one of the client library. `doing` completes "… failed while <doing>"."""

    def query(self, work: Callable[[], T], doing: str, transactional_id: str | None = None) -> T:
        """Run `work`, and repeat it once if that may help.

        Raises:
            StoreError: The client library's errors, translated.
        """
        with self._translating(doing, transactional_id):
            try:
                return work()
            except self.errors as error:
                if not self.passes_for_reads(error):
                    raise
            return work()

    def change(self, work: Callable[[Deadline], T], doing: str, transactional_id: str | None, timeout: float) -> T:
        """Run `work`, which reads and writes, and repeat it after a conflict, and after an error if that may help.

        It must return the same when it runs again after its own success: the response may have been lost.

        Raises:
            ClaimTimeoutError: Others made their changes first, until the timeout.
            StoreError: The client library's errors, translated.
        """
        deadline, pauses, conflicts = Deadline(timeout), Pauses(*_PAUSES), 0
        with self._translating(doing, transactional_id):
            while True:
                try:
                    return work(deadline)
                except Exception as error:
                    is_conflict = isinstance(error, ConflictError)
                    conflicts += is_conflict
                    if not (is_conflict or self.passes(error)):
                        raise
                    if not deadline.pause(pauses):
                        if conflicts:
                            raise _overtaken(error, conflicts, doing, transactional_id, timeout) from error
                        raise

    @contextmanager
    def _translating(self, doing: str, transactional_id: str | None) -> Iterator[None]:
        try:
            yield
        except DualWriteError:
            raise
        except self.errors as error:
            raise self.translated(error, doing, transactional_id) from error


def _overtaken(error: Exception, conflicts: int, doing: str, transactional_id: str | None, timeout: float) -> ClaimTimeoutError:
    return ClaimTimeoutError(
        f"The time limit of {timeout:g} s for {doing} has passed; others changed its row in {conflicts} attempts.",
        transactional_id=transactional_id,
        cause=f"more than one process claims or recovers the id at once (the last attempt: {error or type(error).__name__})",
        next_step="run one writer for each transactional id, then try again",
        timeout=timeout,
        blocker=None,
    )


def row_in(transactional_id: str, found: Found | None) -> StateRow | None:
    """The row that was found under its key.

    Raises:
        StoredStateError: It is not a row.
    """
    return None if found is None else parse_document(transactional_id, found.data)


class ChangeBatch:
    """What a user collects changes in, until the writer commits them with the row. Nothing is in the database before."""

    def __init__(self, transactional_id: str) -> None:
        self._transactional_id = transactional_id
        self._ended = False
        self.writes: dict[Key, Write] = {}
        """What dualwrite writes with it."""
        self._writes_before_unit: dict[Key, Write] = {}

    def check_open(self) -> None:
        """Raise WriterClosedError once the transaction has ended."""
        if self._ended:
            raise WriterClosedError(
                "The transaction that this batch belonged to has ended.", transactional_id=self._transactional_id
            )

    def add(self, write: Write) -> None:
        """Add a write of dualwrite's own, in place of an earlier one of the same key. Called by the writer."""
        self.check_open()
        self.writes[write.key] = write

    def end(self) -> None:
        """Accept no more changes. Called by the writer."""
        self._ended = True

    def begin_unit(self) -> None:
        """Begin a unit: `undo_unit` does not undo the changes made so far."""
        self._writes_before_unit = dict(self.writes)

    def undo_unit(self) -> None:
        """Undo the changes since `begin_unit`."""
        self.writes = dict(self._writes_before_unit)

    # --- what only the writer may do --------------------------------------------------------------------------------------

    commit = refused("commit()")
    __enter__ = __exit__ = refused("`with` on the batch")

    def _refuse(self, call: str) -> NoReturn:
        self.check_open()
        raise control_refused(call, self._transactional_id)


B = TypeVar("B", bound=ChangeBatch)
K = TypeVar("K", bound=KeyValues)


class BatchTransaction(StoreTransaction, Generic[K, B]):
    """A transaction whose changes are a batch, begun with the row that was read last.

    A process that was paused may notice only at its next request that its connection is gone. It is better if a read fails
    then than if the write does, whose outcome would be unknown: so if some time has passed since `record`, `commit` reads once
    more.
    """

    next_step: ClassVar[str]
    """What to do after a commit that has certainly failed."""

    def __init__(self, keys: K, claim: Claim, batch: B, row: StateRow) -> None:
        self.found_number = row.transaction_number
        self._keys = keys
        self._claim = claim
        self._batch = batch
        self._ended = False
        self._read_at: float | None = None
        self._ending = threading.RLock()  # a rollback by another thread waits for a commit that has begun

    @property
    @abstractmethod
    def title(self) -> str:
        """The database, for messages."""

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

    def record(
        self,
        state: PreparedTxnState | None,
        *,
        generation: int,
        transaction_number: int,
        delivery: Delivery | None = None,
    ) -> None:
        """The row is only read; the batch accepts no more changes."""
        batch = self.handle
        read_at = time.monotonic()
        found, row = self._checked("recording the prepared state")
        row = recorded(row, state, generation=generation, transaction_number=transaction_number, delivery=delivery)
        batch.add(Write((ROWS, row.transactional_id), found, document(row).encode()))
        batch.end()
        self._read_at = read_at

    def commit(self) -> None:
        with self._ending:
            batch, read_at = self.handle, self._read_at
            if read_at is None:
                raise UsageError(
                    "The transaction can't be committed: its state is not recorded yet.",
                    transactional_id=self._claim.transactional_id,
                    next_step="call record() first: it checks the fence",
                )
            self.rollback()  # whatever happens now, this object has ended
            if time.monotonic() - read_at > _READ_AGAIN_AFTER:
                try:
                    self._checked("committing")
                except StoreError as error:
                    raise self._failed(f"nothing was sent: {error}") from error
            try:
                self._write(batch)
            except ConflictError as error:
                raise self._overtaken(error) from error

    @abstractmethod
    def _write(self, batch: B) -> None:
        """Write everything, or nothing.

        Raises:
            ConflictError: A key is not as it was found.
            StoreCommitFailedError: Nothing was written.
            StoreCommitUnknownError: It may have been written.
        """

    def rollback(self) -> None:
        with self._ending:
            self._ended = True
            self._batch.end()

    def _checked(self, doing: str) -> tuple[Found | None, StateRow]:
        """What is stored now, and the row in it, checked to have the claim's fence."""
        name = self._claim.transactional_id
        found = self._keys.query(lambda: self._keys.get((ROWS, name)), doing, name)
        return found, check_fence(row_in(name, found), self._claim)

    def _overtaken(self, error: ConflictError) -> DualWriteError:
        if error.key[0] != ROWS:
            return self._failed(f"{error}")
        try:
            self._checked("reading the row")
        except FencedError as replaced:
            return replaced
        except StoreError as unread:
            return self._failed(f"the row of the id was changed by another process, and can't be read now: {unread}")
        return self._failed("the row of the id was changed meanwhile, under the same claim (by an acknowledgement)")

    def _failed(self, cause: str, **facts: str) -> StoreCommitFailedError:
        return StoreCommitFailedError(
            f"{self.title} did not commit; nothing of the transaction was written.",
            transactional_id=self._claim.transactional_id,
            cause=cause,
            next_step=self.next_step,
            **facts,
        )
