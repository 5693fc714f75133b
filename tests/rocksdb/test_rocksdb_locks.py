"""The locks of ids, without a database."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

from dualwrite.stores.rocksdb.database import LockRequest, LockTable


def test_one_holder_at_a_time() -> None:
    locks, inside, most = LockTable(), [], []

    def work(number: int) -> None:
        for _ in range(50):
            request = LockRequest("id", "", "working")
            assert locks.acquire(request, time.monotonic() + 60) is None
            inside.append(number)
            most.append(len(inside))
            inside.remove(number)
            request.release()

    with ThreadPoolExecutor(6) as threads:
        list(threads.map(work, range(6)))
    assert set(most) == {1}
    assert len(most) == 300


def test_locks_of_different_ids_are_independent() -> None:
    locks = LockTable()
    assert [locks.acquire(LockRequest(name, "", ""), 0) for name in "ab"] == [None, None]


def test_acquiring_a_held_lock_again() -> None:
    locks, request, other = LockTable(), LockRequest("id", "owner", "working"), LockRequest("id", "", "")
    assert locks.acquire(request, 0) is None
    assert locks.acquire(request, 0) is None
    assert locks.acquire(other, 0) is request
    assert "'MainThread'" in str(request) or threading.current_thread().name in str(request)
    assert "'owner', working" in str(request)
    request.release()
    request.release()
    assert locks.acquire(other, 0) is None


def test_a_request_released_before_it_was_granted() -> None:
    locks, request = LockTable(), LockRequest("id", "", "")
    request.release()
    assert locks.acquire(request, 0) is None
    assert request.is_released
    assert locks.acquire(LockRequest("id", "", ""), 0) is None
