"""Measures writes by Spark, each into an empty table and a new topic, and verifies each."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

import psutil
from py4j.protocol import Py4JError
from pyspark.errors import PySparkException

import spark_flights
import spark_parts
import workload
from services import Services
from spark_flights import Frame
from spark_parts import Part
from spark_session import SparkError
from spark_sinks import TITLES, Name, Sinks

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

WARM_UP_ROWS: Final = 20_000


@dataclass(frozen=True)
class Measured:
    """The figures of one write.

    Args:
        number: The round; 0 is the warm-up.
        partitions: Partitions of the frame.
        name: The sink.
        rows: How many rows were written.
        seconds: Duration of the whole write, under the sink's name, and of its parts.
        processor: Seconds of processor time of everything that the benchmark has started: Spark, and the servers unless
            existing ones are used. Depends less on other load on the machine than the wall time does.
    """

    number: int
    partitions: int
    name: Name
    rows: int
    seconds: Mapping[str, float]
    processor: float


class Bench:
    """Measures writes.

    Args:
        servers: The servers.
        spark: The session.
        place: A folder for files; the same as for `environment`.
        topic_partitions: Number of partitions of each topic.
        producer: This sink's option `producer`.
    """

    def __init__(self, servers: Services, spark: SparkSession, place: Path, *, topic_partitions: int, producer: str) -> None:
        self._servers, self._spark, self._place = servers, spark, place
        self._topic_partitions = topic_partitions
        self._database = workload.engine(servers.url)
        self._sinks = Sinks(servers.url, servers.kafka, producer=producer)
        self._run = f"{int(time.time()):x}"
        self._topics = 0
        self._clocks = _clocks(place)
        spark.dataSource.register(spark_parts.ClockedDataSource)

    def close(self) -> None:
        """Drop the table."""
        spark_flights.remove(self._database)
        self._database.dispose()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def frame(self, partitions: int, *, times: int, limit: int | None) -> Frame:
        """Flights as files for Spark to read; see `write_frame`."""
        return spark_flights.write_frame(
            self._place / f"{times}-{limit}-{partitions}", times=times, partitions=partitions, limit=limit
        )

    def measure(self, number: int, name: Name, frame: Frame, partitions: int) -> Measured:
        """Measure one write.

        Raises:
            VerificationError: Table and topic don't have what the frame has.
            SparkError: Spark could not write.
        """
        with self._clean(frame) as topic:
            before = _processor_time()
            seconds = self._written(name, frame, partitions, lambda read: self._sinks.write(name, read, topic))
            processor = _processor_time() - before
            if name != "read":
                spark_flights.verify(TITLES[name], self._database, self._servers.kafka, topic, frame)
        return Measured(number, partitions, name, frame.rows, seconds, processor)

    def take_apart(self, frame: Frame, partitions: int) -> list[Part]:
        """Measure the parts of one write by this sink; verified as well.

        Raises: as `measure`.
        """

        def write(read: DataFrame) -> tuple[float, float]:
            began = time.time()
            self._sinks.dualwrite(read, topic, source=spark_parts.NAME)
            return began, time.time()

        with self._clean(frame) as topic:
            began, ended = self._written("dualwrite", frame, partitions, write)
            spark_flights.verify("this sink, with clocks", self._database, self._servers.kafka, topic, frame)
        return spark_parts.collected(self._clocks, began, ended)

    def _written(self, name: Name, frame: Frame, partitions: int, write: Callable[[DataFrame], Any]) -> Any:
        try:
            read = self._spark.read.parquet(str(frame.path))
            found = read.rdd.getNumPartitions()
            if found != partitions:
                raise SparkError(f"Spark made {found} partitions of {partitions} files.")
            return write(read)
        except (PySparkException, Py4JError) as error:
            raise SparkError(f"{TITLES[name]}: {error}") from error

    @contextmanager
    def _clean(self, frame: Frame) -> Iterator[str]:
        """An empty table, and a topic that is deleted afterwards: ten of them would fill a disk."""
        spark_flights.make_table(self._database, frame)
        spark_flights.tidy(self._database)
        self._topics += 1
        topic = f"benchmark-{self._run}-{self._topics}"
        self._servers.make_topic(topic, self._topic_partitions)
        try:
            yield topic
        finally:
            self._servers.delete_topic(topic)


def _processor_time() -> float:
    """Processor seconds of all our child processes and their children, including those that have ended."""
    used = 0.0
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            times = process.cpu_times()
            used += times.user + times.system + times.children_user + times.children_system
    return used


def environment(place: Path) -> dict[str, str]:
    """Environment variables that Spark needs at startup, for its workers."""
    _clocks(place).mkdir()
    return {spark_parts.PLACE: str(_clocks(place))}


def _clocks(place: Path) -> Path:
    return place / "clocks"
