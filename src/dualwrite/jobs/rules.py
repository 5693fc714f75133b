"""The data types of a job: many tasks, each with its own Kafka transaction and staged rows, and one decision for all of them.

A *job* is a streaming query or one batch write. A *batch* is the part of a job that commits as a whole: a micro-batch, or the
whole write. A *run* is one attempt at a batch, by one driver: after a crash the same batch is run again.

The rules for opening a batch on a prefix are pure functions of the job's row, which `JobLedger` reads and writes.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from enum import Enum
from typing import Any, Final

from dualwrite.errors import BatchRefusedError, InvalidTransactionalIdError, JobClosedError, PrefixLeasedError, shell_word
from dualwrite.observability.tracing import Carrier
from dualwrite.state import Delivery, PreparedTxnState
from dualwrite.transactional_id import MAX_TRANSACTIONAL_ID_LENGTH, validate_transactional_id

SEPARATOR: Final = "."
_NUMBERS_LENGTH: Final = 22  # two separators and two numbers of ten digits: in Spark both are 32-bit integers
MAX_PREFIX_LENGTH: Final = MAX_TRANSACTIONAL_ID_LENGTH - _NUMBERS_LENGTH
"""Maximum length of a prefix, in characters."""
_TOKENS_KEPT: Final = 64
"""How many tokens of earlier runs are kept, also of other jobs; runs of a job's earlier batches are identified by their number.

A job with several batches keeps its lease, so tasks of the jobs before it are refused without their tokens.
"""


@dataclass(frozen=True, slots=True)
class JobRun:
    """One attempt at one batch of a job.

    Args:
        prefix: The prefix of its tasks' transactional ids. Only one job at a time can hold a prefix.
        job_id: The job's name, which stays the same over restarts; together with `batch_id` it identifies what is committed
            at most once.
        batch_id: The batch's number, increased by the job; 0 for a job with only one batch.
        keeps_lease: Whether the job also holds its prefix between two batches, as a streaming query does.
        token: A unique token of this run.
        bound_to: What the job's name stands for: a query, or a table and a topic. A batch that is committed for something else
            must not count as this one's.
        carrier: The context of the write's trace, for its tasks and its commit; empty if it has none.
    """

    prefix: str
    job_id: str
    batch_id: int = 0
    keeps_lease: bool = False
    token: str = field(default_factory=lambda: uuid.uuid4().hex)
    bound_to: str = ""
    carrier: Carrier = field(default=(), compare=False, repr=False)

    @property
    def name(self) -> str:
        """The batch, as messages name it."""
        return f"batch {self.batch_id} of job {self.job_id!r}"

    @property
    def facts(self) -> dict[str, Any]:
        """The facts of an error about it."""
        return {"prefix": self.prefix, "job_id": self.job_id, "batch_id": self.batch_id}


@dataclass(frozen=True, slots=True)
class Prepared:
    """What a task has prepared, waiting for the job's decision.

    It can be committed only while the id's row has `fence`. The Kafka transaction began at `began_at`, in seconds by the
    database's clock, and Kafka may abort it `timeout` seconds later; None with two-phase commit.
    """

    transactional_id: str
    fence: int
    owner: str
    generation: int
    state: PreparedTxnState
    delivery: Delivery | None
    began_at: float
    timeout: float | None


@dataclass(frozen=True, slots=True)
class TaskOutcome:
    """What one task attempt reports to the driver: how many rows it staged, each also a message, and what it prepared.

    Nothing is prepared if the partition was empty, or if an earlier run had committed the batch.
    """

    run: JobRun
    partition: int
    attempt: int
    rows: int = 0
    prepared: Prepared | None = None
    already_committed: bool = False


@dataclass(frozen=True, slots=True)
class AttemptId:
    """One attempt, from 0, of the task for one partition: each retry and each speculative copy has its own number."""

    prefix: str
    partition: int
    attempt: int

    def __str__(self) -> str:
        """The logical transactional id."""
        return f"{self.prefix}{SEPARATOR}{self.partition}{SEPARATOR}{self.attempt}"


def validate_prefix(prefix: str) -> str:
    """Return the prefix if it is valid for the ids of all task attempts.

    Raises:
        InvalidTransactionalIdError: The prefix is empty, too long, or has a character that a transactional id can't have.
    """
    validate_transactional_id(prefix)
    if len(prefix) > MAX_PREFIX_LENGTH:
        raise InvalidTransactionalIdError(
            f"The prefix has {len(prefix)} characters; the limit is {MAX_PREFIX_LENGTH}: {prefix[:40]!r}…",
            cause="the partition and the attempt are appended to it, and a transactional id has at most "
            f"{MAX_TRANSACTIONAL_ID_LENGTH} characters",
            next_step="choose a shorter prefix",
        )
    return prefix


@dataclass(frozen=True, slots=True)
class JobRow:
    """What the database stores about a prefix: the job that holds it, or held it last, and its newest run.

    Args:
        prefix: The prefix.
        job_id: The job.
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


class OpeningResult(Enum):
    """The result of opening a run."""

    OPENED = "opened"
    """The run is now the open one; an earlier run that was still open is closed."""

    JOINED = "joined"
    """Another task of the same run had opened it already."""

    ALREADY_COMMITTED = "already committed"
    """An earlier run has committed the batch: there is nothing to write."""


@dataclass(frozen=True, slots=True)
class Committed:
    """What a job has committed: whether the batch in question (and for what, see JobRun), and its highest batch id."""

    this: bool
    newest: int | None
    bound_to: str = ""


def opened(
    row: JobRow | None, run: JobRun, committed: Committed, *, owner: str, staging_table: str, dead: str | None = None
) -> tuple[OpeningResult, JobRow | None]:
    """The result of opening a run, and the row to write, or None if the row does not change.

    `dead` is the token of an open run that was watched and sent no heartbeat: it may be replaced.

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
        return OpeningResult.ALREADY_COMMITTED, None
    if row is not None:
        if row.is_open_for(run):
            return OpeningResult.JOINED, None
        if run.token in (row.token, *row.earlier_tokens) or (row.job_id == run.job_id and row.batch_id > run.batch_id):
            raise closed(run, row)
        if row.job_id != run.job_id and (row.is_open or row.keeps_lease) and row.token != dead:
            raise _leased(run, row)
    return OpeningResult.OPENED, JobRow(
        **run.facts,
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
    return replace(row, earlier_tokens=(*row.earlier_tokens, run.token)[-_TOKENS_KEPT:])


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
        **run.facts,
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
            **run.facts,
        )


def _earlier_tokens(row: JobRow | None, run: JobRun) -> tuple[str, ...]:
    if row is None or (row.job_id == run.job_id and row.batch_id != run.batch_id):
        return ()
    return (*row.earlier_tokens, row.token)[-_TOKENS_KEPT:]


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
        **run.facts,
    )
