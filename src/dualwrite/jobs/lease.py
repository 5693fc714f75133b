"""The rules for opening a batch on a prefix: pure functions of the job's row. `JobLedger` reads and writes the row."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import UTC, datetime
from enum import Enum
from typing import Final

from dualwrite.errors import BatchRefusedError, JobClosedError, PrefixLeasedError
from dualwrite.jobs.base import JobRun
from dualwrite.shell import shell_word

_TOKENS_KEPT: Final = 64
"""How many tokens of earlier runs are kept, also of other jobs; runs of a job's earlier batches are identified by their number.

A job with several batches keeps its lease, so tasks of the jobs before it are refused without their tokens.
"""


@dataclass(frozen=True, slots=True)
class JobRow:
    """What the database stores about a prefix.

    Args:
        prefix: The prefix.
        job_id: The job that holds it, or held it last.
        batch_id: The batch of the newest run.
        token: The newest run.
        is_open: Whether the newest run is neither committed nor aborted.
        keeps_lease: Whether the job holds the prefix even while it has no open run.
        earlier_tokens: Tokens of other runs that can no longer be opened: earlier runs of this batch, runs of jobs that had
            the prefix before, and any run that was given up while another one had it.
        staging_table: Where the newest run stages its rows.
        owner: The name of the process that opened the newest run, for messages.
        updated_at: When the row last changed (UTC, aware); a heartbeat of a task that has not claimed its id changes it, too.
    """

    prefix: str
    job_id: str
    batch_id: int
    token: str
    is_open: bool
    keeps_lease: bool
    earlier_tokens: tuple[str, ...]
    staging_table: str
    owner: str
    updated_at: datetime

    def is_open_for(self, run: JobRun) -> bool:
        """Whether the given run is the open one."""
        return self.is_open and self.token == run.token


class Opening(Enum):
    """The result of opening a run."""

    OPENED = "opened"
    """The run is now the open one; an earlier run that was still open is closed."""

    JOINED = "joined"
    """Another task of the same run had opened it already."""

    ALREADY_COMMITTED = "already committed"
    """An earlier run has committed the batch: there is nothing to write."""


@dataclass(frozen=True, slots=True)
class Committed:
    """The batches that a job has committed, as far as opening a run needs to know.

    Args:
        this: Whether the batch in question is committed.
        newest: The highest committed batch id, or None if no batch is committed.
        bound_to: What the job's name stood for when the batch in question was committed; see JobRun.
    """

    this: bool
    newest: int | None
    bound_to: str = ""


def opened(
    row: JobRow | None, run: JobRun, committed: Committed, *, owner: str, staging_table: str, dead: str | None = None
) -> tuple[Opening, JobRow | None]:
    """The result of opening a run, and the row to write, or None if the row does not change.

    Args:
        row: The current row, or None if there is no row.
        run: The run to open.
        committed: What its job has committed.
        owner: The name of the process that opens it, for messages.
        staging_table: Where the run stages its rows.
        dead: The token of an open run that was watched and sent no heartbeat: it may be replaced.

    Raises:
        PrefixLeasedError: Another job holds the prefix.
        JobClosedError: The run was closed or replaced: the caller is a zombie.
        BatchRefusedError: The job has committed a later batch, or the batch was committed for another query or table.
    """
    if committed.this:
        check_binding(run, committed.bound_to)
    if committed.newest is not None and committed.newest > run.batch_id:
        raise _out_of_order(run, committed.newest)
    if committed.this:
        return Opening.ALREADY_COMMITTED, None
    if row is not None and row.token == run.token:
        if not row.is_open:
            raise closed(run, row)
        return Opening.JOINED, None
    if row is not None and run.token in row.earlier_tokens:
        raise closed(run, row)
    if row is not None and row.job_id == run.job_id and row.batch_id > run.batch_id:
        raise closed(run, row)
    if row is not None and row.job_id != run.job_id and (row.is_open or row.keeps_lease) and row.token != dead:
        raise _leased(run, row)
    return Opening.OPENED, JobRow(
        prefix=run.prefix,
        job_id=run.job_id,
        batch_id=run.batch_id,
        token=run.token,
        is_open=True,
        keeps_lease=run.keeps_lease,
        earlier_tokens=_earlier_tokens(row, run),
        staging_table=staging_table,
        owner=owner,
        updated_at=datetime.now(UTC),
    )


def after_close(row: JobRow, *, keeps_lease: bool | None = None) -> JobRow:
    """The row after its run was committed or aborted, with a new value of `keeps_lease` if given."""
    keeps = row.keeps_lease if keeps_lease is None else keeps_lease
    return replace(row, is_open=False, keeps_lease=keeps, updated_at=datetime.now(UTC))


def with_given_up(row: JobRow, run: JobRun) -> JobRow:
    """The row after another run than its newest one was given up, which can then no longer be opened."""
    if run.token in row.earlier_tokens:
        return row
    return replace(row, earlier_tokens=_newest((*row.earlier_tokens, run.token)))


def closed(run: JobRun, row: JobRow | None) -> JobClosedError:
    """The error for a run that is not, or no longer, the open one."""
    if row is None:
        what = f"{run.name} is not open: the prefix {run.prefix!r} has no row."
    elif row.token == run.token:
        what = f"This run of {run.name} has been closed: it was committed or aborted."
    else:
        state = "open" if row.is_open else "closed"
        what = (
            f"This run of {run.name} was replaced by a run of batch {row.batch_id} of job {row.job_id!r} "
            f"({state}, owner {row.owner!r})."
        )
    return JobClosedError(
        what,
        cause="the task outlived its run, or the job runs twice at once",
        next_step="nothing of this task is kept; make sure that the job runs only once at a time",
        prefix=run.prefix,
        job_id=run.job_id,
        batch_id=run.batch_id,
    )


def check_binding(run: JobRun, bound_to: str) -> None:
    """Check that a batch was committed for what the run writes: only then it must not be written again.

    Raises:
        BatchRefusedError: It was committed for another query or table: these rows were never written.
    """
    if run.bound_to != bound_to:
        raise BatchRefusedError(
            f"{run.name} was committed for {bound_to or 'something else'}; this run is of {run.bound_to or 'something else'}.",
            cause="two jobs have the same name, or the query has a new checkpoint, which numbers its batches from 0 again",
            next_step="nothing was written; give these rows a job_id (jobId) of their own, or continue with the checkpoint, "
            "the table and the topic that the job had",
            prefix=run.prefix,
            job_id=run.job_id,
            batch_id=run.batch_id,
        )


def _earlier_tokens(row: JobRow | None, run: JobRun) -> tuple[str, ...]:
    if row is None or (row.job_id == run.job_id and row.batch_id != run.batch_id):
        return ()
    return _newest((*row.earlier_tokens, row.token))


def _newest(tokens: tuple[str, ...]) -> tuple[str, ...]:
    return tokens[-_TOKENS_KEPT:]


def _leased(run: JobRun, row: JobRow) -> PrefixLeasedError:
    if row.keeps_lease:
        cause = "a streaming query holds its prefix for as long as it exists, even while it is stopped"
    else:
        cause = f"its batch {row.batch_id} is open and still sends heartbeats"
    return PrefixLeasedError(
        f"The prefix {run.prefix!r} is held by job {row.job_id!r} (opened by {row.owner!r}); job {run.job_id!r} can't use it.",
        cause=cause,
        next_step="give this job its own transactionalIdPrefix; or, if the other job will never run again, "
        f"run `dualwrite recover --prefix {shell_word(run.prefix)} --release`",
        prefix=run.prefix,
        job_id=row.job_id,
        batch_id=row.batch_id,
        owner=row.owner,
    )


def _out_of_order(run: JobRun, newest: int) -> BatchRefusedError:
    return BatchRefusedError(
        f"{run.name} is out of order: batch {newest} of the same job is already committed.",
        cause="the checkpoint was reset to an earlier state, or two queries share it",
        next_step="nothing was written; continue from the newest checkpoint, or start a new query",
        prefix=run.prefix,
        job_id=run.job_id,
        batch_id=run.batch_id,
    )
