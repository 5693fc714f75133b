"""A job's process dies at every step of the commit protocol and is restarted: table and topic stay equal."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path

import pytest
from job_driver import rows_of
from job_scene import JobScene

from dualwrite.failpoints import NAMES
from fixtures.fork_server import ForkedProcess
from fixtures.pace import ended, until
from fixtures.tiers import thinned

HERE = Path(__file__).parent
BATCHES = 2
KILLS = 15
PAUSED_AT = ["job_after_claim", "after_take_over", "job_after_fence", "job_after_prepare"]
"""With an id alone, with a producer too, with its locks, and with all that a task does."""
TASK_POINTS = (
    "job_after_open",
    "job_after_claim",
    "before_take_over",
    "after_take_over",
    "job_after_start",
    "job_after_batch",
    "job_before_staged",
    "job_after_fence",
    "job_after_staged",
    "job_after_prepare",
)
COMMIT_POINTS = (
    "job_before_commit",
    "job_after_record",
    "job_after_move",
    "job_after_commit",
    "recover_after_end_txn",
    "recover_after_resolution",
    "job_after_complete",
    "job_after_clear",
)
RESOLVING_POINTS = ("recover_after_describe", "recover_after_decision")
"""Also passed by tasks, which resolve what is left on their ids."""
ABORT_POINTS = ("job_after_abort", "recover_after_end_txn")
SOME_POINTS = ["job_after_claim", "job_after_prepare", "job_after_move", "job_after_commit"]


class Job:
    """The driver's process, which can be started repeatedly."""

    def __init__(self, scene: JobScene, folder: Path, *producer: str, batches: int = BATCHES, done: int = 0) -> None:
        self._scene, self.log = scene, folder / "commits"
        self.log.write_text(str(done))
        self._arguments = [scene.url, scene.servers, scene.prefix, scene.sink.topic, str(self.log), str(batches), *producer]

    def start(self, failpoints: str = "") -> ForkedProcess:
        return ForkedProcess("job_driver", self._arguments, failpoints=failpoints, folder=HERE)

    def run(self, failpoints: str = "") -> int:
        with self.start(failpoints) as process:
            try:
                return ended(process)
            finally:
                process.kill()

    def run_to_the_end(self) -> None:
        for _ in range(3):
            if self.run() == 0:
                return
        raise AssertionError("the job did not come to its end")


def all_rows(batches: int = BATCHES) -> Sequence[int]:
    return [row for batch in range(batches) for row in rows_of(batch)]


def wait_for(flag: Path, process: ForkedProcess) -> None:
    def reached() -> bool:
        assert flag.exists() or process.poll() is None, "the driver ended before"
        return flag.exists()

    until(reached, flag.name)


@contextmanager
def paused(job: Job, point: str, folder: Path, *, nth: int) -> Iterator[ForkedProcess]:
    """The driver, paused at a failpoint."""
    flag = folder / "reached"
    with job.start(f"{point}#{nth}=touch:{flag};{point}#{nth}=stop") as process:
        try:
            wait_for(flag, process)
            yield process
        finally:
            process.kill()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("point", "nth"),
    [*((point, 2) for point in TASK_POINTS), *((point, 1) for point in COMMIT_POINTS + RESOLVING_POINTS)],
)
def test_a_process_that_is_killed(postgres_scene: JobScene, tmp_path: Path, point: str, nth: int) -> None:
    job = Job(postgres_scene, tmp_path)
    assert job.run(f"{point}#{nth}=kill") == -signal.SIGKILL
    job.run_to_the_end()
    postgres_scene.assert_holds(all_rows())


def test_every_failpoint_of_a_job_is_one_that_a_process_is_killed_at() -> None:
    assert {name for name in NAMES if name.startswith("job_")} <= {*TASK_POINTS, *COMMIT_POINTS, *ABORT_POINTS}


@pytest.mark.slow
@pytest.mark.parametrize("point", ["job_after_batch", "job_after_commit"])  # above, a process is killed at every point
def test_a_step_that_fails(postgres_scene: JobScene, tmp_path: Path, point: str) -> None:
    """A task is retried; a batch is aborted, and the next start runs it again."""
    job = Job(postgres_scene, tmp_path)
    job.run(f"{point}#2=raise")
    job.run_to_the_end()
    postgres_scene.assert_holds(all_rows())


@pytest.mark.slow
@pytest.mark.parametrize("point", ABORT_POINTS)
def test_an_abort_that_is_killed(postgres_scene: JobScene, tmp_path: Path, point: str) -> None:
    job = Job(postgres_scene, tmp_path)
    assert job.run(f"job_after_move#1=raise;{point}#1=kill") == -signal.SIGKILL
    job.run_to_the_end()
    postgres_scene.assert_holds(all_rows())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("database_url", "point"), [*zip(cycle(["sqlite", "mariadb"]), SOME_POINTS)], indirect=["database_url"]
)
def test_a_kill_on_other_databases(scene: JobScene, tmp_path: Path, point: str) -> None:
    job = Job(scene, tmp_path)
    assert job.run(f"{point}#2=kill") == -signal.SIGKILL
    job.run_to_the_end()
    scene.assert_holds(all_rows())


@pytest.mark.slow
@pytest.mark.parametrize("point", ["job_after_prepare", "job_after_commit"])
def test_a_kill_with_the_librdkafka_producer(postgres_scene: JobScene, tmp_path: Path, point: str) -> None:
    job = Job(postgres_scene, tmp_path, "librdkafka")
    assert job.run(f"{point}#2=kill") == -signal.SIGKILL
    job.run_to_the_end()
    postgres_scene.assert_holds(all_rows())


@pytest.mark.soak
def test_kills_at_random(postgres_scene: JobScene, tmp_path: Path) -> None:
    endless = Job(postgres_scene, tmp_path, batches=1_000_000)
    for kill in range(KILLS):
        at_work = tmp_path / f"at work {kill}"
        with endless.start(f"job_after_open#1=touch:{at_work}") as process:
            wait_for(at_work, process)
            time.sleep(random.uniform(0, 3))
            process.kill()
    batches = int(endless.log.read_text() or 0) + BATCHES
    job = Job(postgres_scene, tmp_path, batches=batches, done=batches - BATCHES)
    job.run_to_the_end()
    postgres_scene.assert_holds(all_rows(batches))


@pytest.mark.slow
@pytest.mark.parametrize("point", thinned(TASK_POINTS, kept=PAUSED_AT))
def test_a_zombie_that_wakes(postgres_scene: JobScene, tmp_path: Path, point: str) -> None:
    """A driver is paused in a task and replaced by the next one; then it continues."""
    replaced_while_paused(postgres_scene, tmp_path, point)
    postgres_scene.assert_holds(all_rows())


@pytest.mark.slow
@pytest.mark.parametrize("point", thinned(TASK_POINTS, kept=["job_after_fence"]))
def test_a_zombie_that_wakes_on_mariadb(mariadb_scene: JobScene, tmp_path: Path, point: str) -> None:
    """It may lock staged rows other than its own; the next cleanup after its end deletes them."""
    replaced_while_paused(mariadb_scene, tmp_path, point)
    mariadb_scene.assert_holds(all_rows(), may_be_staged=True)
    Job(mariadb_scene, tmp_path, batches=BATCHES + 1, done=BATCHES).run_to_the_end()
    mariadb_scene.assert_holds(all_rows(BATCHES + 1))


def replaced_while_paused(scene: JobScene, folder: Path, point: str, *, nth: int = 2) -> None:
    job = Job(scene, folder)
    with paused(job, point, folder, nth=nth) as zombie:
        job.run_to_the_end()
        zombie.send_signal(signal.SIGCONT)
        ended(zombie)


@pytest.mark.slow
@pytest.mark.parametrize(
    "point",
    thinned(
        ["job_before_commit", "job_after_move", "job_after_commit", "recover_after_end_txn", "job_after_clear"],
        kept=["job_after_move", "job_after_commit"],  # before and after the decision
    ),
)
def test_a_zombie_that_wakes_in_commit(postgres_scene: JobScene, tmp_path: Path, point: str) -> None:
    replaced_while_paused(postgres_scene, tmp_path, point, nth=1)
    postgres_scene.assert_holds(all_rows())
