"""The queue of calls that wait for a group: first come, first served; calls with the same ordering key keep their order."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Hashable
from queue import Empty, SimpleQueue

from dualwrite.pool.call import Call


class WaitingCalls:
    """A queue. Any thread may `put` calls, even in a signal handler; one thread at a time may wait in `take`.

    A call is held back while another call with the same key is in a group that has not committed yet.

    Args:
        goes_alone: Whether a call must be the only one of its group.
    """

    def __init__(self, goes_alone: Callable[[Call], bool] = lambda call: call.alone) -> None:
        self._goes_alone = goes_alone
        self._inbox: SimpleQueue[Call | None] = SimpleQueue()  # None wakes the thread that takes calls
        self._calls: deque[Call] = deque()  # received from the inbox, and not taken by a group yet
        self._in_groups = 0
        self._busy: set[Hashable] = set()
        self._lock = threading.Lock()  # for these three
        self._is_closed = False
        self._is_drained = False

    def put(self, call: Call) -> bool:
        """Add a call; False if the queue is closed."""
        if self._is_closed:
            return False
        self._inbox.put(call)
        return not (self._is_drained and call.cancel())  # closed in between: nobody takes calls any more

    def take(self, most: int, groups: int = 1) -> tuple[list[Call], bool]:
        """Wait for calls and take some of them for a group.

        Args:
            most: The number of calls to take at most.
            groups: How many groups share the calls: none takes more than its part of all that wait or are in groups.

        Returns:
            The calls, and whether they were waiting already; none once the queue is closed and empty.
        """
        was_waiting = True
        while True:
            with self._lock:
                self._receive()
                taken = self._takable(most, set(), may_be_alone=True, groups=groups)
                if taken:
                    return taken, was_waiting
                if self._is_closed and not self._calls:
                    self._is_drained = True
                    if not self._receive():
                        return [], was_waiting
                    continue
            was_waiting = False
            call = self._inbox.get()
            if call is not None:
                with self._lock:
                    self._calls.append(call)

    def take_more(self, most: int, group: Collection[Call], groups: int = 1) -> list[Call]:
        """Take further calls for a group that has not committed yet; does not wait. Any thread may call this."""
        with self._lock:
            if not self._inbox.empty():
                self._receive()
                self._inbox.put(None)  # for the thread that waits in `take`, which what was received may have been meant for
            own = {call.key for call in group if call.key is not None}
            return self._takable(most, own, may_be_alone=False, groups=groups, has=len(group))

    def put_back(self, calls: list[Call], group: Collection[Call]) -> None:
        """Put the calls that were taken last, and have not begun, back at the front. Any thread may call this.

        Args:
            calls: The calls, in the order in which they were taken.
            group: The calls that stay in the group: their keys stay busy.
        """
        keys = {call.key for call in calls} - {call.key for call in group}
        with self._lock:
            self._calls.extendleft(reversed(calls))
            self._in_groups -= len(calls)
            self._busy -= keys
        self._inbox.put(None)  # another group may take them

    def release(self, group: Collection[Call]) -> None:
        """Note that a group has ended, so that calls with its keys can be taken. Any thread may call this."""
        keys = {call.key for call in group if call.key is not None}
        with self._lock:
            self._in_groups -= len(group)
            self._busy -= keys
        if keys:
            self._inbox.put(None)

    @property
    def is_closed(self) -> bool:
        """Whether the queue accepts no more calls."""
        return self._is_closed

    def close(self) -> None:
        """Accept no more calls; those that are waiting are still taken."""
        self._is_closed = True
        self._inbox.put(None)

    def cancel(self) -> None:
        """After `close`, in any thread: cancel the waiting calls, because the threads that should take them are blocked."""
        self._is_drained = True
        while True:
            try:
                call = self._inbox.get_nowait()
            except Empty:
                break
            if call is not None:
                call.cancel()
        for call in list(self._calls):
            call.cancel()
        self._inbox.put(None)

    def __len__(self) -> int:
        return len(self._calls) + self._inbox.qsize()

    def _receive(self) -> bool:
        """Empty the inbox; return whether there was a call in it."""
        before = len(self._calls)
        try:
            while True:
                call = self._inbox.get_nowait()
                if call is not None:
                    self._calls.append(call)
        except Empty:
            return len(self._calls) > before

    def _takable(self, most: int, own: set[Hashable], *, may_be_alone: bool, groups: int, has: int = 0) -> list[Call]:
        if groups > 1:
            most = min(most, -(-(len(self._calls) + self._in_groups) // groups) - has)
        taken: list[Call] = []
        passed_over: list[Call] = []
        blocked: set[Hashable] = set()
        while self._calls and len(taken) < most:
            call = self._calls.popleft()
            if call.is_cancelled:
                continue
            alone = self._goes_alone(call)
            try:
                is_held_back = self._is_held_back(call.key, own, blocked, joins=not alone or (may_be_alone and not taken))
            except Exception as error:  # noqa: BLE001  (a method of the key, such as __eq__)
                call.deliver_error(error)
                continue
            if is_held_back:
                passed_over.append(call)
            else:
                taken.append(call)
                if alone:
                    break
        self._calls.extendleft(reversed(passed_over))
        self._in_groups += len(taken)
        return taken

    def _is_held_back(self, key: Hashable, own: set[Hashable], blocked: set[Hashable], *, joins: bool) -> bool:
        """Whether a call with this key must wait for an earlier one, or can't join; if not, the key is busy from now on."""
        if key is None:
            return not joins
        if not joins or key in blocked or (key not in own and key in self._busy):
            blocked.add(key)
            return True
        own.add(key)
        self._busy.add(key)
        return False
