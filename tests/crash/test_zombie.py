"""A process stopped at each failpoint (SIGSTOP), its id taken over by another that commits, then woken (SIGCONT).

The woken one fails with FencedError, or says "in doubt" where that is the truth; neither data nor messages change. RocksDB has
one process at a time: see test_zombie_threads.
"""

from __future__ import annotations

import re
from itertools import product

import pytest
import sqlalchemy as sa

from crash.cases import LEFT, OPENING_POINTS, PAST_COMMIT_POINT, RECOVERY_POINTS, mostly_committed, with_producers
from crash.databases import Databases
from crash.scene import Scene, Worker
from dualwrite.devcluster import DevCluster

ROW_NOT_LOCKED = ["after_begin", "after_send", "after_prepare"]
ROW_LOCKED = ["after_record", "before_db_commit"]
OPENING = [*RECOVERY_POINTS, *OPENING_POINTS]


def stopped(scene: Scene, point: str) -> Worker:
    zombie = scene.write(1, 3, f"{point}#2=stop")
    zombie.wait_for("begin 2")
    zombie.wait_until_stopped()
    return zombie


def woken(zombie: Worker) -> tuple[int, list[str]]:
    zombie.resume()
    code = zombie.end()
    return code, zombie.lines


@pytest.mark.parametrize(
    ("producer", "database", "point"),
    with_producers(
        product(["postgresql"], ROW_NOT_LOCKED),
        [*product(["mariadb"], ROW_NOT_LOCKED), *product(["zookeeper"], ROW_NOT_LOCKED + ROW_LOCKED)],
    ),
)
def test_a_writer_stopped_where_it_holds_no_lock_is_fenced(
    databases: Databases, broker: DevCluster, database: str, point: str
) -> None:
    """ZooKeeper has no locks: the version that the commit is conditional on has moved."""
    scene = databases.scene(database, broker)
    zombie = stopped(scene, point)
    scene.write_here(100)
    assert scene.agree() == [1, 100]
    code, lines = woken(zombie)
    assert (code, lines[-1].split()[:2]) == (1, ["error", "FencedError"]), lines
    assert scene.agree() == [1, 100]
    scene.write_here(101)
    assert scene.agree() == [1, 100, 101]


@pytest.mark.parametrize(
    ("producer", "database", "point"),
    with_producers(product(["postgresql"], ROW_LOCKED), product(["mariadb"], ROW_LOCKED)),
)
def test_a_writer_stopped_with_its_row_locked_is_named_ended_and_left_in_doubt(
    databases: Databases, broker: DevCluster, database: str, point: str
) -> None:
    scene = databases.scene(database, broker)
    zombie = stopped(scene, point)
    waiting = scene.write(100, 1, CLAIM_TIMEOUT="1")
    assert waiting.end() == 1
    assert waiting.last().startswith("error ClaimTimeoutError")
    advised = re.search(r"SELECT pg_terminate_backend\(\d+\)|KILL \d+", waiting.last())
    assert advised is not None, waiting.last()
    with scene.engine.connect() as connection:
        connection.execute(sa.text(advised[0]))
    scene.write_here(100)
    assert scene.agree() == [1, 100]
    code, lines = woken(zombie)
    # Stopped at before_db_commit it sends COMMIT into a dead connection: it can't know, and must not say "rolled back".
    assert (code, lines[-1].split()[:2]) == (1, ["error", "InDoubtTransactionError"]), lines
    assert scene.agree() == [1, 100]


@pytest.mark.parametrize(
    ("producer", "database", "point"),
    with_producers(product(["sqlite", "postgresql"], PAST_COMMIT_POINT), product(["mariadb", "zookeeper"], PAST_COMMIT_POINT)),
)
def test_a_writer_stopped_past_its_commit_point_learns_that_it_committed_and_is_fenced(
    databases: Databases, broker: DevCluster, producer: str, database: str, point: str
) -> None:
    scene = databases.scene(database, broker)
    zombie = stopped(scene, point)
    scene.write_here(100)
    assert scene.agree() == [1, 2, 100]
    code, lines = woken(zombie)
    if producer == "native" and point != "after_kafka_commit":
        # Its id has gone on in other hands: nothing at Kafka tells any more how its transaction ended, so it does not guess.
        assert (code, lines[-1].split()[:3]) == (1, ["error", "InDoubtTransactionError", "True"]), lines
    else:
        assert lines[-3:-1] == ["done 2", "begin 3"], lines
        assert (code, lines[-1].split()[:2]) == (1, ["error", "FencedError"]), lines
    assert scene.agree() == [1, 2, 100]


@pytest.mark.slow
@pytest.mark.parametrize("point", ROW_NOT_LOCKED + ROW_LOCKED)
def test_on_sqlite_a_stopped_writer_keeps_the_write_lock_and_wins(databases: Databases, broker: DevCluster, point: str) -> None:
    scene = databases.scene("sqlite", broker)
    zombie = stopped(scene, point)
    waiting = scene.write(100, 1, CLAIM_TIMEOUT="1")
    assert waiting.end() == 1
    assert waiting.last().startswith("error ClaimTimeoutError")
    code, lines = woken(zombie)
    assert (code, lines[-1]) == (0, "closed"), lines
    assert scene.agree() == [1, 2, 3]


@pytest.mark.parametrize(
    ("producer", "database", "left", "point"),
    mostly_committed(
        with_producers(
            product(["sqlite", "postgresql"], LEFT, OPENING), product(["mariadb", "zookeeper"], ["after_db_commit"], OPENING)
        )
    ),
)
@pytest.mark.slow
def test_a_writer_stopped_while_it_opens_is_fenced(
    databases: Databases, broker: DevCluster, database: str, left: str, point: str
) -> None:
    scene = databases.scene(database, broker)
    expected = left_behind(scene, left)
    zombie = scene.write(50, 1, f"{point}=stop")
    zombie.wait_until_stopped()
    scene.write_here(100)
    assert scene.agree() == [*expected, 100]
    code, lines = woken(zombie)
    assert (code, lines[-1].split()[:2]) == (1, ["error", "FencedError"]), lines
    assert scene.agree() == [*expected, 100]
    scene.write_here(101)
    assert scene.agree() == [*expected, 100, 101]


@pytest.mark.parametrize(
    ("producer", "database", "left", "point"),
    mostly_committed(
        with_producers(
            product(["sqlite", "postgresql"], LEFT, RECOVERY_POINTS),
            product(["mariadb", "zookeeper"], ["after_db_commit"], RECOVERY_POINTS),
        )
    ),
)
@pytest.mark.slow
def test_a_recoverer_stopped_on_its_way_changes_nothing_after_it_was_overtaken(
    databases: Databases, broker: DevCluster, database: str, left: str, point: str
) -> None:
    scene = databases.scene(database, broker)
    expected = left_behind(scene, left)
    zombie = scene.recovery(f"{point}=stop")
    zombie.wait_until_stopped()
    scene.write_here(100)
    assert scene.agree() == [*expected, 100]
    code, lines = woken(zombie)
    assert code == 0
    assert '"taken_over_by": "writer' in lines[-1], lines
    assert scene.agree() == [*expected, 100]
    scene.write_here(101)
    assert scene.agree() == [*expected, 100, 101]


def left_behind(scene: Scene, point: str) -> list[int]:
    """Kill a writer at the point in its second transaction; what must be there after recovery."""
    worker = scene.write(1, 3, f"{point}#2=kill")
    assert worker.end() == -9, f"{worker.lines} {worker.errors[-2000:]}"
    return [1] if point == "after_prepare" else [1, 2]
