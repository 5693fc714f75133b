"""The log shows how a transaction ended, even if its coordinator has forgotten it: for both producers, on real brokers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient
from producer_cases import NATIVE

from dualwrite.devcluster import DevCluster
from dualwrite.kafka.base import GroupMetadata, TransactionalProducer
from dualwrite.kafka.client import log_reader
from dualwrite.kafka.client.config import KafkaConfig
from dualwrite.kafka.client.coordinator import WireTransactionCoordinator
from dualwrite.kafka.librdkafka.librdkafka_producer import LibrdkafkaProducer
from dualwrite.kafka.native.native_producer import NativeProducer
from dualwrite.observability import outages
from dualwrite.state import ConsumedOffset, Delivery, Fate, FoundMessages, GroupOffsets, Place, PreparedTxnState
from fixtures.broker import make_topic, wait_for_markers
from fixtures.pace import LIMIT

NewName = Callable[[str], str]


@pytest.fixture
def coordinator(cluster: DevCluster) -> Iterator[WireTransactionCoordinator]:
    made = WireTransactionCoordinator(KafkaConfig.of(cluster.bootstrap_servers), timeout=LIMIT)
    yield made
    made.close()


@pytest.fixture
def producer(
    case: str, cluster: DevCluster, coordinator: WireTransactionCoordinator, new_name: NewName
) -> Iterator[TransactionalProducer]:
    kind: Any = NativeProducer if case == NATIVE else LibrdkafkaProducer
    made: TransactionalProducer = kind(KafkaConfig.of(cluster.bootstrap_servers), new_name("id"), coordinator)
    made.init_transactions(timeout=LIMIT)
    yield made
    made.close()


@pytest.fixture
def topic(cluster: DevCluster, new_name: NewName) -> str:
    name = new_name("topic")
    make_topic(cluster, name, 3)
    return name


def prepared(producer: TransactionalProducer, topic: str, count: int = 1) -> tuple[PreparedTxnState, Delivery]:
    """A prepared transaction with messages in partition 1."""
    producer.begin_transaction()
    for number in range(count):
        producer.send(topic, f"message {number}", partition=1)
    state = producer.prepare_transaction(timeout=LIMIT)
    assert state is not None
    assert producer.delivery is not None
    return state, producer.delivery


def proof_of(delivery: Delivery) -> Place:
    return delivery.proofs[0]


def test_a_producer_reports_where_its_messages_are(producer: TransactionalProducer, topic: str) -> None:
    by_topic = isinstance(producer, LibrdkafkaProducer)
    _, first = prepared(producer, topic, 3)
    producer.commit_transaction(timeout=LIMIT)
    assert (first.messages, first.places) == (3, (Place(topic, 1, 0, 3, by_topic),))
    _, second = prepared(producer, topic)
    producer.commit_transaction(timeout=LIMIT)
    assert second.places == (Place(topic, 1, 4, 1, by_topic),)  # after three messages and a marker
    producer.begin_transaction()
    assert producer.delivery is None
    producer.abort_transaction(timeout=LIMIT)


def test_every_topic_of_a_transaction_has_a_place(producer: TransactionalProducer, topic: str, cluster: DevCluster) -> None:
    by_topic = isinstance(producer, LibrdkafkaProducer)
    other = f"{topic}-other"
    make_topic(cluster, other)
    producer.begin_transaction()
    for _ in range(2):
        producer.send(topic, "message", partition=2)
    producer.send(other, "message")
    producer.prepare_transaction(timeout=LIMIT)
    producer.commit_transaction(timeout=LIMIT)
    assert producer.delivery is not None
    assert set(producer.delivery.places) == {Place(topic, 2, 0, 2, by_topic), Place(other, 0, 0, 1, by_topic)}


def test_the_offsets_of_a_transaction_are_part_of_its_delivery(
    producer: TransactionalProducer, topic: str, new_name: NewName, coordinator: WireTransactionCoordinator
) -> None:
    groups = [GroupMetadata(new_name("group")) for _ in range(2)]
    producer.begin_transaction()
    producer.send_offsets_to_transaction([ConsumedOffset(topic, 0, 3), ConsumedOffset(topic, 1, 5)], groups[0], timeout=LIMIT)
    producer.send_offsets_to_transaction([ConsumedOffset(topic, 1, 6, 2, "note")], groups[0], timeout=LIMIT)
    producer.send_offsets_to_transaction([ConsumedOffset(topic, 0, 8)], groups[1], timeout=LIMIT)
    producer.send_offsets_to_transaction([], groups[1], timeout=LIMIT)
    state = producer.prepare_transaction(timeout=LIMIT)
    assert state is not None
    delivery = producer.delivery
    assert delivery is not None
    assert (delivery.messages, delivery.places) == (0, ())
    assert delivery.offsets == (
        GroupOffsets(groups[0].group_id, (ConsumedOffset(topic, 0, 3), ConsumedOffset(topic, 1, 6, 2, "note"))),
        GroupOffsets(groups[1].group_id, (ConsumedOffset(topic, 0, 8),)),
    )
    producer.abort_transaction(timeout=LIMIT)
    assert coordinator.find_messages(state, delivery) == FoundMessages(())
    unknown = replace(delivery, offsets=(GroupOffsets("orders", ()),))
    assert coordinator.find_messages(state, unknown).missing == ("the offsets of group orders were not stored",)
    _, second = prepared(producer, topic)
    assert second.offsets == ()
    producer.abort_transaction(timeout=LIMIT)


@pytest.mark.parametrize("commit", [True, False], ids=["commit", "abort"])
def test_the_outcome_of_an_ended_transaction_is_found_in_the_log(
    producer: TransactionalProducer, topic: str, cluster: DevCluster, coordinator: WireTransactionCoordinator, commit: bool
) -> None:
    earlier, earlier_delivery = prepared(producer, topic, 2)
    producer.abort_transaction(timeout=LIMIT)
    state, delivery = prepared(producer, topic, 2)
    assert coordinator.fate(state, proof_of(delivery)) is Fate.OPEN
    (producer.commit_transaction if commit else producer.abort_transaction)(timeout=LIMIT)
    later, later_delivery = prepared(producer, topic, 2)
    producer.commit_transaction(timeout=LIMIT)
    wait_for_markers(cluster.bootstrap_servers)
    assert coordinator.fate(state, proof_of(delivery)) is (Fate.COMMITTED if commit else Fate.ABORTED)
    assert coordinator.fate(earlier, proof_of(earlier_delivery)) is Fate.ABORTED
    assert coordinator.fate(later, proof_of(later_delivery)) is Fate.COMMITTED


def test_a_message_of_another_producer_proves_nothing(
    producer: TransactionalProducer, topic: str, cluster: DevCluster, coordinator: WireTransactionCoordinator
) -> None:
    state, delivery = prepared(producer, topic)
    producer.commit_transaction(timeout=LIMIT)
    wait_for_markers(cluster.bootstrap_servers)
    place = proof_of(delivery)
    assert coordinator.fate(PreparedTxnState(state.producer_id + 1, state.epoch), place) is Fate.GONE
    assert coordinator.fate(PreparedTxnState(state.producer_id, state.epoch + 1), place) is Fate.GONE
    assert coordinator.fate(state, Place(topic, 1, 1, 1)) is Fate.GONE  # the marker


def test_deleted_records_are_reported_as_gone(
    producer: TransactionalProducer, topic: str, cluster: DevCluster, coordinator: WireTransactionCoordinator
) -> None:
    state, delivery = prepared(producer, topic, 2)
    producer.commit_transaction(timeout=LIMIT)
    wait_for_markers(cluster.bootstrap_servers)
    place = proof_of(delivery)
    assert coordinator.fate(state, Place(topic, 1, 10, 1)) is Fate.GONE  # past the end
    assert coordinator.fate(state, Place(topic, 7, 0, 1)) is Fate.GONE  # no such partition
    assert coordinator.fate(state, Place(f"{topic}-missing", 0, 0, 1)) is Fate.GONE
    admin = AdminClient({"bootstrap.servers": cluster.bootstrap_servers})
    admin.delete_records([TopicPartition(topic, 1, 3)])[TopicPartition(topic, 1)].result(20)
    assert coordinator.fate(state, place) is Fate.GONE


@pytest.mark.slow
def test_a_topic_that_is_gone_is_no_outage(
    broker: DevCluster, new_name: NewName, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kafka answers, again and again, that it knows no such partition."""
    monkeypatch.setattr(log_reader, "_CERTAIN", 4 * outages.SLOW)
    with (
        caplog.at_level(logging.WARNING, "dualwrite.outages"),
        closing(WireTransactionCoordinator(KafkaConfig.of(broker.bootstrap_servers), timeout=LIMIT)) as coordinator,
    ):
        assert coordinator.fate(PreparedTxnState(1, 1), Place(new_name("gone"), 0, 0, 1)) is Fate.GONE
    assert [record.getMessage() for record in caplog.records if "does not answer" in record.getMessage()] == []
