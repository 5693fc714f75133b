"""write_partitions: writes a DataFrame with each task's own DualWriter; each partition or chunk is atomic by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, Final, Literal, overload

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import Row
from pyspark.sql.conversion import ArrowTableToRowsConversion
from pyspark.sql.types import StructType

from dualwrite.errors import ConfigurationError, UsageError
from dualwrite.jobs.rules import validate_prefix
from dualwrite.observability.logs import SubjectLogger
from dualwrite.spark.chunks import DEFAULT_ATTEMPTS, Chunk, JobPlan, PartitionAttempt, PartitionReport, arrow_chunks
from dualwrite.transaction import Transaction
from dualwrite.writer import DualWriter

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

log = SubjectLogger(__name__)

WriterFactory = Callable[[str], DualWriter]

_COUNT_PROPERTY: Final = "dualwrite.partitions"
_REPORT: Final = "partition int, rows bigint, chunks bigint, rows_before bigint, chunks_before bigint"
_REPORT_SCHEMA: Final = pa.schema(
    [("partition", pa.int32()), *((name, pa.int64()) for name in ("rows", "chunks", "rows_before", "chunks_before"))]
)


@dataclass(frozen=True, slots=True)
class WriteReport:
    """What a call of write_partitions did.

    Args:
        partitions: One report per partition, in order of the partitions' numbers.
    """

    partitions: tuple[PartitionReport, ...]

    @property
    def rows(self) -> int:
        """Rows that this run wrote."""
        return sum(each.rows for each in self.partitions)

    @property
    def chunks(self) -> int:
        """Chunks that this run wrote, each in a transaction."""
        return sum(each.chunks for each in self.partitions)

    @property
    def rows_before(self) -> int:
        """Rows in the chunks that were committed before: by an earlier run, or by an attempt whose task failed."""
        return sum(each.rows_before for each in self.partitions)

    @property
    def chunks_before(self) -> int:
        """Chunks that were committed before, as their markers show."""
        return sum(each.chunks_before for each in self.partitions)


@overload
def write_partitions(
    df: DataFrame,
    writer_factory: WriterFactory,
    fn: Callable[[Transaction, list[Row]], object],
    *,
    job_id: str,
    prefix: str | None = ...,
    rows_per_transaction: int | None = ...,
    partitions: int | None = ...,
    arrow: Literal[False] = ...,
    attempts: int = ...,
) -> WriteReport: ...


@overload
def write_partitions(
    df: DataFrame,
    writer_factory: WriterFactory,
    fn: Callable[[Transaction, pa.Table], object],
    *,
    job_id: str,
    prefix: str | None = ...,
    rows_per_transaction: int | None = ...,
    partitions: int | None = ...,
    arrow: Literal[True],
    attempts: int = ...,
) -> WriteReport: ...


def write_partitions(
    df: DataFrame,
    writer_factory: WriterFactory,
    fn: Callable[[Transaction, Any], object],
    *,
    job_id: str,
    prefix: str | None = None,
    rows_per_transaction: int | None = None,
    partitions: int | None = None,
    arrow: bool = False,
    attempts: int = DEFAULT_ATTEMPTS,
) -> WriteReport:
    """Write each partition of a DataFrame in its own transactions, to a SQL database and Kafka, each chunk exactly once.

    A *chunk* is what one transaction writes: a whole partition, or `rows_per_transaction` rows of it. Every chunk is atomic,
    the frame as a whole is not. Run it again with the same `job_id` to continue: committed chunks are skipped. The frame must
    be deterministic: each run must have the same rows in the same partitions, and with `rows_per_transaction` in the same
    order. The guide about Spark has an example, and describes what happens if two attempts run at once.

    Args:
        df: The frame; it must not be streaming (in `foreachBatch`, use write_batch, which has the marker that restarts need).
        writer_factory: Returns a writer (`dualwrite.connect`) for a transactional id; called in each task, which closes the
            writer. It is pickled: it should open what it needs and must not contain a connection.
        fn: Writes one chunk. Called with a transaction and the chunk's rows; must not keep either. May be called again with
            the same rows after a failure; the failed transaction left nothing behind.
        job_id: Identifies what is to be written once. At most 200 characters.
        prefix: The prefix of the transactional ids; by default the job's id.
        rows_per_transaction: Rows per chunk; None makes each partition one chunk.
        partitions: The expected number of partitions, which is checked; None queries the number from Spark.
        arrow: Whether `fn` receives a `pyarrow.Table` instead of a list of Rows: this avoids a conversion, and `send_many` and
            COPY accept columns.
        attempts: Maximum number of attempts for a chunk's transaction within the task, after errors that leave nothing behind
            (such as serialization failures).

    Raises:
        ConfigurationError: An argument is not valid. Nothing was written, unless the message says otherwise.
        UsageError: The frame is a streaming frame.
        pyspark.errors.PythonException: A task failed as often as Spark allows; the text has the error with its cause and next
            step: ChunkChangedError, JobPlanChangedError, what `fn` raised, or as `DualWriter.open` and `transaction`.
    """
    if df.isStreaming:
        raise UsageError(
            "write_partitions can't write a streaming frame.",
            next_step="use df.writeStream.format('dualwrite'), or foreachBatch with dualwrite.spark.write_batch",
        )
    plan = JobPlan(job_id, partitions, rows_per_transaction)
    if attempts < 1:
        raise ConfigurationError(f"attempts must be at least 1, not {attempts}.")
    prefix = validate_prefix(job_id if prefix is None else prefix)
    task = _Task(plan, prefix, writer_factory, fn, None if arrow else df.schema, attempts)
    with _counted(df.mapInArrow(task, _REPORT), partitions) as results:
        rows = results.collect()
    report = WriteReport(tuple(sorted((PartitionReport(**row.asDict()) for row in rows), key=lambda each: each.partition)))
    if partitions is not None and len(report.partitions) != partitions:
        raise ConfigurationError(
            f"The frame of the job {job_id!r} has {len(report.partitions)} partitions, not {partitions}; it has been written.",
            next_step="pass the frame's actual number for the next job; another run of this job with a number other than "
            f"{partitions} is refused",
        )
    log.info(
        "wrote %d rows in %d transactions over %d partitions; skipped %d rows in %d chunks that were committed before",
        *(report.rows, report.chunks, len(rows), report.rows_before, report.chunks_before),
        job=job_id,
    )
    return report


@dataclass(frozen=True)
class _Task:
    """The function that runs in Spark's workers, once per partition."""

    plan: JobPlan
    prefix: str
    writer_factory: WriterFactory
    fn: Callable[[Transaction, Any], object]
    row_schema: StructType | None
    attempts: int

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        context = TaskContext.get()
        assert context is not None  # Spark calls this in a task
        plan, partition = self._plan(context), context.partitionId()
        chunks = arrow_chunks(batches, plan.rows_per_transaction, self._content)
        first = list(islice(chunks, 1))  # before the writer is opened: a slow frame must not fence another attempt early
        # even if there are no rows: only the store knows whether chunks of this partition were committed before
        with self._writer(f"{self.prefix}.{partition}") as writer:
            chunks = chain(_drain(first), chunks)
            report = PartitionAttempt(writer, plan, partition, self.attempts).write(chunks, self.fn)
        yield pa.RecordBatch.from_pylist([asdict(report)], schema=_REPORT_SCHEMA)

    def _plan(self, context: TaskContext) -> JobPlan:
        counted = context.getLocalProperty(_COUNT_PROPERTY)
        count = self.plan.partitions if counted is None else int(counted)
        return JobPlan(self.plan.job_id, count, self.plan.rows_per_transaction)

    def _writer(self, transactional_id: str) -> DualWriter:
        writer = self.writer_factory(transactional_id)
        if not isinstance(writer, DualWriter):
            raise ConfigurationError(
                f"The writer factory returned a {type(writer).__name__}, not a DualWriter.",
                transactional_id=transactional_id,
                next_step="return dualwrite.connect(…, transactional_id=transactional_id)",
            )
        if writer.transactional_id != transactional_id:
            writer.close()
            raise ConfigurationError(
                f"The writer factory returned a writer for {writer.transactional_id!r}: partitions would fence each other.",
                transactional_id=transactional_id,
                next_step="use the transactional id that is passed to the factory",
            )
        return writer

    def _content(self, table: pa.Table) -> Any:
        return table if self.row_schema is None else ArrowTableToRowsConversion.convert(table, self.row_schema)


def _drain(chunks: list[Chunk[Any]]) -> Iterator[Chunk[Any]]:
    """Yield the chunks and drop each reference, so that the first chunk does not stay in memory."""
    while chunks:
        yield chunks.pop(0)


@contextmanager
def _counted(results: DataFrame, partitions: int | None) -> Iterator[DataFrame]:
    """Pass the number of partitions to the tasks, if Spark provides it.

    With adaptive execution the number is known after the last shuffle. It is taken from the same plan that is collected
    afterwards, so there is no second shuffle.
    """
    plan = getattr(results, "_jdf", None)  # None: Spark Connect
    count = 0 if plan is None else plan.queryExecution().toRdd().getNumPartitions()
    if count == 0:
        yield results
        return
    if partitions not in (None, count):
        raise ConfigurationError(
            f"The frame has {count} partitions, not {partitions}; nothing was written.",
            next_step=f"omit `partitions`, or call df.repartition({partitions}, …)",
        )
    context = results.sparkSession.sparkContext
    before = context.getLocalProperty(_COUNT_PROPERTY)
    context.setLocalProperty(_COUNT_PROPERTY, str(count))
    try:
        yield results
    finally:
        context.setLocalProperty(_COUNT_PROPERTY, before)  # type: ignore[arg-type]  # None removes it
