"""The data types of a job: many tasks, each with its own Kafka transaction and staged rows, and one decision for all of them.

A *job* is a streaming query or one batch write. A *batch* is the part of a job that commits as a whole: a micro-batch, or the
whole write. A *run* is one attempt at a batch, by one driver: after a crash the same batch is run again.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from typing import Final

from dualwrite.delivery import Delivery
from dualwrite.errors import InvalidTransactionalIdError
from dualwrite.state import PreparedTxnState
from dualwrite.transactional_id import MAX_TRANSACTIONAL_ID_LENGTH, validate_transactional_id


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
    """

    prefix: str
    job_id: str
    batch_id: int = 0
    keeps_lease: bool = False
    token: str = field(default_factory=lambda: uuid.uuid4().hex)
    bound_to: str = ""

    @property
    def name(self) -> str:
        """The batch, as messages name it."""
        return f"batch {self.batch_id} of job {self.job_id!r}"


@dataclass(frozen=True, slots=True)
class Prepared:
    """What a task has prepared, waiting for the job's decision.

    Args:
        transactional_id: The logical id of the task attempt.
        fence: The fencing token of its claim; the transaction can be committed only while the row has it.
        owner: Who claimed the id.
        generation: The generation of the id that the transaction runs on.
        state: The prepared Kafka transaction.
        delivery: Where its messages are in Kafka's log.
        began_at: When the Kafka transaction began, in seconds by the database's clock.
        timeout: Seconds after which Kafka may abort it; None with two-phase commit.
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
    """What one task attempt reports to the driver.

    Args:
        run: The run that the task belongs to.
        partition: Number of the partition.
        attempt: Number of the attempt.
        rows: How many rows it staged; each row is also a message.
        prepared: What it prepared; None if the partition was empty or the batch had been committed before.
        already_committed: Whether an earlier run had committed the batch, so that nothing was written.
    """

    run: JobRun
    partition: int
    attempt: int
    rows: int = 0
    prepared: Prepared | None = None
    already_committed: bool = False


SEPARATOR: Final = "."
_NUMBERS_LENGTH: Final = 22  # two separators and two numbers of ten digits: in Spark both are 32-bit integers

MAX_PREFIX_LENGTH: Final = MAX_TRANSACTIONAL_ID_LENGTH - _NUMBERS_LENGTH
"""Maximum length of a prefix, in characters."""


@dataclass(frozen=True, slots=True)
class AttemptId:
    """One attempt of the task for one partition.

    Args:
        prefix: The job's prefix.
        partition: Number of the partition, from 0.
        attempt: Number of the attempt, from 0: each retry and each speculative copy has its own number.
    """

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
