"""The rows as nodes: what other clients see and do, many of them, rows that are unreadable or too large."""

from __future__ import annotations

import itertools
import json
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime

import pytest
from kazoo.client import KazooClient
from zookeeper_scene import ID, STATE

from dualwrite.errors import StoredStateError, StoreError
from dualwrite.stores.base import Claim, LostKind, LostTransaction, Resolution
from dualwrite.stores.key_values import ROWS
from dualwrite.stores.zookeeper import ZooKeeperStore
from dualwrite.stores.zookeeper.nodes import condition
from dualwrite.testing.proxy import Link, TcpProxy
from fixtures.pace import LIMIT

LOST = LostTransaction(LostKind.LOST, STATE, 0, datetime(2026, 1, 1, tzinfo=UTC))


def test_any_other_client_can_read_the_row(store: ZooKeeperStore, claim: Claim, plain: KazooClient) -> None:
    transaction = store.begin(claim)
    transaction.record(STATE, generation=0, transaction_number=1)
    transaction.commit()
    data, _ = plain.get(f"/kafka_transaction_state/{ID}")
    found = json.loads(data.decode("utf-8"))
    assert found["prepared_transaction_state"] == str(STATE)
    assert found["fence"] == 1
    assert found["owner"] == "tests"


def test_foreign_nodes_are_not_listed(store: ZooKeeperStore, claim: Claim, plain: KazooClient) -> None:
    plain.create("/kafka_transaction_state/b%zz", b"not ours")
    assert store.list() == [claim.transactional_id]


@pytest.mark.slow
def test_list_of_many_ids(store: ZooKeeperStore, rival: ZooKeeperStore) -> None:
    ids = [f"id-{number:04}" for number in range(450)]
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda each: store.claim(each, "tests", timeout=LIMIT), ids))
    assert rival.list("id-") == ids


# --- changes --------------------------------------------------------------------------------------------------------------


def test_a_row_that_became_too_large(url: str) -> None:
    with ZooKeeperStore.from_url(url, max_request_bytes=2_000) as store:
        claim = store.claim(ID, "tests", timeout=LIMIT)
        generations = itertools.count()

        def lose() -> None:
            store.record_resolution(
                claim, Resolution(lost=LostTransaction(LostKind.LOST, STATE, next(generations), LOST.recorded_at))
            )

        for _ in range(10):
            lose()
        with pytest.raises(StoreError, match=r"(?s)row of the id would take .* the limit is 2,000") as caught:
            list(iter(lose, "never"))
        assert caught.value.size > caught.value.limit == 2_000
        assert len(store.acknowledge(ID)) > 5


def test_no_write_is_conditional_on_the_version_that_means_any() -> None:
    """Simulated: a real node reaches this version after four billion changes."""
    assert condition((ROWS, ID), -2) == -2
    with pytest.raises(StoredStateError, match="-1"):
        condition((ROWS, ID), -1)


# --- connections that break -----------------------------------------------------------------------------------------------


def test_a_read_survives_a_broken_connection(proxied_store: ZooKeeperStore, proxy: TcpProxy, claim: Claim) -> None:
    proxied_store.check()
    proxy.on_client_bytes(b"/kafka_transaction_state", Link.cut)
    assert proxied_store.read_claimed(claim).fence == 1
