"""Three brokers, of which one is killed, or a leader moved, at each step of a transaction: nothing lost, nothing twice."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest

from crash.cases import PRODUCERS
from crash.databases import Databases
from crash.scene import Scene
from dualwrite.devcluster import DevCluster
from dualwrite.testing import failpoints
from fixtures.broker import make_topic
from fixtures.leaders import coordinator_of, leader_of, move_leader
from fixtures.tiers import thinned

pytestmark = pytest.mark.slow

MOMENTS = {
    "in the middle of the transaction": "after_send",
    "prepared": "after_prepare",
    "committed by the database": "after_db_commit",
}
ErrorClass = Callable[[DevCluster, Scene], Callable[[], None]]


def kill_leader(cluster: DevCluster, scene: Scene) -> Callable[[], None]:
    node = leader_of(scene.bootstrap, scene.topic)
    cluster.kill(node)
    return lambda: cluster.start(node)


def kill_coordinator(cluster: DevCluster, scene: Scene) -> Callable[[], None]:
    node = coordinator_of(scene.bootstrap, scene.kafka_id())
    cluster.kill(node)
    return lambda: cluster.start(node)


def move_the_leader(cluster: DevCluster, scene: Scene) -> Callable[[], None]:
    assert move_leader(scene.bootstrap, scene.topic) == leader_of(scene.bootstrap, scene.topic)
    return lambda: None


@pytest.mark.parametrize(
    ("producer", "lanes", "trouble", "moment"),
    thinned(
        product(PRODUCERS, ["1", "3"], [kill_leader, kill_coordinator, move_the_leader], MOMENTS),
        kept=[  # starting a broker takes long: one of each trouble
            ("native", "1", kill_leader, "prepared"),
            ("native", "3", kill_coordinator, "committed by the database"),
            ("native", "3", move_the_leader, "in the middle of the transaction"),
        ],
    ),
    indirect=["producer"],
)
def test_a_writer_continues_while_a_broker_fails(
    databases: Databases,
    three_brokers: DevCluster,
    monkeypatch: pytest.MonkeyPatch,
    trouble: ErrorClass,
    moment: str,
    producer: str,
    lanes: str,
) -> None:
    monkeypatch.setenv("DUALWRITE_LANES", lanes)
    scene = databases.scene("sqlite", three_brokers)
    make_topic(three_brokers, scene.topic)
    mend: list[Callable[[], None]] = []
    try:
        with scene.connect() as writer:
            scene.event(writer, 1)
            once = failpoints.only_at(1, lambda: mend.append(trouble(three_brokers, scene)))
            with failpoints.armed(MOMENTS[moment], once):
                scene.event(writer, 2)
            assert mend
            for number in range(3, 8):
                scene.event(writer, number)
    finally:
        for start in mend:
            start()
    assert scene.agree() == [1, 2, 3, 4, 5, 6, 7]
