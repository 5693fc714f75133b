"""At the brokers' address another cluster answers first, then the right one: only on that one something is published."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

import dualwrite
from crash.databases import Databases
from crash.scene import Scene
from dualwrite.devcluster import DevCluster
from dualwrite.kafka.client.config import KafkaConfig
from dualwrite.kafka.client.coordinator import WireTransactionCoordinator
from dualwrite.recovery.clusters import cluster_that_answers
from dualwrite.testing.proxy import TcpProxy
from dualwrite.transactional_id import drainer_id
from fixtures.broker import make_topic
from fixtures.pace import LIMIT, until, until_recorded
from fixtures.tiers import thinned
from journal.journal_scene import gate_of, journal_pool
from pool.pool_scene import both

pytestmark = pytest.mark.slow


def target(cluster: DevCluster) -> tuple[str, int]:
    host, _, port = cluster.bootstrap_servers.partition(":")
    return host, int(port)


@pytest.fixture
def name() -> Iterator[TcpProxy]:
    """A name in the DNS, as it were: nobody answers there until it leads somewhere."""
    with TcpProxy("127.0.0.1", 9) as proxy:
        yield proxy


def leads_to(name: TcpProxy, cluster: DevCluster) -> None:
    name.redirect(*target(cluster))
    name.cut()


def outcome(pool: dualwrite.WriterPool[Any], scene: Scene, number: int) -> str | None:
    """How a unit that writes an event has ended."""

    def unit(tx: dualwrite.Transaction) -> dualwrite.Transaction:
        both(tx, scene, number)
        return tx

    return pool.run(unit).outcome


@pytest.mark.parametrize(
    ("producer", "database"),
    thinned(
        [("native", "sqlite"), ("native", "postgresql"), ("librdkafka", "sqlite"), ("librdkafka", "postgresql")],
        kept=[("native", "postgresql"), ("librdkafka", "sqlite")],
    ),
    indirect=["producer"],
)
def test_a_pool_that_has_met_another_cluster_goes_on_with_the_right_one(
    databases: Databases,
    broker: DevCluster,
    other_broker: DevCluster,
    name: TcpProxy,
    producer: str,
    database: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its thread that drains, and its writers, which have started while nobody answered."""
    right = databases.scene(database, broker)
    wrong = replace(right, bootstrap=other_broker.bootstrap_servers)
    for cluster in (broker, other_broker):
        make_topic(cluster, right.topic)
    replace(right, transactional_id=f"{right.transactional_id}.7").connect(lanes=1).close()  # the prefix has a cluster
    scene = replace(right, bootstrap=f"127.0.0.1:{name.port}")
    with caplog.at_level(logging.WARNING), journal_pool(scene, size=1) as pool:
        assert outcome(pool, scene, 1) == "journaled"
        leads_to(name, other_broker)
        until(lambda: "the journal can't be emptied now" in caplog.text, "the thread that drains has met the other cluster")
        assert "are in use on cluster" in caplog.text
        assert outcome(pool, scene, 2) == "journaled"
        lease = pool.store.leases.entries
        until(lambda: all(each.has_ended for each in lease(drainer_id(scene.transactional_id))), "another process may drain")
        leads_to(name, broker)
        until(lambda: not gate_of(pool, scene).is_open, "the journal's gate closed")
        assert right.agree() == [1, 2]
    assert wrong.messages() == []


def is_written(writer: dualwrite.DualWriter[Any], scene: Scene, number: int) -> bool:
    """Write an event, unless the journal's gate is opened or closed meanwhile, as on a busy machine."""
    try:
        scene.event(writer, number)
    except dualwrite.JournalSwitchedError:
        return False
    return True


@pytest.mark.parametrize("producer", ["native", "librdkafka"], indirect=True)
def test_a_writer_that_is_connected_to_another_cluster_leaves_it(
    databases: Databases,
    broker: DevCluster,
    other_broker: DevCluster,
    name: TcpProxy,
    producer: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It has started while nobody answered, so it acquires its id when it is idle."""
    right = databases.scene("sqlite", broker)
    right.write_here(1)
    scene = replace(right, bootstrap=f"127.0.0.1:{name.port}")
    with caplog.at_level(logging.INFO), scene.connect(when_kafka_is_down="journal") as writer:
        scene.event(writer, 2)
        leads_to(name, other_broker)
        until(lambda: "could not be resolved yet: This is Kafka cluster" in caplog.text, "it has met the other cluster")
        name.redirect(*target(broker))
        until(lambda: "its gate is closed" in caplog.text, "the journal's gate closed")
        until(lambda: is_written(writer, scene, 3), "the writer goes on")
        until_recorded(right.messages, [1, 2, 3], "all is published, by the writer or from the journal")
    assert right.agree() == [1, 2, 3]


def test_a_client_forgets_a_cluster_if_another_one_answers(
    broker: DevCluster, other_broker: DevCluster, name: TcpProxy
) -> None:
    coordinator = WireTransactionCoordinator(KafkaConfig.of(f"127.0.0.1:{name.port}"), timeout=LIMIT)
    leads_to(name, other_broker)
    first = coordinator.cluster_id()
    leads_to(name, broker)
    with pytest.raises(dualwrite.ClusterMismatchError):
        until(lambda: coordinator.cluster_id() != first, "the connection is closed")
    second = cluster_that_answers(coordinator)
    assert second != first
    assert cluster_that_answers(coordinator) == coordinator.cluster_id() == second
    coordinator.close()
