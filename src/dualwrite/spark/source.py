"""Spark's data source `dualwrite`: batch and streaming writes to a table and a topic, all or nothing.

Where Spark runs what (measured, PySpark 4.0 to 4.3): `writer` and `streamWriter` run in a Python worker of the driver, once per
write or micro-batch, and their result is pickled into every task. A batch write's commit and abort are called on the same
object, a stream's on another object, which knows only the options. So the run's token is created with the writer, and a
stream's commit gets it from the tasks' messages.
"""

from __future__ import annotations

import inspect
import logging
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final
from uuid import uuid4

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSource, DataSourceArrowWriter, DataSourceStreamWriter, WriterCommitMessage
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from dualwrite.errors import ConfigurationError
from dualwrite.jobs.driver import JobCommitter
from dualwrite.jobs.job_context import OpenSite
from dualwrite.jobs.rules import JobRun, TaskOutcome
from dualwrite.jobs.task import TaskAttempt
from dualwrite.observability import tracing
from dualwrite.spark.frame import FrameSink
from dualwrite.spark.source_options import SinkOptions, query_name
from dualwrite.stores.sql import SqlStateStore

if TYPE_CHECKING:
    from pyarrow import RecordBatch

try:
    from pyspark.sql.datasource import DataSourceStreamArrowWriter
except ImportError:  # Spark 4.0 passes Arrow batches to a class that derives from both

    class DataSourceStreamArrowWriter(DataSourceArrowWriter, DataSourceStreamWriter):  # type: ignore[misc, no-redef]  # commit and abort are its own
        """Spark has this class since 4.1."""


log = logging.getLogger(__name__)

NAME: Final = "dualwrite"
_BATCH_ID: Final = "streaming.sql.batchId"
_QUERY_ID: Final = "sql.streaming.queryId"
_UNKNOWN_BATCH: Final = -1
_SINK_LIFETIME: Final = 60.0
"""Seconds for which a sink is cached."""
_observing: Final[set[str]] = set()
"""The functions of the option `observe` that have been called in this process."""
_sinks: Final[dict[tuple[object, ...], tuple[float, FrameSink]]] = {}


@dataclass(frozen=True)
class TaskMessage(WriterCommitMessage):
    """What a task reports to the driver."""

    outcome: TaskOutcome


class DualWriteDataSource(DataSource):
    """`df.write.format("dualwrite")` and `df.writeStream.format("dualwrite")`; see `dualwrite.spark` for the options."""

    @classmethod
    def name(cls) -> str:
        """The name for `format`."""
        return NAME

    def writer(self, schema: StructType, overwrite: bool) -> BatchWriter:
        """The writer of a batch write.

        Raises:
            ConfigurationError: The options are not valid, or the frame does not fit the table.
        """
        options = _checked(self.options, overwrite=overwrite)
        run = JobRun(
            options.prefix,
            options.job_id or f"batch-{uuid4()}",
            options.batch_id or 0,
            keeps_lease=options.batch_id is not None,
            bound_to=options.bound_to,
        )
        observe(options.observe)
        with tracing.job_step("write", options.carrier, job=run.name) as carrier:
            sink = _sink(options, schema)
            with options.site.opened() as site:
                site.producers(options.prefix)  # reports what Kafka does not support now, rather than in each task
        return BatchWriter(options, sink, replace(run, carrier=carrier))

    def streamWriter(self, schema: StructType, overwrite: bool) -> StreamWriter:  # noqa: N802  (Spark's name)
        """The writer of a micro-batch.

        Raises:
            ConfigurationError: The options are not valid, or the frame does not fit the table.
        """
        options = _checked(self.options, overwrite=overwrite)
        if (options.job_id, options.batch_id, options.query_id) != (None, None, None):
            raise ConfigurationError(
                "jobId, batchId and queryId can't be set for streams: the query and its micro-batch define them.",
                next_step="omit them, or write with foreachBatch: dualwrite.spark.write_batch(df, batch_id, job_id=…)",
            )
        return StreamWriter(options, _sink(options, schema), JobRun(options.prefix, "", _UNKNOWN_BATCH, keeps_lease=True))


class _JobWriter:
    """The common part of the batch and stream writers. For a stream, the tasks add the query and the batch to the run."""

    def __init__(self, options: SinkOptions, sink: FrameSink, run: JobRun) -> None:
        self._options = options
        self._sink = sink
        self._run = run

    def _written(self, run: JobRun, batches: Iterator[RecordBatch]) -> TaskMessage:
        context = TaskContext.get()
        assert context is not None
        partition, limit = context.partitionId(), self._options.num_partitions
        if limit is not None and partition >= limit:
            raise ConfigurationError(
                f"The frame has more partitions than numPartitions allows ({limit}).",
                cause="each partition uses its own transactional ids",
                next_step=f"call df.coalesce({limit}) before writing, or set a higher numPartitions",
            )
        filled = (batch for batch in batches if len(batch))
        attempt = context.attemptNumber()
        with self._step("task", run.carrier, job=run.name, partition=partition, attempt=attempt) as site:
            return TaskMessage(TaskAttempt(site, run, self._sink, partition=partition, attempt=attempt).write(filled))

    def _committed(self, messages: Sequence[WriterCommitMessage | None], otherwise: str) -> None:
        """Commit; `otherwise` names the run in traces if it had no tasks."""
        outcomes = _outcomes(messages)
        name = next((outcome.run.name for outcome in outcomes if outcome is not None), otherwise)
        with self._step("commit", self._run.carrier, job=name) as site:
            JobCommitter(site, self._sink).commit(outcomes)

    def _aborted(self, run: JobRun) -> None:
        with self._step("abort", run.carrier, job=run.name) as site:
            JobCommitter(site, self._sink).abort(run)

    @contextmanager
    def _step(self, step: tracing.JobStep, carrier: tracing.Carrier = (), **names: Any) -> Iterator[OpenSite]:
        """Open the site for a step of the job, with the user's observers and a trace."""
        _show_log()
        observe(self._options.observe)
        with tracing.job_step(step, carrier, **names), self._options.site.opened() as site:
            yield site


class BatchWriter(_JobWriter, DataSourceArrowWriter):
    """Implements Spark's protocol for batch writes; see `JobCommitter` and `TaskAttempt` for what each step does."""

    def write(self, iterator: Iterator[RecordBatch]) -> WriterCommitMessage:
        """Run one task attempt."""
        return self._written(self._run, iterator)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Commit, after all tasks have finished."""
        self._committed(messages, self._run.name)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Abort, after a task has finally failed or commit has raised. Raises no DualWriteError, which would hide the cause."""
        del messages  # the run is known even if no task has reported
        self._aborted(self._run)


class StreamWriter(_JobWriter, DataSourceStreamArrowWriter):
    """Implements Spark's protocol for micro-batches; see `JobCommitter` and `TaskAttempt` for what each step does."""

    def write(self, iterator: Iterator[RecordBatch]) -> WriterCommitMessage:
        """Run one task attempt."""
        context = TaskContext.get()
        assert context is not None
        query, batch = context.getLocalProperty(_QUERY_ID), context.getLocalProperty(_BATCH_ID)
        if query is None or batch is None:
            raise ConfigurationError(
                "Spark does not provide the query and the micro-batch of a task.",
                cause="dualwrite does not support this version of Spark",
                next_step="write with foreachBatch: dualwrite.spark.write_batch(df, batch_id, …)",
            )
        run = replace(self._run, job_id=query, batch_id=int(batch), bound_to=query_name(query))
        return self._written(run, iterator)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803  (Spark's name)
        """Commit, after all tasks of the micro-batch have finished."""
        self._committed(messages, self._unknown(batchId))  # the tasks' messages identify the run

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803  (Spark's name)
        """Abort, after a task has finally failed or commit has raised. Raises no DualWriteError, which would hide the cause."""
        reported = [outcome for outcome in _outcomes(messages) if outcome is not None]
        if reported:
            self._aborted(reported[0].run)
            return
        with self._step("abort", job=self._unknown(batchId)) as site:
            JobCommitter(site, self._sink).abort_unknown(self._options.prefix, batchId)

    def _unknown(self, batch_id: int) -> str:
        """The name of a run whose query is not known, since no task has reported it."""
        return f"batch {batch_id} of {self._options.prefix}"


def _checked(options: Mapping[str, str], *, overwrite: bool) -> SinkOptions:
    if overwrite:
        raise ConfigurationError(
            "format 'dualwrite' does not support mode overwrite: messages can't be taken back.",
            next_step='use .mode("append"), with upsertKeys if rows should replace earlier ones',
        )
    return SinkOptions.of(options)


def _sink(options: SinkOptions, schema: StructType) -> FrameSink:
    """The sink, after comparing the frame with the table. Cached, since a stream needs it twice per micro-batch."""
    key = (options.site.url, options.frame, schema.json())
    found = _sinks.get(key)
    if found is None or found[0] < time.monotonic():
        _sinks.clear()
        with SqlStateStore.from_url(options.site.url, schema=options.site.schema) as store:
            store.check()
            store.check_rights("writer", "jobs")
            sink = FrameSink.found(store.engine, options.frame, arrow_schema(schema))
        found = _sinks[key] = (time.monotonic() + _SINK_LIFETIME, sink)
    return found[1]


def observe(name: str | None) -> None:
    """Call the user's function that installs observers and tracers, once in this process; if it fails, the work goes on.

    Args:
        name: `module:function`, the option `observe`; None if it is not set.
    """
    if name is None or name in _observing:
        return
    _observing.add(name)
    module, _, function = name.partition(":")
    try:
        getattr(import_module(module), function)()
    except Exception:
        log.exception("observe=%s has failed in this process; this is logged once, and the work goes on", name)


def arrow_schema(schema: StructType) -> pa.Schema:
    """A frame's schema as Arrow's."""
    if "timezone" in inspect.signature(to_arrow_schema).parameters:  # since Spark 4.2; earlier versions use UTC
        return to_arrow_schema(schema, timezone="UTC")
    return to_arrow_schema(schema)


def _outcomes(messages: Sequence[WriterCommitMessage | None]) -> list[TaskOutcome | None]:
    return [message.outcome if isinstance(message, TaskMessage) else None for message in messages]


def _show_log() -> None:
    """Write our INFO log to Spark's standard error, unless logging is configured: Spark's workers show only warnings."""
    ours = logging.getLogger("dualwrite")
    if ours.level == logging.NOTSET and not ours.handlers and not logging.getLogger().handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s dualwrite: %(message)s"))
        ours.addHandler(handler)
        ours.setLevel(logging.INFO)
