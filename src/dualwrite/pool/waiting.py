"""The calls that wait for a group, first come first served; calls with the same ordering key keep their order."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Hashable, Iterable

from dualwrite.pool.call import Call


class WaitingCalls:
    """A queue with several takers. A call waits as long as one with its key is in a group that is not committed yet."""

    def __init__(self) -> None:
        self._calls: deque[Call] = deque()
        self._changed = threading.Condition(threading.Lock())
        self._busy: set[Hashable] = set()
        self._closed = False

    def put(self, call: Call) -> bool:
        """Add a call; False if the queue is closed."""
        with self._changed:
            if self._closed:
                return False
            self._calls.append(call)
            self._changed.notify()
            return True

    def take(self, most: int) -> list[Call]:
        """Wait for calls and take at most so many of them for one group; an empty list once the queue is closed and empty."""
        with self._changed:
            while True:
                taken = self._takable(most, set())
                if taken:
                    return taken
                if self._closed and not self._calls:
                    self._changed.notify_all()
                    return []
                self._changed.wait()

    def take_more(self, most: int, group: Iterable[Call]) -> list[Call]:
        """Take at most so many calls that came meanwhile for a group that has not committed yet; does not wait."""
        if not self._calls:  # no lock for the usual case: a call that comes now is taken by the next group
            return []
        with self._changed:
            return self._takable(most, {call.key for call in group if call.key is not None})

    def release(self, group: Iterable[Call]) -> None:
        """The group has ended: calls with its keys can be taken."""
        keys = {call.key for call in group if call.key is not None}
        if keys:
            with self._changed:
                self._busy -= keys
                self._changed.notify_all()

    def close(self) -> None:
        """Accept no more calls; those that wait are still taken."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def __len__(self) -> int:
        return len(self._calls)

    def _takable(self, most: int, own: set[Hashable]) -> list[Call]:
        taken: list[Call] = []
        passed_over: list[Call] = []
        blocked: set[Hashable] = set()
        while self._calls and len(taken) < most:
            call = self._calls.popleft()
            key = call.key
            if key is not None and (key in blocked or (key in self._busy and key not in own)):
                blocked.add(key)
                passed_over.append(call)
                continue
            if not call.begin():
                continue  # cancelled
            taken.append(call)
            if key is not None:
                own.add(key)
                self._busy.add(key)
        self._calls.extendleft(reversed(passed_over))
        return taken
