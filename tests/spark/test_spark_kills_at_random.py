"""Many micro-batches, with a kill of a random part of Spark every few batches: table and topic are equal in the end.

Twelve files, one per micro-batch, with about three kills by default. For more:
DUALWRITE_SPARK_BATCHES=100 pytest -n 0 -s -m soak tests/spark/test_spark_kills_at_random.py
"""

from __future__ import annotations

import itertools
import os
import random
import time
from collections import Counter

import pytest
from driven_scene import DrivenScene
from spark_scene import LIMIT

from fixtures.pace import TimeLimitError
from spark.job import SparkJob
from spark.processes import Role

pytestmark = [pytest.mark.soak, pytest.mark.timeout(3600)]

BATCHES = int(os.environ.get("DUALWRITE_SPARK_BATCHES", "12"))
BETWEEN_KILLS = (2, 4)
"""Micro-batches, at least and at most."""

KILLED = ("task", "jvm", "commit", "all")


class Killer:
    """Kills parts of Spark while a stream runs.

    Attributes:
        kills: How often each part was killed.
    """

    def __init__(self, scene: DrivenScene) -> None:
        self._scene = scene
        self._whom = itertools.cycle(random.sample(KILLED, len(KILLED)))
        self._next = 1
        self.kills: Counter[str] = Counter()

    def watch(self, job: SparkJob) -> None:
        """Kill from time to time, until the job has ended."""
        deadline = time.monotonic() + LIMIT * 10
        while job.process.poll() is None:
            if time.monotonic() > deadline:
                raise TimeLimitError(f"{self._scene.micro_batches} batches; {job.output[-4000:]}")
            if self._next <= self._scene.micro_batches < BATCHES - 1:
                time.sleep(random.uniform(0, 1))  # anywhere in a micro-batch
                self._kill(job, next(self._whom))
            time.sleep(0.02)

    def _kill(self, job: SparkJob, whom: str) -> None:
        if whom == "all":
            job.kill_all()
        elif not job.kill(Role(whom)):
            return
        self.kills[whom] += 1
        self._next = self._scene.micro_batches + random.randint(*BETWEEN_KILLS)


def test_micro_batches_with_kills(driven: DrivenScene) -> None:
    ids = driven.add_files(BATCHES, rows=20)
    killer, drivers, began = Killer(driven), 0, time.monotonic()
    while True:
        drivers += 1
        with driven.stream_driver(random.randint(1, 4), tries=BATCHES) as job:
            killer.watch(job)
            job.wait()
            if job.process.returncode == 0:
                break
    driven.assert_holds(ids)
    # Spark's file source records a file before Spark records the micro-batch: a kill in between adds the next file to it.
    assert BATCHES - drivers < driven.micro_batches <= BATCHES
    assert killer.kills.total() >= BATCHES // 6
    kills = ", ".join(f"{whom} {count}" for whom, count in sorted(killer.kills.items()))
    seconds = time.monotonic() - began
    done = f"{driven.micro_batches} micro-batches, {killer.kills.total()} kills ({kills})"
    print(f"{done}, {drivers} drivers, {seconds:.0f} s")  # noqa: T201  (pytest -s shows the numbers)
