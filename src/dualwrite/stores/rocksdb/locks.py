"""Locks on ids between the threads of one process: what row locks are in a SQL database.

Designed so that neither Ctrl-C nor the garbage collector can leave one locked, or deadlock on one. `Hold.release` takes no
mutex, and may be called by any thread, any number of times, and from `__del__`. The id is free from the moment its hold is
marked released, even if the table of holds still lists it; and when the hold is garbage-collected, since the table refers to it
weakly: a hold whose release was interrupted ends with the stack frame.
"""

from __future__ import annotations

import threading
import time
import weakref
from contextlib import suppress
from typing import Final

from dualwrite.errors import ClaimTimeoutError

_SLICE: Final = 1.0
"""Seconds after which a waiter checks again by itself: an interrupted waiter may not have passed on the wake-up."""


class Hold:
    """One holder's lock on one id: waiting, held, or released for good.

    Args:
        transactional_id: The id.
        owner: The claim's owner.
        doing: What is done under it, to complete "while <doing>".
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
        """Note that the id is held from now on."""
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
        """Wait until `hold` has the id's lock, and return None; or return the current holder if the deadline passes.

        Args:
            hold: The hold to lock it with. The caller must release it, also if this raises (KeyboardInterrupt).
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


def lock_for(locks: IdLocks, hold: Hold, timeout: float) -> None:
    """Wait until `hold` has its lock.

    Args:
        locks: The database's locks.
        hold: The hold; the caller must release it, also if this raises.
        timeout: Seconds to wait.

    Raises:
        ClaimTimeoutError: Another thread held it until then.
    """
    blocker = locks.acquire(hold, time.monotonic() + timeout)
    if blocker is not None:
        raise ClaimTimeoutError(
            f"A lock was not released within {timeout:g} s while {hold.doing}.",
            cause=f"the lock is held by {blocker}",
            next_step="let that thread commit or roll back its transaction, then try again",
            timeout=timeout,
            blocker=str(blocker),
        )


def _pass_through(gate: threading.Lock, timeout: float) -> None:
    if gate.acquire(timeout=timeout):
        with suppress(RuntimeError):
            gate.release()
