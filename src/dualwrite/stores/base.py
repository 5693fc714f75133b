"""The contract of a store: the database that decides, with one row per logical transactional id.

A custom store implements `TxnStateStore` and `StoreTransaction`; `rows` has what each change does to a row, `documents` a
row as text, and `dualwrite.testing.stores` the suite that shows whether the contract is kept.

The row (docs/how-it-works) is only changed under a claim. Each claim gets the next fencing token, `fence`. Every write but the
claim itself happens on the condition that the row's fence is still the claim's, so a process that was paused and replaced finds
out before it can do harm.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import Enum
from types import TracebackType
from typing import Any, ClassVar, Final, ParamSpec, Protocol, Self, TypeVar

from dualwrite.delivery import Delivery
from dualwrite.producer_kind import ProducerKind
from dualwrite.state import PreparedTxnState
from dualwrite.stores.identity import StoreIdentity, copied, moved
from dualwrite.stores.leases import LeaseStore
from dualwrite.stores.positions import Positions
from dualwrite.transactional_id import TransactionalId

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

MAX_OWNER_LENGTH: Final = 255
"""Characters of an owner; a longer one is truncated."""


@dataclass(frozen=True, slots=True)
class Claim:
    """The right to write the row of one id, until the next claim of it.

    Args:
        transactional_id: The logical id.
        fence: The claim's fencing token; every write to the row requires that it is still the row's.
        owner: Who claimed, for people: host, process id and the like, at most MAX_OWNER_LENGTH characters.
    """

    transactional_id: str
    fence: int
    owner: str


class LostKind(Enum):
    """Why an entry is in a row's `lost` list."""

    LOST = "LOST"
    """The database committed, Kafka provably aborted."""

    UNVERIFIED = "UNVERIFIED"
    """The database committed, and Kafka has no evidence left."""


@dataclass(frozen=True, slots=True)
class LostTransaction:
    """A transaction whose messages are lost or unverified; it stays in the row until it is acknowledged.

    Args:
        kind: What is known about it.
        state: The prepared state that the database had committed.
        generation: The generation of the id that it ran under.
        recorded_at: When recovery found it (UTC, aware).
        delivery: How many messages it had, where they are in the log, and when it was prepared; None if that was not stored.
        producer: Which kind of producer had prepared it; None if that is not known.
    """

    kind: LostKind
    state: PreparedTxnState
    generation: int
    recorded_at: datetime
    delivery: Delivery | None = None
    producer: ProducerKind | None = None


@dataclass(frozen=True, slots=True)
class StateRow:
    """What the database keeps for one logical transactional id.

    Args:
        transactional_id: The logical id.
        fence: The fencing token: number of the newest claim.
        generation: The newest generation taken (0: the logical id itself).
        generation_kind: Which kind of producer it was taken for.
        prepared_state: The state S that the last recorded transaction committed, or None.
        prepared_generation: The generation that S belongs to; has no meaning while S is None.
        delivery: Where the messages of S's transaction are in Kafka's log; None while S is None, if the transaction has no
            messages, and if an older release stored S.
        resolved_generation: Nothing is open on any generation up to this one; -1 at first.
        transaction_number: The number of the last recorded transaction, counted by its writer from 1 at each claim; 0 at
            each claim. With `fence` it names a transaction that sent no message and so has no S.
        lost: What recovery found lost or unverified and is not acknowledged yet.
        owner: Who owns the newest claim.
        updated_at: When the row last changed (UTC, aware).
        forgotten: Whether it is only a tombstone that keeps the fence.
        cluster_id: Kafka's `cluster.id`, of the cluster that the generations are on; empty if none was taken yet, and in a
            row last written by a release before revision 0005.
        store_id: Identifies the database in the ids that Kafka sees, from the generation `named_from` on (rule ST).
        named_from: The first generation whose Kafka id contains the store's id; None if there is no such generation.
        claim_token: Unique to the call that made the newest claim: by it a store recognizes its own claim whose commit was
            never answered.
    """

    transactional_id: str
    fence: int
    generation: int
    prepared_state: PreparedTxnState | None
    prepared_generation: int
    resolved_generation: int
    transaction_number: int
    lost: tuple[LostTransaction, ...]
    owner: str
    updated_at: datetime
    forgotten: bool = False
    generation_kind: ProducerKind = ProducerKind.LIBRDKAFKA
    claim_token: str = ""
    delivery: Delivery | None = None
    cluster_id: str = ""
    store_id: str = ""
    named_from: int | None = None

    def kafka_id(self, generation: int) -> str:
        """The id that Kafka sees for a generation."""
        is_named = self.named_from is not None and generation >= self.named_from
        return str(TransactionalId.of_row(self.transactional_id).at(generation, self.store_id if is_named else ""))

    def kind_of(self, generation: int) -> ProducerKind | None:
        """Which kind of producer a generation was taken for; None for one before the newest, whose kind is not kept."""
        return self.generation_kind if generation == self.generation else None

    @property
    def unresolved_generations(self) -> range:
        """The generations on which something may still be open; the resolved ones are not described again (rule SG)."""
        return range(self.resolved_generation + 1, self.generation + 1)

    @property
    def generations_to_look_at(self) -> tuple[int, ...]:
        """What recovery checks: the unresolved generations, and those of UNVERIFIED entries (rule UC)."""
        return tuple(sorted({*self.unresolved_generations, *(entry.generation for entry in self.unverified)}))

    @property
    def unverified(self) -> tuple[LostTransaction, ...]:
        """The entries of `lost` whose outcome may still be found."""
        return tuple(entry for entry in self.lost if entry.kind is LostKind.UNVERIFIED)


@dataclass(frozen=True, slots=True)
class Resolution:
    """One conditional change of a row by recovery. Fields left at their defaults change nothing.

    Args:
        clear_state: S is resolved: set it to None, and its delivery too.
        lost: Add this entry to `lost`, in the same write that clears S.
        resolved_generation: Nothing is open any more on the generations up to this one.
        resolved_entry: Remove this entry from `lost`: its outcome is known now (rule UC). Ignored if it is not there.
        cluster_id: The id has moved to this Kafka cluster.
        clear_lost: Remove every entry from `lost`: they belong to the database that this one is a copy of.
        clear_only: As `clear_state`, but only if S still is this state; otherwise S stays.
    """

    clear_state: bool = False
    lost: LostTransaction | None = None
    resolved_generation: int | None = None
    resolved_entry: LostTransaction | None = None
    cluster_id: str | None = None
    clear_lost: bool = False
    clear_only: PreparedTxnState | None = None


class TransactionThread(Protocol):
    """The thread of a transaction that a coroutine uses (docs/guides/asyncio.md).

    Attributes:
        ident: The thread's identifier, as `threading.get_ident()` returns it.
    """

    ident: int

    async def call(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a function in the thread and wait for it, without blocking the event loop; calls run one after another.

        A call that was sent can't be stopped: a cancellation of the coroutine is raised when the function has ended.

        Raises:
            BaseException: What the function raises.
            WriterClosedError: The coroutine's unit or block has ended.
        """


class StoreTransaction(ABC):
    """One database transaction, begun under a claim whose fence was current when it began.

    While the user's block runs, `handle` (and `session`) refuse to end the transaction: TransactionControlError. Once it has
    been committed or rolled back, they and every method but `rollback` raise WriterClosedError.
    """

    @property
    @abstractmethod
    def handle(self) -> Any:
        """What the user writes with: SQLAlchemy Connection, RocksDB batch, ZooKeeper transaction."""

    @property
    def session(self) -> Any:
        """A SQLAlchemy ORM Session on the same transaction, created at the first use.

        Raises:
            UsageError: The store does not support ORM sessions.
        """
        from dualwrite.errors import UsageError  # noqa: PLC0415  (only on this path)

        raise UsageError(f"{type(self).__name__} has no ORM session; write through `tx.db`.")

    # --- for coroutines: called in the event loop's thread, while the transaction's thread waits --------------------------

    def async_handle(self, thread: TransactionThread) -> Any:
        """What a coroutine writes with. By default `handle` itself: for stores that only collect changes before the commit.

        Args:
            thread: The transaction's thread, for what blocks.

        Raises:
            UsageError: The store's handle would block the event loop.
        """
        del thread
        return self.handle

    def async_session(self, thread: TransactionThread) -> Any:
        """An ORM session for a coroutine, on the same transaction.

        Raises:
            UsageError: The store does not support ORM sessions.
        """
        del thread
        return self.session

    def before_commit(self) -> None:  # noqa: B027  (only SQL has an ORM)
        """Called when the block ended without an error and Kafka's side is still open: this may still write and send messages.

        With an ORM session: runs its `before_commit` event, and flushes pending changes.

        Raises:
            Exception: What the user's listeners and the flush raise, unchanged; both sides are rolled back.
        """

    # --- units of work that share this transaction (group commit) -----------------------------------------------------------

    def begin_unit(self) -> None:
        """Begin the next unit: from here on, `undo_unit` undoes what this unit has written, and only that.

        The three methods are called only if the store has `undoes_units`.

        Raises:
            TransactionControlError: The unit before has ended the transaction itself.
            StoreError: Any other failure; the transaction must be rolled back.
        """
        from dualwrite.errors import UsageError  # noqa: PLC0415  (only on this path)

        raise UsageError(f"{type(self).__name__} can't undo a single unit of a transaction.")

    def end_unit(self) -> None:  # noqa: B027  (without a session nothing is pending)
        """End the unit: as `before_commit`, for what this unit has left pending. The next unit gets a session of its own.

        Raises:
            Exception: As `before_commit`; the unit must be undone.
            StoreCommitFailedError: The unit has left the transaction unable to commit; the unit must be undone.
        """

    def undo_unit(self, error: BaseException) -> None:  # noqa: B027  (never called without begin_unit)
        """Undo what was written since `begin_unit`; the transaction continues without it.

        Args:
            error: Why the unit is undone; it may show that the database has rolled back more than the unit.

        Raises:
            TransactionControlError: The unit has ended the transaction itself.
            StoreError: The unit can't be undone alone; the transaction must be rolled back.
        """

    def begin_units(self) -> None:
        """Begin units that are undone only together, each ended by `end_unit`. The database may answer later than it is asked.

        So an error of one may be raised in a later one, or by `end_units`. What a unit reads it gets at once. This and the two
        following methods are called only if the store says `undoing_units_costs`, and at most once in a transaction, before
        any `begin_unit`.

        Raises:
            StoreError: The transaction must be rolled back.
        """
        self.begin_unit()

    savepoints: int = 0
    """How many savepoints units have set themselves so far, as far as the store sees it; a group takes fewer units then."""

    answers_are_late: bool = False
    """Whether the database is still to answer some statements of the units; `end_units` waits for it."""

    def end_units(self) -> None:  # noqa: B027  (nothing is late unless a store makes it so)
        """Wait for what the database has not answered yet.

        Raises:
            Exception: The error of a statement; the units must be undone.
            StoreCommitFailedError: A unit has left the transaction unable to commit; the units must be undone.
        """

    def undo_units(self, error: BaseException) -> None:
        """Undo what was written since `begin_units`; see `undo_unit`."""
        self.undo_unit(error)

    @abstractmethod
    def record(
        self,
        state: PreparedTxnState | None,
        *,
        generation: int,
        transaction_number: int,
        delivery: Delivery | None = None,
    ) -> None:
        """Write S, its generation, delivery and number, on the condition that the fence is still the claim's.

        Called once, as the last write of the transaction. Pending changes of the ORM session are flushed first.

        If the database locks rows, a claim of the id waits from here to the end of the transaction. If it compares versions
        instead, the condition is checked at `commit`: a claim in between makes the commit fail.

        Raises:
            FencedError: There is a newer claim of the id. The transaction must be rolled back.
            TransactionControlError: The user's block has already ended the transaction; what it wrote before that may be
                committed, without its messages.
            StoreError: Any other failure of the store; the transaction must be rolled back, nothing was committed. It is
                retriable (StoreCommitFailedError) if the database aborted the transaction because of a conflict with another.
            Exception: What the flush of the user's own changes raises, unchanged.
        """

    def record_at_commit(
        self,
        state: PreparedTxnState | None,
        *,
        generation: int,
        transaction_number: int,
        delivery: Delivery | None = None,
    ) -> None:
        """As `record`, but may leave the write to `commit`, which then does both in one round trip and raises either's errors.

        Called instead of `record` under two-phase commit, where nothing has to be checked between the two.

        Raises: as for `record`.
        """
        self.record(state, generation=generation, transaction_number=transaction_number, delivery=delivery)

    is_surely_rolled_back: bool = False
    """Set by `commit` before it raises an error of `record`: certainly nothing was committed."""

    @abstractmethod
    def commit(self) -> None:
        """Commit: the commit point of the whole recipe.

        Raises:
            StoreCommitFailedError: Certainly not committed, and already rolled back.
            FencedError: The same, because the id was claimed again after `record`.
            StoreCommitUnknownError: The outcome is unknown. Any other exception, including KeyboardInterrupt, must also be
                treated as unknown, unless `is_surely_rolled_back` is set.
            DualWriteError: After `record_at_commit`: as for `record`, with `is_surely_rolled_back` set.
        """

    @abstractmethod
    def rollback(self) -> None:
        """Roll back and release everything. May be called at any time and more than once; does nothing after `commit`.

        A connection that can't roll back any more is closed, which makes the database roll back. Raises no `Exception`, only
        other exceptions such as KeyboardInterrupt.
        """


class TxnStateStore(ABC):
    """Keeps the rows. Safe to use from several threads, each with its own claims and transactions.

    Every method raises StoreUnavailableError if the database can't be reached, StateTableMissingError if it does not have our
    table, and StoredStateError if a row can't be read. No method waits for a lock indefinitely: `claim` waits for its
    `timeout`, the others for a limit of the store; after that they raise ClaimTimeoutError.

    After a broken connection a store repeats its own statements where that is harmless: calling `record_resolution`
    twice has the same effect as once (also for the entry in `lost`), and a generation may be skipped.
    """

    undoes_units: ClassVar[bool] = False
    """Whether its transactions can undo one unit of work alone, so that a pool can commit many units together."""

    undoing_units_costs: ClassVar[bool] = False
    """Whether that costs something for each unit, such as a savepoint: then the units of a group are first tried under one."""

    @property
    @abstractmethod
    def description(self) -> str:
        """The database's address for people and errors, without its password."""

    @abstractmethod
    def check(self) -> None:
        """Connect, and check that the table exists and has this release's schema."""

    def durability(self) -> Mapping[str, str]:
        """The settings that decide whether an acknowledged commit is durable, by their names in the database; may be empty.

        They are read over a connection of this store, because some can be set per user, database or connection.
        """
        return {}

    @property
    def leases(self) -> LeaseStore | None:
        """Leases on numbered ids, for pools; None if this store has none: then a pool uses fixed ids."""
        return None

    @property
    def positions(self) -> Positions | None:
        """Positions of consumer groups, for consuming as part of a dual write; None if this store keeps none."""
        return None

    # --- which database this is ---------------------------------------------------------------------------------------------

    detects_copies: ClassVar[bool] = True
    """Whether different marks prove that this is another database; False if a replica of the same database has other marks."""

    @abstractmethod
    def identity(self) -> StoreIdentity | None:
        """The database's id at Kafka, with the marks that are stored with it; None before the first generation.

        `acquire_generation` creates it and stores the marks of that moment with it. Every store on the database returns the
        same identity, and so does a store on a copy of it.
        """

    @abstractmethod
    def set_identity(self, identity: StoreIdentity, *, expected: StoreIdentity | None) -> bool:
        """Replace the identity if it still is `expected` (None: not set yet); return False if it is not.

        If the answer to its COMMIT is lost, this raises although the new identity may be stored.
        """

    def marks(self) -> frozenset[str]:
        """What distinguishes this database from a copy of it; empty if nothing does."""
        return frozenset()

    def why_no_marks(self) -> str | None:
        """Why there are no marks, if this kind of database usually has some: a sentence without a period, for `doctor`."""
        return None

    _told_marks: frozenset[str] = frozenset()  # the log was told of a database with these

    def check_original(self) -> None:
        """Check, before anything is claimed, that this database is the one its ids at Kafka were created in. Changes nothing.

        If it may be a copy, but need not be, this is logged, once by each store object.

        Raises:
            StoreCopiedError: It is a copy or has moved, and `detects_copies` is set.
        """
        identity, found = self.identity(), self.marks()
        if identity is None or not identity.marks or not found or found == identity.marks:
            return
        is_elsewhere = identity.is_elsewhere(found)
        error = copied(self.description, identity, found)
        if is_elsewhere and self.detects_copies:
            raise error
        if found == self._told_marks:
            return
        self._told_marks = found
        if is_elsewhere:
            log.warning("%s (If it is a replica that was promoted, `dualwrite db keep-store-id` ends this warning.)", error)
            return
        log.warning(
            "%s. If it is a copy whose original is still in use (for example on another machine), run `dualwrite db "
            "new-store-id` at once; if it is the original, `dualwrite db keep-store-id` ends this warning.",
            moved(self.description, identity, found),
        )

    def _own_identity(self) -> StoreIdentity:
        """The identity, created if it is missing; the current marks are added if there were none. For `acquire_generation`.

        Other marks are not replaced here, but by `dualwrite db keep-store-id` and `new-store-id`, once somebody has found out
        whether this is the original.
        """
        while True:
            kept, found = self.identity(), self.marks()
            if kept is None:
                self.set_identity(StoreIdentity.new(found), expected=None)
            elif kept.marks or not found:
                return kept
            else:
                self.set_identity(StoreIdentity(kept.store_id, found), expected=kept)

    @abstractmethod
    def claim(self, transactional_id: str, owner: str, *, timeout: float, expected_fence: int | None = None) -> Claim:
        """Raise the fence by one, in a transaction of its own; create the row if it is missing, revive it if forgotten.

        Waits for the lock of a transaction that is about to commit, so that what is read afterwards is decided. Sets
        `transaction_number` to 0 unless `expected_fence` is given. If the connection breaks, it is replaced and the claim
        repeated until the timeout.

        Args:
            transactional_id: The logical id.
            owner: Who claims, for people.
            timeout: Seconds to wait at most.
            expected_fence: Claim only if the fence still is this number (rule F8).

        Raises:
            FencedError: `expected_fence` was given and is no longer the row's fence (or the row is gone). A claim made by this
                same call whose commit was not answered does not count as another's.
            ClaimTimeoutError: The row stayed locked; the error names the blocker if the database reports it.
        """

    @abstractmethod
    def read(self, transactional_id: str) -> StateRow | None:
        """The row, or None; a tombstone has `forgotten` set."""

    @abstractmethod
    def read_claimed(self, claim: Claim) -> StateRow:
        """The row, on the condition that its fence still is the claim's.

        Raises:
            FencedError: There is a newer claim of the id.
        """

    @abstractmethod
    def record_resolution(self, claim: Claim, resolution: Resolution) -> None:
        """Change the row by a resolution, in a transaction of its own, on the condition that the fence still is the claim's.

        Raises:
            FencedError: There is a newer claim of the id; nothing was changed.
        """

    @abstractmethod
    def acquire_generation(self, claim: Claim, kind: ProducerKind, *, reuse: bool = False, cluster_id: str = "") -> int:
        """Take a generation for a producer, on the condition that the fence still is the claim's.

        From then on something may be open on that generation.

        Args:
            claim: The caller's claim.
            kind: Which kind of producer will use it.
            reuse: Continue with the newest generation if the row's `generation_kind` is `kind` and that kind can take over an
                id: then only `resolved_generation` is lowered below it. Otherwise, and without `reuse`, `generation` is raised
                by one; also if the newest has an UNVERIFIED entry (rule UG) or is not named by this store's id (rule ST). The
                row's `store_id` and `named_from` say which ids at Kafka the generations have.
            cluster_id: Kafka's `cluster.id`, which the row keeps from now on (rule CL); empty: unchanged.

        Raises:
            FencedError: There is a newer claim of the id; nothing was changed.
            ClusterMismatchError: The row belongs to another cluster; nothing was changed.
        """

    @abstractmethod
    def begin(self, claim: Claim) -> StoreTransaction:
        """Begin a database transaction, and check the fence in it before anything else happens (rule F2).

        Raises:
            FencedError: There is a newer claim of the id; no transaction is open.
        """

    def begin_group(self, claim: Claim) -> StoreTransaction:
        """As `begin`, for a transaction in which `begin_units` or `begin_unit` is called before anything is written.

        So a store can send what those would send together with BEGIN.
        """
        return self.begin(claim)

    def is_conflict(self, error: BaseException) -> bool:
        """Whether `error`, raised by the user's own statement, is a serialization failure or a deadlock.

        The database has then rolled back the transaction, and the same one may succeed if it runs again. Errors of this
        store's own methods have the attribute `retriable` for this.
        """
        del error
        return False

    def is_outage(self, error: BaseException) -> bool:
        """Whether `error`, raised by the user's own statement, says nothing about the statement, and may not come again.

        The database could not be reached or ended the connection, or another transaction kept a lock for too long. Errors of
        this store's own methods have the attribute `retriable` for this.
        """
        del error
        return False

    @abstractmethod
    def acknowledge(self, transactional_id: str) -> tuple[LostTransaction, ...]:
        """Remove the entries of `lost` and return them. Needs no claim: only recovery adds to the list."""

    @abstractmethod
    def list(self, prefix: str = "") -> list[str]:
        """The logical ids that begin with `prefix`, sorted, without tombstones."""

    @abstractmethod
    def forget(self, transactional_id: str) -> None:
        """Drop an id that is no longer used; its fence is raised and stays as a tombstone, so that no zombie can come back.

        Raises:
            NotResolvedError: The id still has something to recover or acknowledge; nothing was changed.
        """

    @abstractmethod
    def close(self) -> None:
        """Release what the store opened itself. What the user passed in stays open."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
