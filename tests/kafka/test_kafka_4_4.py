"""What Kafka 4.4 adds: brokers that say that they are not the wanted one (KIP-1242), offsets of a topic by its id."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any
from uuid import uuid4

import pytest
from confluent_kafka import Consumer, TopicPartition

from dualwrite.devcluster import DevCluster
from dualwrite.errors import ClusterMismatchError, TopicReplacedError
from dualwrite.kafka import ConsumedOffset, GroupMetadata, NativeProducer
from dualwrite.kafka.client.broker_connection import Connection, ConnectionLostError
from dualwrite.kafka.client.brokers import Network
from dualwrite.kafka.client.config import Address, KafkaConfig
from dualwrite.kafka.inspect import topic_ids
from dualwrite.kafka.librdkafka.topic_admin import admin_client
from dualwrite.testing.proxy import TcpProxy
from fixtures.broker import make_topic, started
from fixtures.pace import LIMIT, until, until_recorded

pytestmark = pytest.mark.slow

VERSION = "4.4.0"


@pytest.fixture(scope="module")
def new_broker() -> Iterator[DevCluster]:
    with started(kafka_version=VERSION) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def other_new_broker() -> Iterator[DevCluster]:
    with started(kafka_version=VERSION) as cluster:
        yield cluster


def place_of(cluster: DevCluster) -> tuple[str, int]:
    host, _, port = cluster.bootstrap_servers.partition(":")
    return host, int(port)


@pytest.fixture
def met(new_broker: DevCluster) -> Iterator[tuple[Network, TcpProxy, Address]]:
    """A network that has met the broker at a proxy's address, and takes it for the node with the number 1 there."""
    with TcpProxy(*place_of(new_broker)) as proxy:
        network = Network(KafkaConfig.of(f"127.0.0.1:{proxy.port}"))
        address = Address("127.0.0.1", proxy.port)
        network.brokers()
        network._nodes[address] = 1
        yield network, proxy, address
        network.close()


def test_a_broker_confirms_that_it_is_the_wanted_one(
    met: tuple[Network, TcpProxy, Address], monkeypatch: pytest.MonkeyPatch
) -> None:
    network, _, address = met
    network.connection(address).close()
    sent: list[str] = []
    send = Connection.send

    def noted(connection: Connection, request: Any, *others: Any) -> int:
        sent.append(type(request).__name__)
        return send(connection, request, *others)

    monkeypatch.setattr(Connection, "send", noted)
    assert network.connection(address).is_confirmed
    assert sent == ["ApiVersionsRequest"], "the broker is not asked which cluster it belongs to"
    assert network.cluster_id()


def test_a_broker_of_another_cluster_refuses(met: tuple[Network, TcpProxy, Address], other_new_broker: DevCluster) -> None:
    network, proxy, address = met
    first = network.cluster_id()
    proxy.redirect(*place_of(other_new_broker))
    network.connection(address).close()
    with pytest.raises(ClusterMismatchError) as caught:
        network.connection(address)
    other = Network(KafkaConfig.of(other_new_broker.bootstrap_servers))
    assert (caught.value.stored_cluster_id, caught.value.seen_cluster_id) == (first, other.cluster_id())
    other.close()


def test_an_older_broker_of_another_cluster_is_noticed_too(met: tuple[Network, TcpProxy, Address], broker: DevCluster) -> None:
    network, proxy, address = met
    proxy.redirect(*place_of(broker))
    network.connection(address).close()
    with pytest.raises(ClusterMismatchError):
        network.connection(address)


def test_another_broker_of_the_cluster_is_taken_once_metadata_was_forgotten(met: tuple[Network, TcpProxy, Address]) -> None:
    network, _, address = met
    network.connection(address).close()
    network._nodes[address] = 7
    with pytest.raises(ConnectionLostError, match=r"is not node 7 of the cluster '.*', but another broker of the cluster"):
        network.connection(address)
    assert network.connection(address).usable


def committed_offsets(cluster: DevCluster, group: str, topic: str) -> dict[str, int]:
    with closing(Consumer({"bootstrap.servers": cluster.bootstrap_servers, "group.id": group})) as consumer:
        found = consumer.committed([TopicPartition(topic, 0)], timeout=LIMIT)
    return {one.topic: one.offset for one in found if one.offset >= 0}


def test_offsets_are_of_the_topic_that_was_read(new_broker: DevCluster) -> None:
    """Not of another one that has its name now, and not of one that is gone; the transaction can only be aborted then."""
    topic, group, name = (f"{each}-{uuid4()}" for each in ("topic", "group", "id"))
    kafka = new_broker.bootstrap_servers
    make_topic(new_broker, topic)
    read = ConsumedOffset(topic, 0, 3, topic_id=topic_ids(kafka, [topic])[topic])
    admin = admin_client({"bootstrap.servers": kafka}, LIMIT)
    with closing(NativeProducer(KafkaConfig.of(kafka), name)) as producer:
        producer.init_transactions(timeout=LIMIT)
        producer.begin_transaction()
        producer.send_offsets_to_transaction([read], GroupMetadata(group), timeout=LIMIT)
        producer.prepare_transaction(timeout=LIMIT)
        producer.commit_transaction(timeout=LIMIT)
        until_recorded(lambda: committed_offsets(new_broker, group, topic), {topic: 3})
        for again, text in ((False, "was deleted since it was read"), (True, "was deleted and created again since")):
            if again:
                make_topic(new_broker, topic)
            else:
                admin.delete_topics([topic])[topic].result(LIMIT)
                until(lambda: topic not in admin.list_topics(timeout=LIMIT).topics, "the topic is gone")
            producer.begin_transaction()
            with pytest.raises(TopicReplacedError, match=text) as caught:
                producer.send_offsets_to_transaction([read], GroupMetadata(group), timeout=LIMIT)
            assert caught.value.topic == topic
            with pytest.raises(TopicReplacedError):
                producer.prepare_transaction(timeout=LIMIT)
            producer.abort_transaction(timeout=LIMIT)
        found = topic_ids(kafka, [topic])[topic]
        producer.begin_transaction()
        producer.send_offsets_to_transaction([replace(read, topic_id=found, offset=1)], GroupMetadata(group), timeout=LIMIT)
        producer.prepare_transaction(timeout=LIMIT)
        producer.commit_transaction(timeout=LIMIT)
        until_recorded(lambda: committed_offsets(new_broker, group, topic), {topic: 1})
