"""The two functions that a job calls: `register` the data source, and `write_batch` for one batch of a stream."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from pyspark.errors import PySparkException

from dualwrite.errors import ConfigurationError
from dualwrite.spark.source import NAME, DualWriteDataSource
from dualwrite.spark.worker_python import warn_of_other_python

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

log = logging.getLogger(__name__)

_QUERY_ID: Final = "sql.streaming.queryId"
_RUN_ID: Final = "spark.jobGroup.id"
_newest: Final[dict[str, tuple[str | None, int]]] = {}
"""The run and the batch that each job has written last in this process."""
_OLDEST: Final = (4, 0)


def register(spark: SparkSession) -> None:
    """Register `format("dualwrite")` with a session; call it once per session.

    Warns (SparkSetupWarning) if the session's workers would run in a Python without dualwrite.

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

    For example::

        def each(frame, batch_id):
            dualwrite.spark.write_batch(frame, batch_id, **options)

        stream.writeStream.foreachBatch(each).option("checkpointLocation", …).start()

    If an earlier run of the query has committed the batch, it is not written again. Only the newest batch can be repeated: an
    earlier number comes from a checkpoint that was reset, and is refused. Two calls for one micro-batch, for two tables,
    are two jobs: each is atomic by itself, and each needs its own `transactionalIdPrefix`.

    A job belongs to one query, which its checkpoint identifies. With a new checkpoint, the query is another one: it numbers its
    batches from 0 again, and its rows must not be taken for the old one's. So it is refused, with a `job_id`, too.

    Args:
        frame: The micro-batch.
        batch_id: Its number.
        job_id: A name that stays the same over restarts of the query, and that no other query has; by default the query's id,
            which is stored in its checkpoint, and the name of the table. Through Spark Connect the query is not known: there a
            new checkpoint needs a new name.
        options: The options of the data source: `**{"kafka.bootstrap.servers": …, "topic": …}`.

    Raises:
        ConfigurationError: No `job_id` was given, and there is no query to derive it from; or the same run has already written
            this batch of the job.
        BatchRefusedError: The batch, or a later one, was committed by another query: the job has a new checkpoint. Spark raises
            it as an error of its own, which has the text.
    """
    spark = frame.sparkSession
    query_id, run_id = _query_of(spark)
    if job_id is None and query_id is not None:
        job_id = f"{query_id} {options.get('dbtable', '')}"
    if not job_id:
        raise ConfigurationError(
            "write_batch can't determine which query the batch belongs to.",
            cause="it was called outside foreachBatch, or through Spark Connect",
            next_step="pass job_id=…, a name that stays the same over restarts",
        )
    _refuse_second_call(job_id, run_id, batch_id)
    register(spark)
    limit = options.get("numPartitions")
    if limit is not None:
        frame = frame.coalesce(int(limit))
    if query_id is not None:
        options["queryId"] = query_id
    frame.write.format(NAME).mode("append").options(**options, jobId=job_id, batchId=str(batch_id)).save()
    _newest[job_id] = (run_id, batch_id)


def _query_of(spark: SparkSession) -> tuple[str | None, str | None]:
    """The ids of the query and of its run that call us; None if there are none, or if they are not known (Spark Connect)."""
    try:
        context = spark.sparkContext
    except PySparkException:
        return None, None
    query_id = context.getLocalProperty(_QUERY_ID)
    return query_id, None if query_id is None else context.getLocalProperty(_RUN_ID)


def _refuse_second_call(job_id: str, run_id: str | None, batch_id: int) -> None:
    """Refuse a batch that the same run has already written: it would count as committed before and be skipped silently."""
    if run_id is not None and _newest.get(job_id) == (run_id, batch_id):
        raise ConfigurationError(
            f"write_batch was called twice for batch {batch_id} of job {job_id!r}.",
            cause="a job writes each micro-batch once, so the second frame would not be written",
            next_step="combine the frames with union, or give one of the calls its own job_id and transactionalIdPrefix",
        )
