"""Rows that a release before the ids of cluster and store has written."""

from __future__ import annotations

import pytest
from kazoo.client import KazooClient
from zookeeper_scene import ID, STATE

from dualwrite.errors import UsageError
from dualwrite.producer_kind import ProducerKind
from dualwrite.stores.base import Settlement
from dualwrite.stores.zookeeper import ZooKeeperStore
from fixtures.older import OLDER_ROW


def test_a_row_of_an_older_release_is_read_and_moves_on(store: ZooKeeperStore, plain: KazooClient) -> None:
    store.check()
    plain.create(f"/kafka_transaction_state/{ID}", OLDER_ROW.encode(), makepath=True)
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


def test_a_block_may_not_write_the_node_of_the_database_s_id(store: ZooKeeperStore) -> None:
    transaction = store.begin(store.claim(ID, "tests", timeout=5))
    with pytest.raises(UsageError):
        transaction.handle.create("/kafka_transaction_store", b"mine")
    transaction.rollback()
