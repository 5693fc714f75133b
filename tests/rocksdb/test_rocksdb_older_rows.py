"""Rows written by a release that did not store the ids of cluster and store yet."""

from __future__ import annotations

from pathlib import Path

import pytest
from rocksdb_scene import ID, STATE_FAMILY
from rocksdict import Options, Rdict

from dualwrite.stores.rocksdb import RocksDBStore
from fixtures.older import OLDER_ROW, assert_still_usable


@pytest.mark.parametrize("raw", [True, False])
def test_a_row_of_an_older_release_is_read_and_updated(path: Path, raw: bool) -> None:
    rdict = Rdict(str(path), Options(raw_mode=raw))
    family = rdict.create_column_family(STATE_FAMILY, Options(raw_mode=raw))
    family[ID.encode() if raw else ID] = OLDER_ROW.encode() if raw else OLDER_ROW
    family.close()
    rdict.close()
    with RocksDBStore(path) as store:
        assert_still_usable(store, ID)
        row, identity = store.read(ID), store.identity()
    with RocksDBStore(path) as store:
        assert (store.read(ID), store.identity()) == (row, identity)
