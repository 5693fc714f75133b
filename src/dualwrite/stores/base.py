"""The contract of a store: the database that decides, with one row per logical transactional id.

A custom store implements `TxnStateStore` and `StoreTransaction`, and can import everything that the contract names from here.
`dualwrite.stores.rows` defines what each change does to a row, and the row as text; `dualwrite.testing.stores` is the suite
that checks whether a store fulfils the contract.

The row (docs/how-it-works) is only changed under a claim. Each claim gets the next fencing token, `fence`. Every write except
the claim itself is made on the condition that the row's fence is still the claim's, so a process that was paused and replaced
is stopped before it can do harm.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from types import TracebackType
from typing import Any, ClassVar, Self, TypeVar

from dualwrite.errors import UsageError
from dualwrite.failpoints import hit
from dualwrite.observability.outages import database_at
from dualwrite.state import ProducerKind
from dualwrite.stores.identity import StoreIdentity
from dualwrite.stores.journal import JournalStore
from dualwrite.stores.leases import LeaseStore
from dualwrite.stores.positions import Positions
from dualwrite.stores.rows import (
    MAX_OWNER_LENGTH,
    Acquiring,
    Claim,
    ClaimedLanes,
    LostKind,
    LostTransaction,
    Republished,
    Resolution,
    StateRow,
    elsewhere_in,
    none_elsewhere,
    on_cluster,
)
from dualwrite.stores.store_transaction import JoinedUnit, StoreTransaction, TransactionThread, UsersTransaction
from dualwrite.transactional_id import LANE_MARK, further_lanes, name_of

__all__ = [
    "MAX_OWNER_LENGTH",
    "Acquiring",
    "Claim",
    "ClaimedLanes",
    "LostKind",
    "LostTransaction",
    "Republished",
    "Resolution",
    "StateRow",
    "StoreTransaction",
    "TransactionThread",
    "TxnStateStore",
]

log = logging.getLogger(__name__)

U = TypeVar("U", bound=JoinedUnit)


class TxnStateStore(ABC):
    """Keeps the rows. Safe to use from several threads, each with its own claims and transactions.

    Every method raises StoreUnavailableError if the database can't be reached, StateTableMissingError if it does not have our
    table, and StoredStateError if a row can't be read. No method waits for a lock indefinitely: `claim` waits for its
    `timeout`, the others for a limit of the store; after that they raise ClaimTimeoutError, or StoreUnavailableError if `begin`
    waited for the lock of a whole database.

    After a broken connection a store repeats its own statements where that is harmless: calling `record_resolution`
    twice has the same effect as once (also for the entry in `lost`), and a generation may be skipped.
    """

    undoes_units: ClassVar[bool] = False
    """Whether its transactions can undo one unit of work alone, so that a pool can commit many units together."""

    units_need_savepoints: ClassVar[bool] = False
    """Whether undoing one unit alone needs a savepoint, which costs a statement: a pool first tries a group under one."""

    has_local_settings: bool = False
    """Whether its transactions have settings that end with them: `StoreTransaction.set_local`."""

    @property
    def most_side_by_side(self) -> int:
        """How many transactions may run side by side as far as this store is concerned; below 3 a pool runs few, in turn.

        With more, a pool tries whether its calls become faster. So it is the number of connections that are kept, for a server;
        it is 2 for a database without a network in between, and for one that permits one writer at a time.
        """
        return 2

    @property
    @abstractmethod
    def description(self) -> str:
        """The database's address, for messages, without its password."""

    @property
    def is_local(self) -> bool:
        """Whether the database is a file of this machine: then waiting means waiting for another process's lock."""
        return self.description.startswith(("sqlite", "rocksdb"))

    @abstractmethod
    def check(self) -> None:
        """Connect, and check that the table exists and has this release's schema."""

    def check_rights(self, *uses: str) -> None:  # noqa: B027  (only SQL databases have such privileges)
        """Check that the connection's role may do what these uses need, such as "writer", "pool" and "journal".

        Raises:
            StoreError: It may not; the error names everything that is missing.
        """

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

    @property
    def journal(self) -> JournalStore | None:
        """Journals, for writing while Kafka is down; None if this store keeps none."""
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

        If the response to its COMMIT is lost, this raises although the new identity may be stored.
        """

    def marks(self) -> frozenset[str]:
        """What distinguishes this database from a copy of it; empty if nothing does."""
        return frozenset()

    def why_no_marks(self) -> str | None:
        """Why there are no marks, if this kind of database usually has some: a sentence without a period, for `doctor`."""
        return None

    _logged_marks: frozenset[str] = frozenset()  # of the database that was logged last

    def check_original(self) -> None:
        """Check, before anything is claimed, that this database is the one its ids at Kafka were created in. Changes nothing.

        If that is uncertain, a warning is logged, once by each store object.

        Raises:
            StoreCopiedError: It is a copy or has moved, and `detects_copies` is set.
        """
        self._check_marks(self.identity(), self.marks())

    def _check_marks(self, identity: StoreIdentity | None, found: frozenset[str]) -> None:
        """`check_original`, for an identity and marks that have been read."""
        doubt = None if identity is None else identity.doubt(self.description, found)
        if doubt is not None and not isinstance(doubt, str) and self.detects_copies:
            raise doubt
        if doubt is None or found == self._logged_marks:
            return
        self._logged_marks = found
        text = "%s (If it is a replica that was promoted, `dualwrite db keep-store-id` ends this warning.)"
        if isinstance(doubt, str):
            text = (
                "%s. If it is a copy whose original is still in use (for example on another machine), run `dualwrite db "
                "new-store-id` at once; if it is the original, `dualwrite db keep-store-id` ends this warning."
            )
        log.warning(text, f"{doubt}")

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
    def claim(
        self, transactional_id: str, owner: str, *, timeout: float, expected_fence: int | None = None, token: str | None = None
    ) -> Claim:
        """Raise the fence by one, in a transaction of its own; create the row if it is missing, revive it if forgotten.

        A forgotten row comes back without a `cluster_id`: nothing is open on any cluster, and the id may be opened on another.
        Waits for the lock of a transaction that is about to commit, so that what is read afterwards is final. Sets
        `transaction_number` to 0 unless `expected_fence` is given. If the connection breaks, it is replaced and the claim
        repeated until the timeout.

        Args:
            transactional_id: The logical id.
            owner: Who claims, as text for people.
            timeout: Seconds to wait at most.
            expected_fence: Claim only if the fence still is this number (rule F8).
            token: The caller's name for this claim, stored as the row's `claim_token`; at most 32 characters; None: the call
                makes its own. If a claim got no answer, the caller repeats it with the same token.

        Raises:
            FencedError: `expected_fence` was given and is no longer the row's fence (or the row is gone). If the row's newest
                claim has the same token, it is the caller's own, whose COMMIT got no response: then it is returned instead.
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
            FencedError: There is a newer claim of the id. If the response to an earlier attempt of this call was lost, that
                attempt may have changed the row.
            TransactionChangedError: With `republished`: its entry is not in the row any more; nothing was changed.
            StoreError: The database could not be reached, or refused; the change may have been written.
        """

    @abstractmethod
    def acquire_generation(self, claim: Claim, kind: ProducerKind, *, reuse: bool = False, cluster_id: str = "") -> int:
        """Acquire a generation for a producer, on the condition that the fence still is the claim's.

        From then on a transaction may be open on that generation.

        Args:
            claim: The caller's claim.
            kind: Which kind of producer will use it.
            reuse: Continue with the newest generation if the row's `generation_kind` is `kind` and that kind can take over an
                id: then only `resolved_generation` is lowered below it. Otherwise, and without `reuse`, `generation` is raised
                by one; also if the newest has an UNVERIFIED entry (rule UG) or is not named by this store's id (rule ST). The
                row's `store_id` says which ids at Kafka the generations have.
            cluster_id: Kafka's `cluster.id`, which the row keeps from now on (rule CL); empty: unchanged.

        Raises:
            FencedError: There is a newer claim of the id; nothing was changed.
            ClusterMismatchError: The row belongs to another cluster; nothing was changed.
        """

    # --- several rows at once -----------------------------------------------------------------------------------------------

    # An opening calls these with all lanes of its id. They work row by row, unless a store saves round trips by its own.

    def look_at(self, lanes: Sequence[str]) -> tuple[StateRow, ...]:
        """Before anything is claimed: `check_original`, and the rows of an id.

        Args:
            lanes: Ids of lanes, lane 0 first.

        Returns:
            The rows of these lanes, as `read` returns them, and of all other lanes of the id that `list` would return.

        Raises: as `check_original`.
        """
        found = [self.read(lane) for lane in lanes]
        self.check_original()
        found += [self.read(lane) for lane in further_lanes(self.list(lanes[0] + LANE_MARK), lanes)]
        return tuple(row for row in found if row is not None)

    def claim_lanes(
        self,
        lanes: Sequence[str],
        owner: str,
        *,
        timeout: float,
        cluster_id: str | None,
        expected_fence: int | None = None,
        token: str | None = None,
        acquiring: Acquiring | None = None,
    ) -> ClaimedLanes:
        """Claim an id with all its lanes: these, and all other lanes of it that have a row. Lane 0 is claimed first.

        The other rows are listed when lane 0 has been claimed. Thus none is missed that an earlier claimant of the id has
        created, if that one has claimed lane 0 before: see `Lanes`. A store may claim them all in one transaction.

        Args:
            lanes: Ids of lanes, lane 0 first.
            owner: As for `claim`.
            timeout: As for `claim`; for the lock of each row.
            cluster_id: Kafka's `cluster.id`. A lane is not claimed if its row names another cluster, or one of `elsewhere` does
                (rule CL); a store that can't read and claim at once may have claimed it, if the row has got its cluster in
                between. None: Kafka does not answer; the caller checks the cluster before it resolves anything there.
            expected_fence: As for `claim`, for lane 0 (rule F8): its owner owns the others, or is about to.
            token: As for `claim`, for each lane.
            acquiring: Acquire generations in the same transaction, if the store can, and if nothing has to be recovered or
                acknowledged on any of the lanes: as `acquire_generations` would right after the claim.

        Raises:
            ClusterMismatchError: See `cluster_id`.
            FencedError, ClaimTimeoutError: As for `claim`. The lanes before that one may be claimed.
        """
        del acquiring

        def claim(lane: str, expected: int | None = None) -> Claim:
            row = self.read(lane)
            if row is not None and cluster_id is not None:
                on_cluster(row, cluster_id)
            return self.claim(lane, owner, timeout=timeout, expected_fence=expected, token=token)

        if cluster_id is not None:
            none_elsewhere(lanes[0], self.elsewhere(name_of(lanes[0]), cluster_id), cluster_id)
        first = claim(lanes[0], expected_fence)
        claims = [first]
        for lane in (*lanes[1:], *further_lanes(self.list(lanes[0] + LANE_MARK), lanes)):
            hit("recover_after_claim")
            self.read_claimed(first)
            claims.append(claim(lane))
        rows = self.read_claimed_rows(claims)
        if cluster_id is not None:
            for row in rows:  # one may have got its cluster since it was looked at
                on_cluster(row, cluster_id)
        return ClaimedLanes(rows)

    def read_claimed_rows(self, claims: Sequence[Claim]) -> tuple[StateRow, ...]:
        """The rows, as by `read_claimed`.

        Raises: as `read_claimed`.
        """
        return tuple(self.read_claimed(claim) for claim in claims)

    def record_resolutions(self, resolutions: Sequence[tuple[Claim, Resolution]]) -> None:
        """Change rows, as by `record_resolution`. After an error some may be changed.

        Raises: as `record_resolution`.
        """
        for claim, resolution in resolutions:
            self.record_resolution(claim, resolution)

    def acquire_generations(self, claims: Sequence[Claim], acquiring: Acquiring) -> tuple[StateRow, ...]:
        """Acquire generations for lanes of an id, as by `acquire_generation`. After an error some may be acquired.

        A row that named no cluster names one only if no row of `elsewhere` does, however many processes try at the same time.
        Here each writes its rows before it reads those of others: at least one of two finds the other, and takes its own back.

        Returns:
            The rows; the generation of each is the one acquired.

        Raises: as `acquire_generation`; ClusterMismatchError also for a row of `elsewhere`.
        """
        first = claims[0].transactional_id
        new = {row.transactional_id for row in self.read_claimed_rows(claims) if not row.cluster_id}
        for claim in claims:
            self.acquire_generation(
                claim,
                acquiring.kind,
                reuse=claim.transactional_id in acquiring.reuse,
                cluster_id=acquiring.cluster_id,
            )
        rows = self.read_claimed_rows(claims)
        elsewhere = self.elsewhere(name_of(first), acquiring.cluster_id) if new else {}
        for row in rows if elsewhere else ():
            if row.transactional_id in new:
                self.record_resolution(row.claim, Resolution(resolved_generation=row.generation, cluster_id=""))
        none_elsewhere(first, elsewhere, acquiring.cluster_id)
        return rows

    # --- transactions -------------------------------------------------------------------------------------------------------

    @abstractmethod
    def begin(self, claim: Claim) -> StoreTransaction:
        """Begin a database transaction, and check the fence in it before anything else happens (rule F2).

        Raises:
            FencedError: There is a newer claim of the id; no transaction is open.
        """

    def begin_soon(self, claim: Claim) -> StoreTransaction:
        """As `begin`, but if that saves a round trip, the transaction begins with its first statement.

        The fence is checked then: see `StoreTransaction.check_fence`.
        """
        return self.begin(claim)

    def join(self, target: Any, owner: object, new: Callable[[Callable[[], frozenset[Hashable]]], U]) -> U:
        """The unit that commits with the transaction that a session, or a connection, is in or begins next.

        Args:
            target: The user's session or connection.
            owner: Whose units these are.
            new: Makes the unit if there is none yet; it gets a function that returns the savepoints that the transaction is in.

        Raises:
            UsageError: It can't be joined.
        """
        del target, owner, new
        raise self._can_not_join()

    def users_connection(self, connection: Any) -> UsersTransaction:
        """A driver's connection of the user's, as `begin_on` takes it.

        Raises:
            UsageError: It can't be used.
        """
        del connection
        raise self._can_not_join()

    def begin_on(self, connection: Any, claim: Claim, *, gate: str | None) -> StoreTransaction:
        """Take the last steps of a transaction that the user has begun on this connection; its fence is checked later.

        Args:
            connection: As `JoinedUnit.commit` gets it, or a UsersTransaction.
            claim: The claim of the id.
            gate: The prefix whose gate is read with the fence (`dualwrite.stores.journal`), or None.

        Raises:
            UsageError: The store has no such transactions.
        """
        del connection, claim, gate
        raise self._can_not_join()

    def _can_not_join(self) -> UsageError:
        return UsageError(
            f"{type(self).__name__} can't join a transaction of the user's.",
            next_step="use `with pool.transaction() as tx` or `pool.run`; only SQL databases have sessions",
        )

    def is_conflict(self, error: BaseException) -> bool:
        """Whether `error`, raised by the user's own statement, is a serialization failure or a deadlock.

        The database has then rolled back the transaction, and the same one may succeed if it runs again. Errors of this
        store's own methods have the attribute `retriable` for this.
        """
        del error
        return False

    def is_outage(self, error: BaseException) -> bool:
        """Whether `error`, raised by the user's own statement, is not the statement's fault: it may succeed if it runs again.

        The database could not be reached or ended the connection, another transaction kept a lock for too long, or the database
        takes no writes: it is read-only, or lacks disk space or memory. Errors of this store's own methods have the attribute
        `retriable` for this.
        """
        del error
        return False

    def check_now(self) -> None:
        """For a probe: `check`, and that the database takes the writes of this process.

        Raises:
            StoreError: See `check`; StoreNotWritableError: it has refused writes lately, and has accepted none since.
        """
        self.check()
        database_at(self.description).check_writes()

    def passes(self, error: BaseException) -> bool:
        """Whether `error`, raised by the user's own statement, is a conflict or an outage: it says nothing about the data."""
        return self.is_conflict(error) or self.is_outage(error)

    @abstractmethod
    def acknowledge(
        self, transactional_id: str, *, only: Collection[LostTransaction] | None = None
    ) -> tuple[LostTransaction, ...]:
        """Remove the entries of `lost` and return them. Needs no claim: only recovery adds to the list.

        Args:
            transactional_id: The logical id.
            only: Remove only these, compared by kind, state and generation; None: all.
        """

    @abstractmethod
    def list(self, prefix: str = "") -> list[str]:
        """The logical ids that begin with `prefix`, sorted, without tombstones."""

    def elsewhere(self, name: str, cluster_id: str) -> Mapping[str, str]:
        """The ids of a name (`name_of`) whose rows name another Kafka cluster, with that one's `cluster.id` (rule CL)."""
        return elsewhere_in(map(self.read, self.list(name)), name, cluster_id)

    @abstractmethod
    def forget(self, transactional_id: str) -> None:
        """Drop an id that is no longer used; its fence is raised and kept in a tombstone, so that an old writer stays fenced.

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
