"""Chunk markers, which record the committed chunks of a job: rows of `kafka_job_chunk`.

A marker is written in the database transaction of its chunk, so it exists if and only if the chunk's rows do.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final, Self

from sqlalchemy import Connection, bindparam, delete, func, insert, select
from sqlalchemy.exc import IntegrityError

from dualwrite.errors import ConfigurationError, StateTableMissingError, StoreCommitFailedError, StoredStateError
from dualwrite.jobs.tables import CHUNK_TABLE_NAME, MAX_JOB_ID_LENGTH
from dualwrite.jobs.tables import chunk_table as t
from dualwrite.stores.base import TxnStateStore
from dualwrite.stores.sql import SqlStateStore
from dualwrite.stores.sql.guard import GuardedConnection
from dualwrite.transaction import Transaction

WHOLE_JOB: Final = -1
"""The partition number of the one marker that belongs to the job itself and stores its plan."""

_ANY: Final = select(t).where(t.c.job_id == "").limit(1)
_READ: Final = select(t.c.chunk_number, t.c.row_count, t.c.digest).where(
    t.c.job_id == bindparam("job_id"), t.c.partition_number == bindparam("partition")
)
_WRITE: Final = insert(t)
_OF_JOB: Final = t.c.job_id == bindparam("job")
_COUNT: Final = select(func.count()).select_from(t).where(_OF_JOB, t.c.partition_number >= 0)
_DELETE: Final = delete(t).where(_OF_JOB)


@dataclass(frozen=True, slots=True)
class ChunkMarker:
    """Records that a chunk is committed.

    Args:
        number: The chunk's number within its partition, from 0.
        rows: How many rows it has.
        digest: A digest of these rows, at most 64 characters.
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


class ChunkMarkers:
    """Stores and reads the markers in one database. `transaction` always belongs to a writer on it.

    The statements run on the connection of `tx.session`, which every SQL store has. The database's errors are passed on
    unchanged, as they would be for a statement in the user's block.

    Args:
        store: The store.

    Raises:
        ConfigurationError: The store is not a SQL database.
    """

    def __init__(self, store: TxnStateStore) -> None:
        if not isinstance(store, SqlStateStore):
            raise ConfigurationError(
                f"A job in chunks needs a SQL database, but the store is {store.description}.",
                cause="the markers that make it idempotent are rows of a table",
                next_step="use PostgreSQL, MariaDB, MySQL or SQLite",
            )
        self._store = store

    def prepare(self) -> None:
        """Check that the table exists, before the first transaction of a task attempt.

        Raises:
            StateTableMissingError: It does not; `dualwrite db upgrade` creates it.
            StoreUnavailableError: The database can't be reached.
        """
        try:
            self._store.short_transactions.query(
                lambda connection: connection.execute(_ANY).first(), "checking the table of chunk markers"
            )
        except StateTableMissingError as error:
            raise StateTableMissingError(
                f"The table {CHUNK_TABLE_NAME} in {self._store.description} is missing or out of date.",
                cause="the database was last upgraded for an earlier release",
                next_step=error.next_step,
            ) from error

    def read(self, transaction: Transaction, job_id: str, partition: int) -> Mapping[int, ChunkMarker]:
        """The markers of a partition by chunk number, including all that were committed before the writer claimed its id.

        Args:
            transaction: An open transaction.
            job_id: The job.
            partition: Number of the partition, or WHOLE_JOB.
        """
        with _own_statements(transaction) as connection:
            found = connection.execute(_READ, {"job_id": job_id, "partition": partition}).all()
        return {row.chunk_number: ChunkMarker(row.chunk_number, row.row_count, row.digest) for row in found}

    def write(self, transaction: Transaction, job_id: str, partition: int, marker: ChunkMarker) -> None:
        """Add a marker as part of the transaction.

        Raises:
            StoreCommitFailedError: Another writer has committed a marker with this number: the primary key rejects it.
        """
        row = {
            "job_id": job_id,
            "partition_number": partition,
            "chunk_number": marker.number,
            "row_count": marker.rows,
            "digest": marker.digest,
            "committed_at": datetime.now(UTC),
        }
        try:
            with _own_statements(transaction) as connection:
                connection.execute(_WRITE, row)
        except IntegrityError as error:
            raise _committed_meanwhile(job_id, partition, marker) from error

    def forget(self, job_id: str) -> int:
        """Remove all markers of a job, in a separate transaction. Idempotent.

        Returns:
            How many chunks had a marker.

        Raises:
            StoreError: The database's own errors, translated.
        """
        counted = 0  # the maximum over all attempts: a COMMIT whose response was lost may have deleted them already

        def work(connection: Connection) -> None:
            nonlocal counted
            counted = max(counted, connection.execute(_COUNT, {"job": job_id}).scalar_one())
            connection.execute(_DELETE, {"job": job_id})

        self._store.short_transactions.run(work, "forgetting a job")
        return counted


def forget_job(store: TxnStateStore, job_id: str) -> int:
    """Remove the markers of a job that will not run again.

    Afterwards a run with the same id writes everything again. Call it while the job is not running.

    Args:
        store: The database; `writer.store`, or `dualwrite.store_from_url(url)`.
        job_id: The job.

    Returns:
        How many chunks had a marker.

    Raises:
        ConfigurationError: The id is not valid, or the store is not a SQL database.
        StoreError: The database's own errors, translated.
    """
    return ChunkMarkers(store).forget(validate_job_id(job_id))


def _own_statements(transaction: Transaction) -> AbstractContextManager[Connection]:
    connection = transaction.session.connection()
    assert isinstance(connection, GuardedConnection)
    return connection.own_statements()


def _committed_meanwhile(job_id: str, partition: int, marker: ChunkMarker) -> StoreCommitFailedError:
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
