"""Parts of Spark are killed while a stream runs: table and topic are equal in the end.

At each step, and for processes that are paused and resume late, the same without Spark is in tests/jobs/test_job_kills.py.
Twelve micro-batches with about three kills at random by default. For more:
DUALWRITE_SPARK_BATCHES=100 pytest -n 0 -m soak tests/spark/test_spark_kills.py
"""

from __future__ import annotations

import itertools
import os
import random
import time
from typing import TYPE_CHECKING

import pytest
from driven_scene import DrivenScene
from spark_scene import LIMIT

from fixtures.pace import TimeLimitError
from spark.job import SparkJob
from spark.processes import Role

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

BATCHES = int(os.environ.get("DUALWRITE_SPARK_BATCHES", "12"))
BETWEEN_KILLS = (2, 4)
"""Micro-batches, at least and at most."""


@pytest.mark.soak  # in CI: workers that die (test_spark_stream.py), and processes of a job at every point (tests/jobs)
@pytest.mark.parametrize(
    ("dies", "point"),
    [(Role.JVM, "job_after_move"), (None, "job_after_commit"), (Role.DRIVER, "job_after_prepare")],
    ids=lambda part: "all" if part is None else str(part),
)
def test_a_driver_that_dies(driven: DrivenScene, spark: SparkSession, dies: Role | None, point: str) -> None:
    ids = driven.add_files(2)
    with driven.stream_driver() as job:
        driven.wait_for_micro_batches(job, 1)
        driven.stopped_at(job, point)
        if dies is None:
            job.kill_all()
        else:
            job.kill(dies)
            assert job.wait() != 0
    driven.stream_to_the_end(spark)
    driven.assert_holds(ids)


@pytest.mark.soak
def test_micro_batches_with_kills_at_random(driven: DrivenScene) -> None:
    ids = driven.add_files(BATCHES, rows=20)
    parts = itertools.cycle(random.sample([Role.TASK, Role.JVM, Role.COMMIT, None], 4))
    kills, due, drivers = 0, 1, 0

    def kill_until_it_ends(job: SparkJob) -> int:
        nonlocal kills, due
        deadline = time.monotonic() + LIMIT * 10
        while job.process.poll() is None:
            if time.monotonic() > deadline:
                raise TimeLimitError(f"{driven.micro_batches} batches; {job.output[-4000:]}")
            if due <= driven.micro_batches < BATCHES - 1:
                time.sleep(random.uniform(0, 1))  # anywhere in a micro-batch
                part = next(parts)
                if part is None:
                    job.kill_all()
                if part is None or job.kill(part):
                    kills, due = kills + 1, driven.micro_batches + random.randint(*BETWEEN_KILLS)
            time.sleep(0.02)
        return job.wait()

    is_done = False
    while not is_done:
        drivers += 1
        with driven.stream_driver(random.randint(1, 4), tries=BATCHES) as job:
            is_done = kill_until_it_ends(job) == 0
    driven.assert_holds(ids)
    # Spark's file source records a file before Spark records the micro-batch: a kill in between adds the next file to it.
    assert BATCHES - drivers < driven.micro_batches <= BATCHES
    assert kills >= BATCHES // 6
