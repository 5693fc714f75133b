"""A stream's driver dies, as a whole or in part, at steps of the protocol and is restarted, or is paused and resumes late."""

from __future__ import annotations

from typing import TYPE_CHECKING

import psutil
import pytest
from driven_scene import DrivenScene, is_stopped, wait_until
from spark_scene import LIMIT

from fixtures.tiers import thinned
from spark.processes import Role

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.mark.parametrize(
    ("dies", "point"),
    thinned(
        [
            (Role.JVM, "job_after_prepare"),
            (Role.JVM, "job_after_move"),
            (Role.JVM, "job_after_commit"),
            (None, "job_after_commit"),
            (None, "recover_after_end_txn"),
            (Role.DRIVER, "job_after_prepare"),
            (Role.DRIVER, "job_after_commit"),
        ],
        kept=[(None, "job_after_commit")],
    ),
    ids=lambda part: "all" if part is None else str(part),
)
def test_a_driver_that_dies(driven: DrivenScene, spark: SparkSession, dies: Role | None, point: str) -> None:
    ids = driven.add_files(3)
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
@pytest.mark.parametrize("point", ["job_before_staged", "job_after_prepare", "job_after_move", "recover_after_end_txn"])
def test_a_paused_driver_that_resumes_late(driven: DrivenScene, spark: SparkSession, point: str) -> None:
    """All its processes are paused, as on a suspended machine; another driver has done everything when it resumes."""
    ids = driven.add_files(4)
    with driven.stream_driver() as asleep:
        driven.wait_for_micro_batches(asleep, 1)
        driven.stopped_at(asleep, point)
        for process in asleep.processes():
            process.pause()
        driven.stream_to_the_end(spark)
        driven.assert_holds(ids)
        for process in asleep.processes():
            process.resume()
        asleep.wait()
    driven.assert_holds(ids)


@pytest.mark.soak
@pytest.mark.parametrize("point", ["job_after_claim", "job_after_prepare", "job_before_commit", "job_after_commit"])
def test_an_orphaned_worker_that_resumes_late(driven: DrivenScene, spark: SparkSession, point: str) -> None:
    """The worker outlives its JVM, since the daemon that would have ended it is killed first."""
    ids = driven.add_files(4)
    with driven.stream_driver() as job:
        driven.wait_for_micro_batches(job, 1)
        driven.fail_at(point, "sleep:8")
        wait_until(lambda: driven.has_failed, job, point)
        daemons = [one.process for one in job.processes(Role.DAEMON)]
        job.kill(Role.DAEMON)
        psutil.wait_procs(daemons, timeout=LIMIT)  # when it dies, the kernel sends SIGHUP to stopped processes of its group
        orphans = [one for one in job.processes() if one.role in (Role.TASK, Role.COMMIT)]
        for orphan in orphans:
            orphan.pause()
        job.kill(Role.JVM)
        job.process.wait(LIMIT)
        assert any(is_stopped(orphan.process) for orphan in orphans)
        driven.stream_to_the_end(spark)
        driven.assert_holds(ids)
        for orphan in orphans:
            orphan.resume()
        _, alive = psutil.wait_procs([orphan.process for orphan in orphans], timeout=LIMIT)
        assert alive == []
    driven.assert_holds(ids)
