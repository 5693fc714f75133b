"""A driver and its tasks in a process that tests kill: batch after batch, with retries, abort and a commit log, as in Spark.

Tests fork it (`fixtures.fork_server`) with: URL SERVERS PREFIX TOPIC LOG BATCHES [librdkafka]
"""

from __future__ import annotations

import random
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from job_scene import NumberSink

from dualwrite.jobs.driver import JobCommitter
from dualwrite.jobs.job_context import JobSite, OpenSite
from dualwrite.jobs.rules import JobRun, TaskOutcome
from dualwrite.jobs.task import TaskAttempt
from dualwrite.stores.sql import mysql
from dualwrite.testing.failpoints import FailpointError
from fixtures.database import shorten_pauses

ROWS = 12
ATTEMPTS = 3
PAUSE = 3
"""Seconds after which the database releases the locks of a paused driver; the default is ten."""


def rows_of(batch_id: int) -> list[int]:
    return list(range(ROWS * batch_id, ROWS * (batch_id + 1)))


def parts_of(batch_id: int) -> list[list[int]]:
    """The rows of a batch, grouped differently each time."""
    rows, count = rows_of(batch_id), random.randint(1, 5)
    random.shuffle(rows)
    return [rows[i::count] for i in range(count)]


class Driver:
    def __init__(self, opened: OpenSite, sink: NumberSink, prefix: str) -> None:
        self._opened, self._sink, self._prefix = opened, sink, prefix

    def run(self, batch_id: int) -> None:
        run = JobRun(self._prefix, "job", batch_id, keeps_lease=True)
        parts = parts_of(batch_id)
        with ThreadPoolExecutor(2) as threads:
            outcomes = list(threads.map(lambda part: self._task(run, *part), enumerate(parts)))
        committer = JobCommitter(self._opened, self._sink)
        try:
            committer.commit(outcomes)
        except Exception:
            committer.abort(run)
            raise

    def _task(self, run: JobRun, partition: int, part: list[int]) -> TaskOutcome | None:
        for attempt in range(ATTEMPTS):
            try:
                batches = [part[i : i + 3] for i in range(0, len(part), 3)]
                return TaskAttempt(self._opened, run, self._sink, partition=partition, attempt=attempt).write(batches)
            except FailpointError:
                continue
        return None


def main() -> None:
    url, servers, prefix, topic, log, batches, *producer = sys.argv[1:]
    done = Path(log)
    patch = pytest.MonkeyPatch()  # tests wait for it
    patch.setattr(mysql, "_PAUSED", PAUSE)
    shorten_pauses(patch, PAUSE)
    site = JobSite(url, {"bootstrap.servers": servers}, producer=producer[0] if producer else "auto", lease_timeout=1.0)
    with site.opened() as opened:
        driver = Driver(opened, NumberSink(topic), prefix)
        for batch_id in range(int(done.read_text() or 0), int(batches)):
            driver.run(batch_id)
            done.write_text(str(batch_id + 1))
