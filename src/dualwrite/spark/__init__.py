"""Spark: writes a DataFrame to a database and Kafka, all or nothing.

    import dualwrite.spark

    dualwrite.spark.register(spark)
    frame.write.format("dualwrite").mode("append").options(**options).save()
    frame.writeStream.format("dualwrite").options(**options).option("checkpointLocation", …).start()

The columns `key`, `value`, `topic`, `partition`, `headers` and `timestamp` make the message, as in Spark's own Kafka sink; all
other columns make the row of the table. Each row is written to both, and a consumer with `read_committed` sees the messages of
a batch if and only if its rows are in the table.

| option | meaning |
| --- | --- |
| `url`, `user`, `password` | the database, as for `store_from_url`, or its JDBC URL |
| `dbtable` | the table, `table` or `schema.table` |
| `upsertKeys` | columns by which a row replaces an earlier one; without it, rows are appended |
| `stagingSchema` | the schema in which the staging table is created; by default the table's own schema |
| `stateSchema` | the schema of dualwrite's own tables, where `db upgrade --schema` created them |
| `kafka.bootstrap.servers`, `kafka.…` | Kafka's settings, in librdkafka's names |
| `topic` | the topic of all messages; without it, the column `topic` |
| `transactionalIdPrefix` | the prefix of the tasks' transactional ids; only one job at a time holds it |
| `jobId` | for a batch write: a name; a write with this name is done once, no matter how often you run it |
| `batchId`, `queryId` | set by `write_batch`: the micro-batch, and the query that it belongs to |
| `numPartitions` | the maximum number of partitions of a frame |
| `producer`, `twoPhase` | as for `connect` |
| `markRepublished` | `true` gives messages that are published again the header `dualwrite-republished` |
| `observe` | `module:function`: called once in each Python process of the job, to install observers or a tracer there |
| `traceparent`, `tracestate`, `baggage` | the trace that a batch write belongs to; streams ignore it |
| `claimTimeout`, `kafkaTimeout`, `deliveryTimeout` | seconds, as in `Timeouts` |
| `commitTimeout` | how many seconds it may take to move a batch's rows into the table (600) |
| `leaseTimeout` | after how many seconds without a heartbeat another batch write that holds the prefix is presumed dead (30) |
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dualwrite.errors import MissingDependencyError

try:
    import pyarrow as pa  # noqa: F401  (checks that it is installed)
    import pyspark  # noqa: F401
except ImportError as error:
    raise MissingDependencyError(
        f"dualwrite.spark needs PySpark and pyarrow, but {error.name} is not installed.",
        next_step="pip install 'dualwrite[spark]' (Spark 4.0 or newer, which needs Java 17 or 21)",
    ) from error

from dualwrite.spark.chunks import forget_job
from dualwrite.spark.setup import SparkSetupWarning, register, warn_without_java, write_batch

if TYPE_CHECKING:
    from dualwrite.spark.partitions import WriteReport, write_partitions

__all__ = ["SparkSetupWarning", "WriteReport", "forget_job", "register", "write_batch", "write_partitions"]

warn_without_java()


def __getattr__(name: str) -> object:
    if name in ("WriteReport", "write_partitions"):
        from dualwrite.spark import partitions  # noqa: PLC0415  (the data source does not need it)

        return getattr(partitions, name)
    raise AttributeError(f"module 'dualwrite.spark' has no attribute {name!r}")
