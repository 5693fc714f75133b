"""The rows of the state as RocksDB stores them, and rows that cannot be read."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest
from rocksdb_scene import ID, STATE, STATE_FAMILY, make_database, recorded
from rocksdict import Options, Rdict

from dualwrite.errors import StoredStateError
from dualwrite.state import PreparedTxnState
from dualwrite.stores.base import Claim, LostKind, LostTransaction
from dualwrite.stores.rocksdb import RocksDBStore
from fixtures.pace import LIMIT

LOST = LostTransaction(LostKind.LOST, STATE, 0, datetime(2026, 11, 21, 10, 0, 0, 123456, tzinfo=UTC))
UNVERIFIED = LostTransaction(LostKind.UNVERIFIED, PreparedTxnState(1, 2, 3), 1, datetime(2026, 11, 21, 11, tzinfo=UTC))


# --- what is in the database ----------------------------------------------------------------------------------------------


def test_other_clients_can_read_the_rows(fresh: RocksDBStore, fresh_claim: Claim, path: Path) -> None:
    recorded(fresh, fresh_claim).commit()
    fresh.close()
    (path / "rocksdict-config.json").unlink()  # other clients don't write it: rocksdict assumes raw mode then
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
