"""An observer with a thread of its own, for those that may take long: writing to a file, sending to a server."""

from __future__ import annotations

import os
import threading
import weakref
from queue import Full, Queue
from typing import Final

from dualwrite.deadline import Deadline
from dualwrite.errors import ConfigurationError
from dualwrite.observability.events import Event
from dualwrite.observability.observers import Guarded, Observer

_CLOSE_LIMIT: Final = 5.0
"""Seconds that `close` waits for the events that are waiting."""


class Buffered:
    """Calls an observer in a thread of its own, so that it may take long without delaying the work.

    If the observer is too slow, events that find the buffer full are dropped and counted: the work never waits. After a fork
    the child has a thread of its own; what was waiting is the parent's.

    Args:
        observer: The observer.
        capacity: The number of events that may wait.

    Attributes:
        dropped: How many events found the buffer full.

    Raises:
        ConfigurationError: The capacity is not a positive integer.
    """

    def __init__(self, observer: Observer, *, capacity: int = 10_000) -> None:
        if capacity < 1:
            raise ConfigurationError(f"The capacity must be at least 1, not {capacity!r}.")
        self.dropped = 0
        self._observer = Guarded(observer)
        self._capacity = capacity
        self._begin()
        _all.add(self)

    def _begin(self) -> None:
        self._events: Queue[Event | None] = Queue(self._capacity)
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def __call__(self, event: Event) -> None:
        """Keep an event for the thread."""
        try:
            self._events.put_nowait(event)
        except Full:
            self.dropped += 1
            return
        if self._thread is None:
            self._start()

    def close(self) -> None:
        """End the thread, after the events that are waiting, or after five seconds."""
        with self._lock:
            thread, self._thread = self._thread, None
        if thread is None:
            return
        limit = Deadline.after(_CLOSE_LIMIT)
        try:
            self._events.put(None, timeout=limit.left)
        except Full:
            return
        thread.join(limit.left)

    def _start(self) -> None:
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="dualwrite observer", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        while (event := self._events.get()) is not None:
            self._observer(event)


_all: Final[weakref.WeakSet[Buffered]] = weakref.WeakSet()


def _begin_again() -> None:
    """After a fork: the thread is gone, and may have held a lock."""
    for buffered in list(_all):
        buffered._begin()  # noqa: SLF001  (of this module)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_again)
