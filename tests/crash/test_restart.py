"""The crash matrix with the broker killed and started again between the crash and the recovery.

All crashes come first, then one restart, then all recoveries, each by two processes at once. On one database, since the kind of
database makes no difference.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

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

RECOVERING = [*RECOVERY_POINTS, *OPENING_POINTS]
RECOVERY_STEPS = list(product(LEFT, RECOVERING))
KEPT_STEPS = [*product(["after_db_commit"], RECOVERING), *product(["after_prepare"], RECOVERING[1::3])]
"""Steps that are not only for soak runs; test_matrix has all of them, without a restart."""

Crashed = dict[str | tuple[str, str], Scene]


def soaks(session: pytest.Session) -> bool:
    """Whether any test of this module that is left to soak runs is run."""
    return any(item.path == Path(__file__) and item.get_closest_marker("soak") for item in session.items)


@pytest.fixture(scope="module", params=thinned(PRODUCERS, kept=["native"]))
def restarted(request: pytest.FixtureRequest, databases: Databases) -> Iterator[Crashed]:
    """A scene for each step of this run, with a writer that died there; then the broker was killed and restarted."""
    steps = [step for step in RECOVERY_STEPS if step in KEPT_STEPS or soaks(request.session)]
    with DevCluster.temporary() as cluster, ThreadPoolExecutor(3) as pool:
        by = {"DUALWRITE_PRODUCER": str(request.param)}
        scenes: Crashed = {step: databases.scene("postgresql", cluster) for step in [*WRITER_POINTS, *steps]}
        crashes = [pool.submit(crash_writer, scenes[point], point, **by) for point in WRITER_POINTS]
        crashes += [pool.submit(crash_recovery, scenes[step], *step, **by) for step in steps]
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


@pytest.mark.parametrize(("left", "point"), thinned(RECOVERY_STEPS, kept=KEPT_STEPS))
def test_a_dead_recovery_is_finished_after_a_restart_of_the_broker(restarted: Crashed, left: str, point: str) -> None:
    scene = restarted[left, point]
    for report in scene.recover_twice_at_once():
        assert report["error"] is None
    assert scene.agree() == LEFT[left]
