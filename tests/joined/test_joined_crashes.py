"""A process with sessions of its own is killed, or paused and replaced, at each step: both sides have the same in the end."""

from __future__ import annotations

from itertools import cycle, product

import pytest

from crash.cases import WRITER_POINTS
from crash.databases import Databases
from crash.scene import Scene, Worker
from dualwrite.devcluster import DevCluster
from fixtures.tiers import thinned
from joined.own_sessions import ASYNC, DATABASE, SYNC, skip_unless_installed
from pool.pool_scene import assert_reports_true, both, open_pool, reported_committed, reported_failed

EVENTS = 40
DRIVERS = (*SYNC, *ASYNC)
IN_CI = [driver for driver in DRIVERS if driver != "mysqldb"]
EACH = [*zip(cycle(IN_CI), WRITER_POINTS), *zip(DRIVERS, cycle(["after_db_commit"]))]
"""Each driver with one or two points, each point with one driver, and all drivers with the most critical point."""


def worker(scene: Scene, driver: str, first: int, failpoints: str = "", **environment: str) -> Worker:
    skip_unless_installed(driver)
    where = [scene.url, scene.bootstrap, scene.transactional_id, scene.topic]
    return Worker([*where, str(first), str(EVENTS), "4"], failpoints, module="joined.worker", DRIVER=driver, **environment)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("driver", "point", "producer"),
    thinned(
        product(DRIVERS, WRITER_POINTS, ("native", "librdkafka")),
        kept=[*((*each, "native") for each in dict.fromkeys(EACH)), ("asyncpg", "after_record", "librdkafka")],
    ),
    indirect=["producer"],
)
def test_a_process_that_dies_while_its_users_commit(
    databases: Databases, broker: DevCluster, driver: str, point: str, producer: str
) -> None:
    del producer
    scene = databases.scene(DATABASE[driver], broker)
    dies = worker(scene, driver, 0, f"{point}#7=kill")
    dies.killed()
    kept = assert_reports_true(scene, dies)
    last = worker(scene, driver, EVENTS)
    last.wait_for("closed")
    assert last.end() == 0
    assert set(scene.agree()) == {*kept, *range(EVENTS, 2 * EVENTS)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("driver", "point"),
    thinned(
        product(
            ("psycopg", "psycopg2", "asyncpg", "pymysql", "mysqldb", "aiomysql"),
            ("after_begin", "after_db_commit", "before_kafka_commit"),
        ),
        kept=[
            ("psycopg", "after_begin"),
            ("asyncpg", "after_begin"),
            ("asyncpg", "after_db_commit"),
            ("pymysql", "after_begin"),
            ("mysqldb", "after_begin"),
            ("aiomysql", "after_begin"),
        ],
    ),
)
def test_a_process_that_is_paused_while_its_ids_are_recovered(
    databases: Databases, broker: DevCluster, driver: str, point: str
) -> None:
    """Before it has locked its row, or after its COMMIT: in between, recovery waits for the database to end its session."""
    scene = databases.scene(DATABASE[driver], broker)
    zombie = worker(scene, driver, 0, f"{point}#7=stop", SIZE="1")
    zombie.wait_until_stopped()
    before = assert_reports_true(scene)
    with open_pool(scene) as pool:
        assert pool.run(both, scene, EVENTS) == EVENTS
    zombie.resume()
    zombie.wait_for("closed")
    assert zombie.end() == 0
    found = assert_reports_true(scene, zombie)
    assert found == before | reported_committed(zombie) | {EVENTS}
    assert reported_failed(zombie) | reported_committed(zombie) >= set(range(EVENTS)) - before
