from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path

import pytest
from rocksdb_scene import ID, STATE, STATE_FAMILY, make_database, recorded
from rocksdict import Options, Rdict

from dualwrite.errors import FencedError, NotSettledError, StoredStateError
from dualwrite.producer_kind import ProducerKind
from dualwrite.state import PreparedTxnState
from dualwrite.stores.base import Claim, LostKind, LostTransaction, Settlement
from dualwrite.stores.rocksdb import RocksDBStore
from fixtures.pace import LIMIT

LOST = LostTransaction(LostKind.LOST, STATE, 0, datetime(2026, 11, 21, 10, 0, 0, 123456, tzinfo=UTC))
UNVERIFIED = LostTransaction(LostKind.UNVERIFIED, PreparedTxnState(1, 2, 3), 1, datetime(2026, 11, 21, 11, tzinfo=UTC))


@pytest.fixture
def committed(store: RocksDBStore, claim: Claim) -> Claim:
    recorded(store, claim).commit()
    return claim


def test_settling_changes_only_what_it_names(store: RocksDBStore, committed: Claim) -> None:
    store.settle(committed, Settlement(settled_generation=0))
    assert store.read_claimed(committed).prepared_state == STATE
    store.settle(committed, Settlement(clear_state=True))
    row = store.read_claimed(committed)
    assert (row.prepared_state, row.settled_generation, row.lost, row.transaction_number) == (None, 0, (), 1)


def test_settling_twice_is_settling_once(store: RocksDBStore, committed: Claim) -> None:
    for _ in range(2):
        store.settle(committed, Settlement(clear_state=True, lost=LOST))
    store.settle(committed, Settlement(lost=UNVERIFIED))
    row = store.read_claimed(committed)
    assert (row.prepared_state, row.lost) == (None, (LOST, UNVERIFIED))


def test_a_fenced_settlement_changes_nothing(store: RocksDBStore, rival: RocksDBStore, committed: Claim) -> None:
    theirs = rival.claim(ID, "theirs", timeout=LIMIT)
    for settlement in (Settlement(clear_state=True), Settlement(lost=LOST), Settlement(settled_generation=5)):
        with pytest.raises(FencedError):
            store.settle(committed, settlement)
    row = store.read_claimed(theirs)
    assert (row.prepared_state, row.lost, row.settled_generation) == (STATE, (), -1)


def test_generations(store: RocksDBStore, claim: Claim) -> None:
    native, two_phase = ProducerKind.NATIVE, ProducerKind.NATIVE_TWO_PHASE
    assert [store.take_generation(claim, ProducerKind.LIBRDKAFKA, reuse=True) for _ in range(2)] == [1, 2]
    taken = [store.take_generation(claim, kind, reuse=True) for kind in (native, native, two_phase, native)]
    assert taken == [3, 3, 4, 5]
    store.settle(claim, Settlement(settled_generation=5))
    assert store.take_generation(claim, native, reuse=True) == 5
    assert list(store.read_claimed(claim).unsettled_generations) == [5]


def test_acknowledging(store: RocksDBStore, claim: Claim) -> None:
    store.settle(claim, Settlement(lost=LOST))
    store.settle(claim, Settlement(lost=UNVERIFIED))
    assert store.acknowledge(ID) == (LOST, UNVERIFIED)
    assert store.acknowledge(ID) == ()
    assert store.acknowledge("nobody") == ()
    assert store.read("nobody") is None


def test_times_are_kept_in_utc(store: RocksDBStore, claim: Claim) -> None:
    east = LOST.recorded_at.astimezone(timezone(timedelta(hours=9)))
    store.settle(claim, Settlement(lost=LostTransaction(LostKind.LOST, STATE, 0, east)))
    row = store.read_claimed(claim)
    assert row.lost[0].recorded_at == LOST.recorded_at
    assert row.updated_at.utcoffset() == timedelta(0)


def test_listing_by_prefix(store: RocksDBStore) -> None:
    ids = ["a", "A", "a%b", "a_b", "axb", "b", "ä", "äö", "a\\b", "\U0001f600", "\uffff"]
    for transactional_id in ids:
        store.claim(transactional_id, "tests", timeout=LIMIT)
    assert store.list() == sorted(ids)
    assert store.list("a") == ["a", "a%b", "a\\b", "a_b", "axb"]
    assert store.list("a_") == ["a_b"]
    assert store.list("ä") == ["ä", "äö"]
    assert store.list("c") == []


def test_forgetting_keeps_the_fence(store: RocksDBStore, claim: Claim) -> None:
    store.take_generation(claim, ProducerKind.LIBRDKAFKA)
    store.settle(claim, Settlement(settled_generation=1))
    store.forget(ID)
    store.forget(ID)
    assert store.list() == []
    row = store.read(ID)
    assert row is not None
    assert (row.forgotten, row.fence) == (True, 2)
    with pytest.raises(FencedError):
        store.begin(claim)
    revived = store.claim(ID, "tests", timeout=LIMIT)
    row = store.read_claimed(revived)
    assert (row.fence, row.forgotten, row.generation, row.settled_generation) == (3, False, 1, 1)
    assert store.list() == [ID]
    store.forget("nobody")
    assert store.read("nobody") is None


def test_what_is_not_settled_is_not_forgotten(store: RocksDBStore, committed: Claim) -> None:
    for settlement in (Settlement(clear_state=True), Settlement(settled_generation=0, lost=LOST)):
        with pytest.raises(NotSettledError):
            store.forget(ID)
        store.settle(committed, settlement)
    with pytest.raises(NotSettledError, match="--acknowledge"):
        store.forget(ID)
    store.acknowledge(ID)
    store.forget(ID)


# --- what stands in the database ------------------------------------------------------------------------------------------


def test_other_clients_can_read_the_rows_of_a_database_of_ours(fresh: RocksDBStore, fresh_claim: Claim, path: Path) -> None:
    recorded(fresh, fresh_claim).commit()
    fresh.close()
    (path / "rocksdict-config.json").unlink()  # no other client has it: rocksdict takes raw mode then
    rdict = Rdict(str(path))
    family = rdict.get_column_family(STATE_FAMILY)
    assert list(family.keys()) == [b"orders"]
    assert json.loads(family[b"orders"])["prepared_transaction_state"] == "4711:3"
    family.close()
    rdict.close()


def test_in_a_database_that_is_not_in_raw_mode_rocksdict_reads_them_as_text(path: Path) -> None:
    rdict = make_database(path, raw=False)
    with RocksDBStore(rdict) as store:
        store.claim("ä", "tests", timeout=LIMIT)
    with rdict.get_column_family(STATE_FAMILY) as family:
        assert json.loads(family["ä"])["fence"] == 1
    rdict.close()


def _overwrite(store: RocksDBStore, text: bytes, *, raw: bool) -> None:
    family = store.rdict.get_column_family(STATE_FAMILY)
    family[ID.encode() if raw else ID] = text


@pytest.mark.parametrize("raw", [True, False])
@pytest.mark.parametrize("text", [b"", b"[]", b"{}", b'{"fence": "1"}', b"null", b"\xff\xfe"])
def test_a_row_that_cannot_be_read(path: Path, raw: bool, text: bytes) -> None:
    rdict = Rdict(str(path), Options(raw_mode=raw))
    with RocksDBStore(rdict) as store:
        claim = store.claim(ID, "tests", timeout=LIMIT)
        store.claim("other", "tests", timeout=LIMIT)
        transaction = store.begin(claim)
        _overwrite(store, text, raw=raw)
        for use in (
            lambda: store.read(ID),
            lambda: store.read_claimed(claim),
            lambda: store.claim(ID, "tests", timeout=LIMIT),
            lambda: store.forget(ID),
            lambda: store.begin(claim),
            lambda: transaction.record(STATE, generation=0, transaction_number=1),
        ):
            with pytest.raises(StoredStateError) as caught:
                use()
            assert caught.value.transactional_id == ID
        transaction.rollback()
        assert store.list() == [ID, "other"]
        assert store.claim("other", "tests", timeout=0).fence == 2
    rdict.close()


@pytest.mark.parametrize("value", [{"fence": 1}, 17, None, b"\xff", 1.5])
def test_a_row_of_another_type(path: Path, value: object) -> None:
    rdict = Rdict(str(path))
    with RocksDBStore(rdict) as store:
        store.check()
        rdict.get_column_family(STATE_FAMILY)[ID] = value
        if value is None:
            assert store.read(ID) is None
        else:
            with pytest.raises(StoredStateError):
                store.read(ID)
    rdict.close()


def test_a_row_that_is_a_broken_pickle(path: Path) -> None:
    rdict = Rdict(str(path))
    with RocksDBStore(rdict) as store:
        store.check()
        with rdict.get_column_family(STATE_FAMILY) as family:
            family.set_dumps(lambda _: b"no pickle")
            family[ID] = []
        with pytest.raises(StoredStateError, match="UnpicklingError"):
            store.read(ID)
        assert store.list() == [ID]
    rdict.close()
