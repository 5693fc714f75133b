"""A process is stopped at each failpoint (SIGSTOP), another takes over its id and commits, then the first continues (SIGCONT).

The first process fails with FencedError, or reports "in doubt" if it can't know; neither data nor messages change. Only one
process can open a RocksDB database: there a thread is paused in place of a process.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterable, Sequence
from itertools import cycle, product
from typing import Any

import pytest
import sqlalchemy as sa

import dualwrite
from crash.cases import (
    BEFORE_COMMIT_POINT,
    LEFT,
    OPENING_POINTS,
    PAST_COMMIT_POINT,
    PRODUCERS,
    RECOVERY_POINTS,
    ROW_LOCKED,
    ROW_NOT_LOCKED,
    crash_writer,
)
from crash.databases import Databases
from crash.scene import Scene, Worker
from dualwrite.devcluster import DevCluster
from dualwrite.testing import failpoints
from fixtures.pace import happened, joined
from fixtures.tiers import thinned

OPENING = [*RECOVERY_POINTS, *OPENING_POINTS]


class ZombieThread(threading.Thread):
    """Writes events with its own writer, with the interface and the lines of a Worker, and pauses at a failpoint.

    Args:
        scene: The scene.
        first: The first of three events.
        point: The failpoint.
        armed_at: The event in which it pauses; None: when it opens.
    """

    def __init__(self, scene: Scene, first: int, point: str, armed_at: int | None) -> None:
        super().__init__(daemon=True)
        self._scene, self._first, self._point, self._armed_at = scene, first, point, armed_at
        self._is_armed = armed_at is None
        self._paused, self._woken = threading.Event(), threading.Event()
        self._code = 0
        self.lines: list[str] = []
        self.start()

    def run(self) -> None:
        try:
            with failpoints.armed(self._point, self._pause), self._scene.connect() as writer:
                for number in range(self._first, self._first + 3):
                    self.lines.append(f"begin {number}")
                    self._is_armed = number == self._armed_at
                    self._scene.event(writer, number)
                    self.lines.append(f"done {number}")
            self.lines.append("closed")
        except dualwrite.DualWriteError as error:
            self.lines.append(f"error {type(error).__name__} {error.facts.get('database_committed')}")
            self._code = 1

    def _pause(self) -> None:
        if threading.current_thread() is self and self._is_armed and not self._paused.is_set():
            self._paused.set()
            happened(self._woken)

    def wait_until_stopped(self) -> None:
        happened(self._paused, lambda: f"it pauses: {self.lines}")

    def resume(self) -> None:
        self._woken.set()

    def end(self) -> int:
        joined(self)
        return self._code


Zombie = Worker | ZombieThread


def stopped(scene: Scene, point: str, *, first: int = 1, opens: bool = False) -> Zombie:
    """A writer that has stopped in its second transaction, or while it opens."""
    zombie: Zombie
    if scene.events.one_process:
        zombie = ZombieThread(scene, first, point, None if opens else first + 1)
    else:  # each lane that opens reaches the point, before what they ask for next is sent together
        zombie = scene.write(first, 3, f"{point}#{1 if opens else 2}=stop")
        if not opens:
            zombie.wait_for(f"begin {first + 1}")
    zombie.wait_until_stopped()
    return zombie


def woken(zombie: Zombie) -> tuple[int, list[str]]:
    zombie.resume()
    code = zombie.end()
    return code, zombie.lines


def with_producers(databases: list[str], points: Iterable[str], producers: Iterable[str] = PRODUCERS) -> Any:
    """Each point on each database, with both producers.

    Without soak: all points with the native producer on PostgreSQL; one point, each time the next, with librdkafka there and
    with the native producer on each of the other databases. A single database has the last point before the COMMIT.
    """
    points = list(points)
    cases = [(name, *case) for name in producers for case in product(databases, points)]
    kept = [case for case in cases if case[:2] == ("native", "postgresql")]
    if len(databases) == 1:
        kept += [case for case in cases if case[0] == "native" and case[-1] == points[-1] and case not in kept]
    else:
        others = [("librdkafka" if name == "postgresql" else "native", name) for name in databases]
        kept += [(*other, point) for other, point in zip(others, cycle(points), strict=False)]
    quick = [case for case in kept if case[:2] == ("native", "postgresql")][-1:]
    tiers = thinned(cases, kept=kept, quick=quick)
    return pytest.mark.parametrize(("producer", "database", "point"), tiers, indirect=["producer"])


def with_what_is_left(databases: list[str], points: Sequence[str], kept: Iterable[tuple[str, str, str, str]]) -> Any:
    """Each point on each database, for each state that recovery can find, with both producers; without soak those in `kept`."""
    cases = [(name, *case) for name in PRODUCERS for case in product(databases, LEFT, points)]
    return pytest.mark.parametrize(("producer", "database", "left", "point"), thinned(cases, kept=kept), indirect=["producer"])


@pytest.mark.slow
@with_producers(["postgresql", "mariadb", "zookeeper", "rocksdb"], ROW_NOT_LOCKED)
def test_a_writer_stopped_where_it_holds_no_lock_is_fenced(
    databases: Databases, broker: DevCluster, database: str, producer: str, point: str
) -> None:
    fenced_before_the_commit_point(databases.scene(database, broker), point)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("producer", "database", "point"),
    thinned(
        product(PRODUCERS, ["zookeeper", "rocksdb"], ROW_LOCKED),
        kept=[("native", "zookeeper", ROW_LOCKED[-1]), *product(["native"], ["rocksdb"], ROW_LOCKED)],
    ),
    indirect=["producer"],
)
def test_a_database_without_locks(databases: Databases, broker: DevCluster, database: str, producer: str, point: str) -> None:
    """What the commit is conditional on has changed."""
    fenced_before_the_commit_point(databases.scene(database, broker), point)


def fenced_before_the_commit_point(scene: Scene, point: str) -> None:
    zombie = stopped(scene, point)
    scene.write_here(100)
    assert scene.agree() == [1, 100]
    code, lines = woken(zombie)
    assert (code, lines[-1].split()[:2]) == (1, ["error", "FencedError"]), lines
    scene.assert_continues([1, 100], 101)


@pytest.mark.slow
@with_producers(["postgresql"], ROW_LOCKED, producers=["native"])
def test_postgresql_locks_the_row_only_in_the_commit(
    databases: Databases, broker: DevCluster, database: str, producer: str, point: str
) -> None:
    """Under two-phase commit the record is sent with the COMMIT: a process that stops before it blocks no other."""
    fenced_before_the_commit_point(databases.scene(database, broker), point)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("producer", "database", "point"),
    thinned(
        [*product(["librdkafka"], ["postgresql"], ROW_LOCKED), *product(PRODUCERS, ["mariadb"], ROW_LOCKED)],
        kept=[("librdkafka", "postgresql", ROW_LOCKED[-1]), ("native", "mariadb", ROW_LOCKED[0])],
    ),
    indirect=["producer"],
)
def test_a_writer_stopped_with_its_row_locked_is_named_ended_and_left_in_doubt(
    databases: Databases, broker: DevCluster, database: str, producer: str, point: str
) -> None:
    scene = databases.scene(database, broker)
    zombie = stopped(scene, point)
    waiting = scene.write(100, 1, CLAIM_TIMEOUT="0.5")
    assert waiting.end() == 1
    assert waiting.last().startswith("error ClaimTimeoutError")
    with scene.engine.connect() as connection:
        if database == "postgresql":
            advised = re.search(r"SELECT pg_terminate_backend\(\d+\)", waiting.last())
            assert advised is not None, waiting.last()
            connection.execute(sa.text(advised[0]))
        else:  # as docs/troubleshooting.md says
            (holder,) = connection.scalars(sa.text("SELECT trx_mysql_thread_id FROM information_schema.INNODB_TRX")).all()
            connection.exec_driver_sql(f"KILL {holder}")
    scene.write_here(100)
    assert scene.agree() == [1, 100]
    code, lines = woken(zombie)
    # Stopped at before_db_commit, it sends COMMIT over a dead connection: it can't know, and must not report "rolled back".
    assert (code, lines[-1].split()[:2]) == (1, ["error", "InDoubtTransactionError"]), lines
    assert scene.agree() == [1, 100]


@with_producers(["sqlite", "postgresql", "mariadb", "zookeeper", "rocksdb"], PAST_COMMIT_POINT)
def test_a_writer_stopped_past_its_commit_point_learns_that_it_committed_and_is_fenced(
    databases: Databases, broker: DevCluster, producer: str, database: str, point: str
) -> None:
    scene = databases.scene(database, broker)
    zombie = stopped(scene, point)
    scene.write_here(100)
    assert scene.agree() == [1, 2, 100]
    code, lines = woken(zombie)
    if producer == "native" and point != "after_kafka_commit":
        # Its id has a new owner: Kafka no longer shows how its transaction ended, so it does not guess.
        assert (code, lines[-1].split()[:3]) == (1, ["error", "InDoubtTransactionError", "True"]), lines
    else:
        assert lines[-3:-1] == ["done 2", "begin 3"], lines
        assert (code, lines[-1].split()[:2]) == (1, ["error", "FencedError"]), lines
    assert scene.agree() == [1, 2, 100]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("producer", "database", "point"),
    thinned(product(PRODUCERS, ["sqlite"], BEFORE_COMMIT_POINT), kept=[("native", "sqlite", BEFORE_COMMIT_POINT[-1])]),
    indirect=["producer"],
)
def test_a_stopped_writer_keeps_the_lock_of_the_whole_database_and_wins(
    databases: Databases, broker: DevCluster, database: str, producer: str, point: str
) -> None:
    scene = databases.scene(database, broker)
    zombie = stopped(scene, point)
    with pytest.raises(dualwrite.ClaimTimeoutError):
        scene.connect(scene.url, timeouts=dualwrite.Timeouts(claim=0.5))
    code, lines = woken(zombie)
    assert (code, lines[-1]) == (0, "closed"), lines
    assert scene.agree() == [1, 2, 3]


@pytest.mark.slow
@with_what_is_left(
    ["sqlite", "postgresql", "mariadb", "zookeeper", "rocksdb"],
    OPENING,
    kept=[
        *product(["native"], ["postgresql"], ["after_db_commit"], OPENING),
        ("native", "mariadb", "after_prepare", "recover_after_describe"),
        ("native", "zookeeper", "after_db_commit", "before_take_over"),
        ("librdkafka", "sqlite", "after_db_commit", "before_take_over"),
        ("native", "rocksdb", "after_prepare", "recover_after_describe"),
        ("native", "rocksdb", "after_db_commit", "before_take_over"),
    ],
)
def test_a_writer_stopped_while_it_opens_is_fenced(
    databases: Databases, broker: DevCluster, database: str, producer: str, left: str, point: str
) -> None:
    scene = databases.scene(database, broker)
    crash_writer(scene, left)
    expected = LEFT[left]
    zombie = stopped(scene, point, first=50, opens=True)
    scene.write_here(100)
    assert scene.agree() == [*expected, 100]
    code, lines = woken(zombie)
    assert (code, lines[-1].split()[:2]) == (1, ["error", "FencedError"]), lines
    scene.assert_continues([*expected, 100], 101)


@pytest.mark.slow
@with_what_is_left(
    ["sqlite", "postgresql", "mariadb", "zookeeper"],
    RECOVERY_POINTS,
    kept=[  # the steps are those of a writer that opens: above; recovery does not use the producer
        ("native", "postgresql", "after_db_commit", "recover_after_claim"),
        ("native", "postgresql", "after_db_commit", "recover_after_end_txn"),
        ("native", "sqlite", "after_prepare", "recover_after_describe"),
        ("native", "mariadb", "after_db_commit", "recover_after_decision"),
        ("native", "zookeeper", "after_db_commit", "recover_after_describe"),
    ],
)
def test_a_recoverer_stopped_midway_changes_nothing_once_overtaken(
    databases: Databases, broker: DevCluster, database: str, producer: str, left: str, point: str
) -> None:
    scene = databases.scene(database, broker)
    crash_writer(scene, left)
    expected = LEFT[left]
    zombie = scene.recovery(f"{point}=stop")
    zombie.wait_until_stopped()
    scene.write_here(100)
    assert scene.agree() == [*expected, 100]
    code, lines = woken(zombie)
    assert code == 0
    assert '"taken_over_by": "writer' in lines[-1], lines
    scene.assert_continues([*expected, 100], 101)
