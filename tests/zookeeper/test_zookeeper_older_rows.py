"""Rows written by a release that did not store the ids of cluster and store yet."""

from __future__ import annotations

import pytest
from kazoo.client import KazooClient
from zookeeper_scene import ID

from dualwrite.errors import UsageError
from dualwrite.stores.zookeeper import ZooKeeperStore
from fixtures.older import OLDER_ROW, assert_still_usable
from fixtures.pace import LIMIT


def test_a_row_of_an_older_release_is_read_and_updated(store: ZooKeeperStore, plain: KazooClient) -> None:
    store.check()
    plain.create(f"/kafka_transaction_state/{ID}", OLDER_ROW.encode(), makepath=True)
    assert_still_usable(store, ID)


def test_a_block_may_not_write_the_identity_node(store: ZooKeeperStore) -> None:
    transaction = store.begin(store.claim(ID, "tests", timeout=LIMIT))
    with pytest.raises(UsageError):
        transaction.handle.create("/kafka_transaction_store", b"mine")
    transaction.rollback()
