"""The contract of chunk markers: which chunks of a job are committed, told by the very transactions that committed them.

A marker is written in the database transaction of its chunk, so that it stands there exactly if the chunk's rows do. Where it
is kept depends on the store: a table for SQL, a column family for RocksDB, nodes for ZooKeeper. A store of your own has a
method `chunk_markers()` that returns a ChunkMarkers of your own; it runs wherever the tasks do.
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
"""The number of the partition under which the one marker stands that is of the job itself: how it is cut."""

MAX_JOB_ID_LENGTH: Final = 200
"""Characters of a job's id."""

MAX_DIGEST_LENGTH: Final = 64
"""Characters of a marker's digest."""


@dataclass(frozen=True, slots=True)
class ChunkMarker:
    """That a chunk is committed.

    Args:
        number: Which chunk of its partition, from 0.
        rows: How many rows it has.
        digest: Of what these rows hold, at most MAX_DIGEST_LENGTH characters.
    """

    number: int
    rows: int
    digest: str


@dataclass(frozen=True, slots=True)
class JobPlan:
    """How a job is cut into chunks. A job that runs again must be cut as it was.

    Args:
        job_id: The job: runs of the same id write each chunk once between them.
        partitions: How many partitions it has, or None where that can't be known beforehand.
        rows_per_transaction: Rows of a chunk, or None: the whole partition is one.

    Raises:
        ConfigurationError: The id or a number can't be used.
    """

    job_id: str
    partitions: int | None = None
    rows_per_transaction: int | None = None

    def __post_init__(self) -> None:
        validate_job_id(self.job_id)
        for name in ("partitions", "rows_per_transaction"):
            number = getattr(self, name)
            if number is not None and (not isinstance(number, int) or number < 1):
                raise ConfigurationError(f"{name} is {number!r}; it must be a whole number from 1 on, or None.")

    def __str__(self) -> str:
        partitions = "partitions of unknown number" if self.partitions is None else f"{self.partitions} partitions"
        rows = (
            "one transaction each" if self.rows_per_transaction is None else f"{self.rows_per_transaction} rows a transaction"
        )
        return f"{partitions}, {rows}"

    @property
    def marker(self) -> ChunkMarker:
        """The plan as the marker of the whole job."""
        text = json.dumps({"partitions": self.partitions, "rows": self.rows_per_transaction}, separators=(",", ":"))
        return ChunkMarker(0, 0, text)

    @classmethod
    def of(cls, job_id: str, marker: ChunkMarker) -> Self:
        """The plan that a marker of the whole job holds.

        Raises:
            StoredStateError: It can't be read.
        """
        try:
            found = json.loads(marker.digest)
            return cls(job_id, found["partitions"], found["rows"])
        except (ValueError, KeyError, TypeError) as error:
            raise StoredStateError(
                f"The stored plan of the job {job_id!r} can't be read: {marker.digest!r}.",
                cause="it was changed by hand or by a newer release",
                next_step="put it back, or upgrade; nothing was changed",
                text=marker.digest,
            ) from error

    def agrees_with(self, other: JobPlan) -> bool:
        """Whether both cut the job alike, as far as both know."""
        alike = None in (self.partitions, other.partitions) or self.partitions == other.partitions
        return alike and self.rows_per_transaction == other.rows_per_transaction


def validate_job_id(job_id: str) -> str:
    """Return the id if it can be one: 1 to 200 characters that print.

    Raises:
        ConfigurationError: It can't.
    """
    if not isinstance(job_id, str) or not 0 < len(job_id) <= MAX_JOB_ID_LENGTH or not job_id.isprintable():
        raise ConfigurationError(
            f"A job's id is a text of 1 to {MAX_JOB_ID_LENGTH} printable characters, not {str(job_id)[:60]!r}.",
            next_step="choose a name that stays when the job is run again, such as 'flights-2013-01'",
        )
    return job_id


class ChunkMarkers(ABC):
    """Keeps the markers of one store. `transaction` is always one of a writer on that store.

    What the database raises goes through as it is, as from a statement of the user's.
    """

    def prepare(self) -> None:  # noqa: B027  (there may be nothing to prepare)
        """Make what a first marker needs, or raise where somebody must: StateTableMissingError, StoreUnavailableError.

        Called before each task attempt's first transaction, and by several at once.
        """

    @abstractmethod
    def read(self, transaction: Transaction, job_id: str, partition: int) -> Mapping[int, ChunkMarker]:
        """The markers of a partition by their numbers, all that were committed before the writer claimed its id.

        Args:
            transaction: An open one.
            job_id: The job.
            partition: Number of the partition, or WHOLE_JOB.
        """

    @abstractmethod
    def write(self, transaction: Transaction, job_id: str, partition: int, marker: ChunkMarker) -> None:
        """Add a marker as part of the transaction.

        Where one of its number has been committed, by anybody, the transaction must fail: here (`committed_meanwhile`) or
        when it commits, by StoreCommitFailedError.
        """

    @abstractmethod
    def forget(self, job_id: str) -> int:
        """Remove all markers of a job, in transactions of its own; how many chunks they stood for. Harmless to repeat.

        Raises:
            StoreError: The database's own errors, translated.
        """


def committed_meanwhile(job_id: str, partition: int, marker: ChunkMarker) -> StoreCommitFailedError:
    """The error for a marker that stands there already: another attempt has written the chunk, and ours is rolled back.

    Retriable, since at the next try the fence tells more.
    """
    what = f"The plan of the job {job_id!r}" if partition == WHOLE_JOB else f"Chunk {marker.number} of the job {job_id!r}"
    return StoreCommitFailedError(
        f"{what} was committed by another attempt meanwhile; nothing of this transaction is left.",
        cause="tasks of a job begin at once, a task has a speculative copy, or the job runs twice at once",
        next_step="let the other attempt end, then run the job again",
        partition=partition,
    )
