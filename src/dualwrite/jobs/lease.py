"""Who may open a batch on a prefix: pure, over the job's row as it stands. `JobLedger` reads and writes the row."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import UTC, datetime
from enum import Enum
from typing import Final

from dualwrite.errors import BatchRefusedError, JobClosedError, PrefixLeasedError, shell_word
from dualwrite.jobs.base import JobRun

_TOKENS_KEPT: Final = 64
"""Of earlier runs of the newest batch; those of earlier batches are told by their number."""


@dataclass(frozen=True, slots=True)
class JobRow:
    """What the database keeps of a prefix.

    Args:
        prefix: The prefix.
        job_id: The job that holds it, or held it last.
        batch_id: The batch of the newest run.
        token: The newest run.
        is_open: Whether the newest run is neither committed nor aborted.
        keeps_lease: Whether the job holds the prefix also while it has nothing open.
        earlier_tokens: Runs of this batch that were replaced.
        staging_table: Where the newest run stages its rows.
        owner: Who opened the newest run, for people.
        updated_at: When the row last changed (UTC, aware).
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
        """Whether it is this run that is open."""
        return self.is_open and self.token == run.token


class Opening(Enum):
    """What opening a run came to."""

    OPENED = "opened"
    """The row names this run now; what an earlier one left open is closed by it."""

    JOINED = "joined"
    """It was open already, by another task of the same run."""

    ALREADY_COMMITTED = "already committed"
    """An earlier run has committed the batch: there is nothing to write."""


@dataclass(frozen=True, slots=True)
class Committed:
    """What is known of the batches that a job has committed.

    Args:
        this: Whether the batch in question is among them.
        newest: The greatest batch id among them, or None where there is none.
    """

    this: bool
    newest: int | None


def opened(
    row: JobRow | None, run: JobRun, committed: Committed, *, owner: str, staging_table: str, dead: str | None = None
) -> tuple[Opening, JobRow | None]:
    """What opening comes to, and the row to write, or None where it stays as it is.

    Args:
        row: The row as it stands, or None where there is none.
        run: The run that wants to begin.
        committed: What its job has committed.
        owner: Who opens, for people.
        staging_table: Where the run stages its rows.
        dead: The token of an open run that was watched and gave no sign of life: it may be replaced.

    Raises:
        PrefixLeasedError: Another job holds the prefix.
        JobClosedError: The run was closed or replaced: whoever asks is a zombie.
        BatchRefusedError: The job has committed a later batch, and not this one.
    """
    if committed.this:
        return Opening.ALREADY_COMMITTED, None
    if committed.newest is not None and committed.newest > run.batch_id:
        raise _too_late(run, committed.newest)
    if row is not None and row.token == run.token:
        if not row.is_open:
            raise closed(run, row)
        return Opening.JOINED, None
    if row is not None and (row.job_id, row.batch_id) == (run.job_id, run.batch_id) and run.token in row.earlier_tokens:
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
    """The row once its run was committed or aborted; `keeps_lease` to change that, too."""
    keeps = row.keeps_lease if keeps_lease is None else keeps_lease
    return replace(row, is_open=False, keeps_lease=keeps, updated_at=datetime.now(UTC))


def closed(run: JobRun, row: JobRow | None) -> JobClosedError:
    """The error of a run that is not, or no longer, the open one."""
    if row is None:
        what = f"{run.name} is not open: the prefix {run.prefix!r} has no row."
    elif row.token == run.token:
        what = f"This run of {run.name} has been closed: it was committed or aborted."
    else:
        state = "is open" if row.is_open else "was the newest"
        what = f"This run of {run.name} was replaced: batch {row.batch_id} of job {row.job_id!r} {state}, by {row.owner!r}."
    return JobClosedError(
        what,
        cause="the task outlived its run, or the job runs twice",
        next_step="nothing of this task is kept; see that the job runs once",
        prefix=run.prefix,
        job_id=run.job_id,
        batch_id=run.batch_id,
    )


def _earlier_tokens(row: JobRow | None, run: JobRun) -> tuple[str, ...]:
    if row is None or (row.job_id, row.batch_id) != (run.job_id, run.batch_id):
        return ()
    return (*row.earlier_tokens, row.token)[-_TOKENS_KEPT:]


def _leased(run: JobRun, row: JobRow) -> PrefixLeasedError:
    if row.keeps_lease:
        cause = "a streaming query holds its prefix as long as it exists, also while it is stopped"
    else:
        cause = f"its batch {row.batch_id} is open since {row.updated_at:%Y-%m-%d %H:%M:%S%z}, and shows signs of life"
    return PrefixLeasedError(
        f"The prefix {run.prefix!r} is held by job {row.job_id!r} (opened by {row.owner!r}); {run.job_id!r} can't have it.",
        cause=cause,
        next_step="give this job a transactionalIdPrefix of its own; or, if the other one is gone for good, "
        f"`dualwrite recover --prefix {shell_word(run.prefix)} --release`",
        prefix=run.prefix,
        job_id=row.job_id,
        batch_id=row.batch_id,
        owner=row.owner,
    )


def _too_late(run: JobRun, newest: int) -> BatchRefusedError:
    return BatchRefusedError(
        f"{run.name} comes after batch {newest} of the same job was committed.",
        cause="the checkpoint was set back, or two queries share it",
        next_step="nothing was written; go on from the newest checkpoint, or with a new query",
        prefix=run.prefix,
        job_id=run.job_id,
        batch_id=run.batch_id,
    )
