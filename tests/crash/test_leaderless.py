"""A transaction is ended only while each of its partitions has a leader (rule FB), on a Kafka release that needs it.

Kafka 4.3.0 to 4.4.0 treat a partition without a leader as deleted: they complete the transaction without its marker
(KAFKA-20734).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from itertools import product

import pytest
from confluent_kafka.admin import NewTopic

import dualwrite
from crash.cases import LEFT, PRODUCERS
from crash.databases import Databases
from crash.scene import Scene
from dualwrite.admin import Reason, TransactionAdmin
from dualwrite.devcluster import DevCluster
from dualwrite.errors import BrokerUnavailableError, RepairRefusedError
from dualwrite.kafka.base import EndingTransaction
from dualwrite.kafka.client.config import KafkaConfig
from dualwrite.kafka.client.coordinator import WireTransactionCoordinator
from dualwrite.kafka.inspect import describe_topics
from dualwrite.kafka.librdkafka.topic_admin import admin_client
from dualwrite.kafka.native.native_producer import NativeProducer
from dualwrite.state import TransactionStatus
from dualwrite.testing import failpoints
from dualwrite.testing.topics import read_committed
from fixtures.broker import read_values, started
from fixtures.leaders import coordinator_of
from fixtures.pace import LIMIT, limit, until
from fixtures.tiers import thinned

pytestmark = pytest.mark.slow

SHORT = dualwrite.Timeouts(claim=LIMIT, kafka=limit(3), delivery=LIMIT)
"""Kafka's time limit must expire, but not before the missing leader was noticed."""


@pytest.fixture(scope="module")
def forgetful() -> Iterator[DevCluster]:
    """Three nodes of a release that omits markers."""
    with started(nodes=3, kafka_version="4.3.1") as cluster:
        yield cluster


@pytest.fixture
def scene(databases: Databases, forgetful: DevCluster) -> Scene:
    return databases.scene("sqlite", forgetful)


def make_topics_apart(cluster: DevCluster, *scenes: Scene) -> int:
    """Make the topics of one or two scenes with one replica, on a node that coordinates none of their ids; return that node."""
    coordinators = {coordinator_of(scene.bootstrap, scene.kafka_id()) for scene in scenes}
    node = next(number for number in (1, 2, 3) if number not in coordinators)
    admin = admin_client({"bootstrap.servers": cluster.bootstrap_servers}, LIMIT)
    topics = [NewTopic(scene.topic, 1, replica_assignment=[[node]]) for scene in scenes]
    for made in admin.create_topics(topics).values():
        made.result(LIMIT)
    return node


@contextmanager
def without_leader(cluster: DevCluster, node: int, *topics: str) -> Iterator[None]:
    """The node is down, and the topics have no leader; then the node is up again."""

    def all_without() -> bool:
        return all(topic.without_leader for topic in describe_topics(cluster.bootstrap_servers, list(topics)))

    cluster.kill(node)
    try:
        until(all_without, f"{topics} have no leader")
        yield
    finally:
        cluster.start(node)


def values(scene: Scene, isolation: str = "read_committed") -> list[bytes | None]:
    return read_values(scene.bootstrap, scene.topic, isolation=isolation)


@pytest.mark.soak
def test_a_topic_without_leader_is_read_when_the_leader_is_back(scene: Scene, forgetful: DevCluster) -> None:
    node = make_topics_apart(forgetful, scene)
    with scene.connect() as writer:
        scene.event(writer, 1)
    assert scene.agree() == [1]  # the marker is written, which this release would omit
    with (
        without_leader(forgetful, node, scene.topic),
        pytest.raises(BrokerUnavailableError, match=f"Topic '{scene.topic}' can't be read"),
    ):
        read_committed(scene.bootstrap, scene.topic, timeout=0.5)
    assert scene.agree() == [1]


def end_without_leader(cluster: DevCluster, scene: Scene, node: int, value: bytes) -> list[TransactionStatus]:
    """Commit a message without a leader and without dualwrite's check; the status then, and once the leader is back."""
    config, kafka_id = KafkaConfig.of(scene.bootstrap), scene.kafka_id()
    with (
        closing(WireTransactionCoordinator(config)) as coordinator,
        closing(NativeProducer(config, kafka_id, coordinator, two_phase=True)) as producer,
    ):
        producer.init_transactions()
        producer.begin_transaction()
        producer.send(scene.topic, value)
        prepared = producer.prepare_transaction()
        assert prepared is not None
        with without_leader(cluster, node, scene.topic):
            described_at = time.monotonic()  # without partitions, so that no leader is asked for
            ending = EndingTransaction(kafka_id, prepared.producer_id, prepared.epoch, commit=True, described_at=described_at)
            assert coordinator.end_all([ending])[0].proven
            found = [coordinator.describe(kafka_id)]
        found.append(coordinator.describe(kafka_id))
        return [described.status for described in found if described]


@pytest.mark.soak
def test_kafka_by_itself_commits_without_the_marker(forgetful: DevCluster, scene: Scene) -> None:
    """Why the rule is needed; if this test fails, the bug is fixed in this release.

    The transaction hangs there. Aborting it loses what its coordinator has committed, so that takes force.
    """
    node = make_topics_apart(forgetful, scene)
    assert end_without_leader(forgetful, scene, node, b"lost")[1] is TransactionStatus.COMPLETE_COMMIT
    assert (values(scene), values(scene, "read_uncommitted")) == ([], [b"lost"])
    with TransactionAdmin(scene.bootstrap, timeout=LIMIT) as admin:
        (held,) = admin.stuck(topic=scene.topic).partitions
        assert held.holder.hanging is Reason.WITHOUT_PARTITION
        examined = admin.examine(scene.topic, 0, start_offset=held.end.last_stable_offset)
        assert examined is not None
        assert (examined.hangs, examined.was_committed) == (True, True)
        with pytest.raises(RepairRefusedError, match="KAFKA-20734"):
            admin.abort(examined)
        assert len(admin.stuck(topic=scene.topic).partitions) == 1
        admin.abort(examined, force=True)
        assert admin.stuck(topic=scene.topic).partitions == ()


@pytest.mark.soak
def test_the_release_of_the_development_cluster_writes_the_marker_when_the_leader_is_back(databases: Databases) -> None:
    """Kafka's own behaviour, without dualwrite's check of the leaders."""
    with started(nodes=3) as cluster:
        scene = databases.scene("sqlite", cluster)
        node = make_topics_apart(cluster, scene)
        assert end_without_leader(cluster, scene, node, b"kept")[0] is TransactionStatus.PREPARE_COMMIT
        assert values(scene) == [b"kept"]  # read after every transaction of the cluster has ended


@pytest.mark.soak  # in CI: a producer and recovery (below)
@pytest.mark.usefixtures("producer")
@pytest.mark.parametrize("producer", PRODUCERS, indirect=True)
def test_a_writer_commits_when_the_leader_is_back(forgetful: DevCluster, scene: Scene) -> None:
    """With both producers; the database has already committed."""
    node = make_topics_apart(forgetful, scene)
    with (
        ExitStack() as down,
        scene.connect(timeouts=SHORT) as writer,
    ):
        lose = failpoints.only_at(1, lambda: down.enter_context(without_leader(forgetful, node, scene.topic)))
        with failpoints.armed("after_db_commit", lose), pytest.raises(dualwrite.InDoubtTransactionError, match="no leader"):
            scene.event(writer, 1)
        down.close()
        writer.reopen()
        scene.event(writer, 2)
    assert scene.agree() == [1, 2]


@pytest.mark.parametrize(
    ("producer", "point"), thinned(product(PRODUCERS, LEFT), kept=[("native", "after_db_commit")]), indirect=["producer"]
)
@pytest.mark.soak
def test_a_producer_and_recovery_wait_for_the_leader(forgetful: DevCluster, scene: Scene, producer: str, point: str) -> None:
    """Both in one outage. Whichever producer wrote, recovery ends the transaction; the producer alone is the native one."""
    alone = replace(scene, transactional_id=f"{scene.transactional_id}-alone")
    node = make_topics_apart(forgetful, scene, alone)
    committed = point == "after_db_commit"
    scene.write(1, failpoints=f"{point}=kill").killed()
    with closing(NativeProducer(KafkaConfig.of(alone.bootstrap), alone.kafka_id(), two_phase=True)) as waiting:

        def end(timeout: float) -> None:
            (waiting.commit_transaction if committed else waiting.abort_transaction)(timeout=timeout)

        waiting.init_transactions()
        waiting.begin_transaction()
        waiting.send(alone.topic, b"first")
        waiting.prepare_transaction()
        with without_leader(forgetful, node, scene.topic, alone.topic):
            with pytest.raises(BrokerUnavailableError, match=f"{alone.topic}-0 has no leader"):
                end(limit(2))
            with pytest.raises(BrokerUnavailableError, match="has no leader"):
                end(limit(2))
            with pytest.raises(BrokerUnavailableError, match=f"Topic '{scene.topic}' can't be read"):
                read_committed(scene.bootstrap, scene.topic, timeout=0.5)
            assert f"{scene.topic}-0 has no leader" in scene.recover(SHORT)["error"]
        end(LIMIT)
        waiting.begin_transaction()
        waiting.send(alone.topic, b"second")
        waiting.commit_transaction()
    assert values(alone) == ([b"first", b"second"] if committed else [b"second"])
    assert scene.recover()["outcomes"] == ["COMMITTED" if committed else "ABORTED"]
    scene.write_here(2)
    assert scene.agree() == ([1, 2] if committed else [2])
