"""A process is killed, or paused and replaced, at each step of a block: both sides have the same in the end."""

from __future__ import annotations

from itertools import product

import pytest

from crash.cases import WRITER_POINTS
from crash.databases import Databases
from crash.scene import Scene, Worker
from dualwrite.devcluster import DevCluster
from fixtures.tiers import thinned
from pool.pool_scene import assert_reports_true, both, open_pool, reported_committed, reported_failed

EVENTS = 40


def worker(scene: Scene, first: int, failpoints: str = "", **environment: str) -> Worker:
    where = [scene.url, scene.bootstrap, scene.transactional_id, scene.topic]
    return Worker([*where, str(first), str(EVENTS), "4"], failpoints, module="django_project.worker", **environment)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("database", "point", "producer"),
    thinned(
        product(("postgresql", "mariadb", "sqlite"), WRITER_POINTS, ("native", "librdkafka")),
        kept=[*product(("postgresql", "mariadb", "sqlite"), WRITER_POINTS, ("native",))],
    ),
)
def test_a_process_that_dies_in_a_block(
    databases: Databases, broker: DevCluster, database: str, point: str, producer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DUALWRITE_PRODUCER", producer)
    scene = databases.scene(database, broker)
    dies = worker(scene, 0, f"{point}#7=kill")
    dies.killed()
    kept = assert_reports_true(scene, dies)
    last = worker(scene, EVENTS)
    last.wait_for("closed")
    assert last.end() == 0
    assert set(scene.agree()) == {*kept, *range(EVENTS, 2 * EVENTS)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("database", "engine", "point"),
    [("postgresql", "postgresql", "after_record"), ("mariadb", "mysql", "after_db_commit")],
)
def test_a_process_that_dies_with_our_engine(
    databases: Databases, broker: DevCluster, database: str, engine: str, point: str
) -> None:
    scene = databases.scene(database, broker)
    dies = worker(scene, 0, f"{point}#7=kill", SHOP_ENGINE=f"dualwrite.django.backends.{engine}")
    dies.killed()
    assert assert_reports_true(scene, dies)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("database", "point"), [("postgresql", "after_begin"), ("postgresql", "after_db_commit"), ("mariadb", "after_begin")]
)
def test_a_process_that_is_paused_while_its_ids_are_recovered(
    databases: Databases, broker: DevCluster, database: str, point: str
) -> None:
    scene = databases.scene(database, broker)
    zombie = worker(scene, 0, f"{point}#7=stop", SIZE="1")
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
