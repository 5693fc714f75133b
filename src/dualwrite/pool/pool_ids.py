"""The ids of a pool: fixed or leased ones, the thread that renews their leases, and the search for those of dead processes.

A pool whose leases can't be renewed keeps working: a lease only says which pool should use an id. If another pool then leases
the id, it claims the id, and the claim fences this pool's writer.
"""

from __future__ import annotations

import logging
import threading
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from itertools import count as numbers
from itertools import islice
from typing import ClassVar, Final

from dualwrite.deadline import Pauses
from dualwrite.errors import DualWriteError
from dualwrite.observability import observers
from dualwrite.observability.events import LeaseLost, LeaseTaken
from dualwrite.observability.logs import SubjectLogger, if_unexpected
from dualwrite.observability.outages import DATABASE, Side, level_of
from dualwrite.recovery.recoverer import Recoverer, describe_owner
from dualwrite.recovery.report import RecoveryReport, raise_for_lost
from dualwrite.stores.base import StateRow, TxnStateStore
from dualwrite.stores.leases import Lease, LeaseStore, numbered, numbered_ids
from dualwrite.transactional_id import TransactionalId

log = SubjectLogger(__name__)

RENEWALS: Final = 3
"""How often a lease is renewed within its length, so that one renewal may fail."""

_FIRST_RETRY: Final = 0.1
"""The pause after the first failed renewal, as a fraction of the renewal interval; doubled after each further failure."""

_JOIN: Final = 10.0
"""Seconds that `close` waits for a renewal in progress."""

_Seen = tuple[tuple[str, int, int], ...]


class Ids(ABC):
    """The ids that a pool uses. Thread-safe."""

    are_leased: ClassVar[bool]
    """Whether the pool can get a different id after another process has claimed one of its ids."""

    @abstractmethod
    def acquire(self, count: int) -> list[str]:
        """Acquire ids for `count` further writers, the lowest numbers first; StoreError if they could not be leased."""

    @abstractmethod
    def keeps(self, name: str) -> bool:
        """Whether the pool has owned an id without interruption; may query the database, and raise its StoreError."""

    @abstractmethod
    def release(self, name: str) -> None:
        """Release an id whose writer is closed; after a StoreError its lease will expire."""

    def avoid(self, name: str) -> None:
        """Release an id that can't be opened now, and don't acquire it again."""
        self.release(name)

    @abstractmethod
    def close(self) -> None:
        """Release all ids. Raises no error: leases that could not be released will expire."""


class FixedIds(Ids):
    """Ids with the lowest numbers, without leases: only one pool may use the prefix at a time."""

    are_leased = False

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._used: set[str] = set()

    def acquire(self, count: int) -> list[str]:
        names = (numbered(self._prefix, number) for number in numbers(1))
        acquired = list(islice((name for name in names if name not in self._used), count))
        self._used.update(acquired)
        return acquired

    def keeps(self, name: str) -> bool:
        return name in self._used

    def release(self, name: str) -> None:
        self._used.discard(name)

    def close(self) -> None:
        self._used.clear()


class LeasedIds(Ids):
    """The ids that a pool has leased; a thread, which starts with the first id, renews the leases.

    A relay uses it as well, with the `role` "relay" in the leases' owner.

    Attributes:
        owner: The leases' owner: host, process id, program and a random part, which no other pool has.
        on_lost: Called in the thread with ids that this pool no longer owns.
    """

    are_leased = True

    def __init__(self, leases: LeaseStore, prefix: str, *, seconds: float, database: Side, role: str = "pool") -> None:
        self.owner = f"{describe_owner(role)} {uuid.uuid4().hex[:8]}"
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
        return name in self.held and bool(self._leases.renew([name], self.owner, seconds=self._seconds))

    def release(self, name: str) -> None:
        with self._changing:
            with self._lock:
                self._held.discard(name)
            self._leases.release([name], self.owner)

    def avoid(self, name: str) -> None:
        self._avoided.add(name)
        self.release(name)

    def close(self) -> None:
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(_JOIN)
        with self._lock:
            names = frozenset(self._held)
            self._held.clear()
        try:
            self._leases.release(names, self.owner)
        except Exception as error:  # whatever the driver raises
            text = "the leases of the pool's ids could not be released; they expire: %s"
            log.warning(text, error, exc_info=if_unexpected(error), prefix=self._prefix)

    # --- the thread -------------------------------------------------------------------------------------------------------

    def _add(self, names: list[str]) -> None:
        self._report(LeaseTaken, names)
        with self._lock:
            self._held.update(names)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=f"dualwrite leases {self._prefix}", daemon=True)
                self._thread.start()

    def _report(self, kind: type[LeaseTaken | LeaseLost], names: Iterable[str]) -> None:
        if observers.installed:
            for name in names:
                observers.notify(kind(self._prefix, name))

    def _run(self) -> None:
        pause, retries = self.interval, Pauses(self.interval * _FIRST_RETRY, self.interval * (1 - _FIRST_RETRY), spread=0.0)
        while not self._stopping.wait(pause):
            try:
                self._renew()
            except Exception as error:  # whatever the driver raises: this thread must keep running
                if not self._stopping.is_set():
                    text = "the pool's leases could not be renewed; trying again: %s"
                    level = logging.INFO if retries.taken else level_of(error)
                    log.log(level, text, error, exc_info=if_unexpected(error), prefix=self._prefix)
                pause = next(retries)
            else:
                pause = self.interval
                retries.reset()

    def _renew(self) -> None:
        names = self.held
        if not names:
            return  # nothing is asked, so nothing is answered
        with self._database.call(DATABASE):
            ours = self._leases.renew(names, self.owner, seconds=self._seconds)
        lost = (names - ours) & self.held
        if lost:
            log.warning("other processes have leased %s meanwhile", ", ".join(sorted(lost)), prefix=self._prefix)
            self._report(LeaseLost, lost)
            self.on_lost(lost)  # before the ids can be acquired again: it must concern the writers that use them now
            with self._lock:
                self._held -= lost


class Adoption:
    """Finds ids of the prefix that no process has leased, and recovers those on which a transaction may be open.

    An id whose lease has ended is recovered immediately. An id without a lease may belong to a writer that uses no leases, or,
    in ZooKeeper, to a process whose session has expired: it is recovered if it was not used between two searches.

    Only the pool that acquires the id's lease recovers the id. A process that was merely slow is fenced, and leases another id.
    """

    def __init__(
        self, store: TxnStateStore, leases: LeaseStore, ids: LeasedIds, prefix: str, open_recoverer: Callable[[], Recoverer]
    ) -> None:
        self._store = store
        self._leases = leases
        self._ids = ids
        self._prefix = prefix
        self._open_recoverer = open_recoverer
        self._seen: dict[str, _Seen] = {}

    def search(self, goes_on: Callable[[], bool]) -> None:
        """Search for abandoned ids once, and recover them, as long as it `goes_on`."""
        leases = {each.transactional_id: each for each in self._leases.entries(f"{self._prefix}.")}
        lanes = self._lanes()
        for name in numbered_ids(self._prefix, {*leases, *lanes}):
            if not goes_on():
                return
            if self._is_abandoned(name, leases.get(name), lanes.get(name, ())):
                self._adopt(name)

    def _lanes(self) -> dict[str, list[str]]:
        """The rows of each logical id."""
        found: dict[str, list[str]] = {}
        for row in self._store.list(f"{self._prefix}."):
            found.setdefault(TransactionalId.of_row(row).logical, []).append(row)
        return found

    def _is_abandoned(self, name: str, lease: Lease | None, lanes: Iterable[str]) -> bool:
        before = self._seen.pop(name, ())
        if name in self._ids.held:
            return False
        if lease is not None:
            return lease.has_ended
        rows = [row for row in map(self._store.read, lanes) if row is not None and _is_open(row)]
        seen = tuple((row.transactional_id, row.fence, row.transaction_number) for row in rows)
        if not seen:
            return False
        self._seen[name] = seen
        return seen == before

    def _adopt(self, name: str) -> None:
        if not self._ids.acquire_one(name):
            return
        try:
            with self._open_recoverer() as recoverer:
                pending = recoverer.pending([name])
                if pending:
                    log.info("no process leases this id any more; recovering it", transactional_id=name)
                    self._log(recoverer.recover(pending))
        finally:
            self._ids.release(name)

    def _log(self, report: RecoveryReport) -> None:
        for failed in report.failed:
            error, name = failed.error, failed.transactional_id
            assert error is not None
            log.log(level_of(error), "can't be recovered now; trying again: %s", error, transactional_id=name)
        try:
            raise_for_lost(report.unacknowledged, report.not_published)
        except DualWriteError as lost:
            log.error("%s", lost, transactional_id=lost.transactional_id)  # noqa: TRY400  (the traceback adds nothing)


def _is_open(row: StateRow) -> bool:
    return not row.forgotten and bool(row.unresolved_generations)
