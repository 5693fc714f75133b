"""The steps at which a process dies or is paused, by the names of the failpoints, and the expected results."""

from __future__ import annotations

from itertools import product

from crash.scene import Scene
from dualwrite.failpoints import NAMES

JOB_POINTS = tuple(name for name in NAMES if name.startswith("job_"))
"""Failpoints that only jobs pass."""

PRODUCERS = ("librdkafka", "native")

OPENING_POINTS = tuple(name for name in NAMES if name.endswith("_take_over"))
"""Reached by a writer that opens, after those of recovery."""
RECOVERY_POINTS = tuple(name for name in NAMES if name.startswith("recover_"))
REPUBLISH_POINTS = tuple(name for name in NAMES if name.startswith("republish_"))
"""Reached only where lost messages are published again."""
GROUP_POINTS = tuple(name for name in NAMES if name.startswith("group_"))
"""Reached only by the groups of a pool."""
JOURNAL_POINTS = tuple(name for name in NAMES if name.startswith("journal_"))
"""Reached only while Kafka is down, or by what empties the journal then: tests/journal/test_chaos.py."""
_OF_POOLS = (*GROUP_POINTS, *JOURNAL_POINTS)
_OTHERS = (*RECOVERY_POINTS, *OPENING_POINTS, *REPUBLISH_POINTS, *_OF_POOLS, *JOB_POINTS)
WRITER_POINTS = tuple(name for name in NAMES if name not in _OTHERS)
"""Reached by a transaction, in this order."""

PAST_COMMIT_POINT = WRITER_POINTS[WRITER_POINTS.index("after_db_commit") :]
BEFORE_COMMIT_POINT = WRITER_POINTS[: WRITER_POINTS.index("after_db_commit")]
ROW_LOCKED = BEFORE_COMMIT_POINT[WRITER_POINTS.index("after_record") :]
"""Where a writer holds its row's lock, in databases that have locks."""
ROW_NOT_LOCKED = BEFORE_COMMIT_POINT[: WRITER_POINTS.index("after_record")]

LEFT = {"after_prepare": [1], "after_db_commit": [1, 2]}
"""States that recovery finds, by where a writer died in its second transaction, and the events that must exist in the end."""


def crash_writer(scene: Scene, point: str, **environment: str) -> None:
    """Let a writer die at the point in its second transaction."""
    worker = scene.write(1, 3, f"{point}#2=kill", **environment)
    worker.killed()
    assert worker.last() == "begin 2"


def crash_recovery(scene: Scene, left: str, point: str, **environment: str) -> None:
    """Let a writer die, and then the process that recovers its id die at the point."""
    crash_writer(scene, left, **environment)
    failpoints = f"{point}=kill"
    opens = point in OPENING_POINTS
    worker = scene.write(3, 1, failpoints, **environment) if opens else scene.recovery(failpoints, **environment)
    worker.killed()


def recovered(scene: Scene, expected: list[int]) -> None:
    """Recover in two processes at once, and again; then continue writing."""
    for report in scene.recover_twice_at_once():
        assert report["error"] is None, report["error"]
        assert report["unacknowledged"] == [], report
    assert scene.agree() == expected
    again = scene.recover()
    assert (again["outcomes"], again["error"]) == ([], None)
    scene.write_here(9)
    assert scene.agree() == [*expected, 9]


def writer_dies(scene: Scene, point: str) -> None:
    """A writer dies at the point, and is recovered."""
    crash_writer(scene, point)
    recovered(scene, after_crash_at(point))


def recovery_dies(scene: Scene, left: str, point: str) -> None:
    """Recovery of what a writer left dies at the point, and the next one ends it."""
    crash_recovery(scene, left, point)
    recovered(scene, LEFT[left])


def recovery_steps(*, aborts_by_registering: bool = False) -> list[tuple[str, str]]:
    """What a writer left, and where its recovery dies.

    Args:
        aborts_by_registering: Whether recovery aborts by InitProducerId, so that nothing dies after its EndTxn: before 4.0.
    """
    never = [("after_prepare", "recover_after_end_txn")] if aborts_by_registering else []
    return [case for case in product(LEFT, (*RECOVERY_POINTS, *OPENING_POINTS)) if case not in never]


def after_crash_at(point: str) -> list[int]:
    return [1] if point in BEFORE_COMMIT_POINT else [1, 2]
