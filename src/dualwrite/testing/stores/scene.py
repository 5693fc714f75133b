"""The scene of the store conformance suite: what it needs from a database and from the store under test."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from itertools import count
from types import TracebackType
from typing import Any, ClassVar, Final, Self
from uuid import uuid4

import pytest

from dualwrite.state import Delivery, PreparedTxnState
from dualwrite.stores.base import TxnStateStore
from dualwrite.stores.rows import Claim
from dualwrite.stores.store_transaction import StoreTransaction
from dualwrite.testing import TIMEOUT

SHORT_TIME: Final = 0.3
"""Seconds: the timeout of a claim that has to wait, and the length of a lease that should end."""

STATE: Final = PreparedTxnState(4711, 3)


class ClaimsWait(Enum):
    """From which step on a claim of an id waits for the end of the id's transaction."""

    FROM_BEGIN = "from begin"
    """The transaction holds a lock from its beginning, as in SQLite."""

    FROM_RECORD = "from record"
    """`record` locks the row, as in PostgreSQL."""

    NEVER = "never"
    """A claim does not wait, and makes the transaction's `record` or `commit` fail with FencedError (a version is compared)."""


class LeasesEnd(Enum):
    """When a lease ends if its owner does not renew it."""

    WITH_TIME = "with time"
    """After its length, by the database's clock."""

    WITH_STORE = "with store"
    """With the session of the store that acquired it, which `close` ends, as in ZooKeeper."""


@dataclass(frozen=True, slots=True)
class StoreCapabilities:
    """What a store does where the contract leaves a choice.

    Args:
        claims_wait: From which step on a claim waits for a transaction.
        transactions_at_once: Transactions of different ids can be open at the same time.
        crashes: The scene has `crash`, for the state machine.
        cuts_commits: The scene has `cut_next_commit`, for the state machine.
        leases_end: When leases end, if the store has any.
    """

    claims_wait: ClaimsWait = ClaimsWait.FROM_RECORD
    transactions_at_once: bool = True
    crashes: bool = False
    cuts_commits: bool = False
    leases_end: LeasesEnd = LeasesEnd.WITH_TIME

    def waits(self, moment: str) -> bool:
        """Whether a claim waits for a transaction that has reached one of MOMENTS."""
        if self.claims_wait is ClaimsWait.FROM_RECORD:
            return moment == "recorded"
        return self.claims_wait is ClaimsWait.FROM_BEGIN


class StoreScene(ABC):
    """A database and stores on it; as a context manager, it closes them.

    `open`, `put` and `numbers` are required. The other methods are for tests that are skipped without them.

    All tests may use the same database: the suite uses unique ids and numbers.
    """

    capabilities: ClassVar[StoreCapabilities] = StoreCapabilities()

    def __init__(self) -> None:
        self._stores: list[TxnStateStore] = []
        self._numbers = count(uuid4().int % 2**30)
        self._given: set[int] = set()

    # --- required ---------------------------------------------------------------------------------------------------------

    @abstractmethod
    def open(self) -> TxnStateStore:
        """A store with its own connections, on the same database each time; stores share one if there can be only one."""

    @abstractmethod
    def put(self, handle: Any, number: int) -> None:
        """Write a number (0 to 2^31 - 1) through the handle of a transaction, as a user would."""

    @abstractmethod
    def numbers(self) -> list[int]:
        """The committed numbers, in any order, including duplicates; does not wait for open transactions."""

    # --- optional ---------------------------------------------------------------------------------------------------------

    def corrupt(self, transactional_id: str) -> None:
        """Make the stored row unreadable, without using the store."""
        del transactional_id
        pytest.skip("this scene has no `corrupt`")

    def ways_to_end(self, handle: Any) -> Mapping[str, Callable[[], Any]]:
        """Every way in which a user could try to end the transaction through its handle, by the name of the call."""
        del handle
        pytest.skip("this scene has no `ways_to_end`: the handle can't end its transaction")

    def opener(self) -> Callable[[], TxnStateStore]:
        """A function that opens a store on this database in another process; it must be picklable."""
        pytest.skip("this scene has no `opener`: another process can't open the database at the same time")

    def open_with_short_timeout(self) -> TxnStateStore:
        """As `open`, but the store waits at most about 0.3 s for a lock, except in `claim`, which has its own timeout."""
        pytest.skip("this scene has no `open_with_short_timeout`: the store does not wait for locks")

    def cut_next_commit(self, *, arrives: bool) -> Callable[[], bool] | None:
        """Cut the connection when a store sends its next commit: before it reaches the database, or before the answer is back.

        The commits of claims, resolutions, leases and other changes count as well. `dualwrite.testing.proxy` can do this.

        Returns:
            A function that says whether the connection has been cut since. With None, nobody notices if it never is, and a
            test of what happens after a cut has tested nothing.
        """
        del arrives
        pytest.skip("this scene has no `cut_next_commit`: there is no connection that could break")

    def cut_connections(self) -> None:
        """Cut all connections of the stores; new ones are accepted."""
        pytest.skip("this scene has no `cut_connections`: there is no connection that could break")

    def turn_clock_back(self, seconds: float) -> None:
        """Leave in the stored leases what a database's clock leaves there that has gone back."""
        del seconds
        pytest.skip("this scene has no `turn_clock_back`: leases don't end by a clock that could go back")

    def remove(self, handle: Any, number: int) -> None:
        """Remove a number that the same transaction has written, through its handle; for stores that undo units."""
        del handle, number
        pytest.skip("this scene has no `remove`")

    def crash(self, store: TxnStateStore) -> None:
        """End a store's open transactions as if its process were killed, and release its locks; for the state machine."""
        raise NotImplementedError(f"{type(self).__name__} has the capability `crashes` without `crash` ({store.description})")

    def close(self) -> None:  # noqa: B027  (most scenes have nothing to close)
        """Release what the scene itself has opened; its stores are closed by then."""

    # --- used by the tests ------------------------------------------------------------------------------------------------

    def new_id(self, kind: str = "id") -> str:
        """A unique id."""
        return f"{kind}-{uuid4().hex[:12]}"

    def new_number(self) -> int:
        """A unique number."""
        number = next(self._numbers)
        self._given.add(number)
        return number

    def new_store(self) -> TxnStateStore:
        """A store that is closed with the scene."""
        return self.adopt(self.open())

    def adopt(self, store: TxnStateStore) -> TxnStateStore:
        """Have a store closed with the scene; returns it."""
        if not any(store is known for known in self._stores):
            self._stores.append(store)
        return store

    def close_stores(self) -> None:
        """Close every store."""
        while self._stores:
            self._stores.pop().close()

    def committed(self) -> list[int]:
        """This scene's committed numbers, sorted."""
        return sorted(number for number in self.numbers() if number in self._given)

    @contextmanager
    def without_an_answer(self, *, arrives: bool) -> Iterator[None]:
        """The commit in the block loses its connection: calls `cut_next_commit`, and checks after the block that it was cut."""
        has_cut = self.cut_next_commit(arrives=arrives)
        yield
        assert has_cut is None or has_cut(), "the scene's `cut_next_commit` has cut no connection: it did not see the commit"

    def claim(self, store: TxnStateStore, transactional_id: str, owner: str = "ours") -> Claim:
        """A claim with a long timeout."""
        return store.claim(transactional_id, owner, timeout=TIMEOUT)

    def claimed(self) -> tuple[TxnStateStore, str, Claim]:
        """A new store, a new id, and a claim of it."""
        store, name = self.new_store(), self.new_id()
        return store, name, self.claim(store, name)

    def recorded(
        self,
        store: TxnStateStore,
        claim: Claim,
        *,
        state: PreparedTxnState | None = STATE,
        generation: int = 0,
        transaction_number: int = 1,
        delivery: Delivery | None = None,
    ) -> tuple[StoreTransaction, int]:
        """A transaction that has written a number and recorded its state, and the number; rolled back if that fails."""
        transaction, number = store.begin(claim), self.new_number()
        try:
            self.put(transaction.handle, number)
            transaction.record(state, generation=generation, transaction_number=transaction_number, delivery=delivery)
        except BaseException:
            transaction.rollback()
            raise
        return transaction, number

    def transact(self, store: TxnStateStore, claim: Claim, **what: Any) -> int:
        """As `recorded`, and then committed; returns the number."""
        transaction, number = self.recorded(store, claim, **what)
        try:
            transaction.commit()
        finally:
            transaction.rollback()
        return number

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            self.close_stores()
        finally:
            self.close()
