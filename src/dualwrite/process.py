"""What happens to a process: it is forked, or told to end by SIGTERM; and stopping a loop from another thread.

Threads, locks and connections are the parent's: a forked child begins without them, and refuses to use what they belong to.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from dualwrite.deadline import Deadline
from dualwrite.errors import UsageError

pid = os.getpid()
"""This process. To ask the system for it with each message would cost as much as encoding the message."""

_STEP_SECONDS: Final = 0.1
"""Seconds between two looks at a StopFlag."""


def call_in_child(begin_again: Callable[[], object]) -> None:
    """Call a function in each child that is forked from now on, before anything else runs there."""
    if hasattr(os, "register_at_fork"):  # not on Windows, which has no fork
        os.register_at_fork(after_in_child=begin_again)


def check_not_forked(what: str, made_in: int, transactional_id: str) -> None:
    """Check that a writer was made in this process; `made_in` is the process that has made it.

    Raises:
        UsageError: This process was forked from that one, which still uses the connections.
    """
    if pid != made_in:
        raise UsageError(
            f"{what} in process {pid}, but the writer was made in process {made_in}: a writer can't be used after a fork.",
            transactional_id=transactional_id,
            next_step="open a writer in each process, after the fork, each with its own transactional id",
        )


def _read_pid() -> None:
    global pid  # noqa: PLW0603  (the one value that a fork changes)
    pid = os.getpid()


call_in_child(_read_pid)


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
        deadline = Deadline(seconds)
        while not (self._is_set or deadline.expired):
            deadline.sleep(_STEP_SECONDS)


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
