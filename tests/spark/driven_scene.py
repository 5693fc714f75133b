"""Orders written as a stream by drivers in separate processes, which tests kill, pause and restart."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, cast

import psutil
from spark_scene import LIMIT, SCHEMA, SparkScene

import dualwrite.spark
from dualwrite.testing.failpoints import ENVIRONMENT_VARIABLE
from fixtures.pace import until
from spark.job import SparkJob
from spark.processes import Role, SparkProcess
from spark.session import MASTER

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

STREAM_DRIVER = Path(__file__).with_name("stream_driver.py")


class DrivenScene(SparkScene):
    """A scene without a session, until `stream_to_the_end`.

    Args:
        url: A database with only dualwrite's tables.
        servers: The brokers.
        name: The prefix and the topic.
        place: A folder for files.
        environment: Environment variables for Spark.
        more: More options of the sink.
    """

    def __init__(self, url: str, servers: str, name: str, place: Path, environment: Mapping[str, str], **more: str) -> None:
        super().__init__(cast("SparkSession", None), url, servers, name, place, place / "failpoints", more)
        self.environment = {**environment, ENVIRONMENT_VARIABLE: f"@{self.failpoints}"}
        self.checkpoint = place / "checkpoint"
        self._drivers = 0

    def close(self) -> None:
        if self.spark is None:
            self.store.close()
        else:
            super().close()

    def add_files(self, count: int, rows: int = 10) -> range:
        """Add input for that many micro-batches; return its ids."""
        for first in range(0, count * rows, rows):
            self.add_input(range(first, first + rows))
        return range(count * rows)

    # --- drivers ----------------------------------------------------------------------------------------------------------

    def stream_driver(
        self, partitions: int = 3, tries: int = 1, master: str = MASTER, spark: Mapping[str, str] | None = None
    ) -> SparkJob:
        """Start a driver that streams the available input and then ends; see stream_driver.py."""
        self._drivers += 1
        settings = self.place / f"driver-{self._drivers}.json"
        place = self.place / f"driver-{self._drivers}"
        place.mkdir()
        told = {
            "place": str(place),
            "master": master,
            "spark": {
                "spark.executorEnv.PYTHONPATH": str(STREAM_DRIVER.parents[1]),
                f"spark.executorEnv.{ENVIRONMENT_VARIABLE}": self.environment[ENVIRONMENT_VARIABLE],
                **(spark or {}),
            },
            "input": str(self.input),
            "checkpoint": str(self.checkpoint),
            "schema": SCHEMA,
            "partitions": partitions,
            "tries": tries,
            "options": self.options,
        }
        settings.write_text(json.dumps(told))
        return SparkJob(STREAM_DRIVER, [settings], environment=self.environment)

    def stream_to_the_end(self, spark: SparkSession, partitions: int = 2) -> None:
        """Run the query to its end, in the session that tests share, as another driver."""
        dualwrite.spark.register(spark)
        self.spark = spark
        self.run(partitions)

    @property
    def micro_batches(self) -> int:
        """How many micro-batches are done according to Spark."""
        done = self.checkpoint / "commits"
        return sum(entry.name.isdecimal() for entry in done.iterdir()) if done.exists() else 0

    def wait_for_micro_batches(self, job: SparkJob, count: int) -> None:
        """Wait until that many are done according to Spark."""
        wait_until(lambda: self.micro_batches >= count, job, f"{count} micro-batches")

    def stopped_at(self, job: SparkJob, point: str) -> SparkProcess:
        """Arm a failpoint that stops the first worker there, and wait until one is stopped."""
        self.fail_at(point, "stop")
        return wait_for_stopped(job)


def wait_for_stopped(job: SparkJob) -> SparkProcess:
    """Wait until one of the job's Python workers is stopped, and return it."""
    found: list[SparkProcess] = []

    def look() -> bool:
        found[:] = [one for one in job.processes() if one.role in (Role.TASK, Role.COMMIT) and is_stopped(one.process)]
        return bool(found)

    wait_until(look, job, "a stopped worker")
    return found[0]


def is_stopped(process: psutil.Process) -> bool:
    try:
        return bool(process.status() == psutil.STATUS_STOPPED)
    except psutil.NoSuchProcess:
        return False


def wait_until(condition: Callable[[], bool], job: SparkJob, what: str) -> None:
    """Wait for a condition while the job runs."""

    def look() -> bool:
        found = condition()
        assert found or job.process.poll() is None, f"ended before {what}: {job.output[-4000:]}"
        return found

    until(look, lambda: f"{what}: {job.output[-4000:]}", seconds=LIMIT, pause=0.05)
