"""librdkafka's errors are mapped to dualwrite's in one place."""

from __future__ import annotations

import pytest
from confluent_kafka import KafkaError, KafkaException

from dualwrite.errors import (
    BrokerAuthorizationError,
    BrokerError,
    BrokerUnavailableError,
    DeliveryError,
    MessageTooLargeError,
    ProducerFencedError,
    TransactionTimeoutRefusedError,
    UnknownTopicError,
)
from dualwrite.kafka.librdkafka.librdkafka_errors import (
    LEADER_MOVED,
    broker_error,
    consumer_recovers,
    consuming_error,
    is_retriable,
    kafka_error,
)
from fixtures.tables import table

KINDS = [
    ("UNKNOWN_TOPIC_OR_PART", UnknownTopicError),
    ("_UNKNOWN_TOPIC", UnknownTopicError),
    ("_UNKNOWN_PARTITION", UnknownTopicError),
    ("TOPIC_EXCEPTION", UnknownTopicError),
    ("MSG_SIZE_TOO_LARGE", MessageTooLargeError),
    ("RECORD_LIST_TOO_LARGE", MessageTooLargeError),
    ("_FENCED", ProducerFencedError),
    ("INVALID_PRODUCER_EPOCH", ProducerFencedError),
    ("PRODUCER_FENCED", ProducerFencedError),
    ("INVALID_PRODUCER_ID_MAPPING", ProducerFencedError),
    ("TOPIC_AUTHORIZATION_FAILED", BrokerAuthorizationError),
    ("GROUP_AUTHORIZATION_FAILED", BrokerAuthorizationError),
    ("CLUSTER_AUTHORIZATION_FAILED", BrokerAuthorizationError),
    ("TRANSACTIONAL_ID_AUTHORIZATION_FAILED", BrokerAuthorizationError),
    ("SASL_AUTHENTICATION_FAILED", BrokerAuthorizationError),
    ("_AUTHENTICATION", BrokerAuthorizationError),
    ("_SSL", BrokerAuthorizationError),
    ("INVALID_TRANSACTION_TIMEOUT", TransactionTimeoutRefusedError),
    ("_TIMED_OUT", BrokerUnavailableError),
    ("_TRANSPORT", BrokerUnavailableError),
    ("_ALL_BROKERS_DOWN", BrokerUnavailableError),
    ("_TIMED_OUT_QUEUE", BrokerUnavailableError),
    ("_WAIT_COORD", BrokerUnavailableError),
    ("_DESTROY_BROKER", BrokerUnavailableError),
    ("COORDINATOR_NOT_AVAILABLE", BrokerUnavailableError),
    ("COORDINATOR_LOAD_IN_PROGRESS", BrokerUnavailableError),
    ("NOT_COORDINATOR", BrokerUnavailableError),
    ("REQUEST_TIMED_OUT", BrokerUnavailableError),
    ("LEADER_NOT_AVAILABLE", BrokerUnavailableError),
    ("CONCURRENT_TRANSACTIONS", BrokerUnavailableError),
]


@pytest.mark.parametrize("wrapped", [True, False])
def test_a_code_has_its_kind_and_keeps_its_facts(wrapped: bool) -> None:
    for name, kind in KINDS:
        original = KafkaError(getattr(KafkaError, name))
        error = broker_error(KafkaException(original) if wrapped else original, "orders#1", "delivery to topic 't'")
        assert type(error) is kind, name
        assert (error.transactional_id, error.code, error.name) == ("orders#1", original.code(), original.name())
        assert str(error).startswith("Kafka error during delivery to topic 't': ")
        assert original.str() in str(error)


@pytest.mark.parametrize("action", ["delivery to topic 't'", "send to topic 't'"])
def test_any_other_error_of_a_message_is_a_delivery_error(action: str) -> None:
    assert type(broker_error(KafkaError(KafkaError.KAFKA_STORAGE_ERROR), "x", action)) is DeliveryError


def test_any_other_error_is_a_broker_error() -> None:
    error = broker_error(KafkaError(KafkaError.INVALID_REQUEST), "x", "commit_transaction")
    assert type(error) is BrokerError
    assert error.name == "INVALID_REQUEST"


def test_a_broker_refuses_the_batch_and_the_producer_the_message() -> None:
    of_broker, own = (
        broker_error(KafkaError(KafkaError.MSG_SIZE_TOO_LARGE), "x", f"{what} to topic 't'") for what in ("delivery", "send")
    )
    assert "batch.size" in str(of_broker.next_step)
    assert "make it smaller" in str(own.next_step)
    assert "batch" not in str(own)


@table(
    ("code", "reason", "kind", "next_step"),
    [
        (KafkaError.GROUP_AUTHORIZATION_FAILED, None, BrokerAuthorizationError, "Read on the consumer group"),
        (KafkaError.TOPIC_AUTHORIZATION_FAILED, None, BrokerAuthorizationError, "Read on the topic"),
        (KafkaError._FATAL, KafkaError.FENCED_INSTANCE_ID, BrokerError, "group.instance.id of its own"),
        (KafkaError._FATAL, KafkaError.UNRELEASED_INSTANCE_ID, BrokerError, "group.consumer.session.timeout.ms"),
        (KafkaError.FENCED_INSTANCE_ID, None, BrokerError, "group.instance.id of its own"),
    ],
)
def test_a_consumer_that_cannot_continue(code: int, reason: int | None, kind: type[BrokerError], next_step: str) -> None:
    text = KafkaError(code if reason is None else reason).str()
    error = consuming_error(KafkaError(code, f"Fatal error: {text}: Fatal consumer error: {text}"), " of t-0")
    assert type(error) is kind
    assert str(error).startswith("Consuming of t-0 failed: ")
    assert next_step in str(error.next_step)
    assert error.code == code


def test_the_consumer_group_is_named_and_a_sentence_has_one_full_stop() -> None:
    text = "FindCoordinator response error: Group authorization failed."
    error = consuming_error(KafkaError(KafkaError.GROUP_AUTHORIZATION_FAILED, text), "", "billing")
    assert f"{error}" == f"Consuming failed: {text} Next step: grant the principal Read on the consumer group 'billing'"


@table("code", sorted(LEADER_MOVED))
def test_reading_and_consuming_continue_when_the_leader_has_moved(code: int) -> None:
    error = broker_error(KafkaError(code), None, "reading the first offsets of partitions")
    assert isinstance(error, BrokerUnavailableError)
    assert error.retriable
    assert consumer_recovers(KafkaError(code))


def test_a_consumer_does_not_recover_from_fatal_and_other_errors() -> None:
    assert consumer_recovers(KafkaError(KafkaError._TRANSPORT))
    assert not consumer_recovers(KafkaError(KafkaError._TRANSPORT, "fatal", fatal=True))
    assert not consumer_recovers(KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED))


def test_a_topic_that_is_not_in_the_metadata_is_unknown() -> None:
    error = broker_error(None, "x", "lookup of topic 't'")
    assert type(error) is UnknownTopicError
    assert "no such topic" in str(error)
    assert error.code is None


def test_the_error_inside_is_found() -> None:
    inner = KafkaError(KafkaError._FENCED)
    assert kafka_error(inner) is inner
    assert kafka_error(KafkaException(inner)) is inner
    assert kafka_error(KafkaException()) is None
    assert kafka_error(KafkaException("text")) is None
    assert kafka_error(ValueError()) is None
    assert kafka_error(None) is None


def test_retriable_errors_of_librdkafka_are_retriable() -> None:
    assert is_retriable(KafkaException(KafkaError(KafkaError._TIMED_OUT, "later", fatal=False, retriable=True)))
    assert not is_retriable(KafkaException(KafkaError(KafkaError._FENCED, "gone", fatal=True)))
    assert not is_retriable(ValueError())


def test_a_topic_being_created_is_looked_up_again() -> None:
    assert is_retriable(KafkaError(KafkaError.LEADER_NOT_AVAILABLE))
    assert is_retriable(KafkaError(KafkaError.UNKNOWN_TOPIC_OR_PART))
