"""The locks of ids, without a database."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

from dualwrite.stores.rocksdb.locks import Hold, IdLocks


def test_one_holder_at_a_time() -> None:
    locks, inside, most = IdLocks(), [], []

    def work(number: int) -> None:
        for _ in range(50):
            hold = Hold("id", "", "working")
            assert locks.acquire(hold, time.monotonic() + 60) is None
            inside.append(number)
            most.append(len(inside))
            inside.remove(number)
            hold.release()

    with ThreadPoolExecutor(6) as threads:
        list(threads.map(work, range(6)))
    assert set(most) == {1}
    assert len(most) == 300


def test_locks_of_different_ids_are_independent() -> None:
    locks = IdLocks()
    assert [locks.acquire(Hold(name, "", ""), 0) for name in "ab"] == [None, None]


def test_acquiring_a_held_lock_again() -> None:
    locks, hold, other = IdLocks(), Hold("id", "owner", "working"), Hold("id", "", "")
    assert locks.acquire(hold, 0) is None
    assert locks.acquire(hold, 0) is None
    assert locks.acquire(other, 0) is hold
    assert "'MainThread'" in str(hold) or threading.current_thread().name in str(hold)
    assert "'owner', working" in str(hold)
    hold.release()
    hold.release()
    assert locks.acquire(other, 0) is None


def test_a_hold_released_before_it_was_acquired() -> None:
    locks, hold = IdLocks(), Hold("id", "", "")
    hold.release()
    assert locks.acquire(hold, 0) is None
    assert hold.over
    assert locks.acquire(Hold("id", "", ""), 0) is None
