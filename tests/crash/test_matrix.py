"""Every failpoint, database and way to die: after recovery, a row is there if and only if its message is.

Each case is recovered by two processes at once and then once more, and then written on by a new writer.
"""

from __future__ import annotations

import pytest

from crash.cases import (
    LEFT,
    RECOVERY_CASES,
    WRITER_CASES,
    after_crash_at,
    crash_recovery,
    crash_writer,
    recovered,
)
from crash.databases import Databases
from dualwrite.devcluster import DevCluster


def _fast(database: str, way: str) -> bool:
    return database == "sqlite" and way == "kill"


def _marked(database: str, way: str, *more: str) -> pytest.param:
    marks = () if _fast(database, way) else (pytest.mark.slow,)
    return pytest.param(database, way, *more, marks=marks)


@pytest.mark.parametrize(("database", "way", "point"), [_marked(*c) for c in WRITER_CASES])
def test_a_writer_that_dies_leaves_both_sides_alike(
    databases: Databases, broker: DevCluster, database: str, way: str, point: str
) -> None:
    scene = databases.scene(database, broker)
    crash_writer(scene, point, way)
    recovered(scene, after_crash_at(point))


@pytest.mark.slow
@pytest.mark.parametrize(("database", "way", "left", "point"), RECOVERY_CASES)
def test_a_recovery_that_dies_leaves_the_next_one_to_finish(
    databases: Databases, broker: DevCluster, database: str, way: str, left: str, point: str
) -> None:
    scene = databases.scene(database, broker)
    crash_recovery(scene, left, point, way)
    recovered(scene, LEFT[left])
