"""The crash matrix with the broker killed and started again between the crash and the recovery.

All crashes come first, then one restart, then all recoveries, each by two processes at once. On one database, since the kind of
database makes no difference.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import product

import pytest

from crash.cases import (
    LEFT,
    OPENING_POINTS,
    PRODUCERS,
    RECOVERY_POINTS,
    WRITER_POINTS,
    after_crash_at,
    crash_recovery,
    crash_writer,
)
from crash.databases import Databases
from crash.scene import Scene
from dualwrite.devcluster import DevCluster
from fixtures.broker import wait_for_markers
from fixtures.tiers import thinned

pytestmark = pytest.mark.slow

RECOVERY_STEPS = list(product(LEFT, [*RECOVERY_POINTS, *OPENING_POINTS]))

Crashed = dict[str | tuple[str, str], Scene]


@pytest.fixture(scope="module", params=thinned(PRODUCERS, kept=["native"]))
def restarted(request: pytest.FixtureRequest, databases: Databases) -> Iterator[Crashed]:
    """A scene for each step, with a writer that died there; then the broker was killed and restarted."""
    with DevCluster.temporary() as cluster, ThreadPoolExecutor(3) as pool:
        by = {"DUALWRITE_PRODUCER": str(request.param)}
        scenes: Crashed = {step: databases.scene("postgresql", cluster) for step in [*WRITER_POINTS, *RECOVERY_STEPS]}
        crashes = [pool.submit(crash_writer, scenes[point], point, **by) for point in WRITER_POINTS]
        crashes += [pool.submit(crash_recovery, scenes[step], *step, **by) for step in RECOVERY_STEPS]
        for crash in crashes:
            crash.result()
        wait_for_markers(cluster.bootstrap_servers)  # or else the broker may omit them: rule FB
        cluster.kill(1)
        cluster.start(1)
        yield scenes


@pytest.mark.parametrize("point", WRITER_POINTS)
def test_a_dead_writer_is_recovered_after_a_restart_of_the_broker(restarted: Crashed, point: str) -> None:
    scene = restarted[point]
    for report in scene.recover_twice_at_once():
        assert report["error"] is None
    assert scene.agree() == after_crash_at(point)


@pytest.mark.parametrize(("left", "point"), RECOVERY_STEPS)
def test_a_dead_recovery_is_finished_after_a_restart_of_the_broker(restarted: Crashed, left: str, point: str) -> None:
    scene = restarted[left, point]
    for report in scene.recover_twice_at_once():
        assert report["error"] is None
    assert scene.agree() == LEFT[left]
