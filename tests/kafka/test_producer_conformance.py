"""Every producer passes the conformance suite, on a broker that creates topics automatically and on one that does not."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
from confluent_kafka import Consumer, ConsumerGroupTopicPartitions, TopicPartition
from confluent_kafka.admin import AdminClient

from dualwrite.devcluster import DevCluster
from dualwrite.kafka.base import TransactionalProducer, progress_of
from dualwrite.kafka.client.config import KafkaConfig
from dualwrite.kafka.client.coordinator import WireTransactionCoordinator
from dualwrite.kafka.librdkafka.librdkafka_producer import LibrdkafkaProducer
from dualwrite.kafka.native.native_producer import NativeProducer
from dualwrite.testing.producers import ProducerCapabilities, ProducerConformance, ProducerScene, SeenMessage
from fixtures.broker import make_topic, read_topic
from fixtures.pace import LIMIT

Make = Callable[[KafkaConfig, str, WireTransactionCoordinator], TransactionalProducer]

LIBRDKAFKA = ProducerCapabilities()
NATIVE = ProducerCapabilities(epoch_per_transaction=True, checks_calls=True, splits_batches=True)
NATIVE_TWO_PHASE = ProducerCapabilities(two_phase=True, epoch_per_transaction=True, checks_calls=True, splits_batches=True)


class ClusterScene(ProducerScene):
    """A scene on a development cluster."""

    def __init__(
        self, capabilities: ProducerCapabilities, cluster: DevCluster, coordinator: WireTransactionCoordinator, make: Make
    ) -> None:
        super().__init__(capabilities, coordinator)
        self.servers = cluster.bootstrap_servers
        self._cluster = cluster
        self._coordinator = coordinator
        self._make = make

    def make(self, kafka_transactional_id: str, settings: Mapping[str, Any]) -> TransactionalProducer:
        config = KafkaConfig.of({"bootstrap.servers": self.servers, **settings})
        return self._make(config, kafka_transactional_id, self._coordinator)

    def make_topic(self, topic: str, partitions: int = 1, **settings: str) -> None:
        make_topic(self._cluster, topic, partitions, **settings)

    def read(self, topic: str) -> list[SeenMessage]:
        found: list[Any] = read_topic(self.servers, topic)
        return [SeenMessage(m.partition(), m.key(), m.value(), m.headers() or [], m.timestamp()[1]) for m in found]

    def committed_offset(self, group: str, topic: str, partition: int) -> int | None:
        admin = AdminClient({"bootstrap.servers": self.servers})
        wanted = ConsumerGroupTopicPartitions(group, [TopicPartition(topic, partition)])
        (found,) = admin.list_consumer_group_offsets([wanted], require_stable=False)[group].result(LIMIT).topic_partitions
        return found.offset if found.offset >= 0 else None


class Conformance(ProducerConformance):
    """The suite for one producer, with the tests that need confluent-kafka."""

    capabilities: ProducerCapabilities

    # The producer waits 5 s for a topic that the broker does not know: it may be in creation.
    test_a_missing_topic_is_reported_by_name = pytest.mark.slow(ProducerConformance.test_a_missing_topic_is_reported_by_name)

    @staticmethod
    def make(config: KafkaConfig, kafka_id: str, coordinator: WireTransactionCoordinator) -> TransactionalProducer:
        raise NotImplementedError

    @pytest.fixture
    def scene(self, broker: DevCluster, coordinator: WireTransactionCoordinator) -> Iterator[ClusterScene]:
        with ClusterScene(self.capabilities, broker, coordinator, self.make) as scene:
            yield scene

    @pytest.fixture
    def strict_scene(
        self, strict_broker: DevCluster, new_coordinator: Callable[..., WireTransactionCoordinator]
    ) -> Iterator[ClusterScene]:
        coordinator = new_coordinator(strict_broker.bootstrap_servers)
        with ClusterScene(self.capabilities, strict_broker, coordinator, self.make) as scene:
            yield scene

    @pytest.mark.parametrize("instance", [None, "static member"])
    def test_consumer_offsets_are_part_of_the_transaction(self, scene: ClusterScene, instance: str | None) -> None:
        """The group metadata of confluent-kafka's consumer matches what the group's coordinator knows (KIP-447)."""
        producer, source = scene.new_producer(), scene.new_name("source")
        producer.begin_transaction()
        producer.send(source, b"in")
        producer.commit_transaction(timeout=LIMIT)
        settings = {
            "bootstrap.servers": scene.servers,
            "group.id": scene.new_name("group"),
            "enable.auto.commit": False,
            "auto.offset.reset": "earliest",
        }
        consumer = Consumer(settings if instance is None else {**settings, "group.instance.id": instance})
        consumer.subscribe([source])
        try:
            message = consumer.poll(LIMIT)
            assert message is not None
            assert message.value() == b"in"
            offsets, group = progress_of(consumer)
            assert group.group_instance_id == instance
            assert group.generation_id > 0
            producer.begin_transaction()
            producer.send_offsets_to_transaction(offsets, group, timeout=LIMIT)
            assert producer.prepare_transaction(timeout=LIMIT) is not None
            producer.commit_transaction(timeout=LIMIT)
            (position,) = consumer.committed(consumer.assignment(), timeout=LIMIT)
            assert position.offset == 1
        finally:
            consumer.close()


@pytest.mark.slow
class TestLibrdkafkaProducer(Conformance):
    capabilities = LIBRDKAFKA

    @pytest.mark.soak  # in CI by test_strict_broker.py
    def test_a_missing_topic_is_reported_by_name(self, strict_scene: ProducerScene) -> None:
        super().test_a_missing_topic_is_reported_by_name(strict_scene)

    @staticmethod
    def make(config: KafkaConfig, kafka_id: str, coordinator: WireTransactionCoordinator) -> TransactionalProducer:
        return LibrdkafkaProducer(config, kafka_id, coordinator, delivery_timeout=LIMIT)


@pytest.mark.slow
class TestNativeProducer(Conformance):
    capabilities = NATIVE

    @pytest.mark.soak  # in CI by the next class, which looks topics up in the same way
    def test_a_missing_topic_is_reported_by_name(self, strict_scene: ProducerScene) -> None:
        super().test_a_missing_topic_is_reported_by_name(strict_scene)

    @staticmethod
    def make(config: KafkaConfig, kafka_id: str, coordinator: WireTransactionCoordinator) -> TransactionalProducer:
        return NativeProducer(config, kafka_id, coordinator, delivery_timeout=LIMIT)


class TestNativeTwoPhaseProducer(Conformance):
    capabilities = NATIVE_TWO_PHASE

    @staticmethod
    def make(config: KafkaConfig, kafka_id: str, coordinator: WireTransactionCoordinator) -> TransactionalProducer:
        return NativeProducer(config, kafka_id, coordinator, two_phase=True, delivery_timeout=LIMIT)
