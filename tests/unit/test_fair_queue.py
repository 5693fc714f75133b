"""Who gets the items of a FairQueue."""

from __future__ import annotations

import random
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from queue import Empty
from typing import Any

import pytest

from dualwrite.pool.fair_queue import FairQueue
from fixtures.pace import LIMIT, until


def test_items_in_their_order() -> None:
    queue: FairQueue[int] = FairQueue()
    queue.put(1)
    queue.put(2)
    assert queue.qsize() == 2
    assert [queue.get(), queue.get(timeout=0)] == [1, 2]
    with pytest.raises(Empty):
        queue.get(timeout=0.01)
    assert queue.qsize() == 0


def test_those_that_wait_get_them_in_their_order_and_before_the_one_that_puts_them_back() -> None:
    queue: FairQueue[int] = FairQueue()
    got: list[tuple[str, int]] = []
    threads = []
    for name in ("first", "second"):
        threads.append(threading.Thread(target=lambda name=name: got.append((name, queue.get(LIMIT)))))
        threads[-1].start()
        until(lambda: len(queue._waiting) == len(threads), "it waits")
    for number in (1, 2):
        queue.put(number)
        with pytest.raises(Empty):
            queue.get(timeout=0)
        threads[number - 1].join(LIMIT)
    assert got == [("first", 1), ("second", 2)]


def test_nothing_is_lost_when_some_stop_waiting() -> None:
    """Also an item that comes just then."""
    queue: FairQueue[int] = FairQueue()
    for number in range(3):
        queue.put(number)
    took = [0] * 8

    def take(place: int) -> None:
        shuffled = random.Random(place)
        for _ in range(400):
            try:
                item = queue.get(timeout=shuffled.choice([0, 0.00001, 0.0001]))
            except Empty:
                continue
            took[place] += 1
            queue.put(item)

    with ThreadPoolExecutor(len(took)) as threads:
        list(threads.map(take, range(len(took))))
    assert all(took)
    assert not queue._waiting
    assert sorted(queue.get(timeout=0) for _ in range(3)) == [0, 1, 2]


def test_an_interrupt_leaves_nobody_behind() -> None:
    queue: FairQueue[int] = FairQueue()

    def interrupt(*_: Any) -> None:
        queue.put(1)  # a signal handler may use it, too
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(KeyboardInterrupt):
            queue.get(LIMIT)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert not queue._waiting
    assert queue.get(timeout=0) == 1
