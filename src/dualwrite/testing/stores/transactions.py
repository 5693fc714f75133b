"""Conformance of transactions, of how they end, and of the units in them: all becomes visible together, or nothing does."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, Final

import pytest

from dualwrite.errors import TransactionControlError, UsageError, WriterClosedError
from dualwrite.state import MAX_EPOCH, MAX_PLACES, MAX_PRODUCER_ID, MAX_TOPIC_LENGTH, Delivery, Place, PreparedTxnState
from dualwrite.stores.base import TxnStateStore
from dualwrite.stores.store_transaction import StoreTransaction
from dualwrite.testing.stores.resolutions import full_row
from dualwrite.testing.stores.scene import STATE, StoreScene
from dualwrite.testing.stores.steps import MOMENTS, at, expect_changed, expect_error, expect_row, record_and_commit

_STATES: Final = (
    PreparedTxnState(0, 0),
    PreparedTxnState(0, 0, 0),
    PreparedTxnState(MAX_PRODUCER_ID, MAX_EPOCH),
    PreparedTxnState(MAX_PRODUCER_ID, MAX_EPOCH, MAX_PRODUCER_ID),
    None,
)
_PREPARED_AT: Final = datetime(2026, 11, 23, 12, 0, 0, 123000, tzinfo=UTC)
_DELIVERIES: Final = (
    Delivery(3, (Place("orders", 0, 0, 2), Place("payments", 7, None, 1)), _PREPARED_AT),
    Delivery(2**40, (Place("t" * MAX_TOPIC_LENGTH, 2**31 - 1, 2**63 - 1, 2**31, in_topic=True),) * 100, _PREPARED_AT),
    Delivery(2**40, tuple(Place("t", each, 2**40 + each, 2**20) for each in range(MAX_PLACES)), _PREPARED_AT),
)
_MANY: Final = 200
_MANY_UNITS = 64


class TransactionConformance:
    """What a transaction writes, and what it does not change."""

    def test_state_and_data_become_visible_at_the_commit(self, scene: StoreScene) -> None:
        """`commit`: the commit point of the whole recipe. Before it neither is visible, after it both are."""
        store, other, name = scene.new_store(), scene.new_store(), scene.new_id()
        claim = scene.claim(store, name)
        transaction, number = store.begin(claim), scene.new_number()
        scene.put(transaction.handle, number)
        assert scene.committed() == [], "the user's data is visible before the commit"
        transaction.record(STATE, generation=3, transaction_number=9)
        assert scene.committed() == [], "the user's data is visible before the commit"
        expect_row(other, name, "before the commit", prepared_state=None, transaction_number=0)
        transaction.commit()
        assert scene.committed() == [number], "commit() returned, but the user's data is not in the database"
        expect_row(other, name, "after the commit", prepared_state=STATE, prepared_generation=3, transaction_number=9)
        assert store.read_claimed(claim) == other.read(name), "two stores see different rows after the commit"

    @pytest.mark.parametrize("state", _STATES, ids=str)
    @pytest.mark.parametrize("method", ["record", "record_at_commit"])
    def test_every_state_is_stored_unchanged(self, scene: StoreScene, method: str, state: PreparedTxnState | None) -> None:
        """`record` writes S, its generation, delivery and number, replacing earlier ones; `record_at_commit`: at the commit."""
        store, name, claim = scene.claimed()
        scene.transact(store, claim)
        for number, delivery in enumerate((*_DELIVERIES, None), start=2**40):
            transaction, written = store.begin(claim), scene.new_number()
            scene.put(transaction.handle, written)
            before = store.read_claimed(claim)
            getattr(transaction, method)(state, generation=70_000, transaction_number=number, delivery=delivery)
            assert store.read_claimed(claim) == before, "the state is visible before the commit"
            transaction.commit()
            assert scene.committed()[-1] == written, "the data of the transaction"
            expect_row(
                store,
                name,
                "after it",
                prepared_state=state,
                prepared_generation=70_000,
                transaction_number=number,
                delivery=delivery,
            )

    def test_record_changes_nothing_else_in_the_row(self, scene: StoreScene) -> None:
        """`record` writes S, its generation, delivery and number, and nothing else."""
        store, name = scene.new_store(), scene.new_id()
        claim, before = full_row(scene, store, name)
        scene.transact(store, claim, generation=1, transaction_number=8, state=None)
        changes = {"prepared_state": None, "prepared_generation": 1, "delivery": None, "transaction_number": 8}
        expect_changed(store, before, "after a transaction", **changes)

    def test_many_writes_are_atomic(self, scene: StoreScene) -> None:
        """Many writes in one transaction are as atomic as one."""
        store, _, claim = scene.claimed()
        numbers = [scene.new_number() for _ in range(_MANY)]
        for end in ("rollback", "commit"):
            transaction = store.begin(claim)
            for number in numbers:
                scene.put(transaction.handle, number)
            transaction.record(STATE, generation=0, transaction_number=1)
            assert scene.committed() == [], "the user's data is visible before the commit"
            getattr(transaction, end)()
            found = scene.committed()
            assert found == (numbers if end == "commit" else []), f"after {end}() {len(found)} of {_MANY} writes are there"

    def test_transactions_of_different_ids_are_independent(self, scene: StoreScene) -> None:
        """Each id has its own fence: transactions begin, commit and roll back in any order."""
        if not scene.capabilities.transactions_at_once:
            pytest.skip("this database runs one transaction at a time")
        store = scene.new_store()
        ids = [scene.new_id() for _ in range(3)]
        claims = [scene.claim(store, name) for name in ids]
        transactions, numbers = zip(*(scene.recorded(store, claim) for claim in claims), strict=True)
        transactions[1].rollback()
        transactions[2].commit()
        transactions[0].commit()
        assert scene.committed() == sorted([numbers[0], numbers[2]])
        for name, state in zip(ids, (STATE, None, STATE), strict=True):
            expect_row(store, name, "after transactions of three ids", prepared_state=state)

    def test_the_store_offers_an_orm_session_or_refuses_it(self, scene: StoreScene) -> None:
        """`session`: a SQLAlchemy ORM Session, or UsageError if the store does not support ORM sessions."""
        store = scene.new_store()
        transaction = store.begin(scene.claim(store, scene.new_id()))
        try:
            with suppress(UsageError):
                assert transaction.session is transaction.session, "each access returns another session"
        finally:
            transaction.rollback()


class OutcomeConformance:
    """How transactions end, and what is possible after that."""

    @pytest.mark.parametrize("moment", MOMENTS)
    def test_a_rollback_at_any_time_undoes_everything(self, scene: StoreScene, moment: str) -> None:
        """`rollback` may be called at any time and more than once, and leaves nothing behind, not even a lock."""
        store, name, claim = scene.claimed()
        transaction, _ = at(scene, store, claim, moment)
        transaction.rollback()
        transaction.rollback()
        assert scene.committed() == [], "rollback() has left the user's data"
        expect_row(store, name, "after rollback()", prepared_state=None, transaction_number=0, fence=claim.fence)
        number = scene.transact(store, claim)
        assert scene.committed() == [number], "the transaction after the one that was rolled back"

    def test_rollback_after_the_commit_does_nothing(self, scene: StoreScene) -> None:
        """`rollback` does nothing after `commit`."""
        store, name = scene.new_store(), scene.new_id()
        transaction, number = scene.recorded(store, scene.claim(store, name))
        transaction.commit()
        for _ in range(2):
            transaction.rollback()
        assert scene.committed() == [number], "rollback() after commit() has removed the user's data"
        expect_row(store, name, "after rollback() after commit()", prepared_state=STATE, transaction_number=1)

    @pytest.mark.parametrize("end", ["commit", "rollback"])
    def test_a_transaction_that_has_ended_refuses_every_call(self, scene: StoreScene, end: str) -> None:
        """A later write through it would be lost, or committed by another transaction: it raises WriterClosedError."""
        store, _, claim = scene.claimed()
        transaction, number = scene.recorded(store, claim)
        handle, late = transaction.handle, scene.new_number()
        getattr(transaction, end)()
        uses: dict[str, Callable[[], Any]] = {
            "a write through its handle": lambda: scene.put(handle, late),
            "handle": lambda: transaction.handle,
            "record()": lambda: transaction.record(STATE, generation=0, transaction_number=2),
            "commit()": transaction.commit,
        }
        for what, use in uses.items():
            with expect_error(WriterClosedError, f"{what} after {end}()"):
                use()
        following = scene.transact(store, claim, transaction_number=3)
        assert scene.committed() == ([number, following] if end == "commit" else [following])

    def test_the_users_block_cannot_end_the_transaction(self, scene: StoreScene) -> None:
        """While the block runs, `handle` refuses to end the transaction (TransactionControlError), which is unchanged."""
        store, _, claim = scene.claimed()
        transaction, number = store.begin(claim), scene.new_number()
        try:
            scene.put(transaction.handle, number)
            for name, end in scene.ways_to_end(transaction.handle).items():
                with expect_error(TransactionControlError, f"{name} through the user's handle"):
                    end()
                assert scene.committed() == [], f"{name} through the user's handle has committed"
            record_and_commit(transaction)
        finally:
            transaction.rollback()
        assert scene.committed() == [number], "a refused call has harmed the transaction"

    def test_other_errors_are_neither_conflicts_nor_outages(self, scene: StoreScene) -> None:
        """`is_conflict` and `is_outage` are for errors of the database's driver, and return False for all others."""
        store: TxnStateStore = scene.new_store()
        for error in (ValueError("no"), KeyError("no"), KeyboardInterrupt(), UsageError("no")):
            assert store.is_conflict(error) is False, f"is_conflict({error!r})"
            assert store.is_outage(error) is False, f"is_outage({error!r})"


class UnitConformance:
    """`begin_unit`, `end_unit`, `undo_unit`, and their forms for several units; skipped for a store without `undoes_units`."""

    def test_undoing_a_unit_undoes_only_that_unit(self, scene: StoreScene) -> None:
        """`undo_unit` undoes what its unit has written, and only that; as many units as a pool puts into one group."""
        transaction = _begun(scene)
        kept = []
        for undone in (True, False, True, True, False, False, True, *(place % 3 == 0 for place in range(_MANY_UNITS))):
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
            record_and_commit(transaction)
        finally:
            transaction.rollback()
        assert scene.committed() == numbers[:1]

    def test_writes_before_the_first_unit_are_kept(self, scene: StoreScene) -> None:
        """`begin_unit`: from here on. A transaction whose units were all undone still commits its other writes and the row."""
        store, name = _store_with_units(scene), scene.new_id()
        transaction = store.begin(scene.claim(store, name))
        scene.put(transaction.handle, number := scene.new_number())
        transaction.begin_unit()
        scene.put(transaction.handle, scene.new_number())
        transaction.undo_unit(ValueError())
        record_and_commit(transaction)
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
        record_and_commit(transaction)
        assert scene.committed() == kept

    def test_units_that_all_succeed(self, scene: StoreScene) -> None:
        """`end_units`: what they wrote is in the transaction, and so is what is written afterwards."""
        transaction, kept = _begun_together(scene), []
        for _ in range(_MANY_UNITS):
            scene.put(transaction.handle, number := scene.new_number())
            transaction.end_unit()
            kept.append(number)
        transaction.end_units()
        scene.put(transaction.handle, number := scene.new_number())
        record_and_commit(transaction)
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
    return store.begin(scene.claim(store, scene.new_id()))


def _begun_together(scene: StoreScene) -> StoreTransaction:
    transaction = _begun(scene)
    transaction.begin_units()
    return transaction


def _store_with_units(scene: StoreScene) -> TxnStateStore:
    store = scene.new_store()
    if not store.undoes_units:
        pytest.skip("this store can't undo a single unit")
    return store
