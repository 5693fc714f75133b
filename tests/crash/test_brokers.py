"""Three brokers, of which one is killed, or a leader moved, at each step of a transaction: nothing lost, nothing twice."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
from kafka.protocol.admin import AlterPartitionReassignmentsRequest, ElectLeadersRequest

from crash.cases import PRODUCERS
from crash.databases import Databases
from crash.scene import Scene
from dualwrite.devcluster import DevCluster
from dualwrite.kafka.client.brokers import Network
from dualwrite.kafka.client.config import KafkaConfig
from dualwrite.testing import failpoints
from fixtures.broker import make_topic
from fixtures.foreign import foreign
from fixtures.leaders import coordinator_of
from fixtures.pace import LIMIT, until
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


def leader_of(servers: str, topic: str) -> int:
    """The node that leads the partition."""
    return _described(servers, topic)[0]


def move_leader(servers: str, topic: str) -> int:
    """Make another replica the leader; returns its node id."""
    leader, replicas = _described(servers, topic)
    chosen = next(node for node in replicas if node != leader)
    order = [chosen, *(node for node in replicas if node != chosen)]
    network = Network(KafkaConfig.of(servers))
    try:
        controller = network.any_broker()
        topics = AlterPartitionReassignmentsRequest.ReassignableTopic
        answer = controller.call(
            foreign(
                AlterPartitionReassignmentsRequest(
                    timeout_ms=int(LIMIT * 1000),
                    topics=[topics(name=topic, partitions=[topics.ReassignablePartition(partition_index=0, replicas=order)])],
                )
            )
        )
        assert answer.error_code == 0, answer

        def elected() -> bool:
            answer = controller.call(
                foreign(
                    ElectLeadersRequest(
                        election_type=0,
                        topic_partitions=[ElectLeadersRequest.TopicPartitions(topic=topic, partitions=[0])],
                        timeout_ms=int(LIMIT * 1000),
                    )
                )
            )
            assert answer.error_code == 0, answer
            return _described(servers, topic)[0] == chosen

        until(elected, f"node {chosen} leads {topic}-0", pause=0.05)
        return chosen
    finally:
        network.close()


def _described(servers: str, topic: str) -> tuple[int, list[int]]:
    network = Network(KafkaConfig.of(servers))

    def led() -> tuple[int, list[int]] | None:
        (found,) = network.metadata([topic]).topics
        if found.error_code:
            return None
        described = next(p for p in found.partitions if p.partition_index == 0)
        return (described.leader_id, list(described.replica_nodes)) if described.leader_id >= 0 else None

    try:
        return until(led, f"a leader of {topic}-0", pause=0.05)
    finally:
        network.close()
