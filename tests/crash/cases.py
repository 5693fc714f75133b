"""The cases of the crash matrix: where a process dies, how, and what must be there afterwards."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from typing import Any

from crash.databases import DATABASES, OTHER_DATABASES
from crash.scene import Scene
from fixtures.tiers import thinned

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
OPENING_POINTS = ["before_take_over", "after_take_over"]
LEFT = {"after_prepare": [1], "after_db_commit": [1, 2]}
_ALWAYS_RUN = [("native", "postgresql"), ("native", "sqlite")]

Case = tuple[str, ...]


def with_producers(both: Iterable[Case], native: Iterable[Case]) -> list[Case]:
    """Each of `both` with either producer, and `native` with our own: what a store does is the same for all producers."""
    return [(producer, *case) for case in both for producer in ("librdkafka", "native")] + [
        ("native", *case) for case in native
    ]


def mostly_committed(recoveries: list[Case]) -> list[Any]:
    """The cases of recoveries for `parametrize`: with another database or producer, those of an abort only by `-m soak`."""
    kept = [case for case in recoveries if "after_db_commit" in case or case[:2] in _ALWAYS_RUN]
    return thinned(recoveries, kept=kept)


def crash_writer(scene: Scene, point: str, way: str) -> None:
    worker = scene.write(1, 3, f"{point}#2={way}")
    assert worker.end() == WAYS[way], f"{worker.lines} {worker.errors[-2000:]}"
    assert worker.last() == "begin 2"


def crash_recovery(scene: Scene, left: str, point: str, way: str) -> None:
    crash_writer(scene, left, "kill")
    worker = scene.write(3, 1, f"{point}={way}") if point in OPENING_POINTS else scene.recovery(f"{point}={way}")
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


_DEATHS = [*product(DATABASES, ["kill"]), ("sqlite", "exit")]  # to a database both are a connection that is gone
WRITER_CASES = [(*death, point) for death, point in product(_DEATHS, WRITER_POINTS)]
RECOVERY_CASES = [(*death, *more) for death, *more in product(_DEATHS, LEFT, [*RECOVERY_POINTS, *OPENING_POINTS])]
OTHER_WRITER_CASES = list(product(OTHER_DATABASES, ["kill"], WRITER_POINTS))
OTHER_RECOVERY_CASES = list(product(OTHER_DATABASES, ["kill"], LEFT, [*RECOVERY_POINTS, *OPENING_POINTS]))
