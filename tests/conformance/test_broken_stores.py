"""Ways to break a real store that the in-memory one can't be broken in, and a broken scene: the suite must detect each."""

from __future__ import annotations

from typing import Any

import pytest

from dualwrite.errors import StoreError
from dualwrite.stores.rocksdb.rocksdb_batch import ColumnFamilyBatch
from dualwrite.stores.rocksdb.rocksdb_store import RocksDBStore
from dualwrite.stores.sql.sql_transaction import SqlStoreTransaction
from dualwrite.testing.stores import ConnectionLossConformance, FencingConformance, StoreScene, UnitConformance, fencing

_record = SqlStoreTransaction.record


def test_a_store_that_reconnects_inside_a_transaction(postgresql_scene: StoreScene, monkeypatch: pytest.MonkeyPatch) -> None:
    """The statement that failed is repeated in a transaction on a new connection, without what the user has written."""

    def record(self: SqlStoreTransaction, *arguments: Any, **what: Any) -> None:
        try:
            _record(self, *arguments, **what)
        except StoreError:
            self.rollback()
            SqlStoreTransaction.__init__(self, self._context, self._claim)
            self.begin(may_wait=False)
            _record(self, *arguments, **what)

    monkeypatch.setattr(SqlStoreTransaction, "record", record)
    with pytest.raises(AssertionError, match="without the user's data"):
        ConnectionLossConformance().test_a_transaction_does_not_continue_on_another_connection(postgresql_scene, "written")


def test_a_store_that_never_compares_the_fence_ends_the_race(
    rocksdb_scene: StoreScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its thread is never fenced; the test must fail, not wait for it."""
    monkeypatch.setattr(fencing, "TIMEOUT", 1.0)
    monkeypatch.setattr(RocksDBStore, "record_resolution", lambda *_: None)
    with pytest.raises(TimeoutError):
        FencingConformance().test_nothing_is_changed_under_an_old_claim_after_a_new_one(rocksdb_scene, "record_resolution")


def test_a_unit_that_is_undone_to_what_is_committed(rocksdb_scene: StoreScene, monkeypatch: pytest.MonkeyPatch) -> None:
    def set_entry(self: ColumnFamilyBatch, place: Any, entry: Any) -> None:
        self._before_unit[place] = None
        self._entries[place] = entry

    monkeypatch.setattr(ColumnFamilyBatch, "_set", set_entry)
    with pytest.raises(AssertionError):
        UnitConformance().test_undoing_a_unit_keeps_what_an_earlier_one_wrote_to_the_same_key(rocksdb_scene)


def test_a_scene_that_cuts_no_connection(postgresql_scene: StoreScene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(postgresql_scene, "_commit", b"no such statement")
    with pytest.raises(AssertionError, match="has cut no connection"):
        ConnectionLossConformance().test_a_claim_without_an_answer_is_retried(postgresql_scene, arrives=True)
