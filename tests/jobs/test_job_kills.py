"""A job's process dies at every step of the commit protocol, and is started again: table and topic stay equal."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from job_driver import rows_of
from job_scene import JobScene

from dualwrite.testing.failpoints import ENVIRONMENT_VARIABLE
from fixtures.job_points import COMMIT_POINTS, SETTLING_POINTS, TASK_POINTS

HERE = Path(__file__).parent
BATCHES = 3
LIMIT = 60.0


class Job:
    """The driver's process, started again and again."""

    def __init__(self, scene: JobScene, folder: Path, *producer: str, batches: int = BATCHES) -> None:
        self._scene, self.log = scene, folder / "commits"
        self.log.write_text("0")
        self._arguments = [scene.url, scene.servers, scene.prefix, scene.sink.topic, str(self.log), str(batches), *producer]

    def start(self, failpoints: str = "") -> subprocess.Popen[bytes]:
        environment = {**os.environ, ENVIRONMENT_VARIABLE: failpoints, "PYTHONPATH": f"{HERE}{os.pathsep}{HERE.parent}"}
        return subprocess.Popen([sys.executable, str(HERE / "job_driver.py"), *self._arguments], env=environment)

    def run(self, failpoints: str = "") -> int:
        with self.start(failpoints) as process:
            try:
                return process.wait(LIMIT)
            finally:
                process.kill()

    def run_to_the_end(self) -> None:
        for _ in range(3):
            if self.run() == 0:
                return
        raise AssertionError("the job did not come to its end")


def all_rows(batches: int = BATCHES) -> Sequence[int]:
    return [row for batch in range(batches) for row in rows_of(batch)]


@contextmanager
def paused(job: Job, point: str, folder: Path, *, nth: int) -> Iterator[subprocess.Popen[bytes]]:
    """The driver, stopped at a point."""
    flag = folder / "reached"
    with job.start(f"{point}#{nth}=touch:{flag};{point}#{nth}=stop") as process:
        try:
            deadline = time.monotonic() + LIMIT
            while not flag.exists():
                assert time.monotonic() < deadline
                time.sleep(0.02)
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("point", "nth"), [*((point, 2) for point in TASK_POINTS), *((point, 1) for point in COMMIT_POINTS + SETTLING_POINTS)]
)
def test_a_process_that_is_killed(postgres_scene: JobScene, tmp_path: Path, point: str, nth: int) -> None:
    job = Job(postgres_scene, tmp_path)
    assert job.run(f"{point}#{nth}=kill") == -signal.SIGKILL
    job.run_to_the_end()
    postgres_scene.assert_holds(all_rows())


@pytest.mark.parametrize("point", TASK_POINTS + COMMIT_POINTS + SETTLING_POINTS)
def test_a_step_that_fails(postgres_scene: JobScene, tmp_path: Path, point: str) -> None:
    """A task is tried again; a batch is aborted, and the next start runs it again."""
    job = Job(postgres_scene, tmp_path)
    job.run(f"{point}#2=raise")
    job.run_to_the_end()
    postgres_scene.assert_holds(all_rows())


@pytest.mark.parametrize("point", ["job_after_abort", "recover_after_end_txn"])
def test_an_abort_that_is_killed(postgres_scene: JobScene, tmp_path: Path, point: str) -> None:
    job = Job(postgres_scene, tmp_path)
    assert job.run(f"job_after_move#1=raise;{point}#1=kill") == -signal.SIGKILL
    job.run_to_the_end()
    postgres_scene.assert_holds(all_rows())


@pytest.mark.slow
@pytest.mark.parametrize("point", ["job_after_claim", "job_after_prepare", "job_after_move", "job_after_commit"])
def test_other_databases(scene: JobScene, tmp_path: Path, point: str) -> None:
    job = Job(scene, tmp_path)
    assert job.run(f"{point}#2=kill") == -signal.SIGKILL
    job.run_to_the_end()
    scene.assert_holds(all_rows())


@pytest.mark.slow
@pytest.mark.parametrize("point", ["job_after_claim", "job_after_prepare", "job_after_move", "job_after_commit"])
def test_librdkafka(postgres_scene: JobScene, tmp_path: Path, point: str) -> None:
    job = Job(postgres_scene, tmp_path, "librdkafka")
    assert job.run(f"{point}#2=kill") == -signal.SIGKILL
    job.run_to_the_end()
    postgres_scene.assert_holds(all_rows())


@pytest.mark.slow
def test_kills_at_random(postgres_scene: JobScene, tmp_path: Path) -> None:
    batches, kills = 60, 0
    job = Job(postgres_scene, tmp_path, batches=batches)
    deadline = time.monotonic() + 240
    while int(job.log.read_text() or 0) < batches:
        assert time.monotonic() < deadline, f"{kills} kills, {job.log.read_text()} batches"
        with job.start() as process:
            try:
                process.wait(random.uniform(1.0, 4.0))
            except subprocess.TimeoutExpired:
                kills += 1
                process.kill()
    job.run_to_the_end()
    assert kills > 5
    postgres_scene.assert_holds(all_rows(batches))


@pytest.mark.parametrize(
    "point",
    ["job_after_open", "job_after_claim", "after_take_over", "job_after_batch", "job_after_staged", "job_after_prepare"],
)
def test_a_zombie_that_wakes(postgres_scene: JobScene, tmp_path: Path, point: str) -> None:
    """A driver that was paused in a task, and replaced by the next one; then it goes on."""
    job = Job(postgres_scene, tmp_path)
    with paused(job, point, tmp_path, nth=2) as zombie:
        job.run_to_the_end()
        zombie.send_signal(signal.SIGCONT)
        zombie.wait(LIMIT)
    postgres_scene.assert_holds(all_rows())


@pytest.mark.parametrize(
    "point", ["job_before_commit", "job_after_move", "job_after_commit", "recover_after_end_txn", "job_after_clear"]
)
def test_a_zombie_that_wakes_in_commit(postgres_scene: JobScene, tmp_path: Path, point: str) -> None:
    job = Job(postgres_scene, tmp_path)
    with paused(job, point, tmp_path, nth=1) as zombie:
        job.run_to_the_end()
        zombie.send_signal(signal.SIGCONT)
        zombie.wait(LIMIT)
    postgres_scene.assert_holds(all_rows())
