"""Conformance of the positions of consumer groups; skipped for a store without positions."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor, wait
from itertools import count
from threading import Barrier
from typing import Final

import pytest

from dualwrite.errors import DualWriteError, PositionMovedError, StoreCommitFailedError
from dualwrite.stores.base import TxnStateStore
from dualwrite.stores.positions import Move, Partition, Position, Positions
from dualwrite.stores.store_transaction import StoreTransaction
from dualwrite.testing import TIMEOUT
from dualwrite.testing.stores.scene import StoreScene
from dualwrite.testing.stores.steps import expect_error, record_and_commit

_TOPIC: Final = "orders"
_PARTITIONS: Final = 3
_ROUNDS: Final = 10
_CONSUMERS: Final = 3
_LARGEST: Final = 2**63 - 1
_NOT_BLOCKED: Final = 0.2
"""Seconds in which a call that is not blocked has ended."""


class PositionConformance:
    """`TxnStateStore.positions`."""

    def test_a_position_is_committed_with_its_transaction(self, scene: StoreScene) -> None:
        """`move`: as part of a transaction; `read`: the committed positions of a group."""
        store, group = scene.new_store(), scene.new_id("group")
        positions = _positions(store)
        transaction = _begun(scene, store)
        scene.put(transaction.handle, number := scene.new_number())
        positions.move(transaction, group, [_to(None, 5)])
        assert scene.capabilities.transactions_at_once is False or _offsets(_positions(scene.new_store()), group) == {}
        record_and_commit(transaction)
        assert _offsets(_positions(scene.new_store()), group) == {(_TOPIC, 0): 5}
        assert scene.committed() == [number]
        (found,) = positions.read(group).values()
        assert found.updated_at is not None
        assert found.updated_at.tzinfo is not None

    def test_a_rollback_moves_no_position(self, scene: StoreScene) -> None:
        """Whether the position was stored before or not."""
        store, group = scene.new_store(), scene.new_id("group")
        positions = _positions(store)
        first = _moved(scene, store, group, None, 5)
        transaction = _begun(scene, store)
        positions.move(transaction, group, [_to(first, 9), _to(None, 1, partition=1)])
        transaction.rollback()
        assert _offsets(positions, group) == {(_TOPIC, 0): 5}

    @pytest.mark.parametrize("begins_at", [None, 4, 6], ids=["nothing", "before", "after"])
    def test_a_move_from_another_position_is_refused(self, scene: StoreScene, begins_at: int | None) -> None:
        """`move`: if a position is not where the move expects it, the transaction fails; neither side keeps anything."""
        store, group = scene.new_store(), scene.new_id("group")
        _moved(scene, store, group, None, 5)
        before = None if begins_at is None else Position(_TOPIC, 0, begins_at)
        with expect_error(PositionMovedError, "move() from another position") as caught:
            _moved(scene, store, group, before, 9)
        error = caught.value
        assert (error.group_id, error.topic, error.partition, error.expected) == (group, _TOPIC, 0, begins_at)
        assert _offsets(_positions(store), group) == {(_TOPIC, 0): 5}
        assert scene.committed() == []

    def test_a_move_from_a_missing_position_is_refused(self, scene: StoreScene) -> None:
        """A position that is expected but missing was forgotten."""
        store, group = scene.new_store(), scene.new_id("group")
        with expect_error(PositionMovedError, "move() of a missing position") as caught:
            _moved(scene, store, group, Position(_TOPIC, 0, 5), 9)
        assert caught.value.found is None
        assert _offsets(_positions(store), group) == {}

    def test_a_move_from_another_topic_of_the_same_name_is_refused(self, scene: StoreScene) -> None:
        """The topic's id is compared together with the offset: the topic was deleted and created again."""
        store, group = scene.new_store(), scene.new_id("group")
        _moved(scene, store, group, None, 5, topic_id="one")
        with expect_error(PositionMovedError, "move() for another topic id"):
            _moved(scene, store, group, Position(_TOPIC, 0, 5, "two"), 9, topic_id="two")
        _moved(scene, store, group, Position(_TOPIC, 0, 5, "one"), 0, topic_id="two")
        (found,) = _positions(store).read(group).values()
        assert (found.offset, found.topic_id) == (0, "two")

    @pytest.mark.parametrize("first", [True, False], ids=["the first", "a later"])
    def test_one_of_two_concurrent_transactions_moves_a_position(self, scene: StoreScene, *, first: bool) -> None:
        """Two consumers have both read from the same position: the messages take effect once."""
        stores = [scene.new_store() for _ in range(2)]
        group, threads = scene.new_id("group"), ThreadPoolExecutor(2)
        with threads:
            for number in range(_ROUNDS):
                before = None if first else _moved(scene, stores[0], group, None, 5, partition=number)
                barrier = Barrier(2)
                move = _to(before, 9, partition=number)
                calls = [threads.submit(_raced, scene, store, group, move, barrier) for store in stores]
                done = [call.result(TIMEOUT) for call in calls]
                assert sum(done) == 1, f"{sum(done)} of two transactions moved the same position"
        assert len(scene.committed()) == _ROUNDS

    def test_concurrent_moves_of_different_partitions_are_all_kept(self, scene: StoreScene) -> None:
        """The consumers of a group move their own partitions at the same time: none reverts another's move."""
        stores, group = [scene.new_store() for _ in range(_CONSUMERS)], scene.new_id("group")
        positions, barrier = _positions(stores[0]), Barrier(_CONSUMERS)
        with ThreadPoolExecutor(_CONSUMERS) as threads:
            for offset in range(_ROUNDS):
                moves = [
                    _to(Position(_TOPIC, partition, offset - 1) if offset else None, offset, partition=partition)
                    for partition in range(_CONSUMERS)
                ]
                calls = [
                    threads.submit(_raced, scene, store, group, move, barrier)
                    for store, move in zip(stores, moves, strict=True)
                ]
                done = [call.result(TIMEOUT) for call in calls]
                assert all(done), f"moves of different partitions to {offset}: {done.count(False)} found theirs elsewhere"
                found = _offsets(positions, group)
                assert found == {(_TOPIC, partition): offset for partition in range(_CONSUMERS)}, "after concurrent moves"

    def test_several_partitions_move_together(self, scene: StoreScene) -> None:
        """Topics and partitions are independent; if one position can't move, none does."""
        store, group = scene.new_store(), scene.new_id("group")
        positions = _positions(store)
        keys: list[Partition] = [(topic, partition) for topic in ("a", "b", "a.b", "A") for partition in (0, 1, 10)]
        moves = [Move(None, Position(*key, number)) for number, key in enumerate(keys)]
        transaction = _begun(scene, store)
        positions.move(transaction, group, moves)
        record_and_commit(transaction)
        assert _offsets(positions, group) == {key: number for number, key in enumerate(keys)}
        after = [Move(move.after, Position(*move.key, _LARGEST)) for move in moves]
        wrong = Move(Position("b", 1, 99), Position("b", 1, 100))
        with expect_error((PositionMovedError, StoreCommitFailedError), "move() of several, one of them not possible"):
            transaction = _begun(scene, store)
            try:
                positions.move(transaction, group, [*(move for move in after if move.key != ("b", 1)), wrong])
                record_and_commit(transaction)
            finally:
                transaction.rollback()
        assert _offsets(positions, group) == {key: number for number, key in enumerate(keys)}
        transaction = _begun(scene, store)
        positions.move(transaction, group, after)
        record_and_commit(transaction)
        assert set(_offsets(positions, group).values()) == {_LARGEST}

    def test_groups_are_independent(self, scene: StoreScene) -> None:
        """Every character of their ids counts, including case and trailing spaces. `groups`: by prefix, sorted."""
        store, base = scene.new_store(), scene.new_id("group")
        names = [base, f"{base}.1", base.upper(), f"{base} ", f"{base}/%_'😀", f"{base}é"]
        for number, name in enumerate(names):
            _moved(scene, store, name, None, number)
        positions = _positions(store)
        assert [_offsets(positions, name) for name in names] == [{(_TOPIC, 0): number} for number in range(len(names))]
        assert positions.groups(base) == sorted(set(names) - {base.upper()})

    def test_a_reset_moves_all_or_none(self, scene: StoreScene) -> None:
        """`reset`: on the same condition as `move`, in a transaction of its own."""
        store, group = scene.new_store(), scene.new_id("group")
        positions = _positions(store)
        first = _moved(scene, store, group, None, 5)
        positions.reset(group, [_to(first, 2), _to(None, 7, partition=1)])
        assert _offsets(positions, group) == {(_TOPIC, 0): 2, (_TOPIC, 1): 7}
        with expect_error(PositionMovedError, "reset() from another position"):
            positions.reset(group, [_to(Position(_TOPIC, 0, 2), 3), _to(first, 9, partition=1)])
        assert _offsets(positions, group) == {(_TOPIC, 0): 2, (_TOPIC, 1): 7}
        with expect_error(PositionMovedError, "move() after a reset"):
            _moved(scene, store, group, first, 9)
        positions.reset(group, [])

    def test_a_group_is_forgotten(self, scene: StoreScene) -> None:
        """`forget`: removes the positions of this group only, and may be called again."""
        store, group = scene.new_store(), scene.new_id("group")
        positions, other = _positions(store), f"{group}2"
        for partition in range(_PARTITIONS):
            _moved(scene, store, group, None, 5, partition=partition)
        _moved(scene, store, other, None, 5)
        assert positions.forget(group) == _PARTITIONS
        assert positions.forget(group) == 0
        assert (_offsets(positions, group), positions.groups(group)) == ({}, [other])
        _moved(scene, store, group, None, 1)
        assert _offsets(positions, group) == {(_TOPIC, 0): 1}

    def test_a_forgotten_position_does_not_come_back(self, scene: StoreScene) -> None:
        """`forget`: a transaction that has moved a position and is still open ends first, or fails."""
        store, group = scene.new_store(), scene.new_id("group")
        positions = _positions(store)
        first = _moved(scene, store, group, None, 5)
        transaction = _begun(scene, store)
        positions.move(transaction, group, [_to(first, 9)])
        with ThreadPoolExecutor(1) as thread:
            forgetting = thread.submit(positions.forget, group)
            wait([forgetting], _NOT_BLOCKED)
            try:
                record_and_commit(transaction)
            except DualWriteError:
                transaction.rollback()
            forgetting.result(TIMEOUT)
        assert _offsets(positions, group) == {}

    def test_an_undone_unit_moves_no_position(self, scene: StoreScene) -> None:
        """A pool undoes one unit of a group; its positions stay where they were."""
        store, group = scene.new_store(), scene.new_id("group")
        if not store.undoes_units:
            pytest.skip("the store does not undo units")
        positions = _positions(store)
        transaction = _begun(scene, store)
        for partition, undone in enumerate((False, True, False)):
            transaction.begin_unit()
            positions.move(transaction, group, [_to(None, 5, partition=partition)])
            if undone:
                transaction.undo_unit(ValueError())
            else:
                transaction.end_unit()
        record_and_commit(transaction)
        assert _offsets(positions, group) == {(_TOPIC, 0): 5, (_TOPIC, 2): 5}


def _positions(store: TxnStateStore) -> Positions:
    positions = store.positions
    if positions is None:
        pytest.skip("the store does not support consumer positions")
    positions.prepare()
    return positions


def _begun(scene: StoreScene, store: TxnStateStore) -> StoreTransaction:
    return store.begin(scene.claim(store, scene.new_id()))


def _to(before: Position | None, offset: int, *, partition: int = 0, topic_id: str = "") -> Move:
    found = before if before is None else Position(before.topic, partition, before.offset, before.topic_id)
    return Move(found, Position(_TOPIC, partition, offset, topic_id))


def _moved(
    scene: StoreScene,
    store: TxnStateStore,
    group: str,
    before: Position | None,
    offset: int,
    *,
    partition: int = 0,
    topic_id: str = "",
) -> Position:
    """Move a position in a transaction of its own; return the new position."""
    positions = _positions(store)
    move = _to(before, offset, partition=partition, topic_id=topic_id)
    transaction = _begun(scene, store)
    try:
        positions.move(transaction, group, [move])
        record_and_commit(transaction)
    except BaseException:
        transaction.rollback()
        raise
    return move.after


def _raced(scene: StoreScene, store: TxnStateStore, group: str, move: Move, barrier: Barrier) -> bool:
    """Whether this one of several transactions has moved the position; it is repeated after a conflict."""
    positions = _positions(store)
    barrier.wait(TIMEOUT)
    for _ in count():
        transaction = _begun(scene, store)
        try:
            scene.put(transaction.handle, scene.new_number())
            positions.move(transaction, group, [move])
            record_and_commit(transaction)
        except PositionMovedError:
            transaction.rollback()
            return False
        except DualWriteError as error:
            transaction.rollback()
            if not error.retriable:
                raise
        except Exception as error:
            transaction.rollback()
            if not store.is_conflict(error):
                raise
        else:
            return True
    raise AssertionError


def _offsets(positions: Positions, group: str) -> dict[Partition, int]:
    found: Iterable[Position] = positions.read(group).values()
    return {position.key: position.offset for position in found}
