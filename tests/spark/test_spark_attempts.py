"""Two attempts of a partition that run at once, and attempts that outlive their write: exactly one of them wins."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import psutil
import pytest
from driven_scene import DrivenScene, is_stopped
from spark_scene import LIMIT, SparkScene

from fixtures.pace import until
from spark.processes import Role

if TYPE_CHECKING:
    import pyarrow as pa

T = TypeVar("T")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SECOND_HOST = "127.0.0.2"


@pytest.mark.soak  # in CI: zombies of tasks in tests/jobs, and a worker of Spark that dies
@pytest.mark.parametrize("wakes", ["before the commit", "after the commit"])
def test_a_retried_stage(scene: SparkScene, spark_place: Path, wakes: str) -> None:
    """The shuffle files are missing when the third task reads them: the stage is rerun while the first task keeps running."""
    armed, shuffles = str(scene.failpoints), str(spark_place / "local")

    def take_away(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import glob  # noqa: PLC0415  (all of this is pickled by value for the workers)
        import os  # noqa: PLC0415

        from pyspark import TaskContext  # noqa: PLC0415

        context = TaskContext.get()
        assert context is not None
        rows = list(batches)
        if context.partitionId() == 1:
            while os.path.exists(armed):  # noqa: PTH110
                time.sleep(0.05)
            for path in glob.glob(f"{shuffles}/**/shuffle_*", recursive=True):  # noqa: PTH207
                os.unlink(path)  # noqa: PTH108
        yield from rows

    def write() -> None:
        frame = scene.orders(range(60)).repartition(3, "id")  # makes the session this thread's own, too
        scene.write(frame.mapInArrow(take_away, frame.schema))

    scene.spark.conf.set("spark.sql.adaptive.enabled", "false")
    scene.fail_at("job_after_batch", "stop")
    with ThreadPoolExecutor(1) as elsewhere:
        saved = elsewhere.submit(write)
        (stopped,) = poll(lambda: [one for one in psutil.Process().children(recursive=True) if is_stopped(one)], saved)
        if wakes == "before the commit":
            poll(lambda: ids_of_partition(scene, 0) == 2, saved)
            stopped.resume()
        saved.result(LIMIT)
    assert ids_of_partition(scene, 0) == 2
    scene.assert_holds(range(60))
    with contextlib.suppress(psutil.NoSuchProcess):
        stopped.resume()
    psutil.wait_procs([stopped], timeout=LIMIT)
    scene.assert_holds(range(60))


def poll(look: Callable[[], T], running: Future[None]) -> T:
    """Poll until there is a result, while the job runs."""

    def look_again() -> T:
        found = look()
        if not found and running.done():
            running.result()
        return found

    return until(look_again, "what is looked for", seconds=LIMIT, pause=0.05)


def ids_of_partition(scene: SparkScene, partition: int) -> int:
    """How many attempts of a partition have claimed an id in the run."""
    query = f"SELECT transactional_id FROM kafka_job_attempt WHERE transactional_id LIKE '{scene.name}.{partition}.%'"
    return len(scene.rows(query))


@pytest.mark.soak
def test_speculation(driven: DrivenScene) -> None:
    """A task that hangs gets a copy on another host, which wins; the first continues during the next micro-batches."""
    if not has_second_host():
        pytest.skip(f"{SECOND_HOST} can't be bound, and Spark copies a task to another host only")
    speculation = {
        "spark.cores.max": "2",
        "spark.executor.cores": "1",
        "spark.speculation": "true",
        "spark.speculation.interval": "100ms",
        "spark.speculation.minTaskRuntime": "100ms",
        "spark.speculation.multiplier": "1.0",
        "spark.speculation.quantile": "0.1",
        "spark.speculation.task.duration.threshold": "500ms",
        "spark.python.task.killTimeout": "60s",
    }
    ids = driven.add_files(5)
    with driven.stream_driver(2, master="standalone", spark=speculation) as job:
        driven.wait_for_micro_batches(job, 1)
        loser = driven.stopped_at(job, "job_after_batch")
        driven.wait_for_micro_batches(job, driven.micro_batches + 1)
        assert is_stopped(loser.process)
        loser.resume()
        psutil.wait_procs([loser.process], timeout=LIMIT)
        assert job.wait() == 0, job.output
    driven.assert_holds(ids)


def has_second_host() -> bool:
    with socket.socket() as probe:
        try:
            probe.bind((SECOND_HOST, 0))
        except OSError:
            return False
    return True


@pytest.mark.soak
def test_executors_of_their_own(driven: DrivenScene) -> None:
    """The commit runs in another process tree than the tasks; one executor dies."""
    ids = driven.add_files(3, rows=50)
    with driven.stream_driver(5, master="local-cluster[2,1,1024]") as job:
        driven.wait_for_micro_batches(job, 1)
        worker = driven.stopped_at(job, "job_after_prepare")
        executor = worker.process.parents()[1]  # behind the daemon
        assert executor.pid in {one.pid for one in job.processes(Role.EXECUTOR)}
        executor.kill()
        assert job.wait() == 0, job.output
    driven.assert_holds(ids)
