"""An example of a custom store: rows and a user's data in memory, lost with the process, but it fulfils the whole contract.

`rows` defines what each change does to a row. A store has to write the new row on the condition that the fencing token is
still the claim's, together with the user's data or not at all. Here one lock and one assignment do both.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from dualwrite.errors import ClaimTimeoutError, UsageError, WriterClosedError
from dualwrite.state import Delivery, PreparedTxnState, ProducerKind
from dualwrite.stores import rows
from dualwrite.stores.base import (
    MAX_OWNER_LENGTH,
    Claim,
    LostTransaction,
    Resolution,
    StateRow,
    StoreTransaction,
    TxnStateStore,
)
from dualwrite.stores.identity import StoreIdentity
from dualwrite.stores.leases import Lease, LeaseStore
from dualwrite.stores.rows import document, parse_document

T = TypeVar("T")

_GONE: Final = object()


@dataclass(frozen=True)
class Content:
    """The database's content; it is replaced as a whole and never modified.

    Args:
        rows: The rows of the transactional ids, as text.
        data: The user's data.
    """

    rows: Mapping[str, str] = field(default_factory=dict)
    data: Mapping[Any, Any] = field(default_factory=dict)


class Database:
    """Plays the part of a database server: it outlives the stores. Change `content` only while holding `lock`."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.content = Content()
        self.identity: StoreIdentity | None = None
        self.leases: dict[str, tuple[str, float]] = {}  # the owner of each id, and until when

    def row(self, transactional_id: str) -> StateRow | None:
        """The current row of an id, or None."""
        text = self.content.rows.get(transactional_id)
        return None if text is None else parse_document(transactional_id, text)

    def write(self, row: StateRow, changes: Mapping[Any, Any] | None = None) -> None:
        """Write a row and a user's changes in one assignment, so that an interrupt comes either before or after all of it."""
        data = {**self.content.data, **(changes or {})}
        self.content = Content(
            {**self.content.rows, row.transactional_id: document(row)},
            {key: value for key, value in data.items() if value is not _GONE},
        )


class Batch:
    """The user's handle: its changes become visible at commit, and to this batch immediately."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self.changes: dict[Any, Any] = {}
        self.ended = False

    def get(self, key: Any) -> Any:
        """The value of a key, or None."""
        self.check_open()
        value = self.changes.get(key, self._database.content.data.get(key))
        return None if value is _GONE else value

    def put(self, key: Any, value: Any) -> None:
        """Set the value of a key."""
        self.check_open()
        self.changes[key] = value

    def delete(self, key: Any) -> None:
        """Remove a key."""
        self.put(key, _GONE)

    def check_open(self) -> None:
        """Raise if the transaction has ended; later changes would be lost."""
        if self.ended:
            raise WriterClosedError("The transaction that this batch belonged to has ended.")


class InMemoryTransaction(StoreTransaction):
    """See StoreTransaction; nothing is written to the database before `commit`."""

    def __init__(self, database: Database, claim: Claim) -> None:
        self._database = database
        self._claim = claim
        self._batch = Batch(database)
        self._record: Callable[[StateRow], StateRow] | None = None

    @property
    def handle(self) -> Batch:
        """See StoreTransaction."""
        self._batch.check_open()
        return self._batch

    def record(
        self,
        state: PreparedTxnState | None,
        *,
        generation: int,
        transaction_number: int,
        delivery: Delivery | None = None,
    ) -> None:
        """See StoreTransaction; also checks the fencing token, so that a fenced writer fails early."""
        self._batch.check_open()
        rows.check_fence(self._database.row(self._claim.transactional_id), self._claim)
        self._record = lambda row: rows.recorded(
            row, state, generation=generation, transaction_number=transaction_number, delivery=delivery
        )

    def commit(self) -> None:
        """See StoreTransaction; reads the row again: it may have changed since `record` (`acknowledge` needs no claim)."""
        self._batch.check_open()
        if self._record is None:
            raise UsageError("record() must be called before commit().", transactional_id=self._claim.transactional_id)
        self._batch.ended = True
        with self._database.lock:
            row = rows.check_fence(self._database.row(self._claim.transactional_id), self._claim)
            self._database.write(self._record(row), self._batch.changes)

    def rollback(self) -> None:
        """See StoreTransaction."""
        self._batch.ended = True


class InMemoryLeases(LeaseStore):
    """See LeaseStore. Leases are optional: with a store without leases, pools use fixed ids."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def acquire(self, ids: Collection[str], owner: str, *, seconds: float) -> frozenset[str]:
        """See LeaseStore."""
        owner = owner[:MAX_OWNER_LENGTH]
        with self._database.lock:
            now = time.monotonic()
            free = [name for name in ids if self._owner(name) in (None, owner) or self._database.leases[name][1] <= now]
            self._database.leases.update(dict.fromkeys(free, (owner, now + seconds)))
        return frozenset(free)

    def renew(self, ids: Collection[str], owner: str, *, seconds: float) -> frozenset[str]:
        """See LeaseStore."""
        owner = owner[:MAX_OWNER_LENGTH]
        with self._database.lock:
            ours = [name for name in ids if self._owner(name) == owner]
            self._database.leases.update({name: (owner, time.monotonic() + seconds) for name in ours})
        return frozenset(ours)

    def release(self, ids: Collection[str], owner: str) -> None:
        """See LeaseStore."""
        owner = owner[:MAX_OWNER_LENGTH]
        with self._database.lock:
            for name in [name for name in ids if self._owner(name) == owner]:
                del self._database.leases[name]

    def entries(self, prefix: str = "") -> list[Lease]:
        """See LeaseStore."""
        with self._database.lock:
            now, found = time.monotonic(), sorted(self._database.leases.items())
        return [Lease(name, owner, until - now) for name, (owner, until) in found if name.startswith(prefix)]

    def _owner(self, name: str) -> str | None:
        return self._database.leases.get(name, (None,))[0]


class InMemoryStore(TxnStateStore):
    """Stores the rows in a `Database`; see TxnStateStore for the contract of each method.

    Args:
        database: The database.
        name: The database's name, for messages.
    """

    recognizes_claims = True

    def __init__(self, database: Database, name: str = "") -> None:
        self._database = database
        self._name = name

    @property
    def description(self) -> str:
        """See TxnStateStore."""
        return f"memory://{self._name}"

    def check(self) -> None:
        """Do nothing: there is no connection to check."""

    @property
    def leases(self) -> LeaseStore:
        """See TxnStateStore."""
        return InMemoryLeases(self._database)

    def identity(self) -> StoreIdentity | None:
        """See TxnStateStore."""
        return self._database.identity

    def set_identity(self, identity: StoreIdentity, *, expected: StoreIdentity | None) -> bool:
        """See TxnStateStore."""
        with self._database.lock:
            if self._database.identity != expected:
                return False
            self._database.identity = identity
            return True

    def claim(
        self, transactional_id: str, owner: str, *, timeout: float, expected_fence: int | None = None, token: str | None = None
    ) -> Claim:
        """See TxnStateStore; no thread holds the lock for longer than it takes to copy a dict."""
        if not self._database.lock.acquire(timeout=timeout):
            raise ClaimTimeoutError(
                f"The database was still locked after {timeout:g} s.", transactional_id=transactional_id, timeout=timeout
            )
        try:
            before = self._database.row(transactional_id)
            token = token or rows.new_token()
            row = rows.claimed(before, transactional_id, owner, token=token, expected_fence=expected_fence)
            self._database.write(row)
        finally:
            self._database.lock.release()
        return Claim(transactional_id, row.fence, owner[:MAX_OWNER_LENGTH])

    def read(self, transactional_id: str) -> StateRow | None:
        """See TxnStateStore."""
        return self._database.row(transactional_id)

    def read_claimed(self, claim: Claim) -> StateRow:
        """See TxnStateStore."""
        return rows.check_fence(self.read(claim.transactional_id), claim)

    def record_resolution(self, claim: Claim, resolution: Resolution) -> None:
        """See TxnStateStore."""
        self._change(claim.transactional_id, lambda row: rows.with_resolution(rows.check_fence(row, claim), resolution))

    def acquire_generation(self, claim: Claim, kind: ProducerKind, *, reuse: bool = False, cluster_id: str = "") -> int:
        """See TxnStateStore."""
        own = {"store_id": self._own_identity().store_id, "cluster_id": cluster_id}
        row = self._change(
            claim.transactional_id,
            lambda row: rows.with_generation(rows.check_fence(row, claim), kind, reuse=reuse, **own),
        )[1]
        assert row is not None  # `check_fence` raises for None
        return row.generation

    def begin(self, claim: Claim) -> StoreTransaction:
        """See TxnStateStore."""
        self.read_claimed(claim)
        return InMemoryTransaction(self._database, claim)

    def acknowledge(
        self, transactional_id: str, *, only: Collection[LostTransaction] | None = None
    ) -> tuple[LostTransaction, ...]:
        """See TxnStateStore."""
        before, after = self._change(transactional_id, lambda row: row and rows.acknowledged(row, only))
        return () if before is None or after is None else tuple(entry for entry in before.lost if entry not in after.lost)

    def list(self, prefix: str = "") -> list[str]:
        """See TxnStateStore."""
        found = ((name, self.read(name)) for name in self._database.content.rows if name.startswith(prefix))
        return sorted(name for name, row in found if row is not None and not row.forgotten)

    def forget(self, transactional_id: str) -> None:
        """See TxnStateStore."""
        self._change(transactional_id, lambda row: row and rows.forgotten(row))

    def close(self) -> None:
        """Do nothing: nothing was opened."""

    def _change(
        self, transactional_id: str, change: Callable[[StateRow | None], StateRow | None]
    ) -> tuple[StateRow | None, StateRow | None]:
        """Apply `change` to the current row and write the result, unless it is None; return the row before and after."""
        with self._database.lock:
            before = self._database.row(transactional_id)
            after = change(before)
            if after is not None:
                self._database.write(after)
        return before, after


_databases: Final[dict[str, Database]] = {}


def store_from_url(url: str) -> InMemoryStore:
    """The entry point's function: the store for `memory://name`; the same name always gives the same database."""
    name = url.partition("://")[2]
    return InMemoryStore(_databases.setdefault(name, Database()), name)
