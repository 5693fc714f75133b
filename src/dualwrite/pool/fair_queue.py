"""A queue that is fair to those that wait in it."""

from __future__ import annotations

import threading
from collections import deque
from queue import SimpleQueue
from typing import Generic, TypeVar

T = TypeVar("T")


class FairQueue(Generic[T]):
    """Gives its items to those that wait for them, in the order in which they came.

    Of a SimpleQueue, the thread that puts an item back takes it again before one that waits has woken up, for as long as both
    go on. It may be used in a signal handler, too.
    """

    def __init__(self) -> None:
        self._items: deque[T] = deque()
        self._waiting: deque[SimpleQueue[T]] = deque()
        self._lock = threading.RLock()

    def qsize(self) -> int:
        """How many items nobody has taken."""
        return len(self._items)

    def put(self, item: T) -> None:
        """Add an item."""
        with self._lock:
            self._items.append(item)
            self._hand_out()

    def get(self, timeout: float | None = None) -> T:
        """The first item, as soon as there is one for this caller.

        Raises:
            Empty: There was none within so many seconds.
        """
        place: SimpleQueue[T] = SimpleQueue()
        try:
            with self._lock:
                self._waiting.append(place)
                self._hand_out()
            return place.get(timeout=timeout)
        except BaseException:
            with self._lock:
                if place in self._waiting:
                    self._waiting.remove(place)
                if not place.empty():  # it has come just now
                    self.put(place.get())
            raise

    def _hand_out(self) -> None:
        while self._items and self._waiting:
            item = self._items.popleft()
            self._waiting.popleft().put(item)
