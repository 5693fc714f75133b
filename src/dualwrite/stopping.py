"""Stopping a loop that runs until it is told to end: from another thread, or by SIGTERM."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

_STEP: Final = 0.1
"""Seconds between two looks at a StopFlag."""


class StopFlag:
    """A threading.Event without a lock: a signal handler would deadlock if its own thread held the lock."""

    def __init__(self) -> None:
        self._is_set = False

    def set(self) -> None:
        """Request the stop. Acquires no lock."""
        self._is_set = True

    def clear(self) -> None:
        """Forget an earlier request."""
        self._is_set = False

    def is_set(self) -> bool:
        """Whether a stop was requested."""
        return self._is_set

    def wait(self, seconds: float) -> None:
        """Sleep for `seconds`, or until the flag is set."""
        deadline = time.monotonic() + seconds
        while not self._is_set and (left := deadline - time.monotonic()) > 0:
            time.sleep(min(_STEP, left))


@contextmanager
def stopped_by_sigterm(stop: Callable[[], None]) -> Iterator[None]:
    """In the block SIGTERM calls `stop`, instead of ending the process, if it runs in the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda *_: stop())
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
