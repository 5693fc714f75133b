"""Compares this Spark sink with Spark's own JDBC and Kafka sinks, one after the other and not atomic. See README.md."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import psutil
from sqlalchemy import create_engine, make_url, text

from dualwrite import DualWriteError
from figures import Spread, table, with_range
from options import add_servers, count, counts, parser_of, some_of
from processes import committed
from records import SIZE, VerificationError, check_records
from servers import Servers, servers
from surroundings import heading, show_progress, surroundings

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

TABLE: Final = "dualwrite_benchmark_orders"
COLUMNS: Final = {
    "id": ("bigint PRIMARY KEY", "id"),
    "body": (f"varchar({SIZE})", f"rpad(concat('0.', id, '.'), {SIZE}, 'x')"),
    "customer": ("integer", "CAST(id % 9973 AS int)"),
    "item": ("text", "concat('item ', id % 101)"),
    "price": ("double precision", "CAST(id % 1009 AS double) / 8"),
    "ordered_at": ("timestamptz", "timestamp_seconds(1700000000 + id)"),
    "note": ("text", "IF(id % 3 = 0, NULL, 'by post')"),
}
"""The table's columns: PostgreSQL's type, and Spark's expression. A body is a record of writer 0."""

TITLES: Final = {"read": "making the rows alone", "dualwrite": "this sink", "spark": "Spark's two sinks"}
JDBC_SETTINGS: Final = {"batchsize": "10000", "driver": "org.postgresql.Driver"}
"""The default of `batchsize` is 1000; the driver's `reWriteBatchedInserts=true` is set in the URL."""

KAFKA_SETTINGS: Final = {"kafka.batch.size": "1000000", "kafka.linger.ms": "50"}
"""Batches as large as this sink's; the defaults of Kafka's Java producer are 16 KB, and 0 or 5 ms."""

_KAFKA: Final = "org.apache.spark:spark-sql-kafka-0-10_2.13"
_DRIVER: Final = "org.postgresql:postgresql:42.7.7"
_WARM_UP_ROWS: Final = 20_000
_NO_PACKAGES: Final = 3


@dataclass(frozen=True)
class Measured:
    """One write of a frame with some partitions by a sink: seconds, and CPU seconds of everything that we started."""

    partitions: int
    name: str
    seconds: float
    processor: float


class Bench:
    """Measures writes, each into an empty table and a new topic, and verifies them."""

    def __init__(self, found: Servers, spark: SparkSession, options: argparse.Namespace) -> None:
        self._servers, self._spark, self._options = found, spark, options
        self._database = create_engine(found.url)
        self._kafka = {f"kafka.{name}": str(value) for name, value in found.kafka.items()}
        self._run, self._topics = f"{int(time.time()):x}", 0

    def close(self) -> None:
        with self._database.begin() as connection:
            connection.execute(text(f"DROP TABLE IF EXISTS {TABLE}"))
        self._database.dispose()

    def measure(self, name: str, rows: int, partitions: int) -> Measured:
        """Measure one write; if table and topic don't have the frame's rows, it fails."""
        columns = ", ".join(f"{column} {kind}" for column, (kind, _) in COLUMNS.items())
        with self._database.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            for statement in (f"DROP TABLE IF EXISTS {TABLE}", f"CREATE TABLE {TABLE} ({columns})", "VACUUM", "CHECKPOINT"):
                connection.execute(text(statement))
        self._topics += 1
        topic = self._servers.make_topic(f"benchmark-{self._run}-{self._topics}", self._options.topic_partitions)
        frame = self._spark.range(0, rows, numPartitions=partitions)
        frame = frame.selectExpr(*(f"{made} AS {column}" for column, (_, made) in COLUMNS.items()))
        before, began = _processor_time(), time.perf_counter()
        if name == "read":
            frame.write.format("noop").mode("append").save()
        else:
            (self._dualwrite if name == "dualwrite" else self._spark_sinks)(frame, topic)
        seconds, processor = time.perf_counter() - began, _processor_time() - before
        if name != "read":
            with self._database.connect().execution_options(stream_results=True) as connection:
                bodies = connection.scalars(text(f"SELECT body FROM {TABLE}"))
                check_records(TITLES[name], "rows", {0: rows}, (str(body).encode() for body in bodies))
            messages = committed(self._servers.kafka, topic)
            values = (json.loads(message.value() or b"{}") for message in messages)
            check_records(TITLES[name], "messages", {0: rows}, (str(value.get("body")).encode() for value in values))
        self._servers.delete_topic(topic)
        return Measured(partitions, name, seconds, processor)

    def _dualwrite(self, frame: DataFrame, topic: str) -> None:
        options = {"url": self._servers.url, "dbtable": TABLE, "topic": topic, "producer": self._options.producer}
        options |= {"transactionalIdPrefix": "dualwrite-benchmark", **self._kafka}
        _with_message(frame).write.format("dualwrite").mode("append").options(**options).save()

    def _spark_sinks(self, frame: DataFrame, topic: str) -> None:
        url = make_url(self._servers.url)
        jdbc = f"jdbc:postgresql://{url.host}:{url.port or 5432}/{url.database}?reWriteBatchedInserts=true"
        options = {"url": jdbc, "dbtable": TABLE, "user": url.username or "", "password": url.password or "", **JDBC_SETTINGS}
        frame.write.format("jdbc").mode("append").options(**options).save()
        messages = _with_message(frame).select("key", "value")
        messages.write.format("kafka").mode("append").options(**KAFKA_SETTINGS, **self._kafka, topic=topic).save()


def _with_message(frame: DataFrame) -> DataFrame:
    return frame.selectExpr("*", "CAST(id AS STRING) AS key", "to_json(struct(*)) AS value")


def _processor_time() -> float:
    """CPU seconds of all our child processes and their children, including those that have ended."""
    used = 0.0
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            times = process.cpu_times()
            used += times.user + times.system + times.children_user + times.children_system
    return used


@contextmanager
def session(place: Path, options: argparse.Namespace) -> Iterator[SparkSession]:
    """A local Spark session with its files in `place`; it and its JVM end with the block."""
    import pyspark  # noqa: PLC0415  (--help works without Spark)
    from pyspark.errors import PySparkRuntimeError  # noqa: PLC0415
    from pyspark.sql import SparkSession  # noqa: PLC0415

    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    packages = options.packages or f"{_KAFKA}:{pyspark.__version__},{_DRIVER}"
    settings = {
        "spark.driver.memory": options.memory,
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.local.dir": str(place / "local"),
        "spark.sql.warehouse.dir": str(place / "warehouse"),
        "spark.sql.session.timeZone": "UTC",
        "spark.ui.enabled": "false",
        "spark.log.level": "ERROR",
    }
    if options.jars is not None:
        settings["spark.jars"] = options.jars
    elif "spark" in options.sinks:
        settings |= {"spark.jars.packages": packages, "spark.jars.excludes": "org.slf4j:slf4j-api"}  # Spark has its own
    builder = SparkSession.builder.master(f"local[{options.cores}]").appName("dualwrite-benchmark")
    for name, value in settings.items():
        builder = builder.config(name, value)
    try:
        spark = builder.getOrCreate()
    except PySparkRuntimeError as error:
        print(
            f"{error}\nSpark does not start: if no reachable repository has {packages}, use those of another release "
            f"(--packages {_KAFKA}:4.0.0,{_DRIVER} also runs on Spark 4.3), pass files with --jars, or --sinks read,dualwrite",
            file=sys.stderr,
        )
        raise SystemExit(_NO_PACKAGES) from error
    try:
        yield spark
    finally:
        gateway: Any = spark.sparkContext._gateway  # noqa: SLF001  (Spark has no public API for it)
        spark.stop()
        gateway.shutdown()
        gateway.proc.stdin.close()  # the JVM ends when its standard input is closed
        gateway.proc.wait(timeout=60)


def measure_all(bench: Bench, options: argparse.Namespace) -> list[Measured]:
    """Run a warm-up round with few rows, then all rounds in alternating order."""
    for name in options.sinks:
        bench.measure(name, min(options.rows, _WARM_UP_ROWS), options.partitions[0])
    found = []
    for number in range(options.rounds):
        for partitions in options.partitions:
            for name in reversed(options.sinks) if number % 2 else options.sinks:
                found.append(bench.measure(name, options.rows, partitions))
                show_progress(f"round {number + 1}/{options.rounds}, {partitions} partitions, {found[-1]}")
    return found


def report(found: Sequence[Measured], rows: int, rounds: int) -> str:
    """Medians, and the ratios of the rounds to Spark's two sinks."""

    def each(partitions: int, name: str, what: Callable[[Measured], float]) -> list[float]:
        return [what(one) for one in found if (one.partitions, one.name) == (partitions, name)]

    whats: tuple[Callable[[Measured], float], ...] = (lambda one: one.seconds, lambda one: one.processor)
    lines = []
    for partitions, name in dict.fromkeys((one.partitions, one.name) for one in found):
        line = [str(partitions), TITLES[name]]
        for what in whats:
            ours, theirs = each(partitions, name, what), each(partitions, "spark", what)
            line += [f"{statistics.median(ours):.1f}", with_range(Spread.of_ratios(ours, theirs) if theirs else None, 2)]
        lines.append([*line, f"{rows / statistics.median(each(partitions, name, whats[0])):,.0f}"])
    head = ["partitions", "what", "s", "÷ Spark's two", "CPU s", "÷ Spark's two", "rows/s"]
    verified = rows * sum(one.name != "read" for one in found)
    shown = table(head, lines, names=2)
    return f"{rows:,} rows; medians of {rounds} rounds:\n\n{shown}\n\nVerified: {verified:,} rows and as many messages."


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--rows", type=count, default=3_000_000, help="rows of the frame")
    add("--rounds", type=count, default=3, help="number of rounds; each measures every sink")
    add("--partitions", type=counts, default=[4, 2], help="partitions of the frame, comma-separated")
    add("--topic-partitions", type=count, default=4, help="partitions of each topic")
    add("--cores", type=count, default=2, help="how many tasks Spark runs at once")
    add("--memory", default="4g", help="memory of Spark's JVM")
    add("--sinks", type=some_of(list(TITLES)), default=list(TITLES), help="what to measure, comma-separated")
    add("--packages", help="spark.jars.packages for Spark's own sinks; default: those of this PySpark version")
    add("--jars", help="files to use instead of packages, comma-separated")
    add_servers(parser)
    return parser.parse_args(given)


def main() -> int:
    options = arguments()
    try:
        with tempfile.TemporaryDirectory(prefix="dualwrite-spark-") as folder, session(Path(folder), options) as spark:
            from dualwrite.spark import register  # noqa: PLC0415  (needs Spark)

            register(spark)
            with servers(options.kafka, url=options.url, warm_up=options.broker_warm_up) as running:
                print(heading(surroundings(running.cluster, running.url, pyspark=spark.version)), flush=True)
                bench = Bench(running, spark, options)
                try:
                    found = measure_all(bench, options)
                finally:
                    bench.close()
    except (VerificationError, DualWriteError, ImportError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    print(f"\n{report(found, options.rows, options.rounds)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
