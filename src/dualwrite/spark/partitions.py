"""write_partitions: a DataFrame by DualWriter transactions of the tasks' own, each partition or chunk atomic by itself."""

from __future__ import annotations

import logging
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

from dualwrite.chunks.arrow import arrow_chunks
from dualwrite.chunks.markers import ChunkMarkers, JobPlan
from dualwrite.chunks.write import DEFAULT_ATTEMPTS, Chunk, PartitionReport, write_chunks
from dualwrite.errors import ConfigurationError, UsageError
from dualwrite.jobs.base import validate_prefix
from dualwrite.stores.base import TxnStateStore
from dualwrite.transaction import Transaction
from dualwrite.writer import DualWriter

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

log = logging.getLogger(__name__)

WriterFactory = Callable[[str], DualWriter]
MarkersFactory = Callable[[TxnStateStore], ChunkMarkers]

_COUNT_PROPERTY: Final = "dualwrite.partitions"
_REPORT: Final = "partition int, rows bigint, chunks bigint, rows_before bigint, chunks_before bigint"
_REPORT_SCHEMA: Final = pa.schema(
    [("partition", pa.int32()), *((name, pa.int64()) for name in ("rows", "chunks", "rows_before", "chunks_before"))]
)


@dataclass(frozen=True, slots=True)
class WriteReport:
    """What a call of write_partitions did.

    Args:
        partitions: One report for each partition, by its number.
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
        """Rows of the chunks that were committed before: by an earlier run, or by an attempt whose task failed."""
        return sum(each.rows_before for each in self.partitions)

    @property
    def chunks_before(self) -> int:
        """Chunks that a marker showed to be committed before."""
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
    markers: MarkersFactory | None = ...,
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
    markers: MarkersFactory | None = ...,
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
    markers: MarkersFactory | None = None,
) -> WriteReport:
    """Write each partition of a DataFrame by transactions of its own, to any store and Kafka, each chunk exactly once.

    A *chunk* is what one transaction writes: a whole partition, or `rows_per_transaction` rows of it. Every chunk is atomic,
    database and messages together. The frame as a whole is not: while the job runs, and after a failure, some chunks are
    there and others are not yet. The data source `dualwrite` writes all or nothing, to SQL databases. ::

        def writer(transactional_id):
            return dualwrite.connect("postgresql://db/shop", kafka="broker:9092", transactional_id=transactional_id)

        def write(tx, rows):
            tx.db.execute(insert(orders), [row.asDict() for row in rows])
            tx.send_many("orders", [row.payload for row in rows], keys=[row.id for row in rows])

        frame = frame.repartition(8, "id").sortWithinPartitions("id")
        write_partitions(frame, writer, write, job_id="orders-2026-11-21", prefix="orders", rows_per_transaction=5000)

    **Run again, it goes on.** Each chunk leaves a marker (job id, partition, chunk) in its own database transaction. A task
    that Spark tries again, and a whole job that is run again under the same `job_id`, pass over the chunks that have one. So
    it is after any failure: an exception in `fn`, a killed worker, an outcome that could not be learnt (opening the writer
    settles that one). A call under a `job_id` that is finished writes nothing.

    **What the frame must be: deterministic.** Run again, it must give the same rows in the same partitions, and with
    `rows_per_transaction` in the same order; without, the order does not matter. The markers keep a digest of their rows, so
    that a committed chunk that comes again with other rows, or not at all, ends the task with ChunkChangedError before it
    writes anything; other partitions may have written chunks by then. Frames that are deterministic: files or tables
    that no longer change, with `repartition(n, unique_key)` and, for chunks of some rows, `sortWithinPartitions(unique_key)`.
    Not so: `rand`, `uuid`, `current_timestamp`, `limit` without an order, `repartition(n)` without a column, a JDBC query
    that others write to. What is costly or impossible to make so is best written to files first.

    The number of partitions must stay, and is noted with the first chunk: another one, or other `rows_per_transaction`, is
    refused with JobPlanChangedError. Without a `repartition` by number Spark chooses it by the cluster's size and statistics.
    It is asked of Spark before the tasks start. Spark Connect has no way to ask: there it is noted and compared only if
    you give it as `partitions`.

    **Transactional ids** are `<prefix>.<partition>`, the same for all attempts of a partition. Each is a row in the store and
    an id at Kafka's coordinator, which stay: so let jobs that come again have one `prefix` and a new `job_id` each time. Two
    jobs with one prefix must not run at once.

    **Two attempts of a partition at once** (speculation, or the job run twice): the later one takes the id over as it opens
    its writer, once it has its first chunk's rows. The earlier fails with FencedError at its next transaction; it can't
    commit any more. Spark counts that as a failure of the task, but does not start it again while the later one runs, so the
    two don't chase each other. A partition so slow that Spark speculates on it again and again loses `spark.task.maxFailures`
    attempts in this way, and the job with them: leave `spark.speculation` off for this (it is Spark's default), or keep
    chunks small, so that each attempt gets on.

    **Memory and time.** A task holds up to two chunks' rows in memory, as Arrow; a transaction begins when all rows of its
    chunk are there, so that a slow frame keeps none open. The frame is evaluated once (it is one `mapInArrow` whose
    small results are collected; this works with Spark Connect as well, where `foreachPartition` does not exist).

    **Markers** are one row (node, key) of some 150 bytes for each chunk, and one for each job: in the table
    `kafka_job_chunk`, in ZooKeeper below `/kafka_job_chunk`, in RocksDB in a column family of that name. They stay until
    `forget_job(store, job_id)`. In ZooKeeper, which has it all in memory, make chunks as large as a request may be
    (jute.maxbuffer: 1 MB).

    **RocksDB** lets one process in at a time, and Spark runs tasks in processes: give it one partition
    (`df.repartition(1)`), or one task at a time (`local[1]`); otherwise tasks fail on the database's lock. The file is on
    one machine, so the task must be, too.

    **Without two-phase commit at the broker** a chunk's messages can be lost to a timeout after its database transaction has
    committed. Its marker stands then: LostTransactionError says so when the writer is opened, until it is acknowledged.

    Args:
        df: The frame; not a streaming one (in `foreachBatch`, write_batch has the marker that restarts need).
        writer_factory: Makes a writer (`dualwrite.connect`) for a transactional id; called in each task, which closes what it
            made. It is pickled: let it open what it needs, and carry no connection.
        fn: Writes one chunk. Called with a transaction and the chunk's rows; must not keep either. May be called again with
            the same rows after a failure, whose transaction left nothing behind.
        job_id: Names what is to be written once. At most 200 characters.
        prefix: What the transactional ids begin with; the job's id if not given.
        rows_per_transaction: Rows of a chunk; None makes each partition one chunk.
        partitions: How many partitions the frame has, to be checked; None asks Spark.
        arrow: Whether `fn` gets a `pyarrow.Table` instead of a list of Rows: it costs no conversion, and `send_many` and COPY
            take columns.
        attempts: How often a chunk's transaction is tried at most within the task, after errors that leave nothing behind
            (serialization failures and the like).
        markers: Makes the ChunkMarkers of a store that has no method `chunk_markers()` for it.

    Raises:
        ConfigurationError: An argument can't be used; nothing was written.
        UsageError: The frame is a streaming one.
        pyspark.errors.PythonException: A task failed as often as Spark lets it; its text has the error with its cause and next
            step: ChunkChangedError, JobPlanChangedError, what `fn` raised, or as `DualWriter.open` and `transaction`.
    """
    if df.isStreaming:
        raise UsageError(
            "write_partitions can't write a streaming frame.",
            next_step="df.writeStream.format('dualwrite'), or foreachBatch with dualwrite.spark.write_batch",
        )
    plan = JobPlan(job_id, partitions, rows_per_transaction)
    if attempts < 1:
        raise ConfigurationError(f"attempts is {attempts}; 1 is the least.")
    task = _Task(
        plan,
        validate_prefix(job_id if prefix is None else prefix),
        writer_factory,
        fn,
        None if arrow else df.schema,
        attempts,
        markers,
    )
    with _counted(df.mapInArrow(task, _REPORT), partitions) as results:
        rows = results.collect()
    report = WriteReport(tuple(sorted((PartitionReport(**row.asDict()) for row in rows), key=lambda each: each.partition)))
    if partitions is not None and len(report.partitions) != partitions:
        raise ConfigurationError(
            f"The frame of the job {job_id!r} has {len(report.partitions)} partitions, not {partitions}; it is written.",
            next_step="give the frame's own number: a run with another one is refused from now on",
        )
    log.info(
        "job %r: %d rows written in %d transactions over %d partitions; %d rows in %d had been before",
        *(job_id, report.rows, report.chunks, len(rows), report.rows_before, report.chunks_before),
    )
    return report


@dataclass(frozen=True)
class _Task:
    """What runs in Spark's workers, once for each partition."""

    plan: JobPlan
    prefix: str
    writer_factory: WriterFactory
    fn: Callable[[Transaction, Any], object]
    row_schema: StructType | None
    attempts: int
    markers: MarkersFactory | None

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        context = TaskContext.get()
        assert context is not None  # Spark calls this in a task
        plan, partition = self._plan(context), context.partitionId()
        chunks = arrow_chunks(batches, plan.rows_per_transaction, self._content)
        first = list(islice(chunks, 1))  # however long the frame takes for it: no other attempt is fenced meanwhile
        # also without rows: whether chunks of this partition were committed before, only the store can tell
        with self._writer(f"{self.prefix}.{partition}") as writer:
            report = write_chunks(
                writer,
                chain(_emptied(first), chunks),
                self.fn,
                plan=plan,
                partition=partition,
                markers=None if self.markers is None else self.markers(writer.store),
                attempts=self.attempts,
            )
        yield pa.RecordBatch.from_pylist([asdict(report)], schema=_REPORT_SCHEMA)

    def _plan(self, context: TaskContext) -> JobPlan:
        counted = context.getLocalProperty(_COUNT_PROPERTY)
        count = self.plan.partitions if counted is None else int(counted)
        return JobPlan(self.plan.job_id, count, self.plan.rows_per_transaction)

    def _writer(self, transactional_id: str) -> DualWriter:
        writer = self.writer_factory(transactional_id)
        if not isinstance(writer, DualWriter):
            raise ConfigurationError(
                f"The writer factory gave a {type(writer).__name__}, not a DualWriter.",
                transactional_id=transactional_id,
                next_step="let it return dualwrite.connect(…, transactional_id=transactional_id)",
            )
        if writer.transactional_id != transactional_id:
            writer.close()
            raise ConfigurationError(
                f"The writer factory made a writer for {writer.transactional_id!r}: partitions would fence each other.",
                transactional_id=transactional_id,
                next_step="let it use the transactional id that it is called with",
            )
        return writer

    def _content(self, table: pa.Table) -> Any:
        return table if self.row_schema is None else ArrowTableToRowsConversion.convert(table, self.row_schema)


def _emptied(chunks: list[Chunk[Any]]) -> Iterator[Chunk[Any]]:
    """The chunks, held by nobody once they were given: the first is as large as the others."""
    while chunks:
        yield chunks.pop(0)


@contextmanager
def _counted(results: DataFrame, partitions: int | None) -> Iterator[DataFrame]:
    """Let the tasks know the number of partitions, where Spark tells it.

    With adaptive execution it is known when the last shuffle is done. Asked of the very plan that is collected afterwards, it
    costs no second shuffle.
    """
    plan = getattr(results, "_jdf", None)
    if plan is None:  # Spark Connect
        yield results
        return
    count = plan.queryExecution().toRdd().getNumPartitions()
    if count == 0:
        yield results
        return
    if partitions not in (None, count):
        raise ConfigurationError(
            f"The frame has {count} partitions, not {partitions}; nothing was written.",
            next_step=f"leave `partitions` out, or repartition: df.repartition({partitions}, …)",
        )
    context = results.sparkSession.sparkContext
    before = context.getLocalProperty(_COUNT_PROPERTY)
    context.setLocalProperty(_COUNT_PROPERTY, str(count))
    try:
        yield results
    finally:
        context.setLocalProperty(_COUNT_PROPERTY, before)  # type: ignore[arg-type]  # None removes it
