"""The store on a key-value database, above its port: the rows, the database's id, and the positions of consumer groups.

A row is one text, and every change reads all of it and replaces it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import TypeAlias

from dualwrite.deadline import Deadline
from dualwrite.errors import StoredStateError
from dualwrite.state import ProducerKind
from dualwrite.stores.base import TxnStateStore
from dualwrite.stores.identity import StoreIdentity
from dualwrite.stores.key_values import POSITIONS, ROWS, STORE, ConflictError, Found, Key, KeyValues, Write, row_in
from dualwrite.stores.positions import (
    Move,
    Partition,
    Position,
    Positions,
    check_expected,
    in_order,
    parse_position,
    position_text,
)
from dualwrite.stores.rows import (
    Claim,
    LostTransaction,
    Resolution,
    StateRow,
    acknowledged,
    check_fence,
    claimed,
    document,
    elsewhere_in,
    forgotten,
    new_token,
    with_generation,
    with_resolution,
)
from dualwrite.stores.store_transaction import StoreTransaction

_RowChange: TypeAlias = Callable[[StateRow | None], StateRow | None]
_Attempts: TypeAlias = Sequence[tuple[StateRow | None, StateRow | None]]


class KeyValueStore(TxnStateStore):
    """A store above a port.

    No claim waits for a transaction. Once a row has changed, a transaction that was recorded before can't commit any more,
    wherever its write is: in its writer, in a queue, or in the network.

    Args:
        change_timeout: Seconds within which changes must succeed; `claim` has its own timeout.
    """

    undoes_units = True

    def __init__(self, change_timeout: float) -> None:
        self._change_timeout = change_timeout

    @property
    @abstractmethod
    def _keys(self) -> KeyValues:
        """The database."""

    @abstractmethod
    def _transaction(self, claim: Claim, row: StateRow) -> StoreTransaction:
        """A transaction under a claim, which has been checked."""

    @property
    def positions(self) -> Positions:
        return KeyValuePositions(lambda: self._keys, self._change_timeout)

    def is_conflict(self, error: BaseException) -> bool:
        """The `__cause__` of what a commit raises."""
        return isinstance(error, ConflictError)

    # --- reading ----------------------------------------------------------------------------------------------------------

    def read(self, transactional_id: str) -> StateRow | None:
        keys = self._keys
        return row_in(
            transactional_id,
            keys.query(lambda: keys.get((ROWS, transactional_id)), "reading the row", transactional_id),
        )

    def read_claimed(self, claim: Claim) -> StateRow:
        return self._checked(claim, "reading the row")

    def begin(self, claim: Claim) -> StoreTransaction:
        """The messages that follow open a transaction at Kafka, so this check must miss no newer claim (rule F2)."""
        return self._transaction(claim, self._checked(claim, "beginning a transaction"))

    def _checked(self, claim: Claim, doing: str) -> StateRow:
        keys, name = self._keys, claim.transactional_id
        return check_fence(row_in(name, keys.query(lambda: keys.confirmed((ROWS, name)), doing, name)), claim)

    def list(self, prefix: str = "") -> list[str]:
        """Includes ids whose row can't be read: reading one raises the error."""
        return sorted(name for name, found in self._stored(prefix) if _is_listed(name, found))

    def elsewhere(self, name: str, cluster_id: str) -> Mapping[str, str]:
        """Reads many rows at once."""
        return elsewhere_in((row_in(each, found) for each, found in self._stored(name)), name, cluster_id)

    def _stored(self, prefix: str) -> Sequence[tuple[str, Found | None]]:
        keys = self._keys

        def work() -> list[tuple[str, Found | None]]:
            names = keys.children((ROWS,), prefix)
            return list(zip(names, keys.read([(ROWS, name) for name in names]), strict=True))

        return keys.query(work, "listing the ids")

    # --- changing a row ---------------------------------------------------------------------------------------------------

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
        return _last(self._change(transactional_id, change, "claiming the id", timeout)).claim

    def record_resolution(self, claim: Claim, resolution: Resolution) -> None:
        def change(row: StateRow | None) -> StateRow:
            return with_resolution(check_fence(row, claim), resolution)

        self._change(claim.transactional_id, change, "resolving a transaction")

    def acquire_generation(self, claim: Claim, kind: ProducerKind, *, reuse: bool = False, cluster_id: str = "") -> int:
        """A number that was written without an answer is skipped, which is harmless."""

        def change(row: StateRow | None) -> StateRow:
            store_id = self._own_identity().store_id  # read each time: it may have been replaced
            return with_generation(check_fence(row, claim), kind, reuse=reuse, store_id=store_id, cluster_id=cluster_id)

        return _last(self._change(claim.transactional_id, change, "acquiring a generation")).generation

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

    def _change(self, transactional_id: str, change: _RowChange, doing: str, timeout: float | None = None) -> _Attempts:
        """Replace a row by what `change` makes of it, if it still is the row that `change` got; otherwise try again.

        Args:
            transactional_id: The logical id.
            change: From the row to the one to write; if it returns the same row, or None, nothing is written. It must do so if
                it finds its own change already made.
            doing: What is done, to complete "while <doing>".
            timeout: Seconds to try at most; None: the store's own limit.

        Returns:
            The row before and after each attempt that was or may have been written; the last one certainly was.
        """
        keys, key = self._keys, (ROWS, transactional_id)
        attempts: list[tuple[StateRow | None, StateRow | None]] = []

        def once(deadline: Deadline) -> None:
            found = keys.get(key, deadline)
            before = row_in(transactional_id, found)
            after = change(before)
            attempts.append((before, after))
            if after is None or after is before:
                return
            try:
                keys.multi([Write(key, found, document(after).encode())], deadline)
            except ConflictError:  # this attempt has written nothing
                attempts.pop()
                raise

        keys.change(once, doing, transactional_id, self._change_timeout if timeout is None else timeout)
        return attempts

    # --- which database this is -------------------------------------------------------------------------------------------

    def identity(self) -> StoreIdentity | None:
        keys = self._keys
        return _identity_in(keys.query(lambda: keys.get((STORE,)), "reading the database's id"))

    def set_identity(self, identity: StoreIdentity, *, expected: StoreIdentity | None) -> bool:
        keys = self._keys

        def work() -> bool:
            found = keys.get((STORE,))
            if _identity_in(found) != expected:
                return False
            try:
                keys.multi([Write((STORE,), found, str(identity).encode())])
            except ConflictError:
                return False
            return True

        return keys.query(work, "storing the database's id")


def _identity_in(found: Found | None) -> StoreIdentity | None:
    return None if found is None else StoreIdentity.parse(found.data)


def _is_listed(transactional_id: str, found: Found | None) -> bool:
    try:
        row = row_in(transactional_id, found)
    except StoredStateError:
        return True
    return row is not None and not row.forgotten


def _last(attempts: _Attempts) -> StateRow:
    row = attempts[-1][1]
    assert row is not None  # no change of a claimed row returns None
    return row


class KeyValuePositions(Positions):
    """A position is one text. A transaction that moves one fails when it commits, if another has moved it since.

    Args:
        keys: The database.
        timeout: Seconds within which changes must succeed.
    """

    def __init__(self, keys: Callable[[], KeyValues], timeout: float) -> None:
        self._database = keys
        self._timeout = timeout

    def read(self, group_id: str) -> Mapping[Partition, Position]:
        keys = self._database()

        def work() -> list[tuple[Partition, Found | None]]:
            partitions = _partitions(keys, group_id)
            found = keys.read([_key(group_id, partition) for partition in partitions])
            return list(zip(partitions, found, strict=True))

        found = keys.query(work, "reading the positions of a group")
        return {key: parse_position(key, each.data) for key, each in found if each is not None}

    def move(self, transaction: StoreTransaction, group_id: str, moves: Iterable[Move]) -> None:
        keys, batch, ordered = self._database(), transaction.handle, in_order(moves)
        stored = keys.query(lambda: keys.read([_key(group_id, one.key) for one in ordered]), "reading positions")
        for one, found in zip(ordered, stored, strict=True):
            earlier = batch.writes.get(_key(group_id, one.key))
            if earlier is None:
                batch.add(_write(group_id, one, found, found))
            else:
                batch.add(_write(group_id, one, earlier.found, Found(earlier.data)))

    def reset(self, group_id: str, moves: Iterable[Move]) -> None:
        keys, ordered = self._database(), in_order(moves)
        may_be_done = False  # by an attempt whose response was lost

        def work(deadline: Deadline) -> None:
            nonlocal may_be_done
            found = keys.read([_key(group_id, one.key) for one in ordered], deadline)
            if may_be_done and all(map(_is_done, ordered, found)):
                return
            writes = [_write(group_id, one, each, each) for one, each in zip(ordered, found, strict=True)]
            may_be_done = True
            try:
                keys.multi(writes, deadline)
            except ConflictError:
                may_be_done = False
                raise

        if ordered:
            keys.change(work, "resetting positions", None, self._timeout)

    def forget(self, group_id: str) -> int:
        keys = self._database()
        counted = 0  # the maximum over all attempts: one whose response was lost may have removed them

        def work(deadline: Deadline) -> int:
            nonlocal counted
            stored = [_key(group_id, partition) for partition in _partitions(keys, group_id)]
            found = zip(stored, keys.read(stored, deadline), strict=True)
            writes = [Write(key, each, None) for key, each in found if each is not None]
            counted = max(counted, len(writes))
            if writes:
                keys.multi(writes, deadline)
            return counted

        return keys.change(work, "forgetting the positions of a group", None, self._timeout)

    def groups(self, prefix: str = "") -> list[str]:
        keys = self._database()

        def work() -> list[str]:
            return [group for group in keys.children((POSITIONS,), prefix) if _partitions(keys, group)]

        return sorted(keys.query(work, "listing the groups with positions"))


def _key(group_id: str, partition: Partition) -> Key:
    return POSITIONS, group_id, partition[0], str(partition[1])


def _partitions(keys: KeyValues, group_id: str) -> list[Partition]:
    folder = (POSITIONS, group_id)
    return [(topic, int(number)) for topic in keys.children(folder) for number in keys.children((*folder, topic))]


def _write(group_id: str, move: Move, found: Found | None, shown: Found | None) -> Write:
    """The write of a move, if the position that shows is the expected one."""
    check_expected(group_id, move, None if shown is None else parse_position(move.key, shown.data))
    return Write(_key(group_id, move.key), found, position_text(move.after))


def _is_done(move: Move, found: Found | None) -> bool:
    position = None if found is None else parse_position(move.key, found.data)
    return position is not None and (position.offset, position.topic_id) == (move.after.offset, move.after.topic_id)
