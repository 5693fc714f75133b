"""How a processor is stopped: a flag that may be set anywhere, also in a signal handler."""

from __future__ import annotations

import time
from typing import Final

_STEP: Final = 0.1


class StopFlag:
    """As threading.Event, whose lock a signal handler would wait for in vain if the same thread holds it just then."""

    def __init__(self) -> None:
        self._is_set = False

    def set(self) -> None:
        """Ask for the stop. Takes no lock."""
        self._is_set = True

    def clear(self) -> None:
        """Nobody has asked yet."""
        self._is_set = False

    def is_set(self) -> bool:
        """Whether somebody has asked."""
        return self._is_set

    def wait(self, seconds: float) -> None:
        """Let time pass, until the flag is set."""
        deadline = time.monotonic() + seconds
        while not self._is_set and (left := deadline - time.monotonic()) > 0:
            time.sleep(min(_STEP, left))


class StoppedError(BaseException):
    """The processor was stopped in the middle of what it did. Never leaves it."""
