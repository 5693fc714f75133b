"""Conformance of units: several units share one transaction, and each can be undone alone (group commit)."""

from __future__ import annotations

import pytest

from dualwrite.errors import UsageError, WriterClosedError
from dualwrite.stores.base import TxnStateStore
from dualwrite.stores.transaction import StoreTransaction
from dualwrite.testing.stores.expectations import expect_row
from dualwrite.testing.stores.scene import STATE, StoreScene

_MANY = 64


class UnitConformance:
    """`begin_unit`, `end_unit`, `undo_unit`, and their forms for several units; skipped for a store without `undoes_units`."""

    def test_undoing_a_unit_undoes_only_that_unit(self, scene: StoreScene) -> None:
        """`undo_unit` undoes what its unit has written, and only that."""
        transaction = _begun(scene)
        kept = []
        for undone in (True, False, True, True, False, False, True):
            transaction.begin_unit()
            number = scene.new_number()
            scene.put(transaction.handle, number)
            scene.put(transaction.handle, other := scene.new_number())
            if undone:
                transaction.undo_unit(ValueError())
            else:
                transaction.end_unit()
                kept += [number, other]
        transaction.record(STATE, generation=0, transaction_number=1)
        assert scene.committed() == [], "a unit is visible before the commit"
        transaction.commit()
        assert scene.committed() == kept

    def test_undoing_a_unit_keeps_what_an_earlier_one_wrote_to_the_same_key(self, scene: StoreScene) -> None:
        """`undo_unit` restores what the units before have written, not what is committed."""
        transaction, numbers = _begun(scene), [scene.new_number() for _ in range(2)]
        try:
            transaction.begin_unit()
            for number in numbers:
                scene.put(transaction.handle, number)
            transaction.end_unit()
            transaction.begin_unit()
            scene.remove(transaction.handle, numbers[0])
            transaction.undo_unit(ValueError())
            transaction.begin_unit()
            scene.remove(transaction.handle, numbers[1])
            transaction.end_unit()
            transaction.record(STATE, generation=0, transaction_number=1)
            transaction.commit()
        finally:
            transaction.rollback()
        assert scene.committed() == numbers[:1]

    def test_a_group_of_many_units(self, scene: StoreScene) -> None:
        """As many units as a pool puts into one group, every third of them undone."""
        transaction = _begun(scene)
        kept = []
        for place in range(_MANY):
            transaction.begin_unit()
            scene.put(transaction.handle, number := scene.new_number())
            if place % 3:
                transaction.end_unit()
                kept.append(number)
            else:
                transaction.undo_unit(ValueError())
        transaction.record(STATE, generation=0, transaction_number=1)
        transaction.commit()
        assert scene.committed() == kept

    def test_writes_before_the_first_unit_are_kept(self, scene: StoreScene) -> None:
        """`begin_unit`: from here on. A transaction whose units were all undone still commits its other writes and the row."""
        store, name = _store_with_units(scene), scene.new_id()
        transaction = store.begin(scene.claim(store, name))
        scene.put(transaction.handle, number := scene.new_number())
        transaction.begin_unit()
        scene.put(transaction.handle, scene.new_number())
        transaction.undo_unit(ValueError())
        transaction.record(STATE, generation=0, transaction_number=1)
        transaction.commit()
        assert scene.committed() == [number]
        expect_row(store, name, "after the commit", prepared_state=STATE, transaction_number=1)

    def test_units_are_rolled_back_with_their_transaction(self, scene: StoreScene) -> None:
        """A unit that has ended is not committed before its transaction is."""
        transaction = _begun(scene)
        for _ in range(2):
            transaction.begin_unit()
            scene.put(transaction.handle, scene.new_number())
            transaction.end_unit()
        transaction.rollback()
        assert scene.committed() == []
        with pytest.raises(WriterClosedError):
            transaction.begin_unit()

    def test_units_undone_together(self, scene: StoreScene) -> None:
        """`undo_units` undoes all of them; after that the transaction continues with units that are undone one by one."""
        transaction = _begun_together(scene)
        for _ in range(3):
            scene.put(transaction.handle, scene.new_number())
            transaction.end_unit()
        scene.put(transaction.handle, scene.new_number())
        transaction.undo_units(ValueError())
        kept = []
        for undone in (False, True, False):
            transaction.begin_unit()
            scene.put(transaction.handle, number := scene.new_number())
            if undone:
                transaction.undo_unit(ValueError())
            else:
                transaction.end_unit()
                kept.append(number)
        transaction.record(STATE, generation=0, transaction_number=1)
        transaction.commit()
        assert scene.committed() == kept

    def test_units_that_all_succeed(self, scene: StoreScene) -> None:
        """`end_units`: what they wrote is in the transaction, and so is what is written afterwards."""
        transaction, kept = _begun_together(scene), []
        for _ in range(_MANY):
            scene.put(transaction.handle, number := scene.new_number())
            transaction.end_unit()
            kept.append(number)
        transaction.end_units()
        scene.put(transaction.handle, number := scene.new_number())
        transaction.record(STATE, generation=0, transaction_number=1)
        transaction.commit()
        assert scene.committed() == [*kept, number]

    def test_units_are_refused_without_undoes_units(self, scene: StoreScene) -> None:
        """Without `undoes_units`, `begin_unit` raises UsageError: the unit could only be undone together with all others."""
        store = scene.new_store()
        transaction = store.begin(scene.claim(store, scene.new_id()))
        if store.undoes_units:
            transaction.begin_unit()
        else:
            with pytest.raises(UsageError):
                transaction.begin_unit()
        transaction.rollback()


def _begun(scene: StoreScene) -> StoreTransaction:
    store = _store_with_units(scene)
    return store.begin_group(scene.claim(store, scene.new_id()))


def _begun_together(scene: StoreScene) -> StoreTransaction:
    transaction = _begun(scene)
    transaction.begin_units()
    return transaction


def _store_with_units(scene: StoreScene) -> TxnStateStore:
    store = scene.new_store()
    if not store.undoes_units:
        pytest.skip("this store can't undo a single unit")
    return store
