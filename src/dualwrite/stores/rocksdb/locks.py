"""Locks of ids between the threads of one process: what row locks are in a SQL database.

Built so that neither Ctrl-C nor the garbage collector can leave one locked, or deadlock on one. `Hold.release` takes no mutex,
may be called by any thread, any number of times, and from `__del__`. A hold is free from the moment it is marked released,
whatever the table of holders still says; and, since that refers to it weakly, when nothing else does: an interrupt that falls
into its release leaves it to die with the frame.
"""

from __future__ import annotations

import threading
import time
import weakref
from contextlib import suppress
from typing import Final

_SLICE: Final = 1.0
"""Seconds after which a waiter looks again by itself: another waiter that was interrupted may have kept the news from it."""


class Hold:
    """One holder's hold on one id: waiting, holding, or released for ever.

    Args:
        transactional_id: The id.
        owner: Who it is for, in the claim's words.
        doing: What is done under it, fit for "while <doing>".
    """

    __slots__ = ("__weakref__", "_over", "_since", "_thread", "doing", "gate", "owner", "transactional_id")

    def __init__(self, transactional_id: str, owner: str, doing: str) -> None:
        self.transactional_id = transactional_id
        self.owner = owner
        self.doing = doing
        self._thread = threading.current_thread().name
        self._since = 0.0
        self._over = False
        self.gate = threading.Lock()  # locked until the hold is released; waiters pass through it one after the other
        self.gate.acquire()

    @property
    def over(self) -> bool:
        """Whether it was released."""
        return self._over

    def taken(self) -> None:
        """The id is held from here on."""
        self._thread = threading.current_thread().name
        self._since = time.monotonic()

    def release(self) -> None:
        """Release it, held or not."""
        self._over = True
        with suppress(RuntimeError):  # released before
            self.gate.release()

    def __str__(self) -> str:
        owner = f" for {self.owner!r}" if self.owner else ""
        return f"thread {self._thread!r} of this process{owner}, {self.doing}, for {time.monotonic() - self._since:.1f} s now"


class IdLocks:
    """The locks of all ids of one database."""

    def __init__(self) -> None:
        self._holds: dict[str, weakref.ref[Hold]] = {}
        self._changing = threading.Lock()

    def acquire(self, hold: Hold, deadline: float) -> Hold | None:
        """Wait until the id is the hold's; None then, or whoever held it when the time was over.

        Args:
            hold: What to hold it by. It must be released in the end, also where this raises (KeyboardInterrupt).
            deadline: By `time.monotonic`.
        """
        while True:
            with self._changing:
                held = self._holds.get(hold.transactional_id)
                current = None if held is None else held()
                if current is None or current.over or current is hold:
                    hold.taken()
                    self._holds[hold.transactional_id] = weakref.ref(hold)
                    return None
            left = deadline - time.monotonic()
            if left <= 0:
                return current
            gate = current.gate
            del current  # a waiter must not keep it alive
            _pass_through(gate, min(left, _SLICE))


def _pass_through(gate: threading.Lock, timeout: float) -> None:
    if gate.acquire(timeout=timeout):
        with suppress(RuntimeError):
            gate.release()
