"""The one decision over a run: all of its tasks' rows and messages, or none. One database transaction."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from enum import Enum
from typing import Final

from sqlalchemy import Connection, bindparam, delete, insert, update

from dualwrite.delivery import delivery_text
from dualwrite.errors import BatchRefusedError, DualWriteError, TransactionTimeoutError
from dualwrite.jobs.base import JobRun, Prepared
from dualwrite.jobs.clock import database_clock
from dualwrite.jobs.job_rows import (
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
from dualwrite.jobs.lease import Committed, JobRow, Opening, after_close, closed, opened
from dualwrite.jobs.tables import batch_table as b
from dualwrite.kafka.time_budget import MORE_TIME, reserve_for
from dualwrite.stores.sql import SqlStateStore
from dualwrite.stores.sql.table import state_table as t

MARKERS_KEPT: Final = 10_000
"""Batches of one job whose markers are kept; an older one that comes again is refused."""

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


class Decided(Enum):
    """What the decision over a run came to."""

    COMMITTED = "committed"
    """This run's rows and messages are what the batch consists of."""

    COMMITTED_BEFORE = "committed before"
    """An earlier run of the batch was committed, and stays; this run is given up."""

    ABORTED = "aborted"
    """The run is given up; nothing of it was committed."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """A decision.

    Args:
        decided: What it came to.
        marker: The marker, where the batch is committed.
        left: Attempts of the prefix that are of no open run and no winners of this one: to be settled, and what they staged
            to be deleted.
    """

    decided: Decided
    marker: Marker | None = None
    left: tuple[AttemptRow, ...] = ()


class JobDecision:
    """Decides over runs, and ends them. Safe to use from several threads.

    Args:
        store: The database, which also keeps the rows of the transactional ids.
        owner: Who decides, for people.
        patience: Seconds to go on for where connections break.
        lock_timeout: Seconds that one statement may take: moving a batch's rows is one.
    """

    def __init__(self, store: SqlStateStore, *, owner: str, patience: float = 30.0, lock_timeout: float = 600.0) -> None:
        self._short = replace(store.short_transactions, lock_timeout=lock_timeout)
        self._owner = owner
        self._patience = patience

    def commit(self, run: JobRun, winners: Sequence[Prepared], rows: int, move: Callable[[Connection], int]) -> Verdict:
        """Decide for the run, in one transaction: the winners' states, their rows, the marker, the end of the run.

        Where the answer to COMMIT is lost, the transaction runs again and finds the marker, or decides anew.

        Args:
            run: The run, open.
            winners: What its tasks have prepared.
            rows: How many rows they have staged.
            move: Moves them into the table, and says how many there were.

        Raises:
            JobClosedError: The run is no longer open.
            BatchRefusedError: A winner was fenced, or the rows are not all there. Nothing was committed.
            TransactionTimeoutError: Kafka may abort one of the transactions before it is committed. Nothing was committed.
            StoreError: Not to be decided now; where the connection broke in COMMIT, it may have committed.
        """
        names = [winner.transactional_id for winner in winners]

        def work(connection: Connection) -> Verdict:
            row = read_job(connection, run.prefix, LOCKED)
            found = read_marker(connection, run.job_id, run.batch_id)
            if found is not None:
                return self._given_up(connection, run, row, found, winners=names)
            if row is None or not row.is_open_for(run):
                raise closed(run, row)
            now = datetime.now(UTC)
            for winner in winners:
                _record(connection, run, winner, now)
            moved = move(connection)
            if moved != rows:
                raise _refused(run, f"The tasks staged {rows} rows, and {moved} are there.")
            named = tuple(Winner(one.transactional_id, one.generation, str(one.state)) for one in winners)
            marker = Marker(run.prefix, run.token, rows, named, now)
            _mark(connection, run, marker)
            ended = self._close(connection, row, winners=names)
            verdict = Verdict(Decided.COMMITTED, marker, _without(left_behind(connection, ended), names))
            _check_time_left(connection, run, winners)
            return verdict

        return self._short.run(work, f"committing {run.name}", patience=self._patience)

    def abort(self, run: JobRun) -> Verdict:
        """Give the run up, unless its batch is committed: close it, and fence its attempts.

        A run that no task has opened yet is noted as ended, so that a task that is late finds it so.
        """

        def work(connection: Connection) -> Verdict:
            row = read_job(connection, run.prefix, LOCKED)
            return self._given_up(connection, run, row, read_marker(connection, run.job_id, run.batch_id))

        return self._short.run(work, f"aborting {run.name}", patience=self._patience)

    def close(self, prefix: str, *, batch_id: int | None = None, release: bool = False) -> tuple[JobRow, Verdict] | None:
        """Close what is open on a prefix, whoever opened it, and fence its attempts.

        Args:
            prefix: The prefix.
            batch_id: Only where this is the open batch.
            release: Let the next job have the prefix, also where the one that holds it would keep it.

        Returns:
            The row as it was, with what is left behind; None where there is none, or it is of another batch.
        """

        def work(connection: Connection) -> tuple[JobRow, Verdict] | None:
            row = read_job(connection, prefix, LOCKED)
            if row is None or batch_id not in (None, row.batch_id):
                return None
            ended = self._close(connection, row, release=release)
            marker = read_marker(connection, row.job_id, row.batch_id)
            return row, Verdict(_decided(marker, row.token), marker, left_behind(connection, ended))

        return self._short.run(work, f"closing the job on {prefix!r}", patience=self._patience)

    def _given_up(
        self, connection: Connection, run: JobRun, row: JobRow | None, marker: Marker | None, *, winners: Collection[str] = ()
    ) -> Verdict:
        """The run goes on no longer: its batch is committed, by it or by an earlier one, or it is aborted."""
        if row is not None and row.is_open_for(run):
            row = self._close(connection, row)
        elif marker is None:
            row = self._note_ended(connection, run, row)
        decided = _decided(marker, run.token)
        left = () if row is None else left_behind(connection, row)
        return Verdict(decided, marker, _without(left, winners if decided is Decided.COMMITTED else ()))

    def _note_ended(self, connection: Connection, run: JobRun, row: JobRow | None) -> JobRow | None:
        """Open and close it at once, if it could be opened: it can't be any more then. Which it can't, needs no note."""
        try:
            outcome, new = opened(row, run, Committed(this=False, newest=None), owner=self._owner, staging_table="")
        except DualWriteError:
            return row
        if new is None or outcome is not Opening.OPENED or (row is not None and row.is_open):
            return row
        new = after_close(replace(new, staging_table="" if row is None else row.staging_table))
        write_job(connection, new, is_new=row is None)
        return new

    def _close(self, connection: Connection, row: JobRow, *, winners: Collection[str] = (), release: bool = False) -> JobRow:
        if row.is_open:
            fence_attempts(connection, row.prefix, row.token, self._owner, keep=winners)
        ended = after_close(row, keeps_lease=False if release else None)
        write_job(connection, ended, is_new=False)
        return ended


# --- inside -------------------------------------------------------------------------------------------------------------------


def _decided(marker: Marker | None, token: str) -> Decided:
    if marker is None:
        return Decided.ABORTED
    return Decided.COMMITTED if marker.token == token else Decided.COMMITTED_BEFORE


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
            winners=json.dumps(marker.winners),
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
                f"{run.name} can't be committed in time: a task's Kafka transaction is {elapsed:.1f} s old, Kafka may abort "
                f"it at {winner.timeout:g} s, and {reserve_for(winner.timeout):g} s are kept for committing.",
                transactional_id=winner.transactional_id,
                cause="the job takes longer than transaction.timeout.ms allows, from its first message to its commit",
                next_step=f"write smaller batches, or {MORE_TIME}",
                elapsed=elapsed,
                timeout=winner.timeout,
            )


def _refused(run: JobRun, what: str) -> BatchRefusedError:
    return BatchRefusedError(
        f"{run.name} was not committed. {what}",
        cause="a task was replaced, or staged rows were taken away (a crash of the database empties an unlogged staging table)",
        next_step="run the batch again",
        prefix=run.prefix,
        job_id=run.job_id,
        batch_id=run.batch_id,
    )
