"""The decision on a run: all of its tasks' rows and messages, or none of them. One database transaction."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from enum import Enum
from typing import Final

from sqlalchemy import Connection, bindparam, delete, insert, update

from dualwrite.errors import BatchRefusedError, DualWriteError, TransactionTimeoutError
from dualwrite.jobs.job_tables import (
    LOCKED,
    AttemptRow,
    Marker,
    Winner,
    fence_attempts,
    left_behind,
    read_job,
    read_marker,
    write_job,
)
from dualwrite.jobs.job_tables import batch_table as b
from dualwrite.jobs.rules import Committed, JobRow, JobRun, Prepared, after_close, check_binding, closed, opened, with_given_up
from dualwrite.kafka.client.time_budget import MORE_TIME, reserve_for
from dualwrite.state import delivery_text
from dualwrite.stores.sql import SqlStateStore
from dualwrite.stores.sql.short import database_clock
from dualwrite.stores.sql.tables import state_table as t

MARKERS_KEPT: Final = 10_000
"""How many of a job's newest markers are kept; an older batch that is run again is refused."""

_RECORD: Final = (
    update(t)
    .where(t.c.transactional_id == bindparam("id"), t.c.fence == bindparam("fence_"))
    .values(
        prepared_transaction_state=bindparam("state"),
        delivery=bindparam("delivery_"),
        prepared_generation=bindparam("generation_"),
        transaction_number=1,
        updated_at=bindparam("now"),
    )
)


class RunOutcome(Enum):
    """The decision on a run."""

    COMMITTED = "committed"
    """The run's rows and messages are committed."""

    COMMITTED_BEFORE = "committed before"
    """An earlier run of the batch was committed; this run is discarded."""

    ABORTED = "aborted"
    """The run is aborted; nothing of it was committed."""


@dataclass(frozen=True, slots=True)
class EndedRun:
    """A decision, the batch's marker if it is committed, and what remains to be done.

    `left` has the attempts of the prefix that belong to no open run and are not winners of this one: their transactions must be
    resolved, and their staged rows deleted.
    """

    decided: RunOutcome
    marker: Marker | None = None
    left: tuple[AttemptRow, ...] = ()


class JobDecision:
    """Decides on runs and closes them. Thread-safe.

    Args:
        store: The database, which also has the rows of the transactional ids.
        owner: The name of the process that decides, for messages.
        patience: Seconds for which to retry when connections break.
        lock_timeout: Seconds that one statement may take; moving a batch's rows is one statement.
    """

    def __init__(self, store: SqlStateStore, *, owner: str, patience: float = 30.0, lock_timeout: float = 600.0) -> None:
        self._short = replace(store.short_transactions, lock_timeout=lock_timeout)
        self._owner = owner
        self._patience = patience

    def commit(self, run: JobRun, winners: Sequence[Prepared], rows: int, move: Callable[[Connection], int]) -> EndedRun:
        """Commit the run in one transaction: record the winners' states, move their rows, write the marker, close the run.

        If the response to COMMIT is lost, the transaction runs again and either finds the marker or decides again.

        The tasks have prepared `winners` and staged `rows` rows; `move` moves these into the table and returns how many there
        were.

        Raises:
            JobClosedError: The run is no longer open.
            BatchRefusedError: A winner was fenced, rows are missing, or the batch was committed for another query or table.
                Nothing was committed.
            TransactionTimeoutError: Kafka may abort one of the transactions before it is committed. Nothing was committed.
            StoreError: The decision could not be made now; if the connection broke during COMMIT, it may have been committed.
        """
        names = [winner.transactional_id for winner in winners]

        def work(connection: Connection) -> EndedRun:
            row = read_job(connection, run.prefix, LOCKED)
            found = read_marker(connection, run.job_id, run.batch_id)
            if found is not None:
                check_binding(run, found.bound_to)
                return self._discarded(connection, run, row, found, names)
            if row is None or not row.is_open_for(run):
                raise closed(run, row)
            now = datetime.now(UTC)
            for winner in winners:
                _record(connection, run, winner, now)
            moved = move(connection)
            if moved != rows:
                raise _refused(run, f"The tasks staged {rows} rows, but {moved} were found.")
            named = tuple(Winner(one.transactional_id, one.generation, str(one.state)) for one in winners)
            marker = Marker(run.prefix, run.token, rows, named, now, run.bound_to)
            _mark(connection, run, marker)
            ended = self._close(connection, row, winners=names)
            verdict = EndedRun(RunOutcome.COMMITTED, marker, _without(left_behind(connection, ended), names))
            _check_time_left(connection, run, winners)
            return verdict

        return self._short.run(work, f"committing {run.name}", patience=self._patience)

    def abort(self, run: JobRun) -> EndedRun:
        """Abort the run, unless its batch is committed: close it and fence its attempts.

        A run that no task has opened yet is recorded as closed, so that a late task can't open it. Another open run stays open.
        """

        def work(connection: Connection) -> EndedRun:
            row = read_job(connection, run.prefix, LOCKED)
            return self._discarded(connection, run, row, read_marker(connection, run.job_id, run.batch_id))

        return self._short.run(work, f"aborting {run.name}", patience=self._patience)

    def close(self, prefix: str, *, expected: JobRow | None = None, release: bool = False) -> tuple[JobRow, EndedRun] | None:
        """Close the open run on a prefix, regardless of its owner, and fence its attempts.

        With `expected`, only if the newest run is still the one in this row, and open only if it was. With `release`, another
        job may use the prefix, even if its job keeps the lease. Returns the row as it was, and what is left behind; None if
        there is no row, or not the expected one.
        """

        def work(connection: Connection) -> tuple[JobRow, EndedRun] | None:
            row = read_job(connection, prefix, LOCKED)
            if row is None or (expected is not None and (row.token, row.is_open) != (expected.token, expected.is_open)):
                return None
            ended = self._close(connection, row, release=release)
            marker = read_marker(connection, row.job_id, row.batch_id)
            return row, EndedRun(_decided(marker, row.token), marker, left_behind(connection, ended))

        return self._short.run(work, f"closing the job on {prefix!r}", patience=self._patience)

    def _discarded(
        self, connection: Connection, run: JobRun, row: JobRow | None, marker: Marker | None, winners: Collection[str] = ()
    ) -> EndedRun:
        """End a run that needs no commit: its batch is already committed, by this run or an earlier one, or it is aborted."""
        if row is not None and row.is_open_for(run):
            row = self._close(connection, row)
        elif marker is None:
            row = self._record_closed(connection, run, row)
        decided = _decided(marker, run.token)
        left = () if row is None else left_behind(connection, row)
        return EndedRun(decided, marker, _without(left, winners if decided is RunOutcome.COMMITTED else ()))

    def _record_closed(self, connection: Connection, run: JobRun, row: JobRow | None) -> JobRow | None:
        """Record a run that could still be opened as closed, so that it can't be opened; other runs need no record.

        It has written nothing, so it does not take the prefix: another job keeps its row, and no new lease begins.
        """
        if row is not None and (row.is_open or row.job_id != run.job_id):
            new = with_given_up(row, run)
        else:
            try:
                _, made = opened(row, run, Committed(this=False, newest=None), owner=self._owner, staging_table="")
            except DualWriteError:
                return row
            if made is None:
                return row
            made = replace(made, staging_table="" if row is None else row.staging_table)
            new = after_close(made, keeps_lease=row is not None and row.keeps_lease)
        write_job(connection, new, is_new=row is None)
        return new

    def _close(self, connection: Connection, row: JobRow, *, winners: Collection[str] = (), release: bool = False) -> JobRow:
        if row.is_open:
            fence_attempts(connection, row.prefix, row.token, self._owner, keep=winners)
        ended = after_close(row, keeps_lease=False if release else None)
        write_job(connection, ended, is_new=False)
        return ended


def _decided(marker: Marker | None, token: str) -> RunOutcome:
    if marker is None:
        return RunOutcome.ABORTED
    return RunOutcome.COMMITTED if marker.token == token else RunOutcome.COMMITTED_BEFORE


def _without(attempts: Iterable[AttemptRow], names: Collection[str]) -> tuple[AttemptRow, ...]:
    return tuple(attempt for attempt in attempts if attempt.transactional_id not in names)


def _mark(connection: Connection, run: JobRun, marker: Marker) -> None:
    connection.execute(
        insert(b).values(
            job_id=run.job_id,
            batch_id=run.batch_id,
            prefix=run.prefix,
            token=run.token,
            row_count=marker.row_count,
            winners=marker.document,
            committed_at=marker.committed_at,
        )
    )
    connection.execute(delete(b).where(b.c.job_id == run.job_id, b.c.batch_id <= run.batch_id - MARKERS_KEPT))


def _record(connection: Connection, run: JobRun, winner: Prepared, now: datetime) -> None:
    changed = connection.execute(
        _RECORD,
        {
            "id": winner.transactional_id,
            "fence_": winner.fence,
            "state": str(winner.state),
            "delivery_": delivery_text(winner.delivery),
            "generation_": winner.generation,
            "now": now,
        },
    ).rowcount
    if changed != 1:
        raise _refused(run, f"The task attempt {winner.transactional_id!r} was fenced after it had prepared.")


def _check_time_left(connection: Connection, run: JobRun, winners: Sequence[Prepared]) -> None:
    bounded = [winner for winner in winners if winner.timeout is not None]
    if not bounded:
        return
    now = database_clock(connection)
    for winner in bounded:
        assert winner.timeout is not None
        elapsed = now - winner.began_at
        if elapsed > winner.timeout - reserve_for(winner.timeout):
            raise TransactionTimeoutError(
                f"{run.name} can't be committed within the time limit: a task's Kafka transaction is {elapsed:.1f} s old, "
                f"Kafka may abort it after {winner.timeout:g} s, and {reserve_for(winner.timeout):g} s are reserved for the "
                "commit.",
                transactional_id=winner.transactional_id,
                cause="from its first message to its commit, the job takes longer than transaction.timeout.ms allows",
                next_step=f"write smaller batches, or {MORE_TIME}",
                elapsed=elapsed,
                timeout=winner.timeout,
            )


def _refused(run: JobRun, what: str) -> BatchRefusedError:
    return BatchRefusedError(
        f"{run.name} was not committed. {what}",
        cause="a task was replaced, or staged rows were lost (a crash of the database empties an unlogged staging table)",
        next_step="run the batch again",
        **run.facts,
    )
