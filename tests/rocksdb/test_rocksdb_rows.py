"""The rows as RocksDB stores them, which other clients can read; and rows that cannot be read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rocksdb_scene import ID, STATE_FAMILY, make_database, recorded
from rocksdict import Rdict

from dualwrite.errors import StoredStateError
from dualwrite.stores.base import Claim
from dualwrite.stores.rocksdb import RocksDBStore
from fixtures.pace import LIMIT


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


def test_in_a_database_that_is_not_in_raw_mode_rocksdict_reads_them_as_bytes(path: Path) -> None:
    rdict = make_database(path, raw=False)
    with RocksDBStore(rdict) as store:
        store.claim("ä", "tests", timeout=LIMIT)
    with rdict.get_column_family(STATE_FAMILY) as family:
        assert json.loads(family["ä".encode()])["fence"] == 1
    rdict.close()


def test_values_that_are_no_texts_cannot_be_read(path: Path) -> None:
    """In a database that is not in raw mode. The others can be used."""
    rdict = make_database(path, raw=False)
    with RocksDBStore(rdict) as store:
        store.claim("other", "tests", timeout=LIMIT)
        with rdict.get_column_family(STATE_FAMILY) as family:
            for value in ({"fence": 1}, 17, 1.5):
                family[ID.encode()] = value
                for use in (lambda: store.read(ID), lambda: store.claim(ID, "tests", timeout=LIMIT)):
                    with pytest.raises(StoredStateError) as caught:
                        use()
                    assert caught.value.transactional_id == ID
            family.set_dumps(lambda _: b"no pickle")
            family[ID.encode()] = []
            with pytest.raises(StoredStateError, match="UnpicklingError"):
                store.read(ID)
        assert store.list() == [ID, "other"]
        assert store.claim("other", "tests", timeout=0).fence == 2
    rdict.close()
