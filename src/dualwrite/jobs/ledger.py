"""The job's rows in the database: a run is opened, and task attempts claim their ids under it.

Locks are taken in one order, the job's row before the rows of transactional ids: a claim shares the job's row, opening and
deciding have it alone. So a task attempt is either claimed before its run is closed, and then fenced by the closing, or not
at all.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any, Final

from sqlalchemy import Connection, Select, bindparam, func, insert, or_, select, update
from tenacity import Retrying, retry_if_exception, stop_after_attempt, wait_random

from dualwrite.errors import PrefixLeasedError, StateTableMissingError
from dualwrite.jobs.base import AttemptId, JobRun
from dualwrite.jobs.job_rows import (
    LOCKED,
    SHARED,
    AttemptRow,
    fence_attempts,
    job_row,
    left_behind,
    read_attempts,
    read_job,
    read_marker,
    write_job,
)
from dualwrite.jobs.lease import Committed, JobRow, Opening, closed, opened
from dualwrite.jobs.tables import attempt_table as a
from dualwrite.jobs.tables import batch_table as b
from dualwrite.jobs.tables import job_table as j
from dualwrite.stores.base import MAX_OWNER_LENGTH, Claim
from dualwrite.stores.rows import fenced
from dualwrite.stores.sql import SqlStateStore
from dualwrite.stores.sql.dialect import ErrorClass
from dualwrite.stores.sql.table import state_table as t

log = logging.getLogger(__name__)

DEFAULT_LEASE_TIMEOUT: Final = 30.0
_WATCH_PAUSE: Final = 0.5
_OPEN_ATTEMPTS: Final = 5
_NEWEST: Final = select(func.max(b.c.batch_id)).where(b.c.job_id == bindparam("job"))
_BEATS: Final = select(func.count(), func.sum(a.c.beats)).where(a.c.prefix == bindparam("p"), a.c.token == bindparam("run"))
_CURRENT: Final = select(t.c.fence, t.c.owner).where(t.c.transactional_id == bindparam("id"))


@dataclass(frozen=True, slots=True)
class Opened:
    """What opening a run came to.

    Args:
        outcome: Whether it was opened, joined, or has been committed before.
        earlier: The job's row as it was before, or None where there was none.
        left: If it was opened: what earlier runs have used, to be settled.
    """

    outcome: Opening
    earlier: JobRow | None
    left: tuple[AttemptRow, ...] = ()


class JobLedger:
    """Reads and writes the rows of jobs. Safe to use from several threads.

    Args:
        store: The database, which also keeps the rows of the transactional ids.
        patience: Seconds to go on for where connections break.
    """

    def __init__(self, store: SqlStateStore, *, patience: float = 30.0) -> None:
        self._store = store
        self._short = store.short_transactions
        self._patience = patience

    # --- a run begins -----------------------------------------------------------------------------------------------------

    def open(self, run: JobRun, *, owner: str, staging_table: str, lease_timeout: float = DEFAULT_LEASE_TIMEOUT) -> Opened:
        """Open the run, or join it. What an earlier run left open on the prefix is closed, and its attempts are fenced.

        Where a job without a lease of its own (a batch write) holds the prefix, its attempts are watched: if none gives a
        sign of life for `lease_timeout` seconds, it is taken for dead.

        Args:
            run: The run.
            owner: Who opens, for people.
            staging_table: Where the run stages its rows.
            lease_timeout: Seconds without a sign of life, after which an open batch write is given up.

        Raises: as `rules.opened`, and StoreError.
        """
        dead: str | None = None
        while True:
            try:
                return self._open_once(run, owner[:MAX_OWNER_LENGTH], staging_table, dead)
            except PrefixLeasedError:
                row = self.job(run.prefix)
                if row is None or (not row.is_open and not row.keeps_lease):
                    continue
                if row.keeps_lease or dead == row.token or not self._seems_dead(row, lease_timeout):
                    raise
                log.warning("%s: job %s gave no sign of life for %g s; taking over", run.prefix, row.job_id, lease_timeout)
                dead = row.token

    def _open_once(self, run: JobRun, owner: str, staging_table: str, dead: str | None) -> Opened:
        def work(connection: Connection) -> Opened:
            row = read_job(connection, run.prefix, LOCKED)
            outcome, new = opened(row, run, _committed(connection, run), owner=owner, staging_table=staging_table, dead=dead)
            if new is not None:
                if row is not None and row.is_open:
                    fence_attempts(connection, row.prefix, row.token, owner)
                write_job(connection, new, is_new=row is None)
                return Opened(outcome, row, left_behind(connection, new))
            return Opened(outcome, row)

        retrying = Retrying(
            retry=retry_if_exception(lambda error: self._short.is_caused_by(error, ErrorClass.DUPLICATE)),
            stop=stop_after_attempt(_OPEN_ATTEMPTS),
            wait=wait_random(0, 0.05),
            reraise=True,
        )
        made: Opened = retrying(self._short.run, work, f"opening {run.name}", patience=self._patience)
        return made

    def _seems_dead(self, row: JobRow, lease_timeout: float) -> bool:
        """Watch an open run for signs of life: its row, and the beats of its attempts. By our own clock alone."""

        def signs() -> tuple[Any, ...]:
            now = self.job(row.prefix)
            beats = self._short.query(
                lambda connection: tuple(connection.execute(_BEATS, {"p": row.prefix, "run": row.token}).one()),
                "looking for signs of life",
            )
            return (None if now is None else (now.token, now.is_open), *beats)

        first = signs()
        deadline = time.monotonic() + lease_timeout
        while time.monotonic() < deadline:
            time.sleep(min(_WATCH_PAUSE, lease_timeout / 4))
            if signs() != first:
                return False
        return True

    def claim(self, run: JobRun, first: AttemptId, task: str, owner: str, *, timeout: float) -> tuple[AttemptId, Claim]:
        """Claim an id for a task attempt, if the run is open, in one transaction.

        Attempts of one partition that live at once must not share an id, and the engine's own numbers do not keep them apart:
        Spark counts from 0 again when it runs a stage again, and leaves the first stage's tasks running. So an id that
        another attempt of this run has is left to it, and the next number is taken.

        Args:
            run: The run.
            first: The id to begin with.
            task: A text that no other attempt has, 32 characters at most.
            owner: Who claims, for people.
            timeout: Seconds to wait at most.

        Raises:
            JobClosedError: The run is not, or no longer, the open one; nothing was claimed.
            DualWriteError: As `TxnStateStore.claim`.
        """
        for number in itertools.count(first.attempt):
            attempt = replace(first, attempt=number)

            def under_the_open_run(connection: Connection, attempt: AttemptId = attempt) -> None:
                row = read_job(connection, run.prefix, SHARED)
                if row is None or not row.is_open_for(run):
                    raise closed(run, row)
                _take(connection, run, attempt, task)

            try:
                return attempt, self._store.claim_if(str(attempt), owner, under_the_open_run, timeout=timeout)
            except _TakenError:
                log.info("%s: another attempt of this run has it", attempt)
        raise AssertionError  # the numbers don't end

    def beat(self, run: JobRun, transactional_id: str) -> bool:
        """Give a sign of life; whether the run is still open and the attempt its own."""

        def work(connection: Connection) -> bool:
            attempt = update(a).where(a.c.transactional_id == transactional_id, a.c.token == run.token)
            if connection.execute(attempt.values(beats=a.c.beats + 1)).rowcount == 0:
                return False
            row = read_job(connection, run.prefix)
            return row is not None and row.is_open_for(run)

        return self._short.run(work, "giving a sign of life", transactional_id)

    def check_fence(self, connection: Connection, claim: Claim) -> None:
        """See that the claim is still the newest, and that nobody claims before the connection's transaction ends.

        The last statement before the COMMIT of staged rows: who fences the attempt after it sees them, and deletes them. A
        process that is paused between the two loses its transaction, since nobody could open the next run before that.

        Raises:
            FencedError: It is not.
        """
        self._short.dialect.limit_pause(connection)
        current = connection.execute(_CURRENT.with_for_update(read=True), {"id": claim.transactional_id}).first()
        if current is None or current.fence != claim.fence:
            raise fenced(claim, *((None, None) if current is None else (current.fence, current.owner)))

    # --- reading ----------------------------------------------------------------------------------------------------------

    def job(self, prefix: str) -> JobRow | None:
        """The row of a prefix, or None."""
        return self._short.query(lambda connection: read_job(connection, prefix), "reading a job's row")

    def jobs(self) -> list[JobRow]:
        """The rows of all prefixes, sorted by them; none where the database has no tables for jobs yet."""
        try:
            found = self._short.query(lambda connection: connection.execute(select(j)).all(), "listing jobs")
        except StateTableMissingError:
            return []
        return sorted(map(job_row, found), key=lambda row: row.prefix)

    def attempts(self, prefix: str, ids: Collection[str] | None = None) -> list[AttemptRow]:
        """The transactional ids that tasks have used under a prefix, or those of them that are given; sorted."""
        return self._short.query(lambda connection: read_attempts(connection, prefix, ids=ids), "listing the ids of tasks")

    def attempts_among(self, ids: Collection[str]) -> frozenset[str]:
        """Those of the ids that are task attempts of jobs."""
        return self._ids(select(a.c.transactional_id)).intersection(ids)

    def attempts_at_work(self) -> frozenset[str]:
        """The ids that tasks of open runs have; none where the database has no tables for jobs yet."""
        query = select(a.c.transactional_id).join(j, (j.c.prefix == a.c.prefix) & (j.c.token == a.c.token))
        try:
            return self._ids(query.where(j.c.is_open))
        except StateTableMissingError:
            return frozenset()

    def _ids(self, query: Select[tuple[str]]) -> frozenset[str]:
        return self._short.query(lambda connection: frozenset(connection.scalars(query)), "listing the ids of tasks")


# --- inside -------------------------------------------------------------------------------------------------------------------


class _TakenError(Exception):
    """Another attempt of the same run has the id."""


def _take(connection: Connection, run: JobRun, attempt: AttemptId, task: str) -> None:
    """Note the id as this attempt's."""
    values = {"token": run.token, "task": task, "beats": 0}
    ours = update(a).where(a.c.transactional_id == str(attempt), or_(a.c.token != run.token, a.c.task == task))
    if connection.execute(ours.values(values)).rowcount:
        return
    if connection.scalar(select(a.c.token).where(a.c.transactional_id == str(attempt))) is not None:
        raise _TakenError
    connection.execute(insert(a).values(transactional_id=str(attempt), prefix=run.prefix, **values))


def _committed(connection: Connection, run: JobRun) -> Committed:
    return Committed(
        this=read_marker(connection, run.job_id, run.batch_id) is not None,
        newest=connection.scalar(_NEWEST, {"job": run.job_id}),
    )
