"""Claims on RocksDB: locks of ids within one process, timeouts, zombie threads."""

from __future__ import annotations

import gc
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from rocksdb_scene import ID, STATE, recorded, stored

from dualwrite.errors import ClaimTimeoutError, FencedError
from dualwrite.stores.base import Claim, StateRow
from dualwrite.stores.rocksdb import RocksDBStore
from dualwrite.testing import failpoints
from fixtures.pace import LIMIT

# --- transactions of the same id ------------------------------------------------------------------------------------------


def test_a_claim_times_out_and_names_the_blocker(store: RocksDBStore, rival: RocksDBStore, claim: Claim) -> None:
    transaction = recorded(store, claim)
    with pytest.raises(ClaimTimeoutError) as caught:
        rival.claim(ID, "theirs", timeout=0.2)
    assert caught.value.timeout == 0.2
    assert f"thread {threading.current_thread().name!r}" in caught.value.blocker
    assert "'tests'" in caught.value.blocker
    assert "committing a transaction" in str(caught.value)
    transaction.commit()
    assert rival.claim(ID, "theirs", timeout=LIMIT).fence == 2


def test_a_thread_that_ends_with_an_open_transaction_can_be_rolled_back_by_another(
    store: RocksDBStore, rival: RocksDBStore, claim: Claim
) -> None:
    with ThreadPoolExecutor(1, thread_name_prefix="gone") as thread:
        transaction = thread.submit(recorded, store, claim).result(timeout=LIMIT)
    with pytest.raises(ClaimTimeoutError, match="gone"):
        rival.claim(ID, "theirs", timeout=0)
    transaction.rollback()
    assert rival.claim(ID, "theirs", timeout=0).fence == 2


def test_a_garbage_collected_transaction_releases_its_lock(store: RocksDBStore, rival: RocksDBStore, claim: Claim) -> None:
    handle = recorded(store, claim).handle
    gc.collect()
    assert rival.claim(ID, "theirs", timeout=0).fence == 2
    del handle
    assert stored(store) is None


def test_a_rollback_by_another_thread_while_record_waits(store: RocksDBStore, claim: Claim) -> None:
    first, second = recorded(store, claim), store.begin(claim)
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(second.record, STATE, generation=0, transaction_number=2)
        time.sleep(0.1)
        second.rollback()
        first.commit()
        with pytest.raises(RuntimeError, match="ended"):
            waiting.result(timeout=LIMIT)
    assert store.claim(ID, "tests", timeout=0).fence == 2
    assert stored(store) == b"1"


# --- lane by lane ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", ["path"], indirect=True)
def test_an_opening_that_is_overtaken_claims_no_further_lane(store: RocksDBStore, rival: RocksDBStore) -> None:
    lanes = [ID, f"{ID}~1", f"{ID}~2"]
    theirs: list[StateRow] = []

    def overtake() -> None:
        theirs.extend(rival.claim_lanes(lanes, "theirs", timeout=LIMIT, cluster_id="c").rows)

    with (
        failpoints.armed("recover_after_claim", failpoints.only_at(1, overtake)),
        pytest.raises(FencedError),
    ):
        store.claim_lanes(lanes, "ours", timeout=LIMIT, cluster_id="c")
    assert rival.read_claimed_rows([row.claim for row in theirs]) == tuple(theirs)
