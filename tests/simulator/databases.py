"""Databases in memory: one that locks rows, as SQL databases do, and the port to a key-value database (ZooKeeper, RocksDB).

What a change does to a row is dualwrite's own code, `dualwrite.stores.rows`; above the port, `KeyValueStore` is, too. A user's
rows are numbers, which a transaction adds.
"""

# ruff: noqa: ARG002  (the arguments are those of the contracts)

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Final, TypeVar

from dualwrite.deadline import Deadline
from dualwrite.errors import (
    ClaimTimeoutError,
    DualWriteError,
    StoreCommitFailedError,
    StoreCommitUnknownError,
    StoreUnavailableError,
    WriterClosedError,
)
from dualwrite.state import Delivery, PreparedTxnState, ProducerKind
from dualwrite.stores.base import Claim, LostTransaction, Resolution, StateRow, StoreTransaction, TxnStateStore
from dualwrite.stores.identity import StoreIdentity
from dualwrite.stores.key_value_store import KeyValueStore
from dualwrite.stores.key_values import BatchTransaction, ChangeBatch, ConflictError, Found, Key, KeyValues, Write
from dualwrite.stores.rows import (
    acknowledged,
    check_fence,
    claimed,
    forgotten,
    new_token,
    recorded,
    with_generation,
    with_resolution,
)
from simulator.world import Fate, Late, World

T = TypeVar("T")

_LOCK_SECONDS: Final = 1.0


@dataclass
class Database:
    """What survives the processes.

    Attributes:
        rows: dualwrite's rows.
        numbers: The user's rows.
        locks: Who holds the lock of a row.
        texts: What a key-value database has.
        order: The user's rows, in the order of their commits.
        era: How often it has gone back, which breaks every connection.
        before: Rows and numbers before the last commit of a user's transaction, and the rows after it.
    """

    name: str
    identity: StoreIdentity
    rows: dict[str, StateRow] = field(default_factory=dict)
    numbers: set[int] = field(default_factory=set)
    locks: dict[str, object] = field(default_factory=dict)
    texts: dict[Key, tuple[bytes, int]] = field(default_factory=dict)
    order: list[int] = field(default_factory=list)
    era: int = 0
    before: tuple[dict[str, StateRow], set[int], dict[str, StateRow]] | None = None

    def go_back(self) -> set[int] | None:
        """Become what it was before its last commit, if nothing was changed since: what it has forgotten."""
        if self.before is None or self.locks or self.rows != self.before[2]:
            return None
        gone = self.numbers - self.before[1]
        self.era += 1
        self.rows, self.numbers, self.before = self.before[0], self.before[1], None
        return gone


def _unavailable() -> StoreUnavailableError:
    return StoreUnavailableError("The database has not answered.")


class MemoryStore(TxnStateStore):
    """A store that locks a row from `record` to the end of COMMIT, or, with `record_at_commit`, only in COMMIT.

    Args:
        begins_late: Whether a transaction begins with its first statement, as on PostgreSQL.
    """

    def __init__(self, world: World, database: Database, *, begins_late: bool) -> None:
        self.world = world
        self.database = database
        self._begins_late = begins_late

    @property
    def description(self) -> str:
        return f"memory {self.database.name}"

    def check(self) -> None: ...

    def identity(self) -> StoreIdentity | None:
        return self.database.identity

    def set_identity(self, identity: StoreIdentity, *, expected: StoreIdentity | None) -> bool:
        if self.database.identity != expected:
            return False
        self.database.identity = identity
        return True

    # --- rows -------------------------------------------------------------------------------------------------------------

    def _query(self, what: str, effect: Callable[[], T]) -> T:
        return self.world.request(what, effect, _unavailable, attempts=2, changes=False)

    def _changed(self, name: str, what: str, change: Callable[[StateRow | None], StateRow], timeout: float = 2.0) -> StateRow:
        """A transaction that changes a row, and is repeated after a broken connection."""
        database, deadline = self.database, Deadline(timeout)

        def effect() -> StateRow:
            row = database.rows[name] = change(database.rows.get(name))
            return row

        for _ in range(2):
            while (holder := database.locks.get(name)) is not None:
                if deadline.expired:
                    raise ClaimTimeoutError("The row is locked.", transactional_id=name, timeout=timeout, blocker=None)
                self.world.pause(deadline.left, until=lambda held=holder: database.locks.get(name) is not held)
            fate = self.world.step(what)
            if name in database.locks:  # while the statement was on its way
                continue
            if fate is Fate.ANSWERED:
                return effect()
            if fate is not Fate.LOST:
                effect()
        raise _unavailable()

    def claim(
        self, transactional_id: str, owner: str, *, timeout: float, expected_fence: int | None = None, token: str | None = None
    ) -> Claim:
        name, token = transactional_id, token or new_token()
        what = f"claims {name}" if expected_fence is None else f"claims {name} if its fence is {expected_fence}"
        return self._changed(
            name, what, lambda row: claimed(row, name, owner, token=token, expected_fence=expected_fence), timeout
        ).claim

    def read(self, transactional_id: str) -> StateRow | None:
        return self._query(f"reads the row of {transactional_id}", lambda: self.database.rows.get(transactional_id))

    def read_claimed(self, claim: Claim) -> StateRow:
        return check_fence(self.read(claim.transactional_id), claim)

    def record_resolution(self, claim: Claim, resolution: Resolution) -> None:
        name = claim.transactional_id
        self._changed(
            name, f"resolves: {_in_words(resolution)}", lambda row: with_resolution(check_fence(row, claim), resolution)
        )

    def acquire_generation(self, claim: Claim, kind: ProducerKind, *, reuse: bool = False, cluster_id: str = "") -> int:
        def change(row: StateRow | None) -> StateRow:
            store_id = self.database.identity.store_id
            return with_generation(check_fence(row, claim), kind, reuse=reuse, store_id=store_id, cluster_id=cluster_id)

        name = claim.transactional_id
        return self._changed(name, f"acquires a generation of {name}{', again' if reuse else ''}", change).generation

    def acknowledge(
        self, transactional_id: str, *, only: Collection[LostTransaction] | None = None
    ) -> tuple[LostTransaction, ...]:
        row = self.database.rows.get(transactional_id)
        if row is None or not row.lost or transactional_id in self.database.locks:
            return ()
        after = self.database.rows[transactional_id] = acknowledged(row, only)
        return tuple(entry for entry in row.lost if entry not in after.lost)

    def list(self, prefix: str = "") -> list[str]:
        rows = self.database.rows
        return self._query(
            "lists the ids", lambda: sorted(n for n, r in rows.items() if n.startswith(prefix) and not r.forgotten)
        )

    def forget(self, transactional_id: str) -> None:
        self._changed(transactional_id, "forgets the id", lambda row: forgotten(row) if row else row)  # type: ignore[arg-type]

    # --- transactions -----------------------------------------------------------------------------------------------------

    def begin(self, claim: Claim) -> MemoryTransaction:
        begun = MemoryTransaction(self, claim)
        begun.check_fence()
        return begun

    def begin_soon(self, claim: Claim) -> MemoryTransaction:
        return MemoryTransaction(self, claim) if self._begins_late else self.begin(claim)

    def close(self) -> None: ...


def _in_words(resolution: Resolution) -> str:
    found = [name for name in resolution.__slots__ if getattr(resolution, name) not in (None, False)]
    return ", ".join(found)


class MemoryTransaction(StoreTransaction):
    """A transaction of a `MemoryStore`."""

    def __init__(self, store: MemoryStore, claim: Claim) -> None:
        self.is_fence_checked = False
        self._store = store
        self._world = store.world
        self._database = store.database
        self._claim = claim
        self._numbers: list[int] = []
        self._record: Callable[[StateRow | None], StateRow] | None = None
        self._at_commit = False
        self._ended = False
        self._era = store.database.era

    @property
    def handle(self) -> MemoryTransaction:
        if self._ended:
            raise WriterClosedError("The transaction has ended.")
        return self

    def write(self, number: int) -> None:
        """The user's statement, with which the transaction begins."""
        self.check_fence()
        self._numbers.append(number)

    def check_fence(self) -> None:
        if self.is_fence_checked:
            return
        row = check_fence(self._store.read(self._claim.transactional_id), self._claim)
        self.found_number = row.transaction_number
        self.is_fence_checked = True

    def _recorded(
        self, state: PreparedTxnState | None, generation: int, transaction_number: int, delivery: Delivery | None
    ) -> Callable[[StateRow | None], StateRow]:
        return lambda row: recorded(
            check_fence(row, self._claim),
            state,
            generation=generation,
            transaction_number=transaction_number,
            delivery=delivery,
        )

    def record(
        self,
        state: PreparedTxnState | None,
        *,
        generation: int,
        transaction_number: int,
        delivery: Delivery | None = None,
    ) -> None:
        self._record = self._recorded(state, generation, transaction_number, delivery)
        self._lock()
        fate = self._world.step(f"records {state}")
        if fate is not Fate.ANSWERED or self._era != self._database.era:
            self.rollback()
            raise _unavailable()
        self._record(self._database.rows.get(self._claim.transactional_id))

    def _lock(self) -> None:
        name, locks, deadline = self._claim.transactional_id, self._database.locks, Deadline(_LOCK_SECONDS)
        while name in locks:
            if deadline.expired:
                raise StoreUnavailableError("The row is locked.")
            self._world.pause(deadline.left, until=lambda: name not in locks)
        locks[name] = self
        process = self._world.current
        if process is not None:
            process.held.append(self.abandoned)

    def record_at_commit(
        self,
        state: PreparedTxnState | None,
        *,
        generation: int,
        transaction_number: int,
        delivery: Delivery | None = None,
    ) -> None:
        if not self._store._begins_late:
            self.record(state, generation=generation, transaction_number=transaction_number, delivery=delivery)
            return
        self._record, self._at_commit = self._recorded(state, generation, transaction_number, delivery), True

    def commit(self) -> None:
        name = self._claim.transactional_id
        fate = self._world.step(f"COMMITs {self._numbers}")
        self._ended = True
        if fate is Fate.DELAYED:
            self._world.late.append(Late(f"COMMIT of {self._numbers}", self._execute_quietly, self.release))
        elif fate is Fate.UNANSWERED:
            self._execute_quietly()
        elif fate is Fate.ANSWERED:
            try:
                self._execute()
            except DualWriteError:
                self.is_surely_rolled_back = True
                raise
            return
        else:
            self.release()
        raise StoreCommitUnknownError("COMMIT was not answered.", transactional_id=name)

    def _execute(self) -> None:
        """What the server does with the COMMIT."""
        name, database = self._claim.transactional_id, self._database
        assert self._record is not None
        if self._era != self._database.era:
            raise StoreCommitFailedError("The connection is broken.", transactional_id=name)
        try:
            if self._at_commit or database.locks.get(name) is self:
                row = self._record(database.rows.get(name))
                before = dict(database.rows), set(database.numbers)
                database.rows[name] = row
                database.numbers.update(self._numbers)
                database.order += self._numbers
                database.before = (*before, dict(database.rows))
        finally:
            self.release()
        self._world.committed()

    def _execute_quietly(self) -> None:
        try:
            self._execute()
        except DualWriteError:
            self._world.note("database", "rolls back, since there is a newer claim")

    def rollback(self) -> None:
        """A connection whose COMMIT is on its way is closed; the server executes it, or has not got it."""
        if self._world.is_dying:
            return
        self.abandoned()
        self._ended = True

    def abandoned(self) -> None:
        """The server notices that the connection is closed."""
        if not self._ended:
            self.release()

    def release(self) -> None:
        """The server ends the transaction."""
        if self._database.locks.get(self._claim.transactional_id) is self:
            del self._database.locks[self._claim.transactional_id]


# --- a key-value database -----------------------------------------------------------------------------------------------------


class ConnectionError(Exception):  # noqa: A001  (the client library's)
    """The connection to the simulated database is lost."""


class MemoryKeyValues(KeyValues):
    """The port to texts in memory."""

    errors: ClassVar[tuple[type[Exception], ...]] = (ConnectionError,)

    def __init__(self, world: World, database: Database) -> None:
        self._world = world
        self._database = database

    def read(self, keys: Sequence[Key], deadline: Deadline | None = None) -> list[Found | None]:
        texts = self._database.texts
        what = f"reads {', '.join(key[-1] for key in keys)}"
        found: list[Found | None] = self._world.request(
            what,
            lambda: [Found(*texts[key]) if key in texts else None for key in keys],
            ConnectionError,
            attempts=1,
            changes=False,
        )
        return found

    def children(self, key: Key, prefix: str = "") -> list[str]:
        texts = self._database.texts
        found: list[str] = self._world.request(
            "lists the ids",
            lambda: [each[-1] for each in texts if each[:-1] == key and each[-1].startswith(prefix)],
            ConnectionError,
            attempts=1,
            changes=False,
        )
        return found

    def multi(self, writes: Sequence[Write], deadline: Deadline | None = None) -> None:
        what = f"writes {', '.join('/'.join(write.key[-2:]) for write in writes)}"
        failed = self._world.request(what, lambda: self._written(writes), ConnectionError, attempts=1)
        if failed is not None:
            raise ConflictError(failed)

    def _written(self, writes: Sequence[Write]) -> Key | None:
        """Write all or nothing; the key that is not as it was found."""
        texts = self._database.texts
        for write in writes:
            stat = texts[write.key][1] if write.key in texts else None
            if stat != (None if write.found is None else write.found.stat):
                return write.key
        for write in writes:
            assert write.data is not None
            texts[write.key] = write.data, (0 if write.found is None else write.found.stat + 1)
            if write.key[0] == "numbers":
                self._database.numbers.add(int(write.key[1]))
                self._database.order.append(int(write.key[1]))
                self._world.committed()
        return None

    def passes(self, error: Exception) -> bool:
        return isinstance(error, ConnectionError)

    def translated(self, error: Exception, doing: str, transactional_id: str | None) -> DualWriteError:
        return StoreUnavailableError(f"The database has not answered while {doing}.", transactional_id=transactional_id)


class NumberBatch(ChangeBatch):
    """The changes of a transaction."""

    def write(self, number: int) -> None:
        self.add(Write(("numbers", str(number)), None, b""))


class MemoryBatchTransaction(BatchTransaction[MemoryKeyValues, NumberBatch]):
    """A transaction that is a batch."""

    next_step: ClassVar[str] = "run it again"
    title = "The database"

    def _write(self, batch: NumberBatch) -> None:
        try:
            self._keys.multi(list(batch.writes.values()))
        except ConnectionError as error:
            raise StoreCommitUnknownError(
                "The database has not answered.", transactional_id=self._claim.transactional_id
            ) from error


class MemoryKeyValueStore(KeyValueStore):
    """dualwrite's store above the port."""

    def __init__(self, world: World, database: Database) -> None:
        super().__init__(2.0)
        self._port = MemoryKeyValues(world, database)
        self.database = database
        database.texts.setdefault(("kafka_transaction_store",), (str(database.identity).encode(), 0))

    @property
    def _keys(self) -> MemoryKeyValues:
        return self._port

    @property
    def description(self) -> str:
        return f"memory {self.database.name}"

    def _transaction(self, claim: Claim, row: StateRow) -> StoreTransaction:
        return MemoryBatchTransaction(self._port, claim, NumberBatch(claim.transactional_id), row)

    def check(self) -> None: ...

    def close(self) -> None: ...
