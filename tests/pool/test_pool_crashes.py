"""A process with a pool is killed at every step of a group: a row exists exactly if its message does, and callers knew it."""

from __future__ import annotations

import random
import time
from itertools import cycle, product

import pytest

from crash.cases import GROUP_POINTS, WRITER_POINTS
from crash.databases import DATABASES
from crash.scene import Scene
from fixtures.pace import limit
from fixtures.tiers import thinned
from pool.pool_scene import assert_reports_true, both, open_pool, pool_worker, reported_committed, reported_failed

UNITS = 60

POINTS = (*WRITER_POINTS, *GROUP_POINTS)
"""What a group passes."""

MOST = ("postgresql", "native")
OTHERS = [("postgresql", "librdkafka"), *((database, "native") for database in DATABASES if database != "postgresql")]
KEPT = [(*combination, point) for combination, point in zip(cycle([MOST, *OTHERS]), POINTS)]
"""Each point with one combination of database and producer, and each combination with one or two points."""
GROUPS = [*((*MOST, point) for point in GROUP_POINTS), *((*combination, "group_after_units") for combination in OTHERS)]
"""The points that only a group has; the matrix of `tests/crash` has the writer's points with every database."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("database", "producer", "point"),
    thinned(
        product(DATABASES, ("native", "librdkafka"), POINTS),
        kept=[*KEPT, *GROUPS, (*MOST, "after_db_commit")],
    ),
    indirect=["producer"],
)
def test_a_process_that_dies_in_a_group(scene: Scene, database: str, producer: str, point: str) -> None:
    """Producers behave the same with all databases, so CI runs the second producer with one; soak runs every combination."""
    del producer, database
    dies = pool_worker(scene, 0, UNITS, f"{point}#4=kill")
    dies.killed()
    kept = assert_reports_true(scene, dies)
    with open_pool(scene) as pool:
        assert pool.run(both, scene, UNITS) == UNITS
    assert set(scene.agree()) == {*kept, UNITS}


WAYS = {
    "pipeline": {"HANDLE": "psycopg"},
    "carefully": {"FAILING": "5"},
    "one by one": {"HEAVY": "5"},
    "all": {"HANDLE": "psycopg", "FAILING": "7", "HEAVY": "11"},
    "restless": {"RESTLESS": "1"},
    "restless and all": {"RESTLESS": "1", "HANDLE": "psycopg", "FAILING": "7", "HEAVY": "11"},
}
"""Ways in which a group runs, by the worker's variables."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "point"),
    thinned(
        product(WAYS, POINTS),
        kept=[
            ("pipeline", "group_after_units"),
            ("pipeline", "after_db_commit"),
            ("carefully", "group_after_unit"),
            ("one by one", "after_db_commit"),
            ("all", "before_kafka_commit"),
            ("restless", "group_after_unit"),
            ("restless", "after_record"),
            ("restless", "after_db_commit"),
            ("restless and all", "before_kafka_commit"),
        ],
    ),
)
def test_a_process_that_dies_in_a_group_run_in_other_ways(scene: Scene, way: str, point: str) -> None:
    """On psycopg's pipeline, with units that fail, one by one."""
    dies = pool_worker(scene, 1, UNITS, f"{point}#6=kill", **WAYS[way])
    dies.killed()
    kept = assert_reports_true(scene, dies)
    last = pool_worker(scene, 1001, UNITS, **WAYS[way])
    last.wait_for("closed")
    assert last.end() == 0
    found = assert_reports_true(scene, dies, last)
    assert found == kept | reported_committed(last)
    assert reported_committed(last) | reported_failed(last) == set(range(1001, 1001 + UNITS))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("database", "point"),
    thinned(
        product(DATABASES, POINTS),
        kept=[("postgresql", "group_after_unit"), ("postgresql", "after_db_commit"), ("rocksdb", "after_record")],
    ),
)
def test_a_process_that_dies_in_a_group_of_coroutines(scene: Scene, database: str, point: str) -> None:
    """Half of the units are coroutines."""
    del database
    dies = pool_worker(scene, 0, UNITS, f"{point}#4=kill", HANDLE="aio")
    dies.killed()
    kept = assert_reports_true(scene, dies)
    last = pool_worker(scene, UNITS, UNITS, HANDLE="aio")
    last.wait_for("closed")
    assert last.end() == 0
    assert set(scene.agree()) == {*kept, *range(UNITS, 2 * UNITS)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("database", "point"),
    thinned(
        product(("postgresql", "mariadb", "zookeeper"), ("group_after_unit", "group_after_units", "after_prepare")),
        kept=[("mariadb", "group_after_unit")],
    ),
)
def test_a_process_with_coroutines_that_is_paused_while_its_ids_are_recovered(scene: Scene, database: str, point: str) -> None:
    """When it resumes, the callers of its current group get the error, and nothing changes; the pool reopens its ids."""
    del database
    # another writer might be inside its COMMIT, and keep its row locked
    zombie = pool_worker(scene, 0, UNITS, f"{point}#4=stop", HANDLE="aio", SIZE="1")
    zombie.wait_until_stopped()
    before = assert_reports_true(scene)
    with open_pool(scene) as pool:
        assert pool.run(both, scene, UNITS) == UNITS
    zombie.resume()
    zombie.wait_for("closed")
    assert zombie.end() == 0
    found = assert_reports_true(scene, zombie)
    fenced = {int(line.split()[1]) for line in zombie.lines if line.startswith("error ") and "FencedError" in line}
    assert fenced, zombie.lines
    assert not fenced & found
    assert found == before | reported_committed(zombie) | {UNITS}
    assert fenced | reported_committed(zombie) == set(range(UNITS))


@pytest.mark.slow
@pytest.mark.parametrize("database", thinned(DATABASES, kept=["postgresql"]))
def test_kills_at_random_moments(scene: Scene, database: str) -> None:
    """The next process uses other ids while the leases last: `dualwrite recover` resolves what the ones before have left."""
    del database
    chance = random.Random(4711)
    processes = []
    for first in range(0, 3 * 1000, 1000):
        processes.append(pool_worker(scene, first, 1000))
        processes[-1].wait_for("open")
        processes[-1].wait_for("told")
        time.sleep(chance.random() * limit(0.3))
        processes[-1].kill()
    last = pool_worker(scene, 5000, 100)
    last.wait_for("closed")
    assert last.end() == 0
    assert len(reported_committed(last)) == 100
    assert len(assert_reports_true(scene, *processes, last)) > 100
