"""A job whose tasks or driver use a different Kafka cluster by mistake: nothing is lost."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from job_scene import JobScene

from dualwrite.devcluster import DevCluster
from dualwrite.errors import ClusterMismatchError
from dualwrite.jobs.job_recovery import recover_job
from dualwrite.testing import failpoints
from dualwrite.testing.failpoints import FailpointError

pytestmark = pytest.mark.slow

PARTS = [[1, 2], [3, 4]]


@pytest.fixture
def scene(sqlite_url: str, broker: DevCluster, new_name: Callable[[str], str]) -> Iterator[JobScene]:
    made = JobScene(sqlite_url, broker.bootstrap_servers, new_name("job"))
    yield made
    made.close()


@pytest.fixture
def elsewhere(scene: JobScene, other_broker: DevCluster) -> Iterator[JobScene]:
    """The same job with the other cluster's address."""
    made = JobScene(scene.url, other_broker.bootstrap_servers, scene.prefix)
    yield made
    made.close()


def test_a_driver_on_another_cluster_commits_nothing(scene: JobScene, elsewhere: JobScene) -> None:
    run = scene.run()
    outcomes = scene.write(run, PARTS)
    with pytest.raises(ClusterMismatchError):
        elsewhere.commit(outcomes)
    assert scene.table() == []
    assert scene.commit(outcomes) == 4
    scene.assert_holds([1, 2, 3, 4])


def test_a_decided_batch_is_completed_on_its_own_cluster_only(scene: JobScene, elsewhere: JobScene) -> None:
    outcomes = scene.write(scene.run(), PARTS)
    dies = failpoints.armed("job_after_commit", failpoints.raises(FailpointError("dead")))
    with dies, pytest.raises(FailpointError):
        scene.commit(outcomes)
    with elsewhere.site.opened() as opened, pytest.raises(ClusterMismatchError):
        recover_job(opened, elsewhere.prefix)
    with scene.site.opened() as opened:
        report = recover_job(opened, scene.prefix)
    assert report is not None
    assert report.ok
    scene.assert_holds([1, 2, 3, 4])


def test_a_task_on_another_cluster_opens_no_run(scene: JobScene, elsewhere: JobScene) -> None:
    scene.commit(scene.write(scene.run(), PARTS))
    rows = [scene.store.read(name) for name in scene.store.list()]
    with pytest.raises(ClusterMismatchError):
        elsewhere.write(elsewhere.run(1), [[5], [6]])
    assert [scene.store.read(name) for name in scene.store.list()] == rows
    scene.commit(scene.write(scene.run(1), [[5], [6]]))
    scene.assert_holds([1, 2, 3, 4, 5, 6])
