"""How a processor is stopped: a flag that may be set anywhere, including in a signal handler."""

from __future__ import annotations

import time
from typing import Final

_STEP: Final = 0.1


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


class StoppedError(BaseException):
    """The processor was stopped in the middle of its work. Internal: the processor never raises it."""
