from __future__ import annotations

import gc
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from rocksdb_scene import ID, STATE, recorded, stored

from dualwrite.errors import ClaimTimeoutError, FencedError
from dualwrite.producer_kind import ProducerKind
from dualwrite.stores.base import MAX_OWNER_LENGTH, Claim, Settlement
from dualwrite.stores.rocksdb import RocksDBStore
from fixtures.pace import LIMIT, happened


def test_the_first_claim_makes_the_row(store: RocksDBStore) -> None:
    claim = store.claim(ID, "host:1", timeout=LIMIT)
    assert claim == Claim(ID, 1, "host:1")
    row = store.read_claimed(claim)
    assert (row.fence, row.generation, row.settled_generation, row.prepared_state) == (1, 0, -1, None)
    assert (row.transaction_number, row.lost, row.owner, row.forgotten) == (0, (), "host:1", False)


def test_each_claim_fences_the_one_before(store: RocksDBStore, rival: RocksDBStore) -> None:
    ours = store.claim(ID, "ours", timeout=LIMIT)
    theirs = rival.claim(ID, "theirs", timeout=LIMIT)
    assert theirs.fence == ours.fence + 1
    for use in (store.read_claimed, store.begin, lambda claim: store.take_generation(claim, ProducerKind.NATIVE)):
        with pytest.raises(FencedError) as caught:
            use(ours)
        assert (caught.value.fence, caught.value.current_fence, caught.value.current_owner) == (1, 2, "theirs")


def test_a_claim_resets_the_transaction_number_but_an_expected_one_keeps_it(store: RocksDBStore, claim: Claim) -> None:
    recorded(store, claim, 7).commit()
    kept = store.claim(ID, "tests", timeout=LIMIT, expected_fence=claim.fence)
    assert store.read_claimed(kept).transaction_number == 7
    renewed = store.claim(ID, "tests", timeout=LIMIT)
    assert store.read_claimed(renewed).transaction_number == 0
    assert store.read_claimed(renewed).prepared_state == STATE


def test_an_expected_fence_that_has_moved_on(store: RocksDBStore, rival: RocksDBStore, claim: Claim) -> None:
    rival.claim(ID, "theirs", timeout=LIMIT)
    with pytest.raises(FencedError) as caught:
        store.claim(ID, "tests", timeout=LIMIT, expected_fence=claim.fence)
    assert (caught.value.fence, caught.value.current_fence, caught.value.current_owner) == (1, 2, "theirs")
    assert store.read(ID).fence == 2  # type: ignore[union-attr]


def test_an_expected_fence_of_an_id_without_row(store: RocksDBStore) -> None:
    with pytest.raises(FencedError, match="gone"):
        store.claim(ID, "tests", timeout=LIMIT, expected_fence=1)
    assert store.read(ID) is None


def test_a_long_owner_is_cut(store: RocksDBStore) -> None:
    claim = store.claim(ID, "ö" * 1000, timeout=LIMIT)
    assert claim.owner == store.read_claimed(claim).owner == "ö" * MAX_OWNER_LENGTH


def test_fences_persist(fresh: RocksDBStore, fresh_claim: Claim) -> None:
    fresh.close()
    assert fresh.claim(ID, "again", timeout=LIMIT).fence == fresh_claim.fence + 1


def test_threads_that_claim_at_once_get_a_fence_each(store: RocksDBStore, rival: RocksDBStore) -> None:
    barrier = threading.Barrier(8)

    def one(number: int) -> list[int]:
        barrier.wait()
        return [(store, rival)[number % 2].claim(ID, f"thread {number}", timeout=LIMIT).fence for _ in range(10)]

    with ThreadPoolExecutor(8) as threads:
        fences = [fence for got in threads.map(one, range(8)) for fence in got]
    assert sorted(fences) == list(range(1, 81))


def test_threads_that_expect_the_same_fence(store: RocksDBStore, claim: Claim) -> None:
    barrier = threading.Barrier(6)

    def one(number: int) -> int | None:
        barrier.wait()
        try:
            return store.claim(ID, f"thread {number}", timeout=LIMIT, expected_fence=claim.fence).fence
        except FencedError:
            return None

    with ThreadPoolExecutor(6) as threads:
        assert sorted(threads.map(one, range(6)), key=str) == [2, None, None, None, None, None]


# --- transactions of the same id ------------------------------------------------------------------------------------------


def test_a_claim_waits_for_a_transaction_that_is_about_to_commit(
    store: RocksDBStore, rival: RocksDBStore, claim: Claim
) -> None:
    transaction = recorded(store, claim)
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(rival.claim, ID, "theirs", timeout=LIMIT)
        time.sleep(0.2)
        assert not waiting.done()
        transaction.commit()
        theirs = waiting.result(timeout=LIMIT)
    assert rival.read_claimed(theirs).prepared_state == STATE


def test_a_claim_gives_up_in_time_and_names_the_blocker(store: RocksDBStore, rival: RocksDBStore, claim: Claim) -> None:
    transaction = recorded(store, claim)
    with pytest.raises(ClaimTimeoutError) as caught:
        rival.claim(ID, "theirs", timeout=0.2)
    assert caught.value.timeout == 0.2
    assert f"thread {threading.current_thread().name!r}" in caught.value.blocker
    assert "'tests'" in caught.value.blocker
    assert "committing a transaction" in str(caught.value)
    transaction.commit()
    assert rival.claim(ID, "theirs", timeout=LIMIT).fence == 2


def test_everything_that_writes_a_row_waits_only_so_long(store: RocksDBStore, rival: RocksDBStore, claim: Claim) -> None:
    transaction = recorded(store, claim)
    blocked = rival.begin(claim)
    for use in (
        lambda: rival.settle(claim, Settlement(clear_state=True)),
        lambda: rival.take_generation(claim, ProducerKind.NATIVE),
        lambda: rival.acknowledge(ID),
        lambda: rival.forget(ID),
        lambda: blocked.record(STATE, generation=0, transaction_number=2),
    ):
        with pytest.raises(ClaimTimeoutError):
            use()
    blocked.rollback()
    assert rival.claim("another id", "theirs", timeout=0).fence == 1
    transaction.commit()
    rival.settle(claim, Settlement(clear_state=True))


def test_a_claim_does_not_wait_for_a_transaction_that_has_not_recorded(
    store: RocksDBStore, rival: RocksDBStore, claim: Claim
) -> None:
    transaction = store.begin(claim)
    transaction.handle.put(b"chair", b"1", cf="orders")
    assert rival.claim(ID, "theirs", timeout=0).fence == 2
    with pytest.raises(FencedError) as caught:
        transaction.record(STATE, generation=0, transaction_number=1)
    assert caught.value.current_owner == "theirs"
    transaction.rollback()
    assert stored(store) is None
    assert store.read(ID).prepared_state is None  # type: ignore[union-attr]
    assert rival.claim(ID, "theirs", timeout=0).fence == 3


def test_a_zombie_thread_finds_out_and_leaves_nothing(store: RocksDBStore, rival: RocksDBStore, claim: Claim) -> None:
    go_on, begun = threading.Event(), threading.Event()

    def zombie() -> None:
        transaction = store.begin(claim)
        transaction.handle.put(b"chair", b"zombie", cf="orders")
        begun.set()
        happened(go_on)
        try:
            transaction.record(STATE, generation=0, transaction_number=1)
            transaction.commit()
        finally:
            transaction.rollback()

    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(zombie)
        happened(begun)
        theirs = rival.claim(ID, "theirs", timeout=LIMIT)
        recorded(rival, theirs, 5).commit()
        go_on.set()
        with pytest.raises(FencedError):
            running.result(timeout=LIMIT)
    assert stored(store) == b"5"
    assert rival.read_claimed(theirs).transaction_number == 5


def test_a_thread_that_ends_with_an_open_transaction_can_be_rolled_back_by_another(
    store: RocksDBStore, rival: RocksDBStore, claim: Claim
) -> None:
    with ThreadPoolExecutor(1, thread_name_prefix="gone") as thread:
        transaction = thread.submit(recorded, store, claim).result(timeout=LIMIT)
    with pytest.raises(ClaimTimeoutError, match="gone"):
        rival.claim(ID, "theirs", timeout=0)
    transaction.rollback()
    assert rival.claim(ID, "theirs", timeout=0).fence == 2


def test_a_transaction_that_is_dropped_without_an_end_gives_the_lock_back(
    store: RocksDBStore, rival: RocksDBStore, claim: Claim
) -> None:
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
