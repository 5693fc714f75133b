"""The contract of a store: the database that decides, with one row per logical transactional id.

A store of your own implements `TxnStateStore` and `StoreTransaction`; `rows` has what each change does to a row, `documents` a
row as text, and `dualwrite.testing.stores` the suite that shows whether the contract is kept.

The row (DESIGN.md §4) is only ever changed under a claim. A claim is a fence: the number of the newest claimant of an id.
Every write but the claim itself happens on the condition that the fence is still the claimant's own, so that a process
that was paused and replaced finds that out before it can do harm.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import Enum
from types import TracebackType
from typing import Any, ClassVar, Final, Self

from dualwrite.delivery import Delivery
from dualwrite.producer_kind import ProducerKind
from dualwrite.state import KafkaId, PreparedTxnState
from dualwrite.stores.identity import StoreIdentity, copied, mark_words

log = logging.getLogger(__name__)

MAX_OWNER_LENGTH: Final = 255
"""Characters of an owner; a longer one is cut."""


@dataclass(frozen=True, slots=True)
class Claim:
    """The right to write the row of one id, for as long as nobody claims it after us.

    Args:
        transactional_id: The logical id.
        fence: Our number; every write to the row requires that it is still the row's.
        owner: Who claimed, for people: host, process id and the like, at most MAX_OWNER_LENGTH characters.
    """

    transactional_id: str
    fence: int
    owner: str


class LostKind(Enum):
    """Why an entry stands in a row's `lost` list."""

    LOST = "LOST"
    """The database committed, Kafka provably aborted."""

    UNVERIFIED = "UNVERIFIED"
    """The database committed, and Kafka has no evidence left."""


@dataclass(frozen=True, slots=True)
class LostTransaction:
    """A transaction whose messages are lost or unverified; it stays in the row until somebody acknowledges it.

    Args:
        kind: What is known of it.
        state: The prepared state that the database had committed.
        generation: The generation of the id that it ran under.
        recorded_at: When recovery found it (UTC, aware).
        delivery: How many messages it had, where they lie in the log, and when it was prepared; None where that was not stored.
    """

    kind: LostKind
    state: PreparedTxnState
    generation: int
    recorded_at: datetime
    delivery: Delivery | None = None


@dataclass(frozen=True, slots=True)
class StateRow:
    """What the database keeps of one logical transactional id.

    Args:
        transactional_id: The logical id.
        fence: Number of the newest claim.
        generation: The newest generation taken (0: the logical id itself).
        generation_kind: Which kind of producer it was taken for.
        prepared_state: The state S that the last recorded transaction committed, or None.
        prepared_generation: The generation that S belongs to; of no meaning while S is None.
        delivery: Where the messages of S's transaction lie in Kafka's log; None while S is None, where the transaction has no
            message, and where an older release stored S.
        settled_generation: Nothing is open on any generation up to this one; -1 at first.
        transaction_number: The number of the last recorded transaction, counted by its writer from 1 at each claim; 0 at
            each claim. With `fence` it names a transaction that sent no message and so has no S.
        lost: What recovery found lost or unverified and nobody has acknowledged.
        owner: Who holds the newest claim.
        updated_at: When the row last changed (UTC, aware).
        forgotten: Whether it is only a tombstone that keeps the fence.
        cluster_id: Kafka's `cluster.id`, of the cluster that the generations are on; empty where none was taken yet, and in a
            row that only a release before revision 0005 has written.
        store_id: What names the database in the ids that Kafka sees, from the generation `named_from` on (rule ST).
        named_from: The first generation whose Kafka id has the store's id in it; None where none has.
        claim_token: Written with the newest claim, and of the very call that made it: a store knows by it a claim of its own
            whose commit was never answered.
    """

    transactional_id: str
    fence: int
    generation: int
    prepared_state: PreparedTxnState | None
    prepared_generation: int
    settled_generation: int
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
        return str(KafkaId(self.transactional_id, generation, self.store_id if is_named else ""))

    @property
    def unsettled_generations(self) -> range:
        """The generations on which something may still be open."""
        return range(self.settled_generation + 1, self.generation + 1)

    @property
    def generations_to_look_at(self) -> tuple[int, ...]:
        """What recovery looks at: the unsettled generations, and those of UNVERIFIED entries (rule UC)."""
        return tuple(sorted({*self.unsettled_generations, *(entry.generation for entry in self.unverified)}))

    @property
    def unverified(self) -> tuple[LostTransaction, ...]:
        """The entries of `lost` whose outcome may still be found."""
        return tuple(entry for entry in self.lost if entry.kind is LostKind.UNVERIFIED)


@dataclass(frozen=True, slots=True)
class Settlement:
    """One conditional change of a row by recovery. What is left at its default stays as it is.

    Args:
        clear_state: S is settled: set it to none, and its delivery with it.
        lost: Add this entry to `lost`, in the same write that clears S.
        settled_generation: Nothing is open up to this generation any more.
        resolved: Take this entry off `lost`: what became of it is known now (rule UC). An entry that is not there is passed
            over.
        cluster_id: The id has moved to this Kafka cluster.
        clear_lost: Take every entry off `lost`: they are those of the database that this one is a copy of.
    """

    clear_state: bool = False
    lost: LostTransaction | None = None
    settled_generation: int | None = None
    resolved: LostTransaction | None = None
    cluster_id: str | None = None
    clear_lost: bool = False


class StoreTransaction(ABC):
    """One database transaction, begun under a claim whose fence was current when it began.

    While the user's block runs, `handle` (and `session`) refuse to end the transaction: TransactionControlError. Once it has
    ended, by whichever end, they and every method but `rollback` raise WriterClosedError.
    """

    @property
    @abstractmethod
    def handle(self) -> Any:
        """What the user writes with: SQLAlchemy Connection, RocksDB batch, ZooKeeper transaction."""

    @property
    def session(self) -> Any:
        """A SQLAlchemy ORM Session on the same transaction, made at the first use.

        Raises:
            UsageError: This store has none.
        """
        from dualwrite.errors import UsageError  # noqa: PLC0415  (only on this path)

        raise UsageError(f"{type(self).__name__} has no ORM session; write through `tx.db`.")

    def before_commit(self) -> None:  # noqa: B027  (only SQL has an ORM)
        """The block has ended well, and Kafka's side is still open: what runs now may yet write, and send messages.

        With an ORM session: its event `before_commit`, and the flush of pending changes.

        Raises:
            Exception: What the user's listeners and the flush raise, as it is; both sides are rolled back.
        """

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

        From here to the end of the transaction a claim of the id waits, where the database locks rows. Where it does not (a
        version is compared instead), the condition holds at `commit`: a claim that comes between makes that fail.

        Raises:
            FencedError: Somebody else has claimed the id. The transaction must be rolled back.
            TransactionControlError: The user's block ended the transaction behind our back; what it wrote before that may be
                committed, without its messages.
            StoreError: Anything else of ours; the transaction must be rolled back, nothing was committed. It is retriable
                (StoreCommitFailedError) where the database gave up the transaction for another's sake.
            Exception: What the flush of the user's own changes raises, as it is.
        """

    @abstractmethod
    def commit(self) -> None:
        """Commit: the commit point of the whole recipe.

        Raises:
            StoreCommitFailedError: Surely not committed, and already rolled back.
            FencedError: The same, since somebody else has claimed the id after `record`.
            StoreCommitUnknownError: The outcome is unknown. Any other exception, KeyboardInterrupt included, must be taken
                for unknown as well.
        """

    @abstractmethod
    def rollback(self) -> None:
        """Roll back and release everything. May be called at any time and more than once; does nothing after `commit`.

        A connection that can't roll back any more is closed, which makes the database do it. Raises nothing but what is no
        `Exception` (KeyboardInterrupt).
        """


class TxnStateStore(ABC):
    """Keeps the rows. Safe to use from several threads, each with its own claims and transactions.

    Every method raises StoreUnavailableError when the database can't be reached, StateTableMissingError when it has no
    table of ours, StoredStateError when a row can't be read. No method waits for a lock without end: `claim` waits for its
    `timeout`, the others for a limit of the store, and both raise ClaimTimeoutError then.

    What a store sends by itself, it sends again after a broken connection where that is harmless: `settle` twice is `settle`
    once (also its entry for `lost`), a generation may be skipped.
    """

    @property
    @abstractmethod
    def description(self) -> str:
        """The database's address for people and errors, without its password."""

    @abstractmethod
    def check(self) -> None:
        """Connect, and see that the table is there and of this release."""

    def durability(self) -> Mapping[str, str]:
        """The settings that decide whether an acknowledged commit stays, by the database's names; empty where it has none.

        They are read from a connection of this store's, since some can be set for a user, a database or a connection.
        """
        return {}

    # --- which database this is ---------------------------------------------------------------------------------------------

    tells_copies: ClassVar[bool] = True
    """Whether other marks mean for sure that this is not the database that they were; not so where a replica has others."""

    @abstractmethod
    def identity(self) -> StoreIdentity | None:
        """The database's id at Kafka, with the marks that are kept beside it; None before the first generation was taken.

        `take_generation` makes it, and keeps the marks of then with it. Every store on the database gives the same, and so
        does a copy of it.
        """

    @abstractmethod
    def set_identity(self, identity: StoreIdentity, *, expected: StoreIdentity | None) -> bool:
        """Replace the identity, if it still is `expected` (None: there is none yet); False where it is not.

        Where the answer to its COMMIT is lost, the identity may be the new one although this raises.
        """

    def marks(self) -> frozenset[str]:
        """By what this database is told from a copy of it; empty where it can't be."""
        return frozenset()

    def check_original(self) -> None:
        """See that this is the database in which its ids at Kafka were made, before anything is claimed. Changes nothing.

        Raises:
            StoreCopiedError: It is a copy, or has moved (and `tells_copies`).
        """
        identity, found = self.identity(), self.marks()
        if identity is None or not identity.marks or not found or found == identity.marks:
            return
        if not identity.is_elsewhere(found):
            log.warning(
                "%s has changed its place from %s to %s. If it is a copy whose original is in use (on another machine, say): "
                "`dualwrite db new-store-id`, at once.",
                *(self.description, mark_words(identity.marks), mark_words(found)),
            )
            return
        error = copied(self.description, identity, found)
        if self.tells_copies:
            raise error
        log.warning("%s (A replica that has taken over: `dualwrite db keep-store-id` ends this warning.)", error)

    def _own_identity(self) -> StoreIdentity:
        """The identity, made if there is none yet, and with the marks of now unless it looks like a copy's.

        For `take_generation`.
        """
        while True:
            kept, found = self.identity(), self.marks()
            if kept is None:
                self.set_identity(StoreIdentity.new(found), expected=None)
            elif not found or found == kept.marks or kept.is_elsewhere(found):
                return kept
            else:
                self.set_identity(StoreIdentity(kept.store_id, found), expected=kept)

    @abstractmethod
    def claim(self, transactional_id: str, owner: str, *, timeout: float, expected_fence: int | None = None) -> Claim:
        """Raise the fence by one, in a transaction of its own, and make the row if it is missing or forgotten.

        Waits for the lock of a transaction that is about to commit, so that what is read afterwards is decided. Sets
        `transaction_number` to 0 unless `expected_fence` is given. Connections that break meanwhile are made anew until the
        time is over.

        Args:
            transactional_id: The logical id.
            owner: Who claims, for people.
            timeout: Seconds to wait at most.
            expected_fence: Claim only if the fence still is this number (rule F8).

        Raises:
            FencedError: `expected_fence` was given and is no longer the row's fence (or the row is gone). A claim of this very
                call whose commit was not answered does not count as somebody else's.
            ClaimTimeoutError: The row stayed locked; the error names the blocker where the database tells.
        """

    @abstractmethod
    def read(self, transactional_id: str) -> StateRow | None:
        """The row, or None; a tombstone is given with `forgotten` set."""

    @abstractmethod
    def read_claimed(self, claim: Claim) -> StateRow:
        """The row, on the condition that the fence still is the claim's.

        Raises:
            FencedError: It is not.
        """

    @abstractmethod
    def settle(self, claim: Claim, settlement: Settlement) -> None:
        """Change the row by a settlement, in a transaction of its own, on the condition of the fence.

        Raises:
            FencedError: Somebody else has claimed the id; nothing was changed.
        """

    @abstractmethod
    def take_generation(self, claim: Claim, kind: ProducerKind, *, reuse: bool = False, cluster_id: str = "") -> int:
        """Take a generation for a producer, on the condition of the fence; from then on something may be open on it.

        Args:
            claim: Ours.
            kind: Which kind of producer is to hold it.
            reuse: Go on with the newest generation, if the row's `generation_kind` is `kind` and that kind takes over: then
                only `settled_generation` is lowered below it. Otherwise, and without `reuse`, `generation` is raised by one;
                so it is where something stands as UNVERIFIED on the newest (rule UG), or the newest is not named by this
                store's id (rule ST). The row's `store_id` and `named_from` say which ids at Kafka the generations have.
            cluster_id: Kafka's `cluster.id`, which the row keeps from now on (rule CL); empty: it stays as it is.

        Raises:
            FencedError: Somebody else has claimed the id; nothing was changed.
            ClusterMismatchError: The row speaks of another cluster; nothing was changed.
        """

    @abstractmethod
    def begin(self, claim: Claim) -> StoreTransaction:
        """Begin a database transaction, and check the fence in it before anything else happens (rule F2).

        Raises:
            FencedError: Somebody else has claimed the id; nothing is open.
        """

    def is_conflict(self, error: BaseException) -> bool:
        """Whether `error`, raised by the user's own statement, says that the database gave up the transaction for another's.

        A serialization failure or a deadlock: nothing of the transaction is left, and the same one may succeed if it runs
        again. Errors of this store's own methods tell it by `retriable`.
        """
        del error
        return False

    @abstractmethod
    def acknowledge(self, transactional_id: str) -> tuple[LostTransaction, ...]:
        """Remove the entries of `lost` and return them. Needs no claim: only recovery adds to the list."""

    @abstractmethod
    def list(self, prefix: str = "") -> list[str]:
        """The logical ids that begin with `prefix`, sorted; tombstones are left out."""

    @abstractmethod
    def forget(self, transactional_id: str) -> None:
        """Drop an id that is no longer used; its fence is raised and stays as a tombstone, so that no zombie can come back.

        Raises:
            NotSettledError: Something of it is still to be recovered or acknowledged; nothing was changed.
        """

    @abstractmethod
    def close(self) -> None:
        """Release what the store opened itself. What the user handed over stays open."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
