"""The data source `dualwrite` of Spark: batch and streaming writes into a table and a topic, all or nothing.

Where Spark runs what (measured, PySpark 4.0 to 4.3): `writer` and `streamWriter` in a Python worker of the driver, once for
each write or micro-batch, and what they return is pickled into every task; a batch write's commit and abort get the same
object, a stream's get another one, of which nothing is known but its options. So the run's token is made with the writer, and
comes to a stream's commit in the tasks' messages.
"""

from __future__ import annotations

import inspect
import logging
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final
from uuid import uuid4

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSource, DataSourceArrowWriter, DataSourceStreamWriter, WriterCommitMessage
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from dualwrite.errors import ConfigurationError
from dualwrite.jobs.base import JobRun, TaskOutcome
from dualwrite.jobs.driver import JobCommitter
from dualwrite.jobs.frame.sink import FrameSink
from dualwrite.jobs.task import TaskAttempt
from dualwrite.spark.options import SinkOptions
from dualwrite.stores.sql import SqlStateStore

if TYPE_CHECKING:
    from pyarrow import RecordBatch

try:
    from pyspark.sql.datasource import DataSourceStreamArrowWriter
except ImportError:  # Spark 4.0 hands Arrow to whoever is both

    class DataSourceStreamArrowWriter(DataSourceArrowWriter, DataSourceStreamWriter):  # type: ignore[misc, no-redef]  # commit and abort are its own
        """What Spark has from 4.1 on."""


log = logging.getLogger(__name__)

NAME: Final = "dualwrite"
_BATCH_ID: Final = "streaming.sql.batchId"
_QUERY_ID: Final = "sql.streaming.queryId"
_UNKNOWN_BATCH: Final = -1
_KEPT: Final = 60.0
"""Seconds."""
_sinks: Final[dict[tuple[object, ...], tuple[float, FrameSink]]] = {}


@dataclass(frozen=True)
class TaskMessage(WriterCommitMessage):
    """What a task tells the driver.

    Args:
        outcome: What it prepared.
    """

    outcome: TaskOutcome


class DualWriteDataSource(DataSource):
    """`df.write.format("dualwrite")` and `df.writeStream.format("dualwrite")`; see `dualwrite.spark` for the options."""

    @classmethod
    def name(cls) -> str:
        """The name for `format`."""
        return NAME

    def writer(self, schema: StructType, overwrite: bool) -> BatchWriter:
        """For a batch write.

        Raises:
            ConfigurationError: Options, frame and table don't fit together.
        """
        options = _checked(self.options, overwrite=overwrite)
        run = JobRun(
            options.prefix,
            options.job_id or f"batch-{uuid4()}",
            options.batch_id or 0,
            keeps_lease=options.batch_id is not None,
        )
        sink = _sink(options, schema)
        with options.site.opened() as site:
            site.producers(options.prefix)  # what Kafka does not offer is told now, and not by each task
        return BatchWriter(options, sink, run)

    def streamWriter(self, schema: StructType, overwrite: bool) -> StreamWriter:  # noqa: N802  (Spark's name)
        """For a micro-batch.

        Raises:
            ConfigurationError: Options, frame and table don't fit together.
        """
        options = _checked(self.options, overwrite=overwrite)
        if options.job_id is not None or options.batch_id is not None:
            raise ConfigurationError("jobId and batchId are not for streams: they are the query's id and its micro-batch's.")
        return StreamWriter(options, _sink(options, schema), JobRun(options.prefix, "", _UNKNOWN_BATCH, keeps_lease=True))


class _Writer:
    """What batch and stream have in common.

    Args:
        options: The options.
        sink: What is written where.
        run: The run; a stream's tasks find out of which query and batch.
    """

    def __init__(self, options: SinkOptions, sink: FrameSink, run: JobRun) -> None:
        self._options = options
        self._sink = sink
        self._run = run

    def _written(self, run: JobRun, batches: Iterator[RecordBatch]) -> TaskMessage:
        _show_log()
        context = TaskContext.get()
        assert context is not None
        partition, limit = context.partitionId(), self._options.num_partitions
        if limit is not None and partition >= limit:
            raise ConfigurationError(
                f"The frame has more partitions than numPartitions, {limit}, allows.",
                cause="each partition has transactional ids of its own",
                next_step=f"df.coalesce({limit}) before it is written, or a higher numPartitions",
            )
        filled = (batch for batch in batches if len(batch))
        with self._options.site.opened() as site:
            task = TaskAttempt(site, run, self._sink, partition=partition, attempt=context.attemptNumber())
            return TaskMessage(task.write(filled))

    def _committed(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        _show_log()
        with self._options.site.opened() as site:
            JobCommitter(site, self._sink).commit(_outcomes(messages))

    def _aborted(self, messages: Sequence[WriterCommitMessage | None], batch_id: int) -> None:
        _show_log()
        with self._options.site.opened() as site:
            JobCommitter(site, self._sink).abort(_outcomes(messages), prefix=self._options.prefix, batch_id=batch_id)


class BatchWriter(_Writer, DataSourceArrowWriter):
    """Spark's protocol of a batch write; see `JobCommitter` and `TaskAttempt` for what each step does."""

    def write(self, iterator: Iterator[RecordBatch]) -> WriterCommitMessage:
        """One task attempt."""
        return self._written(self._run, iterator)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """All tasks are done."""
        self._committed(messages)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """A task has failed for good, or commit has raised. Raises nothing of ours: Spark would show that only."""
        self._aborted(messages, self._run.batch_id)


class StreamWriter(_Writer, DataSourceStreamArrowWriter):
    """Spark's protocol of a micro-batch; see `JobCommitter` and `TaskAttempt` for what each step does."""

    def write(self, iterator: Iterator[RecordBatch]) -> WriterCommitMessage:
        """One task attempt."""
        context = TaskContext.get()
        assert context is not None
        query, batch = context.getLocalProperty(_QUERY_ID), context.getLocalProperty(_BATCH_ID)
        if query is None or batch is None:
            raise ConfigurationError(
                "Spark does not say which query and micro-batch a task belongs to.",
                cause="a version of Spark that dualwrite does not know",
                next_step="write by foreachBatch: dualwrite.spark.write_batch(df, batch_id, …)",
            )
        return self._written(replace(self._run, job_id=query, batch_id=int(batch)), iterator)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803  (Spark's name)
        """All tasks of the micro-batch are done."""
        del batchId  # the tasks' messages name the run
        self._committed(messages)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803  (Spark's name)
        """A task has failed for good, or commit has raised. Raises nothing of ours: Spark would show that only."""
        self._aborted(messages, batchId)


def _checked(options: Mapping[str, str], *, overwrite: bool) -> SinkOptions:
    if overwrite:
        raise ConfigurationError(
            "format 'dualwrite' can't overwrite: messages can't be taken back.",
            next_step='.mode("append"), with upsertKeys where rows shall replace earlier ones',
        )
    return SinkOptions.of(options)


def _sink(options: SinkOptions, schema: StructType) -> FrameSink:
    """What is written where, compared with the table. A stream asks twice for each micro-batch: it is kept for a while."""
    key = (options.site.url, options.frame, schema.json())
    found = _sinks.get(key)
    if found is None or found[0] < time.monotonic():
        _sinks.clear()
        found = _sinks[key] = (time.monotonic() + _KEPT, _looked_up(options, schema))
    return found[1]


def _looked_up(options: SinkOptions, schema: StructType) -> FrameSink:
    with SqlStateStore.from_url(options.site.url) as store:
        store.check()
        return FrameSink.found(store.engine, options.frame, arrow_schema(schema))


def arrow_schema(schema: StructType) -> pa.Schema:
    """The columns of a frame as Arrow sees them."""
    if "timezone" in inspect.signature(to_arrow_schema).parameters:  # from Spark 4.2 on; UTC before
        return to_arrow_schema(schema, timezone="UTC")
    return to_arrow_schema(schema)


def _outcomes(messages: Sequence[WriterCommitMessage | None]) -> list[TaskOutcome | None]:
    return [message.outcome if isinstance(message, TaskMessage) else None for message in messages]


def _show_log() -> None:
    """Show what we log of a batch on Spark's own standard error: its Python workers show warnings only."""
    ours = logging.getLogger("dualwrite")
    if ours.level == logging.NOTSET and not ours.handlers and not logging.getLogger().handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s dualwrite: %(message)s"))
        ours.addHandler(handler)
        ours.setLevel(logging.INFO)
