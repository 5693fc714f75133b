"""Writes one partition of a job chunk by chunk: each in its own transaction, and once, however often the job runs.

A *chunk* is what one transaction writes: the rows of a partition, or some of them. Its marker is written in its database
transaction, so a later attempt sees which chunks are committed and skips them. This relies on the following:

- Opening the writer claims the partition's transactional id and resolves what an earlier attempt left in doubt, including an
  unknown outcome. After that no earlier attempt can commit, so the markers read afterwards are complete.
- Chunks are committed in order, so the chunks with a marker come first.
- On a later run a committed chunk must have the same rows (its marker has their digest, `table_digest`), and the job must be
  divided as before (see JobPlan). Otherwise rows would be lost or duplicated: the attempt fails and writes nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property, partial
from typing import Final, Generic, Self, TypeVar

import pyarrow as pa
from sqlalchemy import Connection, bindparam, delete, func, insert, select
from sqlalchemy.exc import IntegrityError

from dualwrite.errors import (
    ChunkChangedError,
    ConfigurationError,
    DualWriteError,
    FencedError,
    JobPlanChangedError,
    StateTableMissingError,
    StoreCommitFailedError,
    StoredStateError,
    UsageError,
)
from dualwrite.jobs.job_tables import CHUNK_TABLE_NAME, MAX_JOB_ID_LENGTH
from dualwrite.jobs.job_tables import chunk_table as t
from dualwrite.observability.logs import SubjectLogger
from dualwrite.spark.loading import table_digest
from dualwrite.stores.base import TxnStateStore
from dualwrite.stores.sql import SqlStateStore
from dualwrite.stores.sql.guard import GuardedConnection
from dualwrite.transaction import Transaction
from dualwrite.transactional import check_has_run, made_for_each_attempt, name_of, repeated
from dualwrite.writer import DualWriter

log = SubjectLogger(__name__)

T = TypeVar("T")

DEFAULT_ATTEMPTS: Final = 3

_PLAN_ATTEMPTS: Final = 5
_KEEP_ROWS: Final = (
    "materialize the rows before a job's first run (as files, or a table that no longer changes), and keep the number of "
    "partitions; with rows_per_transaction, also the order of rows in each partition"
)
_START_OVER: Final = "To start over, undo what was committed and call forget_job, or use another job id"

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
    """Records that a chunk of a partition (numbered from 0) is committed; the digest has at most 64 characters."""

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
        """The markers of a partition by chunk number, including all that were committed before the writer claimed its id."""
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
        """Remove all markers of a job, in a separate transaction; return how many chunks had one. Idempotent."""
        return self._store.short_transactions.delete(_COUNT, _DELETE, {"job": job_id}, "forgetting a job")


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


@dataclass(frozen=True)
class Chunk(Generic[T]):
    """Rows for one transaction: how many, their digest, and what returns them for each attempt of the job's function."""

    rows: int
    digest: str
    content: Callable[[], T]


@dataclass(frozen=True, slots=True)
class PartitionReport:
    """What one attempt did to its partition.

    Args:
        partition: Number of the partition.
        rows: Rows that it wrote.
        chunks: Chunks that it wrote, each in a transaction.
        rows_before: Rows in the chunks that had been committed before.
        chunks_before: How many chunks had been committed before.
    """

    partition: int
    rows: int = 0
    chunks: int = 0
    rows_before: int = 0
    chunks_before: int = 0


@dataclass(frozen=True)
class PartitionAttempt:
    """One attempt to write a partition of a job.

    Args:
        writer: An open writer whose id belongs to this partition alone: the same id for all attempts, and for all runs of the
            job that may overlap.
        plan: How the job is divided into chunks.
        partition: Number of the partition, from 0.
        attempts: Maximum number of attempts for one chunk's transaction.
    """

    writer: DualWriter
    plan: JobPlan
    partition: int
    attempts: int = DEFAULT_ATTEMPTS

    def write(self, chunks: Iterable[Chunk[T]], fn: Callable[[Transaction, T], object]) -> PartitionReport:
        """Write those chunks that have not been committed yet, each in a transaction.

        Args:
            chunks: All chunks of the partition, starting with the first, in the same order on each attempt.
            fn: Writes one chunk; called with the transaction and the chunk's content.

        Raises:
            JobPlanChangedError: The job was divided differently before.
            ChunkChangedError: A committed chunk has other rows now, or no longer exists.
            ConfigurationError: The writer's store is not a SQL database.
            UsageError: The plan has no partition with this number.
            FencedError: Another attempt of this partition has started since. It skips what is committed.
            DualWriteError: As `DualWriter.transaction`. A later attempt continues correctly after any of them; after
                LostTransactionError, whose chunk's messages were not published again, only once it is acknowledged.
        """
        if self.plan.partitions is not None and not 0 <= self.partition < self.plan.partitions:
            raise UsageError(
                f"The job {self.plan.job_id!r} has no partition {self.partition}: its plan has {self.plan.partitions}, "
                "counted from 0.",
                transactional_id=self.writer.transactional_id,
                next_step="pass the frame's actual number of partitions",
            )
        self._markers.prepare()
        committed = self._committed()
        rows = rows_before = chunks_before = count = 0
        for number, chunk in enumerate(chunks):
            count = number + 1
            marker = committed.get(number)
            if marker is None:
                self._write(number, chunk, fn)
                rows += chunk.rows
            else:
                if (marker.rows, marker.digest) != (chunk.rows, chunk.digest):
                    raise self._changed(marker, chunk.rows)
                rows_before += marker.rows
                chunks_before += 1
        missing = [marker for number, marker in sorted(committed.items()) if number >= count]
        if missing:
            raise self._changed(missing[0], None)
        done = PartitionReport(self.partition, rows, count - chunks_before, rows_before, chunks_before)
        log.info(
            "partition %d: wrote %d rows in %d transactions; skipped %d rows in %d chunks that were committed before",
            *(self.partition, done.rows, done.chunks, rows_before, chunks_before),
            job=self.plan.job_id,
        )
        return done

    @cached_property
    def _markers(self) -> ChunkMarkers:
        return ChunkMarkers(self.writer.store)

    # --- chunks that were committed before --------------------------------------------------------------------------------

    def _committed(self) -> Mapping[int, ChunkMarker]:
        """The partition's markers. The job's first transactions record the plan; if several do so at once, one succeeds."""
        return repeated(self._committed_once, attempts=_PLAN_ATTEMPTS, is_retriable=_may_be_a_conflict)()

    def _committed_once(self) -> Mapping[int, ChunkMarker]:
        job_id = self.plan.job_id
        with self.writer.transaction() as transaction:
            recorded = self._markers.read(transaction, job_id, WHOLE_JOB).get(0)
            if recorded is None:
                self._markers.write(transaction, job_id, WHOLE_JOB, self.plan.marker)
            else:
                self._check_plan(JobPlan.of(job_id, recorded))
            return self._markers.read(transaction, job_id, self.partition)

    def _check_plan(self, before: JobPlan) -> None:
        if not self.plan.agrees_with(before):
            raise JobPlanChangedError(
                f"The job {self.plan.job_id!r} is divided differently than before: {before} then, {self.plan} now.",
                transactional_id=self.writer.transactional_id,
                cause="rows would be in other chunks than the committed ones, and be lost or duplicated",
                next_step="run it as before: repartition the frame by number, and pass the same rows_per_transaction. "
                f"{_START_OVER}",
                job_id=self.plan.job_id,
                before=str(before),
                now=str(self.plan),
            )

    def _changed(self, marker: ChunkMarker, rows: int | None) -> ChunkChangedError:
        now = "no longer exists" if rows is None else f"has other rows now ({rows})"
        return ChunkChangedError(
            f"Chunk {marker.number} of partition {self.partition} of the job {self.plan.job_id!r}, which was committed with "
            f"{marker.rows} rows, {now}.",
            transactional_id=self.writer.transactional_id,
            cause="the frame is not deterministic, or what it reads has changed: committed rows may appear again in other "
            "chunks, and other rows may be skipped",
            next_step=f"{_KEEP_ROWS}. {_START_OVER}",
            job_id=self.plan.job_id,
            partition=self.partition,
            chunk=marker.number,
            committed_rows=marker.rows,
            rows=rows,
        )

    # --- chunks that were not ---------------------------------------------------------------------------------------------

    def _write(self, number: int, chunk: Chunk[T], fn: Callable[[Transaction, T], object]) -> None:
        content = made_for_each_attempt(chunk.content)
        marker = ChunkMarker(number, chunk.rows, chunk.digest)

        def write(transaction: Transaction) -> None:
            check_has_run(fn(transaction, content()), name_of(fn))
            # last: with its lock held, a later attempt would have to wait for one that was paused during `fn`
            self._markers.write(transaction, self.plan.job_id, self.partition, marker)

        try:
            self.writer.transactional(attempts=self.attempts)(write)()
        except FencedError as error:
            error.add_note(
                f"dualwrite: another attempt of partition {self.partition} has taken over (a speculative copy of the task, or "
                "the job runs twice at once). The chunks that this attempt committed stay, and the other attempt skips them."
            )
            raise


def _may_be_a_conflict(error: BaseException) -> bool:
    """Whether the error may come from another task recording the plan at the same time; a driver's own error may, too."""
    return error.retriable if isinstance(error, DualWriteError) else isinstance(error, Exception)


def arrow_chunks(
    batches: Iterable[pa.RecordBatch], rows_per_transaction: int | None, content: Callable[[pa.Table], T]
) -> Iterator[Chunk[T]]:
    """Chunks in the order of the batches; no chunk if there are no rows.

    A chunk's rows stay in memory, in Arrow's format, until the next chunk is complete. `content` converts them to what the
    job's function receives, only for chunks that must be written, once for each attempt.
    """
    for table in cut(batches, rows_per_transaction):
        yield Chunk(table.num_rows, table_digest(table), partial(content, table))


def cut(batches: Iterable[pa.RecordBatch], rows: int | None) -> Iterator[pa.Table]:
    """Tables of `rows` rows, and one with the remainder; no data is copied."""
    pieces: list[pa.RecordBatch] = []
    count = 0
    for batch in batches:
        rest = batch
        while rows is not None and count + rest.num_rows >= rows:
            missing = rows - count
            pieces.append(rest.slice(0, missing))
            yield pa.Table.from_batches(pieces)
            pieces, count, rest = [], 0, rest.slice(missing)
        if rest.num_rows:
            pieces.append(rest)
            count += rest.num_rows
    if pieces:
        yield pa.Table.from_batches(pieces)
