"""Two attempts of a partition that run at once, and attempts that outlive their write: exactly one of them wins."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import psutil
import pytest
from driven_scene import DrivenScene, is_stopped, wait_for_stopped
from spark_scene import LIMIT, SparkScene

from dualwrite.devcluster import DevCluster
from dualwrite.testing.failpoints import ENVIRONMENT_VARIABLE
from fixtures.pace import until
from fixtures.tiers import thinned
from spark.job import SparkJob
from spark.processes import Role

if TYPE_CHECKING:
    import pyarrow as pa

T = TypeVar("T")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

BATCH_DRIVER = Path(__file__).with_name("batch_driver.py")
SECOND_HOST = "127.0.0.2"


class BatchScene(DrivenScene):
    """A driver that writes one batch after another, on request."""

    @contextmanager
    def batches(self, master: str, settings: Mapping[str, str] | None = None) -> Iterator[Batches]:
        place = self.place / "batches"
        place.mkdir()
        executors = {
            "spark.executorEnv.PYTHONPATH": str(BATCH_DRIVER.parents[1]),
            f"spark.executorEnv.{ENVIRONMENT_VARIABLE}": self.environment[ENVIRONMENT_VARIABLE],
        }
        told = {"place": str(place), "master": master, "spark": {**executors, **(settings or {})}, "options": self.options}
        (place / "settings").write_text(json.dumps(told))
        with SparkJob(BATCH_DRIVER, [place / "settings"], environment=self.environment) as job:
            job.wait_for("open")
            yield Batches(job, place)


class Batches:
    """The running driver.

    Args:
        job: Its processes.
        place: The folder in which it looks for requests.
    """

    def __init__(self, job: SparkJob, place: Path) -> None:
        self.job, self._place = job, place
        self._count = 0

    def start(self, ids: range, *, partitions: int = 2) -> str:
        """Start a write; return its number."""
        number = self._count
        self._count += 1
        hidden = self._place / "hidden"
        hidden.write_text(json.dumps({"first": ids.start, "last": ids.stop, "partitions": partitions}))
        hidden.rename(self._place / f"write-{number}")
        return str(number)

    def write(self, ids: range, **how: Any) -> None:
        """Write, and wait for the end of the write."""
        self.job.wait_for(f"saved {self.start(ids, **how)}")

    def end(self) -> None:
        (self._place / "end").touch()
        assert self.job.wait() == 0, self.job.output


@pytest.fixture
def driven(
    postgres_url: str, broker: DevCluster, new_name: Callable[[str], str], tmp_path: Path, spark_environment: dict[str, str]
) -> Iterator[BatchScene]:
    made = BatchScene(postgres_url, broker.bootstrap_servers, new_name("spark"), tmp_path, spark_environment)
    yield made
    made.close()


@pytest.mark.parametrize("wakes", thinned(["before the commit", "after the commit"], kept=["after the commit"]))
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
def test_speculation(driven: BatchScene) -> None:
    """A task that hangs gets a copy on another host, which wins; the first continues when everything is done."""
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
    with driven.batches("standalone", speculation) as batches:
        batches.write(range(10))
        driven.fail_at("job_after_batch", "stop")
        number = batches.start(range(10, 30))
        loser = wait_for_stopped(batches.job)
        batches.job.wait_for(f"saved {number}")
        assert is_stopped(loser.process)
        driven.assert_holds(range(30))
        loser.resume()
        psutil.wait_procs([loser.process], timeout=LIMIT)
        driven.assert_holds(range(30))
        batches.write(range(30, 40))
        batches.end()
    driven.assert_holds(range(40))


def has_second_host() -> bool:
    with socket.socket() as probe:
        try:
            probe.bind((SECOND_HOST, 0))
        except OSError:
            return False
    return True


@pytest.mark.soak
def test_executors_of_their_own(driven: BatchScene) -> None:
    """The commit runs in another process tree than the tasks; one executor dies."""
    with driven.batches("local-cluster[2,1,1024]") as batches:
        batches.write(range(100), partitions=5)
        driven.fail_at("job_after_prepare", "stop")
        number = batches.start(range(100, 200), partitions=5)
        worker = wait_for_stopped(batches.job)
        executor = worker.process.parents()[1]  # behind the daemon
        assert executor.pid in {one.pid for one in batches.job.processes(Role.EXECUTOR)}
        executor.kill()
        batches.job.wait_for(f"saved {number}")
        batches.end()
    driven.assert_holds(range(200))
