"""Who is told what happens: observers get each event, and can neither fail nor change the work that they observe."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, Protocol

from dualwrite.observability.events import Event

log: Final = logging.getLogger(__name__)


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
