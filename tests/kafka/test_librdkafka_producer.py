"""Tests specific to LibrdkafkaProducer: sessions, transaction states, settings. For the rest see producer_suite."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from dualwrite.devcluster import DevCluster
from dualwrite.errors import (
    BrokerAuthorizationError,
    ConfigurationError,
    DeliveryError,
    MessageTooLargeError,
    PrepareError,
    ProducerFencedError,
    UsageError,
)
from dualwrite.kafka.client.config import KafkaConfig
from dualwrite.kafka.client.coordinator import WireTransactionCoordinator
from dualwrite.kafka.librdkafka.librdkafka_producer import LibrdkafkaProducer
from dualwrite.state import TransactionDescription, TransactionStatus
from fixtures import pace
from fixtures.acls import Operation, Resource, grant
from fixtures.broker import make_topic
from fixtures.logins import login_as
from fixtures.pace import LIMIT

S = TransactionStatus
NewName = Callable[[str], str]
Committed = Callable[[str], list[bytes | None]]
NewProducer = Callable[..., LibrdkafkaProducer]


@pytest.fixture
def new_producer(broker: DevCluster, coordinator: WireTransactionCoordinator, new_name: NewName) -> Iterator[NewProducer]:
    """Creates producers on `broker`, initialised, with additional Kafka settings; closes them."""
    with ExitStack() as opened:

        def new(*, kafka_id: str | None = None, **settings: Any) -> LibrdkafkaProducer:
            config = KafkaConfig.of({"bootstrap.servers": broker.bootstrap_servers, **settings})
            producer = LibrdkafkaProducer(config, kafka_id or new_name("id"), coordinator, delivery_timeout=LIMIT)
            opened.callback(producer.close)
            producer.init_transactions(timeout=LIMIT)
            return producer

        yield new


def described(
    coordinator: WireTransactionCoordinator, kafka_id: str, *, until: tuple[TransactionStatus, ...] = ()
) -> TransactionDescription:
    """The description, once its status is one of `until` (any status, if empty)."""

    def look() -> TransactionDescription | None:
        found = coordinator.describe(kafka_id)
        return found if found is not None and (not until or found.status in until) else None

    return pace.until(look, lambda: f"{kafka_id} stays {coordinator.describe(kafka_id)}", pause=0)


# --- the transaction --------------------------------------------------------------------------------------------------


def test_an_aborted_transaction_leaves_the_session_usable_and_the_evidence_intact(
    new_producer: NewProducer, coordinator: WireTransactionCoordinator, new_name: NewName, committed: Committed
) -> None:
    producer, topic = new_producer(), new_name("topic")
    producer.begin_transaction()
    producer.send(topic, b"aborted")
    state = producer.prepare_transaction(timeout=LIMIT)
    producer.abort_transaction(timeout=LIMIT)
    after = described(coordinator, producer.kafka_transactional_id, until=(S.COMPLETE_ABORT, S.EMPTY))
    assert state is not None
    assert (after.status, after.epoch, after.start_time_ms) == (S.COMPLETE_ABORT, state.epoch, state.start_time_ms)
    assert not producer.must_be_replaced
    producer.begin_transaction()
    producer.send(topic, b"kept")
    producer.prepare_transaction(timeout=LIMIT)
    producer.commit_transaction(timeout=LIMIT)
    assert committed(topic) == [b"kept"]


def test_an_abort_before_prepare_waits_for_requests_in_flight(
    new_producer: NewProducer, coordinator: WireTransactionCoordinator, new_name: NewName, committed: Committed
) -> None:
    """An abort with messages in flight would make librdkafka bump its epoch, which destroys the evidence (rule F7)."""
    producer, topic = new_producer(), new_name("topic")
    producer.begin_transaction()
    for _ in range(500):
        producer.send(topic, b"x" * 1000)
    producer.abort_transaction(timeout=LIMIT)
    after = described(coordinator, producer.kafka_transactional_id, until=(S.COMPLETE_ABORT, S.EMPTY))
    assert (after.status, after.epoch) == (S.COMPLETE_ABORT, 0)
    assert not producer.must_be_replaced
    assert committed(topic) == []


# --- messages that can't be sent --------------------------------------------------------------------------------------


def test_a_batch_of_small_messages_that_exceeds_the_limit_of_the_topic(
    broker: DevCluster, new_producer: NewProducer, new_name: NewName, committed: Committed
) -> None:
    """The error names `batch.size`, and with it the messages are sent: librdkafka does not split a batch."""
    topic = new_name("topic")
    make_topic(broker, topic, max_message_bytes="20000")

    def send(**settings: str) -> None:
        producer = new_producer(**settings)
        producer.begin_transaction()
        for _ in range(20_000):
            producer.send(topic, b"x" * 300)
        producer.prepare_transaction(timeout=LIMIT)
        producer.commit_transaction(timeout=LIMIT)

    with pytest.raises(MessageTooLargeError, match=r"(?s)librdkafka sends messages in batches .*Next step: set batch\.size"):
        send()
    send(**{"batch.size": "20000"})
    assert len(committed(topic)) == 20_000


# --- before and after a session ---------------------------------------------------------------------------------------


def test_without_a_session_calls_are_refused(broker: DevCluster, coordinator: WireTransactionCoordinator) -> None:
    producer = LibrdkafkaProducer(KafkaConfig.of(broker.bootstrap_servers), "orders", coordinator)
    assert producer.transaction_timeout is None
    with pytest.raises(UsageError, match="call init_transactions first"):
        producer.begin_transaction()
    producer.close()
    for call in (producer.begin_transaction, lambda: producer.init_transactions(timeout=LIMIT)):
        with pytest.raises(UsageError, match="is closed"):
            call()
    producer.close()


# --- settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"no.such.setting": "1"}, r"no\.such\.setting"),
        ({"compression.type": "best"}, r'Invalid value "best" for configuration property "compression.*"\.\nNext step'),
        ({"transaction.timeout.ms": 900_001}, r"transaction\.max\.timeout\.ms"),
        ({"transaction.timeout.ms": 999}, "must be at least 1000"),
    ],
)
def test_a_setting_that_is_refused_is_named(new_producer: NewProducer, settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        new_producer(**settings)


def test_by_default_the_transaction_timeout_is_the_longest_of_the_broker(new_producer: NewProducer) -> None:
    assert new_producer().transaction_timeout == 900
    assert new_producer(**{"transaction.timeout.ms": 5000}).transaction_timeout == 5


# --- ACLs -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_topic_that_may_be_described_and_not_written_to(guarded: DevCluster, new_name: NewName) -> None:
    """librdkafka drops every message of the transaction without saying why, and then refuses further ones."""
    allowed, refused, kafka_id = new_name("topic"), new_name("topic"), new_name("id")
    for topic in (allowed, refused):
        make_topic(guarded, topic)
        grant(guarded, "writer", Operation.DESCRIBE, Resource.TOPIC, topic)
    for operation in (Operation.DESCRIBE, Operation.WRITE):
        grant(guarded, "writer", operation, Resource.TRANSACTIONAL_ID, kafka_id)
    grant(guarded, "writer", Operation.WRITE, Resource.TOPIC, allowed)
    config = KafkaConfig.of(login_as(guarded, "writer"))
    with ExitStack() as opened:
        coordinator = WireTransactionCoordinator(config, timeout=LIMIT)
        opened.callback(coordinator.close)

        def transaction(*topics: str) -> None:
            producer = LibrdkafkaProducer(config, kafka_id, coordinator, delivery_timeout=LIMIT)
            opened.callback(producer.close)
            producer.init_transactions(timeout=LIMIT)
            producer.begin_transaction()
            for topic in topics:
                producer.send(topic, b"v")
            producer.prepare_transaction(timeout=LIMIT)
            producer.commit_transaction(timeout=LIMIT)

        def is_granted() -> bool:
            try:
                transaction(allowed)
            except BrokerAuthorizationError:  # a new ACL takes a moment to reach the broker
                return False
            return True

        pace.until(is_granted, "what was granted")
        with pytest.raises(BrokerAuthorizationError, match=f"(?s)to '{allowed}' or '{refused}': .*Topic authorization failed"):
            transaction(allowed, refused)


# --- fencing and time -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attempt", range(5))
def test_a_transaction_aborted_from_outside_cannot_be_prepared(
    new_producer: NewProducer, coordinator: WireTransactionCoordinator, new_name: NewName, attempt: int
) -> None:
    """Repeated, since it is a race: with flush() it ended in a SystemError, or in something that no `except` clause catches."""
    producer, topic = new_producer(), new_name("topic")
    producer.begin_transaction()
    producer.send(topic, b"v")
    found = described(coordinator, producer.kafka_transactional_id, until=(S.ONGOING,))
    assert coordinator.end_transaction(
        producer.kafka_transactional_id, producer_id=found.producer_id, epoch=found.epoch, commit=False
    ).proven
    with pytest.raises((PrepareError, ProducerFencedError, DeliveryError)):
        producer.prepare_transaction(timeout=LIMIT)
    assert producer.must_be_replaced
