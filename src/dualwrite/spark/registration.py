"""The two functions that a job calls: make the data source known, and write one batch of a stream by `foreachBatch`."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from dualwrite.errors import ConfigurationError
from dualwrite.spark.source import NAME, DualWriteDataSource

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

log = logging.getLogger(__name__)

_QUERY_ID: Final = "sql.streaming.queryId"
_OLDEST: Final = (4, 0)


def register(spark: SparkSession) -> None:
    """Make `format("dualwrite")` known to a session; to be called once in each.

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
    spark.dataSource.register(DualWriteDataSource)


def write_batch(frame: DataFrame, batch_id: int, *, job_id: str | None = None, **options: str) -> None:
    """Write one micro-batch exactly once, from `foreachBatch`.

        def each(frame, batch_id):
            dualwrite.spark.write_batch(frame, batch_id, **options)

        stream.writeStream.foreachBatch(each).option("checkpointLocation", …).start()

    A batch that was committed before, by an earlier run of the query, is not written again.

    Args:
        frame: The micro-batch.
        batch_id: Its number.
        job_id: A name that stays over restarts of the query; by default the query's own id, which its checkpoint keeps.
        options: The options of the data source: `**{"kafka.bootstrap.servers": …, "topic": …}`.

    Raises:
        ConfigurationError: There is no `job_id`, and no query that it could be taken of.
    """
    spark = frame.sparkSession
    if job_id is None:
        job_id = spark.sparkContext.getLocalProperty(_QUERY_ID)
    if not job_id:
        raise ConfigurationError(
            "write_batch does not know which query the batch belongs to.",
            cause="it was not called by foreachBatch, or by way of Spark Connect",
            next_step="job_id=…: a name that stays the same over restarts",
        )
    register(spark)
    limit = options.get("numPartitions")
    if limit is not None:
        frame = frame.coalesce(int(limit))
    frame.write.format(NAME).mode("append").options(**options, jobId=job_id, batchId=str(batch_id)).save()
