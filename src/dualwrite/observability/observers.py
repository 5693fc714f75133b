"""Who is told what happens: observers get each event, and can neither fail nor change the work that they observe.

`Buffered` is an observer with a thread of its own, for those that may take long: writing to a file, sending to a server.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from queue import Full, Queue
from typing import Final, Protocol

from dualwrite import process
from dualwrite.deadline import Deadline
from dualwrite.errors import ConfigurationError
from dualwrite.observability.events import Event

log: Final = logging.getLogger(__name__)

_CLOSE_SECONDS: Final = 5.0
"""Seconds that `close` waits for the events that are waiting."""


class Observer(Protocol):
    """Gets the events of all writers, pools, processors, relays and recoverers of the process.

    It is called in the thread in which the event happens, in the middle of the work: it must return at once, and must not use
    dualwrite. Several threads may call it at the same time. If it raises an exception, that is logged once, and the work goes
    on. `Buffered` calls an observer that may take long in a thread of its own.
    """

    def __call__(self, event: Event, /) -> object:
        """Take note of an event."""


class Guarded:
    """An observer whose errors reach nobody: the first one is logged.

    Args:
        observer: The observer.
    """

    __slots__ = ("_has_failed", "observer")

    def __init__(self, observer: Observer) -> None:
        self.observer = observer
        self._has_failed = False

    def __call__(self, event: Event) -> None:
        """Tell the observer of an event."""
        try:
            self.observer(event)
        except Exception:
            if not self._has_failed:
                self._has_failed = True
                log.exception("an observer has failed on %s; this is logged once, and the work goes on", type(event).__name__)


installed: tuple[Guarded, ...] = ()
"""The observers of this process. While it is empty no events are made; `add_observer` changes it."""

_lock: Final = threading.Lock()


def add_observer(observer: Observer) -> None:
    """Tell an observer of all events from now on, until `remove_observer`; adding it again changes nothing."""
    global installed  # noqa: PLW0603  (one for the process, as with logging's handlers; read without a lock)
    with _lock:
        if all(each.observer != observer for each in installed):
            installed = (*installed, Guarded(observer))


def remove_observer(observer: Observer) -> None:
    """Tell an observer nothing any more. It may still be called for an event that has just happened."""
    global installed  # noqa: PLW0603  (as above)
    with _lock:
        installed = tuple(each for each in installed if each.observer != observer)


@contextmanager
def observing(observer: Observer) -> Iterator[None]:
    """Tell an observer of all events that happen during the block, in any thread."""
    add_observer(observer)
    try:
        yield
    finally:
        remove_observer(observer)


def notify(event: Event) -> None:
    """Tell all observers of an event. Called where it happens, if any are `installed`."""
    for observer in installed:
        observer(event)


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
        limit = Deadline.after(_CLOSE_SECONDS)
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


process.call_in_child(_begin_again)
