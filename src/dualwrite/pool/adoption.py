"""Ids of dead processes: a live pool with the same prefix recovers them, so that open transactions don't block consumers."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from dualwrite.errors import DualWriteError
from dualwrite.logs import SubjectLogger
from dualwrite.outages import level_of
from dualwrite.pool.leases import LeasedIds
from dualwrite.recovery.recoverer import Recoverer
from dualwrite.recovery.report import Outcome, RecoveryReport, raise_for_lost
from dualwrite.stores.base import StateRow, TxnStateStore
from dualwrite.stores.leases import Lease, LeaseStore, numbered_ids
from dualwrite.transactional_id import TransactionalId

log = SubjectLogger(__name__)

_Seen = tuple[tuple[str, int, int], ...]


class Adoption:
    """Finds ids of the prefix that no process has leased, and recovers those on which a transaction may be open.

    An id whose lease has ended is recovered immediately. An id without a lease may belong to a writer that uses no leases, or,
    in ZooKeeper, to a process whose session has expired: it is recovered if it was not used between two searches.

    Only the pool that acquires the id's lease recovers the id. A process that was merely slow is fenced, and leases another id.

    Args:
        store: The database.
        leases: The store's leases.
        ids: The pool's ids.
        prefix: The prefix of the ids.
        open_recoverer: Opens a recoverer on the store.
    """

    def __init__(
        self,
        store: TxnStateStore,
        leases: LeaseStore,
        ids: LeasedIds,
        prefix: str,
        open_recoverer: Callable[[], Recoverer],
    ) -> None:
        self._store = store
        self._leases = leases
        self._ids = ids
        self._prefix = prefix
        self._open_recoverer = open_recoverer
        self._seen: dict[str, _Seen] = {}

    def search(self, goes_on: Callable[[], bool] = lambda: True) -> None:
        """Search for abandoned ids once, and recover them.

        Args:
            goes_on: Called before each id: False ends the search.

        Raises:
            StoreError: The database could not be read.
        """
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
        for found in report:
            if found.outcome is not Outcome.NOTHING:
                log.info("recovered: %s", found.outcome.in_words, transactional_id=found.transactional_id)
        for failed in report.failed:
            error, name = failed.error, failed.transactional_id
            assert error is not None
            log.log(level_of(error), "can't be recovered now; trying again: %s", error, transactional_id=name)
        try:
            raise_for_lost(report.unacknowledged)
        except DualWriteError as lost:
            log.error("%s", lost, transactional_id=lost.transactional_id)  # noqa: TRY400  (the traceback adds nothing)


def _is_open(row: StateRow) -> bool:
    return not row.forgotten and bool(row.unresolved_generations)
