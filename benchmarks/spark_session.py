"""The benchmark's Spark session, with the packages of Spark's own sinks."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_EXCLUDED: Final = "org.slf4j:slf4j-api"  # already part of Spark; a registry may not have it
JDBC_DRIVER: Final = "org.postgresql:postgresql:42.7.7"
_KAFKA: Final = "org.apache.spark:spark-sql-kafka-0-10_2.13"
_WHOLE_FILES: Final = str(1 << 40)  # each file is one partition: files are neither split nor combined
_STOPPING: Final = 60.0


class SparkError(RuntimeError):
    """Spark could not be started, or could not write."""


class PackagesError(SparkError):
    """The packages of Spark's own sinks can't be downloaded."""


def packages() -> str:
    """What Spark's own sinks need in `spark.jars.packages`, in the version of the installed PySpark."""
    import pyspark  # noqa: PLC0415  (--help works without Spark)

    return f"{_KAFKA}:{pyspark.__version__},{JDBC_DRIVER}"


@contextmanager
def session(
    place: Path, *, cores: int, memory: str, packages: str | None = None, jars: str | None = None
) -> Iterator[SparkSession]:
    """A local Spark session; it and its JVM end with the block.

    Args:
        place: A folder for Spark's files.
        cores: How many tasks run at once.
        memory: The JVM's memory, such as `4g`.
        packages: `spark.jars.packages`.
        jars: `spark.jars`.

    Raises:
        PackagesError: The packages can't be downloaded.
        SparkError: Spark does not start.
    """
    from pyspark.errors import PySparkRuntimeError  # noqa: PLC0415  (see above)
    from pyspark.sql import SparkSession  # noqa: PLC0415

    here = str(Path(__file__).parent)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")]))  # workers: spark_parts
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    settings = {
        "spark.driver.memory": memory,
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.local.dir": str(place / "local"),
        "spark.sql.warehouse.dir": str(place / "warehouse"),
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.files.maxPartitionBytes": _WHOLE_FILES,
        "spark.sql.files.openCostInBytes": _WHOLE_FILES,
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.log.level": "ERROR",
        **({} if packages is None else {"spark.jars.packages": packages, "spark.jars.excludes": _EXCLUDED}),
        **({} if jars is None else {"spark.jars": jars}),
    }
    builder = SparkSession.builder.master(f"local[{cores}]").appName("dualwrite-benchmark")
    for name, value in settings.items():
        builder = builder.config(name, value)
    try:
        spark = builder.getOrCreate()
    except PySparkRuntimeError as error:
        if packages is None:
            raise SparkError(f"Spark does not start: {error}") from error
        raise PackagesError(
            f"Spark does not start with the packages {packages}; its output above shows why. If no reachable repository "
            f"has them, use those of another release (--packages {_KAFKA}:4.0.0,{JDBC_DRIVER} also runs on Spark 4.3), pass "
            "files with --jars, or omit Spark's own sinks: --sinks read,dualwrite"
        ) from error
    try:
        yield spark
    finally:
        _end(spark)


def _end(spark: SparkSession) -> None:
    """Stop the session and its JVM, which would otherwise run until this process ends."""
    gateway = spark.sparkContext._gateway  # noqa: SLF001  (Spark has no public API for it)
    spark.stop()
    if gateway is None:
        return
    gateway.shutdown()
    process = gateway.proc
    process.stdin.close()  # the JVM ends when its standard input is closed
    try:
        process.wait(timeout=_STOPPING)
    except subprocess.TimeoutExpired:
        process.kill()
