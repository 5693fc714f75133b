"""Rows that a release before the ids of cluster and store has written."""

from __future__ import annotations

from pathlib import Path

import pytest
from rocksdb_scene import ID, STATE, STATE_FAMILY
from rocksdict import Options, Rdict

from dualwrite.producer_kind import ProducerKind
from dualwrite.stores.base import Settlement
from dualwrite.stores.rocksdb import RocksDBStore
from fixtures.older import OLDER_ROW


@pytest.mark.parametrize("raw", [True, False])
def test_a_row_of_an_older_release_is_read_and_moves_on(path: Path, raw: bool) -> None:
    rdict = Rdict(str(path), Options(raw_mode=raw))
    family = rdict.create_column_family(STATE_FAMILY, Options(raw_mode=raw))
    family[ID.encode() if raw else ID] = OLDER_ROW.encode() if raw else OLDER_ROW
    family.close()
    rdict.close()
    with RocksDBStore(path) as store:
        row = store.read(ID)
        assert row is not None
        assert (row.prepared_state, row.cluster_id, row.store_id, row.named_from) == (STATE, "", "", None)
        assert (row.kafka_id(0), row.kafka_id(3)) == (ID, f"{ID}#3")
        assert store.identity() is None
        claim = store.claim(ID, "tests", timeout=5)
        store.settle(claim, Settlement(clear_state=True, settled_generation=3))
        assert store.take_generation(claim, ProducerKind.NATIVE_TWO_PHASE, reuse=True, cluster_id="C") == 4
        row = store.read_claimed(claim)
        identity = store.identity()
        assert identity is not None
        assert (row.kafka_id(3), row.kafka_id(4)) == (f"{ID}#3", f"{ID}#{identity.store_id}.4")
        assert store.list() == [ID]
    with RocksDBStore(path) as store:
        assert (store.read(ID), store.identity()) == (row, identity)
