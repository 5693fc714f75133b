"""Transactions on RocksDB: state and data commit together, handles end with their transaction, column families."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from rocksdb_scene import ID, STATE, STATE_FAMILY, make_database, recorded, stored
from rocksdict import Rdict

from dualwrite.errors import UsageError, WriterClosedError
from dualwrite.stores.base import Claim
from dualwrite.stores.rocksdb import RocksDBStore
from fixtures.pace import LIMIT


def test_changes_of_several_column_families_commit_together(store: RocksDBStore, claim: Claim) -> None:
    transaction = store.begin(claim)
    batch = transaction.handle
    batch.put(b"chair", b"1", cf="orders")
    batch.put(b"ada", b"2", "customers")
    batch.delete(b"before", cf="customers")
    batch[b"total"] = b"3"
    transaction.record(STATE, generation=3, transaction_number=9)
    assert (stored(store), stored(store, b"before", "customers")) == (None, b"1")
    transaction.commit()
    assert [stored(store), stored(store, b"ada", "customers"), stored(store, b"total", "default")] == [b"1", b"2", b"3"]
    assert (stored(store, b"before", "customers"), stored(store, b"before")) == (None, b"1")


def test_what_is_not_recorded_is_not_committed(store: RocksDBStore, claim: Claim) -> None:
    transaction = store.begin(claim)
    transaction.handle.put(b"chair", b"1", cf="orders")
    with pytest.raises(UsageError, match="recorded"):
        transaction.commit()
    transaction.rollback()
    assert stored(store) is None


# --- what the user must not do --------------------------------------------------------------------------------------------


def test_the_column_family_of_the_state_table_is_refused(store: RocksDBStore, claim: Claim) -> None:
    batch = store.begin(claim).handle
    for use in (
        lambda: batch.put(b"orders", b"{}", cf=STATE_FAMILY),
        lambda: batch.get(b"orders", cf=STATE_FAMILY),
        lambda: batch.delete(b"orders", cf=STATE_FAMILY),
        lambda: batch.items(STATE_FAMILY),
        lambda: batch.column_family(STATE_FAMILY),
    ):
        with pytest.raises(UsageError, match="belongs to dualwrite"):
            use()


def test_an_unknown_column_family(store: RocksDBStore, claim: Claim) -> None:
    transaction = store.begin(claim)
    with pytest.raises(UsageError, match="It has: customers, default, orders") as caught:
        transaction.handle.put(b"chair", b"1", cf="nowhere")
    assert "store.create_column_family('nowhere')" in caught.value.next_step
    store.create_column_family("nowhere")
    store.create_column_family("nowhere")
    transaction.handle.put(b"chair", b"1", cf="nowhere")
    transaction.record(STATE, generation=0, transaction_number=1)
    transaction.commit()
    assert stored(store, b"chair", "nowhere") == b"1"


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_families_and_iterators_end_with_their_transaction(store: RocksDBStore, claim: Claim, end: str) -> None:
    transaction = store.begin(claim)
    batch = transaction.handle
    family = batch.column_family("orders")
    items = family.items()
    next(items)
    transaction.record(STATE, generation=0, transaction_number=1)
    getattr(transaction, end)()
    for use in (
        lambda: batch.get(b"a"),
        lambda: batch.column_family("orders"),
        lambda: family.put(b"a", b"1"),
        lambda: family.get(b"a"),
        lambda: family.delete(b"a"),
        family.items,
        lambda: list(items),
    ):
        with pytest.raises(WriterClosedError):
            use()


# --- the user's own Rdict -------------------------------------------------------------------------------------------------


def test_a_rdict_of_the_user_stays_open_and_keeps_its_write_options(path: Path) -> None:
    from rocksdict import WriteOptions  # noqa: PLC0415

    rdict = make_database(path, raw=True)
    careless = WriteOptions()
    careless.disable_wal = True  # type: ignore[assignment, method-assign]  # the stub has a method where there is an attribute
    rdict.set_write_options(careless)
    with RocksDBStore(rdict) as store:
        claim = store.claim(ID, "tests", timeout=LIMIT)
        recorded(store, claim).commit()
        log = sum(file.stat().st_size for file in path.glob("*.log"))
        assert log > 0
    rdict[b"still open"] = b"1"
    assert b"still open" in rdict
    rdict.close()
    reopened = Rdict(str(path))  # nothing of the store keeps it open
    reopened.close()


def test_stores_on_one_rdict_or_its_families_share_the_database(path: Path) -> None:
    rdict = make_database(path, raw=True)
    family = rdict.get_column_family("orders")
    with RocksDBStore(rdict) as one, RocksDBStore(family) as two, RocksDBStore(path) as three:
        assert one.database is two.database is three.database
        recorded(one, one.claim(ID, "one", timeout=LIMIT)).commit()
        assert [other.claim(ID, "other", timeout=0).fence for other in (two, three)] == [2, 3]
        batch = two.begin(two.claim(ID, "two", timeout=LIMIT)).handle
        assert batch.get(b"chair") is None  # the default family is `default`, whichever handle was passed
        assert batch.get(b"chair", cf="orders") == b"1"
    family.close()
    rdict.close()


def test_a_rollback_waits_for_a_commit_in_another_thread(store: RocksDBStore, claim: Claim) -> None:
    for number in range(1, 30):
        transaction = recorded(store, claim, number)
        both = threading.Barrier(2)

        def roll_back(transaction: Any = transaction, both: threading.Barrier = both) -> None:
            both.wait()
            transaction.rollback()

        other = threading.Thread(target=roll_back)
        other.start()
        both.wait()
        try:
            transaction.commit()
        except WriterClosedError:
            assert store.read_claimed(claim).transaction_number < number
        else:
            assert store.read_claimed(claim).transaction_number == number
        other.join()
        assert store.claim("other", "tests", timeout=0)
