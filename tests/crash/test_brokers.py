"""Three brokers, of which one is killed, or a leader moved, at each step of a transaction: nothing lost, nothing twice."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import product

import pytest
from kafka.protocol.admin import AlterPartitionReassignmentsRequest, ElectLeadersRequest

import dualwrite
from crash.cases import PRODUCERS
from crash.databases import Databases
from crash.scene import Scene
from crash.worker import write_event
from dualwrite.devcluster import DevCluster
from dualwrite.kafka.client.brokers import Network
from dualwrite.kafka.client.config import KafkaConfig
from dualwrite.testing import failpoints
from fixtures.broker import make_topic
from fixtures.foreign import foreign
from fixtures.leaders import coordinator_of
from fixtures.pace import LIMIT, done, until
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
        with dualwrite.connect(scene.engine, kafka=scene.settings, transactional_id=scene.transactional_id) as writer:
            write_event(writer, scene.topic, 1)
            once = failpoints.only_at(1, lambda: mend.append(trouble(three_brokers, scene)))
            with failpoints.armed(MOMENTS[moment], once):
                write_event(writer, scene.topic, 2)
            assert mend
            for number in range(3, 8):
                write_event(writer, scene.topic, number)
    finally:
        for start in mend:
            start()
    assert scene.agree() == [1, 2, 3, 4, 5, 6, 7]


@pytest.mark.soak  # each of these kills alone: above; at random, under a pool: tests/pool/test_pool_soak.py
@pytest.mark.parametrize("producer", PRODUCERS, indirect=True)
def test_brokers_killed_one_after_another_under_a_stream_of_transactions(
    databases: Databases, three_brokers: DevCluster, writer_thread: ThreadPoolExecutor, producer: str
) -> None:
    scene = databases.scene("sqlite", three_brokers)
    make_topic(three_brokers, scene.topic, partitions=3)
    stop = False
    number = 0

    def stream() -> int:
        nonlocal number
        with dualwrite.connect(scene.engine, kafka=scene.settings, transactional_id=scene.transactional_id) as writer:
            while not stop:
                write_event(writer, scene.topic, number + 1)
                number += 1
        return number

    running = writer_thread.submit(stream)

    def goes_on() -> None:
        before = number
        until(lambda: running.done() or number > before, lambda: f"{number} transactions")

    try:
        goes_on()
        for node in (1, 2, 3):
            three_brokers.kill(node)
            three_brokers.start(node)
            goes_on()
    finally:
        stop = True
    written = done(running)
    assert written > 3
    assert scene.agree() == list(range(1, written + 1))


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
