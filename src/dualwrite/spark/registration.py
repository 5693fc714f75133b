"""The two functions that a job calls: make the data source known, and write one batch of a stream by `foreachBatch`."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from dualwrite.errors import ConfigurationError
from dualwrite.spark.source import NAME, DualWriteDataSource
from dualwrite.spark.worker_python import warn_of_other_python

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

log = logging.getLogger(__name__)

_QUERY_ID: Final = "sql.streaming.queryId"
_RUN_ID: Final = "spark.jobGroup.id"
_newest: Final[dict[str, tuple[str | None, int]]] = {}
"""The run and the batch that each job of this process has written last."""
_OLDEST: Final = (4, 0)


def register(spark: SparkSession) -> None:
    """Make `format("dualwrite")` known to a session; to be called once in each.

    Warns (SparkSetupWarning) where the session's workers would run in a Python without dualwrite.

    Args:
        spark: The session.

    Raises:
        ConfigurationError: The session's Spark is older than 4.0.
    """
    version = tuple(int(part) for part in spark.version.split(".")[:2])
    if version < _OLDEST:
        raise ConfigurationError(
            f"dualwrite's data source needs Spark 4.0 or newer; this is {spark.version}.",
            next_step="pip install 'pyspark>=4.0'",
        )
    warn_of_other_python(spark)
    spark.dataSource.register(DualWriteDataSource)


def write_batch(frame: DataFrame, batch_id: int, *, job_id: str | None = None, **options: str) -> None:
    """Write one micro-batch exactly once, from `foreachBatch`.

    ::

        def each(frame, batch_id):
            dualwrite.spark.write_batch(frame, batch_id, **options)

        stream.writeStream.foreachBatch(each).option("checkpointLocation", …).start()

    A batch that was committed before, by an earlier run of the query, is not written again. Two calls for one micro-batch, into
    two tables, are two jobs, each atomic by itself, with a `transactionalIdPrefix` of its own.

    Args:
        frame: The micro-batch.
        batch_id: Its number.
        job_id: A name that stays over restarts of the query; by default the query's own id, which its checkpoint keeps, with
            the name of the table.
        options: The options of the data source: `**{"kafka.bootstrap.servers": …, "topic": …}`.

    Raises:
        ConfigurationError: There is no `job_id`, and no query that it could be taken of; or the same run has written this batch
            of the job already.
    """
    spark = frame.sparkSession
    run_id = None
    if job_id is None:
        query_id = spark.sparkContext.getLocalProperty(_QUERY_ID)
        run_id = spark.sparkContext.getLocalProperty(_RUN_ID)
        job_id = query_id and f"{query_id} {options.get('dbtable', '')}"
    if not job_id:
        raise ConfigurationError(
            "write_batch does not know which query the batch belongs to.",
            cause="it was not called by foreachBatch, or by way of Spark Connect",
            next_step="job_id=…: a name that stays the same over restarts",
        )
    _refuse_a_second_call(job_id, run_id, batch_id)
    register(spark)
    limit = options.get("numPartitions")
    if limit is not None:
        frame = frame.coalesce(int(limit))
    frame.write.format(NAME).mode("append").options(**options, jobId=job_id, batchId=str(batch_id)).save()
    _newest[job_id] = (run_id, batch_id)


def _refuse_a_second_call(job_id: str, run_id: str | None, batch_id: int) -> None:
    """A batch that its own run writes twice would be taken for one that was committed before, and silently left out."""
    if run_id is not None and _newest.get(job_id) == (run_id, batch_id):
        raise ConfigurationError(
            f"write_batch was called twice for batch {batch_id} of job {job_id!r}.",
            cause="one micro-batch of a job is one frame; the second would not be written",
            next_step="union the frames; or give one of the calls a job_id and a transactionalIdPrefix of its own",
        )
