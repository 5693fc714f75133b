"""Call something that may not answer: in a thread of its own, one call at a time, and wait for it with a limit."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from dualwrite.deadline import Deadline

T = TypeVar("T")


class InThread(Generic[T]):
    """Calls a function in a thread. What does not answer holds up neither the caller nor the end of the process.

    Args:
        name: The thread's name.

    Attributes:
        seconds: How long the last call has taken.
    """

    def __init__(self, name: str) -> None:
        self.seconds = 0.0
        self._name = name
        self._thread: threading.Thread | None = None
        self._outcome: list[T | BaseException] = []

    def start(self, function: Callable[[], T]) -> None:
        """Begin a call, unless an earlier one is still in progress: then `result` waits for that one."""
        if self._thread is None or not self._thread.is_alive():
            self._outcome = []
            self._thread = threading.Thread(target=self._run, args=(function, self._outcome), name=self._name, daemon=True)
            self._thread.start()

    def result(self, deadline: Deadline) -> T:
        """What the function has returned, once `start` was called.

        Raises:
            TimeoutError: The call is still in progress at the deadline.
            Exception: What the function has raised.
        """
        assert self._thread is not None
        self._thread.join(deadline.left)
        if not self._outcome:
            raise TimeoutError
        (found,) = self._outcome
        if isinstance(found, BaseException):
            raise found
        return found

    def _run(self, function: Callable[[], T], outcome: list[Any]) -> None:
        began = time.monotonic()
        try:
            found: Any = function()
        except BaseException as error:  # noqa: BLE001  (raised by `result`)
            found = error
        self.seconds = time.monotonic() - began
        outcome.append(found)
