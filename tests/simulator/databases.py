"""A database in memory: the port of dualwrite's store on key-value databases, and transactions that lock the row as in SQL.

Above the port everything is dualwrite's own code, `KeyValueStore` and `BatchTransaction`. A user's rows are numbers, which a
transaction adds.
"""

# ruff: noqa: ARG002  (the arguments are those of the contracts)

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from types import SimpleNamespace
from typing import Any, ClassVar, Final

from dualwrite.deadline import Deadline
from dualwrite.errors import DualWriteError, StoreCommitUnknownError, StoreUnavailableError
from dualwrite.state import PreparedTxnState
from dualwrite.stores import key_values
from dualwrite.stores.base import Claim, StateRow, StoreTransaction
from dualwrite.stores.identity import StoreIdentity
from dualwrite.stores.key_value_store import KeyValueStore
from dualwrite.stores.key_values import (
    ROWS,
    STORE,
    BatchTransaction,
    ChangeBatch,
    ConflictError,
    Found,
    Key,
    KeyValues,
    Write,
    row_in,
)
from dualwrite.stores.rows import new_token
from simulator.world import Fate, Late, World

key_values.parse_document = lru_cache(1024)(key_values.parse_document)  # rows are values
NUMBERS: Final = "numbers"
_LOCK_SECONDS: Final = 1.0


@dataclass
class Database:
    """What survives the processes.

    Attributes:
        texts: dualwrite's rows and the user's, each with a number that no other version of it has.
        numbers: The user's rows.
        order: The same, in the order of their commits.
        lock: Who holds the lock of the row of this id: a transaction.
        claimants: Who has made the claim with this token: a process.
        era: How often it has gone back, which breaks every connection.
        before: What it was before the last commit of a user's transaction, and after it.
    """

    name: str
    store_id: str
    texts: dict[Key, tuple[bytes, int]] = field(default_factory=dict)
    numbers: set[int] = field(default_factory=set)
    order: list[int] = field(default_factory=list)
    locks: dict[Key, object] = field(default_factory=dict)
    claimants: dict[str, object] = field(default_factory=dict)
    era: int = 0
    before: tuple[dict[Key, tuple[bytes, int]], set[int], dict[Key, tuple[bytes, int]]] | None = None
    _versions: int = 0

    def __post_init__(self) -> None:
        self.texts.setdefault((STORE,), (str(StoreIdentity(self.store_id)).encode(), 0))

    def write(self, writes: Sequence[Write], holder: object, era: int) -> Key | None:
        """Write all or nothing; the key that is locked by another, or not as it was found, or whose connection is broken."""
        texts = self.texts
        for write in writes:
            stat = texts[write.key][1] if write.key in texts else None
            found = None if write.found is None else write.found.stat
            if stat != found or self.locks.get(write.key, holder) is not holder or era != self.era:
                return write.key
        added = [int(write.key[1]) for write in writes if write.key[0] == NUMBERS]
        before = (dict(texts), set(self.numbers)) if added else None
        for write in writes:
            self._versions += 1
            texts[write.key] = write.data or b"", self._versions
        if before is not None:
            self.numbers.update(added)
            self.order += added
            self.before = (*before, dict(texts))
        return None

    def row(self, transactional_id: str) -> StateRow | None:
        """The row, without a request."""
        key = ROWS, transactional_id
        return row_in(transactional_id, Found(self.texts[key][0])) if key in self.texts else None

    def go_back(self) -> set[int] | None:
        """Become what it was before its last commit, if nothing was changed since: what it has forgotten."""
        if self.before is None or self.locks or self.texts != self.before[2]:
            return None
        gone = self.numbers - self.before[1]
        self.era += 1
        self.texts, self.numbers, self.before = self.before[0], self.before[1], None
        return gone


class ConnectionError(Exception):  # noqa: A001  (the client library's)
    """The connection to the simulated database is lost."""


class MemoryKeyValues(KeyValues):
    """The port to a database in memory."""

    errors: ClassVar[tuple[type[Exception], ...]] = (ConnectionError,)

    def __init__(self, world: World, database: Database) -> None:
        self.world = world
        self.database = database

    def read(self, keys: Sequence[Key], deadline: Deadline | None = None) -> list[Found | None]:
        database = self.database
        found: list[Found | None] = self.world.request(
            f"reads {', '.join(key[-1] for key in keys)}",
            lambda: [Found(*database.texts[key]) if key in database.texts else None for key in keys],
            ConnectionError,
            attempts=1,
            changes=False,
        )
        return found

    def children(self, key: Key, prefix: str = "") -> list[str]:
        names = [each[-1] for each in self.database.texts if each[:-1] == key and each[-1].startswith(prefix)]
        found: list[str] = self.world.request("lists the ids", lambda: names, ConnectionError, attempts=1, changes=False)
        return found

    def multi(self, writes: Sequence[Write], deadline: Deadline | None = None) -> None:
        what = f"writes {', '.join('/'.join(write.key[-2:]) for write in writes)}"
        database, locks = self.database, self.database.locks
        if deadline is not None and not deadline.expired and any(write.key in locks for write in writes):
            self.world.pause(deadline.left, until=lambda: not any(write.key in locks for write in writes))
        refused = self.world.request(what, lambda: database.write(writes, self, database.era), ConnectionError, attempts=1)
        if refused is not None:
            raise ConflictError(refused)

    def passes(self, error: Exception) -> bool:
        return isinstance(error, ConnectionError)

    def translated(self, error: Exception, doing: str, transactional_id: str | None) -> DualWriteError:
        return StoreUnavailableError(f"The database has not answered while {doing}.", transactional_id=transactional_id)


class NumberBatch(ChangeBatch):
    """The changes of a transaction."""

    def __init__(self, transaction: MemoryTransaction, transactional_id: str) -> None:
        super().__init__(transactional_id)
        self._transaction = transaction

    def write(self, number: int) -> None:
        """The user's statement, with which the transaction may begin."""
        self._transaction.check_fence()
        self.add(Write((NUMBERS, str(number)), None, b""))


_NOT_READ: Final[Any] = SimpleNamespace(transaction_number=None)


class MemoryTransaction(BatchTransaction[MemoryKeyValues, NumberBatch]):
    """A transaction that is a batch; it may lock the row from the record to the end of COMMIT, as in SQL.

    Args:
        row: As it was read; None: the transaction begins with its first statement.
    """

    next_step: ClassVar[str] = "run it again"
    title = "The database"

    def __init__(self, keys: MemoryKeyValues, claim: Claim, row: StateRow | None, *, locks: bool) -> None:
        super().__init__(keys, claim, NumberBatch(self, claim.transactional_id), row or _NOT_READ)
        self.is_fence_checked = row is not None
        self._locks = locks
        self._key = ROWS, claim.transactional_id
        self._era = keys.database.era
        self._is_committing = self._is_sent = False

    def check_fence(self) -> None:
        if not self.is_fence_checked:
            self.found_number = self._checked("beginning a transaction")[1].transaction_number
            self.is_fence_checked = True

    def record(self, state: PreparedTxnState | None, **details: Any) -> None:
        if self._locks:
            self._lock()
        if self._era != self._keys.database.era:
            raise StoreUnavailableError("The connection is broken.")
        super().record(state, **details)

    def record_at_commit(self, state: PreparedTxnState | None, **details: Any) -> None:
        super().record(state, **details)

    def _lock(self) -> None:
        world, locks, key, deadline = self._keys.world, self._keys.database.locks, self._key, Deadline(_LOCK_SECONDS)
        while key in locks:
            if deadline.expired:
                raise StoreUnavailableError("The row is locked.")
            world.pause(deadline.left, until=lambda: key not in locks)
        locks[key] = self
        if world.current is not None:
            world.current.held.append(self._abandoned)

    def commit(self) -> None:
        self._is_committing = True  # then `rollback` only closes the connection
        try:
            super().commit()
        except DualWriteError as error:
            if not isinstance(error, StoreCommitUnknownError):
                self._release()
            raise

    def _write(self, batch: NumberBatch) -> None:
        world, numbers = self._keys.world, [key[1] for key in batch.writes if key[0] == NUMBERS]
        what = f"COMMIT of {', '.join(numbers)}"
        fate = world.step(what)
        self._is_sent = True
        if fate is Fate.DELAYED:
            world.late.append(Late(what, lambda: self._execute(batch), self._release))
        elif fate is Fate.LOST:
            self._release()
        else:
            refused = self._execute(batch)
            if fate is Fate.ANSWERED:
                if refused is not None:
                    raise ConflictError(refused)
                return
        raise StoreCommitUnknownError("COMMIT was not answered.", transactional_id=self._claim.transactional_id)

    def _execute(self, batch: NumberBatch) -> Key | None:
        """What the server does with the COMMIT."""
        refused = self._keys.database.write(list(batch.writes.values()), self, self._era)
        self._release()
        if refused is None:
            self._keys.world.committed()
        return refused

    def rollback(self) -> None:
        """A connection whose COMMIT is on its way is closed; the server executes it, or has not got it."""
        if not self._keys.world.is_dying:
            super().rollback()
            if not self._is_committing:
                self._release()

    def _abandoned(self) -> None:
        """The server notices that the connection is closed."""
        if not self._is_sent:
            self._release()

    def _release(self) -> None:
        """The server ends the transaction."""
        if self._keys.database.locks.get(self._key) is self:
            del self._keys.database.locks[self._key]


class MemoryStore(KeyValueStore):
    """dualwrite's store above the port.

    Args:
        locks: Whether a transaction locks its row, as in SQL databases.
        begins_late: Whether it begins with its first statement, and records in COMMIT, as on PostgreSQL.
    """

    def __init__(self, world: World, database: Database, *, locks: bool, begins_late: bool) -> None:
        super().__init__(2.0)
        self._port = MemoryKeyValues(world, database)
        self._locks = locks
        self._begins_late = begins_late

    @property
    def _keys(self) -> MemoryKeyValues:
        return self._port

    @property
    def description(self) -> str:
        return f"memory {self._port.database.name}"

    def _transaction(self, claim: Claim, row: StateRow | None) -> StoreTransaction:
        return MemoryTransaction(self._port, claim, row, locks=self._locks)

    def claim(self, transactional_id: str, owner: str, *, token: str | None = None, **details: Any) -> Claim:
        token = token or new_token()
        self._port.database.claimants[token] = self._port.world.current
        return super().claim(transactional_id, owner, token=token, **details)

    def begin_soon(self, claim: Claim) -> StoreTransaction:
        return self._transaction(claim, None) if self._begins_late else self.begin(claim)

    def check(self) -> None: ...

    def close(self) -> None: ...
