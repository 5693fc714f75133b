"""The job's rows in the database: runs are opened there, and task attempts claim their ids under an open run.

Locks are acquired in one order, the job's row before the rows of transactional ids: a claim locks the job's row in shared mode,
opening and deciding lock it exclusively. So a task attempt either claims its id before its run is closed, and is then fenced
when the run is closed, or can't claim it at all.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final

from sqlalchemy import Connection, bindparam, func, insert, or_, select, update

from dualwrite.errors import PrefixLeasedError
from dualwrite.jobs.job_tables import (
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
from dualwrite.jobs.job_tables import attempt_table as a
from dualwrite.jobs.job_tables import batch_table as b
from dualwrite.jobs.job_tables import job_table as j
from dualwrite.jobs.rules import AttemptId, Committed, JobRow, JobRun, OpeningResult, closed, opened
from dualwrite.observability.logs import SubjectLogger
from dualwrite.stores.base import MAX_OWNER_LENGTH, Claim, TxnStateStore
from dualwrite.stores.rows import fenced
from dualwrite.stores.sql import SqlStateStore
from dualwrite.stores.sql.dialect import ErrorClass
from dualwrite.stores.sql.tables import state_table as t
from dualwrite.transactional import repeated

log = SubjectLogger(__name__)

DEFAULT_LEASE_TIMEOUT: Final = 30.0
_WATCH_PAUSE: Final = 0.5
_OPEN_ATTEMPTS: Final = 5
_NEWEST: Final = select(func.max(b.c.batch_id)).where(b.c.job_id == bindparam("job"))
_BEATS: Final = select(func.count(), func.sum(a.c.beats)).where(a.c.prefix == bindparam("p"), a.c.token == bindparam("run"))
_FENCES: Final = (
    select(a.c.transactional_id, t.c.fence, j.c.is_open)
    .join(t, t.c.transactional_id == a.c.transactional_id)
    .outerjoin(j, (j.c.prefix == a.c.prefix) & (j.c.token == a.c.token))
)
_CURRENT: Final = select(t.c.fence, t.c.owner).where(t.c.transactional_id == bindparam("id"))


@dataclass(frozen=True, slots=True)
class Opened:
    """The result of opening a run: the row as it was, and the attempts of earlier runs, whose transactions must be resolved."""

    outcome: OpeningResult
    earlier: JobRow | None
    left: tuple[AttemptRow, ...] = ()


class JobLedger:
    """Reads and writes the rows of jobs. Thread-safe.

    Args:
        store: The database, which also has the rows of the transactional ids.
        patience: Seconds for which to retry when connections break.
    """

    def __init__(self, store: SqlStateStore, *, patience: float = 30.0) -> None:
        self._store = store
        self._short = store.short_transactions
        self._patience = patience

    # --- a run begins -----------------------------------------------------------------------------------------------------

    def open(self, run: JobRun, *, owner: str, staging_table: str, lease_timeout: float = DEFAULT_LEASE_TIMEOUT) -> Opened:
        """Open the run, or join it. If an earlier run is still open on the prefix, it is closed and its attempts are fenced.

        If another batch write, which does not keep its lease, holds the prefix, its attempts are watched: if none of them
        sends a heartbeat for `lease_timeout` seconds, it is presumed dead and replaced.

        Raises: as `rules.opened`, and StoreError.
        """
        dead: str | None = None
        while True:
            try:
                return self._open_once(run, owner[:MAX_OWNER_LENGTH], staging_table, dead)
            except PrefixLeasedError:
                row = self.job(run.prefix)
                if row is None or row.job_id == run.job_id or not (row.is_open or row.keeps_lease):
                    continue
                if row.keeps_lease or dead == row.token:
                    raise
                if self.seems_dead(row, lease_timeout):
                    log.warning("job %s sent no heartbeat for %g s; taking over", row.job_id, lease_timeout, prefix=run.prefix)
                    dead = row.token
                    continue
                now = self.job(run.prefix)
                if now is not None and now.is_open and now.token == row.token:
                    raise
                # otherwise it has ended, or another task of our run has taken over: try again

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

        def is_inserted(error: BaseException) -> bool:  # by another task
            return self._short.is_caused_by(error, ErrorClass.DUPLICATE)

        once = partial(self._short.run, work, f"opening {run.name}", patience=self._patience)
        return repeated(once, attempts=_OPEN_ATTEMPTS, is_retriable=is_inserted)()

    def seems_dead(self, row: JobRow, seconds: float) -> bool:
        """Whether an open run's row and its attempts' heartbeat counters stay unchanged for so many seconds, by our clock."""
        first = self.signs_of_life(row)
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            time.sleep(min(_WATCH_PAUSE, seconds / 4))
            if self.signs_of_life(row) != first:
                return False
        return True

    def signs_of_life(self, row: JobRow) -> tuple[Any, ...]:
        """The prefix's row, and the heartbeats of a run's attempts: something that changes while the run is alive."""
        now = self.job(row.prefix)
        beats = self._short.query(
            lambda connection: tuple(connection.execute(_BEATS, {"p": row.prefix, "run": row.token}).one()),
            "looking for heartbeats",
        )
        return (None if now is None else (now.token, now.is_open, now.updated_at), *beats)

    def claim(self, run: JobRun, first: AttemptId, task: str, owner: str, *, timeout: float) -> tuple[AttemptId, Claim]:
        """Claim an id for a task attempt, if the run is open, in one transaction.

        Attempts of a partition that run at the same time must not share an id, and the engine's attempt numbers don't prevent
        that: when Spark reruns a stage, it counts from 0 again and leaves the first stage's tasks running. So if another
        attempt of this run has the id, the next number is tried.

        `task` is a unique text for this attempt, of at most 32 characters; `first` is the first id to try.

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
                _reserve(connection, run, attempt, task)

            try:
                return attempt, self._store.claim_if(str(attempt), owner, under_the_open_run, timeout=timeout)
            except _TakenError:
                log.info("used by another attempt of this run; trying the next number", transactional_id=attempt)
        raise AssertionError  # the loop is infinite

    def beat(self, run: JobRun, transactional_id: str) -> bool:
        """Send a heartbeat; return whether the run is still open and still owns the id."""

        def work(connection: Connection) -> bool:
            attempt = update(a).where(a.c.transactional_id == transactional_id, a.c.token == run.token)
            if connection.execute(attempt.values(beats=a.c.beats + 1)).rowcount == 0:
                return False
            row = read_job(connection, run.prefix)
            return row is not None and row.is_open_for(run)

        return self._short.run(work, "sending a heartbeat", transactional_id)

    def beat_before_claim(self, run: JobRun, seen: datetime | None) -> datetime | None:
        """Send a heartbeat for a task that has not claimed its id yet: it changes the job's row, if the run is open.

        One such task is enough: if another one has changed the row since the last call, which returned `seen`, it is left
        alone. Returns when the row was last changed; None if the run is not open.
        """

        def work(connection: Connection) -> datetime | None:
            row = read_job(connection, run.prefix)
            if row is None or not row.is_open_for(run):
                return None
            if seen is not None and row.updated_at != seen:
                return row.updated_at
            now = datetime.now(UTC)
            ours = update(j).where(j.c.prefix == run.prefix, j.c.token == run.token, j.c.is_open)
            return now if connection.execute(ours.values(updated_at=now)).rowcount else None

        return self._short.run(work, f"sending a heartbeat for {run.name}")

    def check_fence(self, connection: Connection, claim: Claim) -> None:
        """Check that the claim is still the newest one, and block new claims until the connection's transaction ends.

        This is the last statement before the COMMIT of staged rows: a process that fences the attempt later sees the rows and
        deletes them. If our process is paused between the two statements, the database ends its transaction, because no other
        process could open the next run until then.

        Raises:
            FencedError: A newer claim exists.
        """
        self._short.dialect.limit_pause(connection)
        current = connection.execute(_CURRENT.with_for_update(read=True), {"id": claim.transactional_id}).first()
        if current is None or current.fence != claim.fence:
            raise fenced(claim, *((None, None) if current is None else (current.fence, current.owner)))

    # --- reading ----------------------------------------------------------------------------------------------------------

    def job(self, prefix: str) -> JobRow | None:
        """The row of a prefix, or None if there is no row."""
        return self._short.query(lambda connection: read_job(connection, prefix), "reading a job's row")

    def jobs(self) -> list[JobRow]:
        """The rows of all prefixes, sorted by prefix."""
        found = self._short.query(lambda connection: connection.execute(select(j)).all(), "listing jobs")
        return sorted(map(job_row, found), key=lambda row: row.prefix)

    def attempts(self, prefix: str, ids: Collection[str] | None = None) -> list[AttemptRow]:
        """The transactional ids that tasks have used under a prefix, restricted to `ids` if given; sorted."""
        return self._short.query(lambda connection: read_attempts(connection, prefix, ids=ids), "listing the ids of tasks")

    def attempt_fences(self) -> dict[str, int | None]:
        """The fencing token of each id that a task has used; None for an id that a task of an open run is using.

        A task that claims its id later raises the fencing token.
        """
        found = self._short.query(lambda connection: connection.execute(_FENCES).all(), "listing the ids of tasks")
        return {row.transactional_id: None if row.is_open else row.fence for row in found}


class _TakenError(Exception):
    """Another attempt of the same run has the id."""


def _reserve(connection: Connection, run: JobRun, attempt: AttemptId, task: str) -> None:
    """Record the id as used by this attempt.

    Raises:
        _TakenError: Another attempt of the same run has it.
    """
    values = {"token": run.token, "task": task, "beats": 0}
    ours = update(a).where(a.c.transactional_id == str(attempt), or_(a.c.token != run.token, a.c.task == task))
    if connection.execute(ours.values(values)).rowcount:
        return
    if connection.scalar(select(a.c.token).where(a.c.transactional_id == str(attempt))) is not None:
        raise _TakenError
    connection.execute(insert(a).values(transactional_id=str(attempt), prefix=run.prefix, **values))


def _committed(connection: Connection, run: JobRun) -> Committed:
    marker = read_marker(connection, run.job_id, run.batch_id)
    return Committed(
        this=marker is not None,
        newest=connection.scalar(_NEWEST, {"job": run.job_id}),
        bound_to="" if marker is None else marker.bound_to,
    )


def jobs_of(store: TxnStateStore, beginning: str = "") -> list[JobRow]:
    """The jobs of a database whose prefixes start with `beginning`; empty if the database has no job tables."""
    if not isinstance(store, SqlStateStore):
        return []
    return [row for row in JobLedger(store).jobs() if row.prefix.startswith(beginning)]


def open_job_of(store: TxnStateStore, transactional_ids: Iterable[str]) -> tuple[str, JobRow] | None:
    """The first of the ids that is used by a task of an open batch, with its job; None if there is no such id."""
    ids = frozenset(transactional_ids)
    for row in jobs_of(store):
        if row.is_open and isinstance(store, SqlStateStore):
            for attempt in JobLedger(store).attempts(row.prefix, ids):
                if attempt.token == row.token:
                    return attempt.transactional_id, row
    return None
