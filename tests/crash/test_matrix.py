"""Every failpoint, database and way to die: after recovery, a row is there if and only if its message is.

Each case is recovered by two processes at once and then once more, and then written on by a new writer.
"""

from __future__ import annotations

import pytest

from crash.cases import (
    LEFT,
    OTHER_RECOVERY_CASES,
    OTHER_WRITER_CASES,
    RECOVERY_CASES,
    WRITER_CASES,
    Case,
    after_crash_at,
    crash_recovery,
    crash_writer,
    mostly_committed,
    recovered,
    with_producers,
)
from crash.databases import Databases
from dualwrite.devcluster import DevCluster


def _marked(case: Case) -> pytest.param:
    _, database, way, _ = case
    return pytest.param(*case, marks=() if (database, way) == ("sqlite", "kill") else (pytest.mark.slow,))


@pytest.mark.parametrize(
    ("producer", "database", "way", "point"), [_marked(case) for case in with_producers(WRITER_CASES, OTHER_WRITER_CASES)]
)
def test_a_writer_that_dies_leaves_both_sides_alike(
    databases: Databases, broker: DevCluster, database: str, way: str, point: str
) -> None:
    scene = databases.scene(database, broker)
    crash_writer(scene, point, way)
    recovered(scene, after_crash_at(point))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("producer", "database", "way", "left", "point"), mostly_committed(with_producers(RECOVERY_CASES, OTHER_RECOVERY_CASES))
)
def test_a_recovery_that_dies_leaves_the_next_one_to_finish(
    databases: Databases, broker: DevCluster, database: str, way: str, left: str, point: str
) -> None:
    scene = databases.scene(database, broker)
    crash_recovery(scene, left, point, way)
    recovered(scene, LEFT[left])
