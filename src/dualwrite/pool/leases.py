"""Leased ids, and the thread that renews their leases.

A pool whose leases can't be renewed keeps working: a lease only says which pool should use an id. If another pool then leases
the id, it claims the id, and the claim fences this pool's writer.
"""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Callable
from typing import Final

from dualwrite.logs import SubjectLogger, if_unexpected
from dualwrite.outages import DATABASE, Side, level_of
from dualwrite.pool.ids import Ids
from dualwrite.recovery.recoverer import describe_owner
from dualwrite.stores.leases import LeaseStore

log = SubjectLogger(__name__)

RENEWALS: Final = 3
"""How often a lease is renewed within its length, so that one renewal may fail."""

_FIRST_RETRY: Final = 0.1
"""The pause after the first failed renewal, as a fraction of the renewal interval; doubled after each further failure."""

_JOIN: Final = 10.0
"""Seconds that `close` waits for a renewal in progress."""


class LeasedIds(Ids):
    """The ids that a pool has leased; a thread, which starts with the first id, renews the leases.

    Args:
        leases: The store's leases.
        prefix: The prefix of the ids.
        seconds: The length of a lease.
        database: The database, for the log.

    Attributes:
        owner: The leases' owner: host, process id, program and a random part, which no other pool has.
        on_lost: Called in the thread with ids that this pool no longer owns.
    """

    are_leased = True

    def __init__(self, leases: LeaseStore, prefix: str, *, seconds: float, database: Side) -> None:
        self.owner = f"{describe_owner('pool')} {uuid.uuid4().hex[:8]}"
        self.on_lost: Callable[[frozenset[str]], None] = lambda _: None
        self._leases = leases
        self._prefix = prefix
        self._seconds = seconds
        self._database = database
        self._held: set[str] = set()
        self._avoided: set[str] = set()
        self._lock = threading.Lock()
        self._changing = threading.Lock()  # one change at a time: the store sees all threads as one owner
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def interval(self) -> float:
        """Seconds between two renewals."""
        return self._seconds / RENEWALS

    @property
    def held(self) -> frozenset[str]:
        """The ids that are leased, as far as this pool knows."""
        with self._lock:
            return frozenset(self._held)

    def acquire(self, count: int) -> list[str]:
        """See Ids."""
        with self._changing:
            without = self.held | self._avoided
            names = self._leases.lease(self._prefix, self.owner, count, seconds=self._seconds, without=without)
            self._add(names)
        return names

    def acquire_one(self, name: str) -> bool:
        """Lease this id if it is free; False if it is not, or if this pool has leased it already."""
        with self._changing:
            if name in self.held or not self._leases.acquire([name], self.owner, seconds=self._seconds):
                return False
            self._add([name])
        return True

    def keeps(self, name: str) -> bool:
        """See Ids."""
        return name in self.held and bool(self._leases.renew([name], self.owner, seconds=self._seconds))

    def release(self, name: str) -> None:
        """See Ids."""
        with self._changing:
            with self._lock:
                self._held.discard(name)
            self._leases.release([name], self.owner)

    def avoid(self, name: str) -> None:
        """See Ids."""
        self._avoided.add(name)
        self.release(name)

    def close(self) -> None:
        """See Ids."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(_JOIN)
        with self._lock:
            names = frozenset(self._held)
            self._held.clear()
        try:
            self._leases.release(names, self.owner)
        except Exception as error:  # whatever the driver raises
            log.warning(
                "the leases of the pool's ids could not be released; they expire: %s",
                error,
                exc_info=if_unexpected(error),
                prefix=self._prefix,
            )

    # --- the thread -------------------------------------------------------------------------------------------------------

    def _add(self, names: list[str]) -> None:
        with self._lock:
            self._held.update(names)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=f"dualwrite leases {self._prefix}", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        pause = self.interval
        while not self._stopping.wait(pause):
            try:
                self._renew()
            except Exception as error:  # whatever the driver raises: this thread must keep running
                first = pause == self.interval
                pause = min(self.interval * _FIRST_RETRY if first else pause * 2, self.interval * (1 - _FIRST_RETRY))
                if not self._stopping.is_set():
                    level = level_of(error) if first else logging.INFO
                    log.log(
                        level,
                        "the pool's leases could not be renewed; trying again: %s",
                        error,
                        exc_info=if_unexpected(error),
                        prefix=self._prefix,
                    )
            else:
                pause = self.interval

    def _renew(self) -> None:
        names = self.held
        with self._database.call(DATABASE):
            ours = self._leases.renew(names, self.owner, seconds=self._seconds)
        lost = (names - ours) & self.held
        if lost:
            log.warning("other processes have leased %s meanwhile", ", ".join(sorted(lost)), prefix=self._prefix)
            self.on_lost(lost)  # before the ids can be acquired again: it must concern the writers that use them now
            with self._lock:
                self._held -= lost
