"""The contract of chunk markers, which record the committed chunks of a job.

A marker is written in the database transaction of its chunk, so it exists if and only if the chunk's rows do. Where it is
stored depends on the store: a table for SQL, a column family for RocksDB, nodes for ZooKeeper. To support a store of your own,
give it a method `chunk_markers()` that returns your implementation of ChunkMarkers; it runs in the tasks' processes.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Self

from dualwrite.errors import ConfigurationError, StoreCommitFailedError, StoredStateError
from dualwrite.transaction import Transaction

WHOLE_JOB: Final = -1
"""The partition number of the one marker that belongs to the job itself and stores its plan."""

MAX_JOB_ID_LENGTH: Final = 200
"""Maximum length of a job id, in characters."""

MAX_DIGEST_LENGTH: Final = 64
"""Maximum length of a marker's digest, in characters."""


@dataclass(frozen=True, slots=True)
class ChunkMarker:
    """Records that a chunk is committed.

    Args:
        number: The chunk's number within its partition, from 0.
        rows: How many rows it has.
        digest: A digest of these rows, at most MAX_DIGEST_LENGTH characters.
    """

    number: int
    rows: int
    digest: str


@dataclass(frozen=True, slots=True)
class JobPlan:
    """How a job is divided into chunks. Every run of the same job must be divided in the same way.

    Args:
        job_id: The job; all runs with the same id together write each chunk once.
        partitions: How many partitions it has, or None if that can't be known in advance.
        rows_per_transaction: Rows per chunk, or None if each partition is a single chunk.

    Raises:
        ConfigurationError: The id or a number is not valid.
    """

    job_id: str
    partitions: int | None = None
    rows_per_transaction: int | None = None

    def __post_init__(self) -> None:
        validate_job_id(self.job_id)
        for name in ("partitions", "rows_per_transaction"):
            number = getattr(self, name)
            if number is not None and (not isinstance(number, int) or number < 1):
                raise ConfigurationError(f"{name} must be an integer of at least 1, or None, not {number!r}.")

    def __str__(self) -> str:
        partitions = "unknown number of partitions" if self.partitions is None else f"{self.partitions} partitions"
        rows = (
            "one transaction each" if self.rows_per_transaction is None else f"{self.rows_per_transaction} rows per transaction"
        )
        return f"{partitions}, {rows}"

    @property
    def marker(self) -> ChunkMarker:
        """The job's own marker, which stores the plan."""
        text = json.dumps({"partitions": self.partitions, "rows": self.rows_per_transaction}, separators=(",", ":"))
        return ChunkMarker(0, 0, text)

    @classmethod
    def of(cls, job_id: str, marker: ChunkMarker) -> Self:
        """The plan stored in a job's own marker.

        Raises:
            StoredStateError: The stored text is not a plan.
        """
        try:
            found = json.loads(marker.digest)
            return cls(job_id, found["partitions"], found["rows"])
        except (ValueError, KeyError, TypeError) as error:
            raise StoredStateError(
                f"The stored plan of the job {job_id!r} can't be read: {marker.digest!r}.",
                cause="it was changed manually or by a newer release",
                next_step="restore it, or upgrade dualwrite; nothing was changed",
                text=marker.digest,
            ) from error

    def agrees_with(self, other: JobPlan) -> bool:
        """Whether both divide the job in the same way; an unknown number of partitions agrees with any number."""
        alike = None in (self.partitions, other.partitions) or self.partitions == other.partitions
        return alike and self.rows_per_transaction == other.rows_per_transaction


def validate_job_id(job_id: str) -> str:
    """Return the id if it is valid: 1 to 200 printable characters.

    Raises:
        ConfigurationError: The id is not valid.
    """
    if not isinstance(job_id, str) or not 0 < len(job_id) <= MAX_JOB_ID_LENGTH or not job_id.isprintable():
        raise ConfigurationError(
            f"A job id must be a string of 1 to {MAX_JOB_ID_LENGTH} printable characters, not {str(job_id)[:60]!r}.",
            next_step="choose a name that stays the same when the job is run again, such as 'flights-2013-01'",
        )
    return job_id


class ChunkMarkers(ABC):
    """Stores and reads the markers in one store. `transaction` always belongs to a writer on that store.

    The database's errors are passed on unchanged, as they would be for a statement in the user's block.
    """

    def prepare(self) -> None:  # noqa: B027  (there may be nothing to prepare)
        """Create what the first marker needs, if it is missing.

        Called before the first transaction of each task attempt, by several attempts at once.

        Raises:
            StateTableMissingError: What is missing has to be created beforehand (`dualwrite db upgrade`).
            StoreUnavailableError: The database can't be reached.
        """

    @abstractmethod
    def read(self, transaction: Transaction, job_id: str, partition: int) -> Mapping[int, ChunkMarker]:
        """The markers of a partition by chunk number, including all that were committed before the writer claimed its id.

        Args:
            transaction: An open transaction.
            job_id: The job.
            partition: Number of the partition, or WHOLE_JOB.
        """

    @abstractmethod
    def write(self, transaction: Transaction, job_id: str, partition: int, marker: ChunkMarker) -> None:
        """Add a marker as part of the transaction.

        If any writer has already committed a marker with this number, the transaction must fail: here (`committed_meanwhile`)
        or in its commit, with StoreCommitFailedError.
        """

    @abstractmethod
    def forget(self, job_id: str) -> int:
        """Remove all markers of a job, in separate transactions. Idempotent.

        Returns:
            How many chunks had a marker.

        Raises:
            StoreError: The database's own errors, translated.
        """


def committed_meanwhile(job_id: str, partition: int, marker: ChunkMarker) -> StoreCommitFailedError:
    """The error for a marker that exists already: another attempt has written the chunk, and our transaction is rolled back.

    Retriable: on the next attempt the check of the fencing token shows whether the id was taken over.
    """
    what = f"The plan of the job {job_id!r}" if partition == WHOLE_JOB else f"Chunk {marker.number} of the job {job_id!r}"
    return StoreCommitFailedError(
        f"{what} was committed by another attempt in the meantime; this transaction was rolled back.",
        cause="tasks of the job started at the same time, a task has a speculative copy, or the job runs twice at once",
        next_step="wait for the other attempt to end, then run the job again",
        partition=partition,
    )
