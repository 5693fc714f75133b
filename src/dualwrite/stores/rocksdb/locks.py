"""Who holds what in this process, the only one that can open the database: the locks of ids and positions, and the leases."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from typing import Final

from dualwrite.errors import ClaimTimeoutError
from dualwrite.stores.leases import Lease, LeaseStore
from dualwrite.stores.rows import MAX_OWNER_LENGTH

_SLICE: Final = 1.0
"""Seconds after which a waiter checks again by itself: an interrupted waiter may not have passed on the wake-up."""


class LockRequest:
    """A request for the lock of one id or position: waiting, granted, or released for good.

    `doing` says what is done under the lock, to complete "while <doing>"; `owner` is the claim's, for messages.
    """

    __slots__ = ("__weakref__", "_since", "_thread", "doing", "gate", "is_id", "is_released", "name", "owner")

    def __init__(self, name: str, doing: str, *, owner: str = "", is_id: bool = True) -> None:
        self.name = name
        self.is_id = is_id
        self.owner = owner
        self.doing = doing
        self._thread = threading.current_thread().name
        self._since = 0.0
        self.is_released = False
        self.gate = threading.Lock()  # locked until the request is released; waiters pass through it one after the other
        self.gate.acquire()

    def granted(self) -> None:
        """Note that it has the lock from now on."""
        self._thread = threading.current_thread().name
        self._since = time.monotonic()

    def release(self) -> None:
        """Release it, granted or not."""
        self.is_released = True
        with suppress(RuntimeError):  # released before
            self.gate.release()

    def __str__(self) -> str:
        owner = f" for {self.owner!r}" if self.owner else ""
        return f"thread {self._thread!r} of this process{owner}, {self.doing}, for {time.monotonic() - self._since:.1f} s now"


class LockTable:
    """The locks of one database. A request that is garbage-collected releases its lock."""

    def __init__(self) -> None:
        self._requests: dict[str, weakref.ref[LockRequest]] = {}
        self._changing = threading.Lock()

    def acquire(self, request: LockRequest, timeout: float) -> None:
        """Wait until `request` is granted. The caller must release it, also if this raises (KeyboardInterrupt).

        Raises:
            ClaimTimeoutError: Another thread held the lock until then.
        """
        deadline = time.monotonic() + timeout
        while True:
            with self._changing:
                found = self._requests.get(request.name)
                current = None if found is None else found()
                if current is None or current.is_released or current is request:
                    request.granted()
                    self._requests[request.name] = weakref.ref(request)
                    return
            left = deadline - time.monotonic()
            if left <= 0:
                what = "The row of the id" if request.is_id else "A lock"
                raise ClaimTimeoutError(
                    f"{what} stayed locked for {timeout:g} s while {request.doing}.",
                    transactional_id=request.name if request.is_id else None,
                    cause=f"the lock is held by {current}",
                    next_step="let that thread commit or roll back its transaction, then try again",
                    timeout=timeout,
                    blocker=str(current),
                )
            gate = current.gate
            del current  # a waiter must not keep it alive
            if gate.acquire(timeout=min(left, _SLICE)):
                with suppress(RuntimeError):
                    gate.release()

    @contextmanager
    def held(self, request: LockRequest, timeout: float) -> Iterator[None]:
        """Hold the lock during the block; see `acquire`."""
        try:
            self.acquire(request, timeout)
            yield
        finally:
            request.release()


class LeaseTable:
    """The leases of one open database, shared by all stores of the process on it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.entries: dict[str, tuple[str, float]] = {}
        """By id: the owner, and until when, by `time.monotonic`."""


class RocksDBLeases(LeaseStore):
    """The leases of a RocksDB database."""

    def __init__(self, table: Callable[[], LeaseTable]) -> None:
        self._table = table

    def acquire(self, ids: Collection[str], owner: str, *, seconds: float) -> frozenset[str]:
        return self._leased(ids, owner, seconds, or_free=True)

    def renew(self, ids: Collection[str], owner: str, *, seconds: float) -> frozenset[str]:
        return self._leased(ids, owner, seconds, or_free=False)

    def _leased(self, ids: Collection[str], owner: str, seconds: float, *, or_free: bool) -> frozenset[str]:
        """Lease those of the ids that this owner has leased, or that are free."""
        table, owner = self._table(), owner[:MAX_OWNER_LENGTH]
        with table.lock:
            now = time.monotonic()
            found = {name: table.entries.get(name, ("", 0.0)) for name in ids}
            ours = [name for name, (holder, until) in found.items() if holder == owner or (or_free and until <= now)]
            table.entries.update(dict.fromkeys(ours, (owner, now + seconds)))
        return frozenset(ours)

    def release(self, ids: Collection[str], owner: str) -> None:
        table, owner = self._table(), owner[:MAX_OWNER_LENGTH]
        with table.lock:
            for name in ids:
                if table.entries.get(name, ("", 0.0))[0] == owner:
                    del table.entries[name]

    def entries(self, prefix: str = "") -> list[Lease]:
        table = self._table()
        with table.lock:
            now = time.monotonic()
            found = [(name, *entry) for name, entry in table.entries.items() if name.startswith(prefix)]
        return [Lease(name, owner, until - now) for name, owner, until in sorted(found)]
