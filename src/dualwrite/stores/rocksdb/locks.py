"""Locks on ids between the threads of one process: what row locks are in a SQL database.

Designed so that Ctrl-C can't leave an id locked, and the garbage collector can't cause a deadlock. `LockRequest.release`
acquires no mutex, and may be called by any thread, any number of times, and from `__del__`. The id is free from the moment its
request is marked released, even if the table still lists it; and when the request is garbage-collected, since the table refers
to it weakly: a request whose release was interrupted ends with the stack frame that holds it.
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


class LockRequest:
    """A request for the lock of one id: waiting, granted, or released for good.

    Args:
        transactional_id: The id.
        owner: The claim's owner.
        doing: What is done under the lock, to complete "while <doing>".
    """

    __slots__ = ("__weakref__", "_is_released", "_since", "_thread", "doing", "gate", "owner", "transactional_id")

    def __init__(self, transactional_id: str, owner: str, doing: str) -> None:
        self.transactional_id = transactional_id
        self.owner = owner
        self.doing = doing
        self._thread = threading.current_thread().name
        self._since = 0.0
        self._is_released = False
        self.gate = threading.Lock()  # locked until the request is released; waiters pass through it one after the other
        self.gate.acquire()

    @property
    def is_released(self) -> bool:
        """Whether it was released."""
        return self._is_released

    def granted(self) -> None:
        """Note that it has the lock from now on."""
        self._thread = threading.current_thread().name
        self._since = time.monotonic()

    def release(self) -> None:
        """Release it, granted or not."""
        self._is_released = True
        with suppress(RuntimeError):  # released before
            self.gate.release()

    def __str__(self) -> str:
        owner = f" for {self.owner!r}" if self.owner else ""
        return f"thread {self._thread!r} of this process{owner}, {self.doing}, for {time.monotonic() - self._since:.1f} s now"


class LockTable:
    """The locks of all ids of one database."""

    def __init__(self) -> None:
        self._requests: dict[str, weakref.ref[LockRequest]] = {}
        self._changing = threading.Lock()

    def acquire(self, request: LockRequest, deadline: float) -> LockRequest | None:
        """Wait until `request` is granted, and return None; or return the current holder if the deadline passes.

        Args:
            request: The caller must release it, also if this raises (KeyboardInterrupt).
            deadline: By `time.monotonic`.
        """
        while True:
            with self._changing:
                found = self._requests.get(request.transactional_id)
                current = None if found is None else found()
                if current is None or current.is_released or current is request:
                    request.granted()
                    self._requests[request.transactional_id] = weakref.ref(request)
                    return None
            left = deadline - time.monotonic()
            if left <= 0:
                return current
            gate = current.gate
            del current  # a waiter must not keep it alive
            _pass_through(gate, min(left, _SLICE))


def lock_for(locks: LockTable, request: LockRequest, timeout: float) -> None:
    """Wait until `request` is granted.

    Args:
        locks: The database's locks.
        request: The caller must release it, also if this raises.
        timeout: Seconds to wait.

    Raises:
        ClaimTimeoutError: Another thread held it until then.
    """
    blocker = locks.acquire(request, time.monotonic() + timeout)
    if blocker is not None:
        raise ClaimTimeoutError(
            f"A lock was not released within {timeout:g} s while {request.doing}.",
            cause=f"the lock is held by {blocker}",
            next_step="let that thread commit or roll back its transaction, then try again",
            timeout=timeout,
            blocker=str(blocker),
        )


def _pass_through(gate: threading.Lock, timeout: float) -> None:
    if gate.acquire(timeout=timeout):
        with suppress(RuntimeError):
            gate.release()
