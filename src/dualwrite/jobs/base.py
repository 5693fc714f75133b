"""What a job is: many tasks, each with a Kafka transaction and staged rows of its own, and one decision over all of them.

A *job* is a streaming query or one batch write. A *batch* of it is what commits as one: a micro-batch, or the whole write. A
*run* is one go at a batch, by one driver: after a crash the same batch is run again.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from typing import Final

from dualwrite.delivery import Delivery
from dualwrite.errors import InvalidTransactionalIdError
from dualwrite.state import MAX_TRANSACTIONAL_ID_LENGTH, PreparedTxnState, validate_transactional_id


@dataclass(frozen=True, slots=True)
class JobRun:
    """One go at one batch of a job.

    Args:
        prefix: What the transactional ids of its tasks begin with. One job at a time holds a prefix.
        job_id: The job, by a name that stays over restarts; with `batch_id` it names what is committed at most once.
        batch_id: The batch, counted up by the job; 0 for a job with only one.
        keeps_lease: Whether the job holds its prefix between two batches as well, as a streaming query does.
        token: Of this very run.
    """

    prefix: str
    job_id: str
    batch_id: int = 0
    keeps_lease: bool = False
    token: str = field(default_factory=lambda: uuid.uuid4().hex)

    @property
    def name(self) -> str:
        """The batch, for people."""
        return f"batch {self.batch_id} of job {self.job_id!r}"


@dataclass(frozen=True, slots=True)
class Prepared:
    """What a task has prepared: it waits for the job's decision.

    Args:
        transactional_id: The logical id of the task attempt.
        fence: The fence of its claim; the decision counts only while the row has it.
        owner: Who claimed.
        generation: The generation of the id that the transaction runs on.
        state: The prepared Kafka transaction.
        delivery: Where its messages lie in Kafka's log.
        began_at: When the Kafka transaction began, in seconds by the database's clock.
        timeout: Seconds after which Kafka may abort it; None under two-phase commit.
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
    """What one task attempt gives to the driver.

    Args:
        run: The run that the task belongs to.
        partition: Number of the partition.
        attempt: Number of the attempt.
        rows: How many rows it staged; each is a message as well.
        prepared: What it prepared; None where the partition was empty, or the batch had been committed before.
        already_committed: Whether the batch had been committed by an earlier run, so that nothing was written.
    """

    run: JobRun
    partition: int
    attempt: int
    rows: int = 0
    prepared: Prepared | None = None
    already_committed: bool = False


SEPARATOR: Final = "."
_NUMBERS_LENGTH: Final = 22  # two separators and two numbers of ten digits: Spark counts both in 32 bits

MAX_PREFIX_LENGTH: Final = MAX_TRANSACTIONAL_ID_LENGTH - _NUMBERS_LENGTH
"""Characters of a prefix."""


@dataclass(frozen=True, slots=True)
class AttemptId:
    """One attempt of the task for one partition.

    Args:
        prefix: The job's prefix.
        partition: Number of the partition, from 0.
        attempt: Number of the attempt, from 0: retries and speculative copies have numbers of their own.
    """

    prefix: str
    partition: int
    attempt: int

    def __str__(self) -> str:
        """The logical transactional id."""
        return f"{self.prefix}{SEPARATOR}{self.partition}{SEPARATOR}{self.attempt}"


def validate_prefix(prefix: str) -> str:
    """Return the prefix if the ids of all task attempts can be made of it.

    Raises:
        InvalidTransactionalIdError: It is empty, too long, or holds what no transactional id may hold.
    """
    validate_transactional_id(prefix)
    if len(prefix) > MAX_PREFIX_LENGTH:
        raise InvalidTransactionalIdError(
            f"The prefix has {len(prefix)} characters; {MAX_PREFIX_LENGTH} is the limit: {prefix[:40]!r}…",
            cause="partition and attempt are appended to it, and a transactional id has at most "
            f"{MAX_TRANSACTIONAL_ID_LENGTH} characters",
        )
    return prefix
