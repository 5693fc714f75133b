"""Every failpoint, database and way to die: after recovery, a row is there if and only if its message is.

Each case is recovered by two processes at once and then once more, and then written on by a new writer. Each case also
with the broker restarted between the crash and the recovery.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import product

import pytest

from crash.databases import DATABASES, Databases
from crash.scene import Scene
from dualwrite.devcluster import DevCluster

WAYS = {"exit": 70, "kill": -9}
BEFORE_COMMIT_POINT = ["after_begin", "after_send", "after_prepare", "after_record", "before_db_commit"]
PAST_COMMIT_POINT = ["after_db_commit", "before_kafka_commit", "after_kafka_commit"]
WRITER_POINTS = BEFORE_COMMIT_POINT + PAST_COMMIT_POINT
RECOVERY_POINTS = [
    "recover_after_claim",
    "recover_after_describe",
    "recover_after_decision",
    "recover_after_end_txn",
    "recover_after_settle",
]
LEFT = {"after_prepare": [1], "after_db_commit": [1, 2]}


def crash_writer(scene: Scene, point: str, way: str) -> None:
    worker = scene.write(1, 3, f"{point}#2={way}")
    assert worker.end() == WAYS[way], f"{worker.lines} {worker.errors[-2000:]}"
    assert worker.last() == "begin 2"


def crash_recovery(scene: Scene, left: str, point: str, way: str) -> None:
    crash_writer(scene, left, "kill")
    worker = scene.write(3, 1, f"{point}={way}") if point == "before_take_over" else scene.recovery(f"{point}={way}")
    assert worker.end() == WAYS[way], f"{worker.lines} {worker.errors[-2000:]}"


def recovered(scene: Scene, expected: list[int]) -> None:
    """Recover by two processes at once, and again; then write on."""
    for report in scene.recover_twice_at_once():
        assert report["error"] is None
        assert report["unacknowledged"] == []
    assert scene.agree() == expected
    again = scene.recover()
    assert (again["outcomes"], again["error"]) == ([], None)
    scene.write_here(9)
    assert scene.agree() == [*expected, 9]


def after_crash_at(point: str) -> list[int]:
    return [1] if point in BEFORE_COMMIT_POINT else [1, 2]


# --- the broker stays up ------------------------------------------------------------------------------------------------


def _fast(database: str, way: str) -> bool:
    return database == "sqlite" and way == "kill"


def _marked(database: str, way: str, *more: str) -> pytest.param:
    marks = () if _fast(database, way) else (pytest.mark.slow,)
    return pytest.param(database, way, *more, marks=marks)


@pytest.mark.parametrize(("database", "way", "point"), [_marked(*c) for c in product(DATABASES, WAYS, WRITER_POINTS)])
def test_a_writer_that_dies_leaves_both_sides_alike(
    databases: Databases, broker: DevCluster, database: str, way: str, point: str
) -> None:
    scene = databases.scene(database, broker)
    crash_writer(scene, point, way)
    recovered(scene, after_crash_at(point))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("database", "way", "left", "point"),
    list(product(DATABASES, WAYS, LEFT, [*RECOVERY_POINTS, "before_take_over"])),
)
def test_a_recovery_that_dies_leaves_the_next_one_to_finish(
    databases: Databases, broker: DevCluster, database: str, way: str, left: str, point: str
) -> None:
    scene = databases.scene(database, broker)
    crash_recovery(scene, left, point, way)
    recovered(scene, LEFT[left])


# --- the broker is restarted between crash and recovery: all crashes first, one restart, then all recoveries ----------------

WRITER_CASES = list(product(DATABASES, WAYS, WRITER_POINTS))
RECOVERY_CASES = list(product(DATABASES, WAYS, LEFT, [*RECOVERY_POINTS, "before_take_over"]))


@pytest.fixture(scope="module")
def restarted(databases: Databases) -> Iterator[dict[tuple[str, ...], Scene]]:
    with DevCluster.temporary() as cluster, ThreadPoolExecutor(3) as pool:
        scenes = {case: databases.scene(case[0], cluster) for case in [*WRITER_CASES, *RECOVERY_CASES]}
        crashes = [pool.submit(crash_writer, scenes[c], c[2], c[1]) for c in WRITER_CASES]
        crashes += [pool.submit(crash_recovery, scenes[c], c[2], c[3], c[1]) for c in RECOVERY_CASES]
        for crash in crashes:
            crash.result()
        cluster.kill(1)
        cluster.start(1)
        yield scenes


@pytest.mark.slow
@pytest.mark.parametrize("case", WRITER_CASES, ids="-".join)
def test_a_dead_writer_is_recovered_after_a_restart_of_the_broker(
    restarted: dict[tuple[str, ...], Scene], case: tuple[str, ...]
) -> None:
    scene = restarted[case]
    for report in scene.recover_twice_at_once():
        assert report["error"] is None
    assert scene.agree() == after_crash_at(case[2])


@pytest.mark.slow
@pytest.mark.parametrize("case", RECOVERY_CASES, ids="-".join)
def test_a_dead_recovery_is_finished_after_a_restart_of_the_broker(
    restarted: dict[tuple[str, ...], Scene], case: tuple[str, ...]
) -> None:
    scene = restarted[case]
    for report in scene.recover_twice_at_once():
        assert report["error"] is None
    assert scene.agree() == LEFT[case[2]]
