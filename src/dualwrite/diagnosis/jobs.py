"""The jobs of a database (Spark, and others of many tasks): what holds each prefix, and whether its tasks are still alive."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Final

from dualwrite.diagnosis.facts import Fact, Facts
from dualwrite.jobs.ledger import JobLedger, jobs_of
from dualwrite.jobs.rules import JobRow
from dualwrite.stores.base import TxnStateStore
from dualwrite.stores.sql import SqlStateStore
from dualwrite.texts import in_natural_order

JOBS: Final = Facts(
    Fact("prefix", "prefix"),
    Fact("job_id", "job"),
    Fact("batch_id", "batch"),
    Fact("is_open", "", words=lambda is_open: "open" if is_open else "ended"),
    Fact("is_held", "owned", lambda row: row.keeps_lease or row.is_open, lambda is_held: "by this job" if is_held else "no"),
    Fact("owner", "owner"),
    Fact("updated_at", "updated"),
)
"""The facts about the row of a job."""


SILENT_SECONDS: Final = 60.0
"""Seconds without a heartbeat after which a run is probably gone; its tasks send one every few seconds."""


@dataclass(frozen=True)
class WatchedJob:
    """A job, and for how long its open run has shown no sign of life.

    Args:
        row: Its row.
        ids: The transactional ids that tasks of its newest run have claimed.
        unresolved: How many of these have a transaction that has not ended.
        silent: Seconds for which no heartbeat was seen, since it is watched; None if its run is not open.
    """

    row: JobRow
    ids: frozenset[str]
    unresolved: int
    silent: float | None

    @property
    def is_alive(self) -> bool:
        """Whether its run is open and has sent heartbeats lately: what is open on its ids is somebody's work."""
        return self.silent is not None and self.silent <= SILENT_SECONDS


class JobWatch:
    """Reads the jobs of a database again and again, and notices heartbeats between two reads. Used by one thread at a time.

    Args:
        store: The database.
    """

    def __init__(self, store: TxnStateStore) -> None:
        self._store = store
        self._seen: dict[str, tuple[Any, float]] = {}

    def read(self) -> list[WatchedJob]:
        """The jobs now, sorted by prefix; none if the database is not a SQL database.

        Raises:
            StoreError: The database's own errors, translated; StateTableMissingError if it has no tables for jobs.
        """
        if not isinstance(self._store, SqlStateStore):
            return []
        ledger = JobLedger(self._store)
        rows = sorted(jobs_of(self._store), key=lambda row: in_natural_order(row.prefix))
        before, self._seen = self._seen, {}
        return [self._watched(ledger, row, before) for row in rows]

    def _watched(self, ledger: JobLedger, row: JobRow, before: dict[str, tuple[Any, float]]) -> WatchedJob:
        tasks = [each for each in ledger.attempts(row.prefix) if each.token == row.token]
        silent = None
        if row.is_open:
            now, signs = time.monotonic(), ledger.signs_of_life(row)
            known = before.get(row.prefix)
            since = known[1] if known is not None and known[0] == signs else now
            self._seen[row.prefix] = signs, since
            silent = now - since
        return WatchedJob(
            row, frozenset(each.transactional_id for each in tasks), sum(not each.is_resolved for each in tasks), silent
        )
