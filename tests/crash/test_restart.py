"""The crash matrix with the broker killed and started again between the crash and the recovery.

All crashes come first, then one restart, then all recoveries, each by two processes at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from crash.cases import LEFT, RECOVERY_CASES, WRITER_CASES, after_crash_at, crash_recovery, crash_writer
from crash.databases import Databases
from crash.scene import Scene
from dualwrite.devcluster import DevCluster
from fixtures.broker import wait_for_markers
from fixtures.tiers import thinned

pytestmark = pytest.mark.slow


@pytest.fixture
def producer() -> str:
    """Of no meaning here: the writers are those of `restarted`, and recovery is the same for all."""
    return "auto"


@pytest.fixture(scope="module", params=thinned(["librdkafka", "native"], kept=["native"]))
def restarted(request: pytest.FixtureRequest, databases: Databases) -> Iterator[dict[tuple[str, ...], Scene]]:
    with DevCluster.temporary() as cluster, ThreadPoolExecutor(3) as pool, pytest.MonkeyPatch.context() as patch:
        patch.setenv("DUALWRITE_PRODUCER", request.param)
        scenes = {case: databases.scene(case[0], cluster) for case in [*WRITER_CASES, *RECOVERY_CASES]}
        crashes = [pool.submit(crash_writer, scenes[c], c[2], c[1]) for c in WRITER_CASES]
        crashes += [pool.submit(crash_recovery, scenes[c], c[2], c[3], c[1]) for c in RECOVERY_CASES]
        for crash in crashes:
            crash.result()
        wait_for_markers(cluster.bootstrap_servers)  # later the broker may leave them out, see README, further limits
        cluster.kill(1)
        cluster.start(1)
        yield scenes


@pytest.mark.parametrize("case", WRITER_CASES, ids="-".join)
def test_a_dead_writer_is_recovered_after_a_restart_of_the_broker(
    restarted: dict[tuple[str, ...], Scene], case: tuple[str, ...]
) -> None:
    scene = restarted[case]
    for report in scene.recover_twice_at_once():
        assert report["error"] is None
    assert scene.agree() == after_crash_at(case[2])


@pytest.mark.parametrize("case", RECOVERY_CASES, ids="-".join)
def test_a_dead_recovery_is_finished_after_a_restart_of_the_broker(
    restarted: dict[tuple[str, ...], Scene], case: tuple[str, ...]
) -> None:
    scene = restarted[case]
    for report in scene.recover_twice_at_once():
        assert report["error"] is None
    assert scene.agree() == LEFT[case[2]]
