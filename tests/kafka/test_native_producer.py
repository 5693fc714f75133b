"""Tests specific to NativeProducer: taking over ids, epochs, KIP-939, settings. For the rest see producer_suite."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from confluent_kafka import Consumer
from confluent_kafka.cimpl import NewPartitions

from dualwrite.devcluster import DevCluster
from dualwrite.errors import (
    BrokerError,
    ConfigurationError,
    DeliveryError,
    InvalidTransactionalIdError,
    InvalidTransitionError,
    ProducerFencedError,
    TransactionTimeoutRefusedError,
    UnknownTopicError,
)
from dualwrite.kafka.base import GroupMetadata
from dualwrite.kafka.client.compression import NAMES as COMPRESSIONS
from dualwrite.kafka.client.config import KafkaConfig
from dualwrite.kafka.client.coordinator import WireTransactionCoordinator
from dualwrite.kafka.librdkafka.topic_admin import admin_client
from dualwrite.kafka.native.native_producer import NativeProducer, ProducerState
from dualwrite.state import PreparedTxnState, TransactionDescription, TransactionStatus
from fixtures import pace
from fixtures.broker import make_topic, read_topic, read_values
from fixtures.logins import LOGINS, settings_for
from fixtures.pace import LIMIT
from fixtures.producing import producing

S = TransactionStatus
NewName = Callable[[str], str]
NewProducer = Callable[..., NativeProducer]
Committed = Callable[[str], list[bytes | None]]

NO_TIMEOUT_MS = 2**31 - 1


def ready(producer: NativeProducer) -> NativeProducer:
    producer.init_transactions(timeout=LIMIT)
    return producer


def send_one(producer: NativeProducer, topic: str, value: bytes = b"v") -> PreparedTxnState:
    """A prepared transaction with one message."""
    producer.begin_transaction()
    producer.send(topic, value)
    state = producer.prepare_transaction(timeout=LIMIT)
    assert state is not None
    return state


def described(
    coordinator: WireTransactionCoordinator, producer: NativeProducer, *, until: S | None = None
) -> TransactionDescription:
    """The coordinator's description, once no markers are being written, or once the status is `until`."""

    def look() -> TransactionDescription | None:
        found = coordinator.describe(producer.kafka_transactional_id)
        assert found is not None
        is_it = found.status is until or (until is None and not found.status.is_ending)
        return found if is_it else None

    return pace.until(look, f"{producer.kafka_transactional_id}: {until or 'markers are written'}", pause=0)


# --- epochs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("two_phase", [False, True])
def test_each_transaction_is_named_by_its_own_epoch(
    new_native: NewProducer, coordinator: WireTransactionCoordinator, new_name: NewName, two_phase: bool
) -> None:
    producer, topic = ready(new_native(two_phase=two_phase)), new_name("topic")
    producer_id, first = producer.identity
    for number, end in enumerate((producer.commit_transaction, producer.abort_transaction) * 2):
        state = send_one(producer, topic)
        found = described(coordinator, producer)
        assert (found.status, found.producer_id, found.epoch) == (S.ONGOING, producer_id, first + number)
        assert str(state) == f"{producer_id}:{first + number}"
        assert found.timeout_ms == (NO_TIMEOUT_MS if two_phase else 900_000)
        end(timeout=LIMIT)
        assert producer.identity == (producer_id, first + number + 1)


def test_a_transaction_with_nothing_sent_keeps_its_epoch_and_asks_nothing_of_the_coordinator(
    new_native: NewProducer, coordinator: WireTransactionCoordinator, new_name: NewName
) -> None:
    producer = ready(new_native())
    send_one(producer, new_name("topic"))
    producer.commit_transaction(timeout=LIMIT)
    before, identity = described(coordinator, producer), producer.identity
    for end in (producer.commit_transaction, producer.abort_transaction):
        producer.begin_transaction()
        with pytest.raises(BrokerError):
            producer.send(new_name("topic"), b"x" * 2_000_000)  # above message.max.bytes
        end(timeout=LIMIT)
    assert producer.identity == identity
    assert described(coordinator, producer) == before


@pytest.mark.parametrize("two_phase", [False, True])
def test_the_timeout_is_the_configured_one(
    new_native: NewProducer, coordinator: WireTransactionCoordinator, two_phase: bool
) -> None:
    settings = {} if two_phase else {"transaction_timeout_ms": 5_000}
    producer = ready(new_native(two_phase=two_phase, **settings))
    assert described(coordinator, producer).timeout_ms == (NO_TIMEOUT_MS if two_phase else 5_000)
    assert producer.transaction_timeout == (None if two_phase else 5)
    assert producer.two_phase is two_phase


# --- taking over an id ------------------------------------------------------------------------------------------------


def test_an_id_is_created_only_where_it_is_unknown(
    new_native: NewProducer, coordinator: WireTransactionCoordinator, new_name: NewName, committed: Committed
) -> None:
    first, topic = new_native(two_phase=True), new_name("topic")
    assert first.create(timeout=LIMIT)
    assert first.identity == (described(coordinator, first).producer_id, 0)
    send_one(first, topic)
    before = described(coordinator, first)
    for two_phase in (True, False):
        second = new_native(first.kafka_transactional_id, two_phase=two_phase)
        assert not second.create(timeout=LIMIT)
        assert second.state is ProducerState.UNINITIALIZED
    assert described(coordinator, first) == before
    first.commit_transaction(timeout=LIMIT)
    assert committed(topic) == [b"v"]


@pytest.mark.parametrize("ongoing", [False, True])
def test_an_id_is_adopted_by_whoever_raised_its_epoch(
    new_native: NewProducer, coordinator: WireTransactionCoordinator, new_name: NewName, committed: Committed, ongoing: bool
) -> None:
    """Rule F5: EndTxn of the described epoch, and its answer."""
    old, topic = ready(new_native(two_phase=True)), new_name("topic")
    send_one(old, topic, b"before")
    old.commit_transaction(timeout=LIMIT)
    if ongoing:
        send_one(old, topic, b"old")
    found = described(coordinator, old)
    answer = coordinator.end_transaction(
        old.kafka_transactional_id, producer_id=found.producer_id, epoch=found.epoch, commit=False
    )
    assert answer.proven
    new = new_native(old.kafka_transactional_id, two_phase=True)
    assert new.wanted_timeout_ms(timeout=LIMIT) == found.timeout_ms
    new.adopt(answer.producer_id, answer.epoch, timeout_ms=found.timeout_ms)
    assert new.identity == (found.producer_id, found.epoch + 1)
    assert new.transaction_timeout is None
    send_one(new, topic, b"new")
    go_on = (lambda: old.commit_transaction(timeout=LIMIT)) if ongoing else (lambda: send_one(old, topic, b"late"))
    with pytest.raises(ProducerFencedError):
        go_on()
    new.commit_transaction(timeout=LIMIT)
    assert committed(topic) == [b"before", b"new"]


def test_init_transactions_aborts_the_transaction_of_an_earlier_holder_and_fences_it(
    new_native: NewProducer, coordinator: WireTransactionCoordinator, new_name: NewName, committed: Committed
) -> None:
    old, topic = ready(new_native(two_phase=True)), new_name("topic")
    send_one(old, topic, b"old")
    new = new_native(old.kafka_transactional_id, two_phase=True)
    assert new.init_transactions(timeout=LIMIT) is None
    found = described(coordinator, new)
    assert (found.status, found.producer_id, found.epoch) == (S.EMPTY, *new.identity)
    assert committed(topic) == []
    with pytest.raises(ProducerFencedError):
        old.commit_transaction(timeout=LIMIT)
    assert old.must_be_replaced
    ready(old)  # a fenced producer may acquire the id again
    send_one(old, topic, b"again")
    old.commit_transaction(timeout=LIMIT)
    assert committed(topic) == [b"again"]


# --- keeping a prepared transaction: today's brokers --------------------------------------------------------------------

OTHER = PreparedTxnState(1, 1)
ENDS: dict[str, tuple[Callable[[NativeProducer, PreparedTxnState], None], bool]] = {
    "complete by its state": (lambda p, state: p.complete_prepared_transaction(state, timeout=LIMIT), True),
    "complete by another state": (lambda p, _: p.complete_prepared_transaction(OTHER, timeout=LIMIT), False),
    "complete by the next epoch": (
        lambda p, state: p.complete_prepared_transaction(PreparedTxnState(state.producer_id, state.epoch + 1), timeout=LIMIT),
        False,
    ),
    "complete by none": (lambda p, _: p.complete_prepared_transaction(None, timeout=LIMIT), False),
    "commit": (lambda p, _: p.commit_transaction(timeout=LIMIT), True),
    "abort": (lambda p, _: p.abort_transaction(timeout=LIMIT), False),
}


@pytest.mark.parametrize("how", ENDS)
def test_a_prepared_transaction_of_an_earlier_holder_is_kept_until_it_is_ended(
    new_native: NewProducer, coordinator: WireTransactionCoordinator, new_name: NewName, committed: Committed, how: str
) -> None:
    end, commits = ENDS[how]
    old, topic = ready(new_native(two_phase=True)), new_name("topic")
    state = send_one(old, topic, b"kept")
    old.close()
    new = new_native(old.kafka_transactional_id, two_phase=True)
    assert new.init_transactions(keep_prepared_txn=True, timeout=LIMIT) == state
    assert described(coordinator, new).status is S.ONGOING
    with pytest.raises(InvalidTransitionError, match="complete_prepared_transaction"):
        new.begin_transaction()
    end(new, state)
    assert new.state is ProducerState.READY
    send_one(new, topic, b"next")
    new.commit_transaction(timeout=LIMIT)
    assert committed(topic) == ([b"kept", b"next"] if commits else [b"next"])


def test_an_earlier_holder_that_is_alive_is_fenced_once_its_transaction_was_ended(
    new_native: NewProducer, new_name: NewName, committed: Committed
) -> None:
    old, topic = ready(new_native()), new_name("topic")
    state = send_one(old, topic, b"kept")
    new = new_native(old.kafka_transactional_id)
    assert new.init_transactions(keep_prepared_txn=True, timeout=LIMIT) == state
    new.complete_prepared_transaction(state, timeout=LIMIT)
    with pytest.raises(ProducerFencedError):
        old.abort_transaction(timeout=LIMIT)
    send_one(new, topic, b"new")
    new.commit_transaction(timeout=LIMIT)
    assert committed(topic) == [b"kept", b"new"]


@pytest.mark.parametrize("before", ["unknown", "empty", "committed", "aborted", "plain"])
def test_with_nothing_prepared_the_id_can_be_used_and_its_earlier_holder_is_fenced(
    new_native: NewProducer, coordinator: WireTransactionCoordinator, new_name: NewName, committed: Committed, before: str
) -> None:
    old, topic = new_native(two_phase=before != "plain"), new_name("topic")
    if before != "unknown":
        ready(old)
    if before in ("committed", "aborted"):
        send_one(old, topic, before.encode())
        (old.commit_transaction if before == "committed" else old.abort_transaction)(timeout=LIMIT)
    new = new_native(old.kafka_transactional_id, two_phase=True)
    assert new.init_transactions(keep_prepared_txn=True, timeout=LIMIT) is None
    assert described(coordinator, new).timeout_ms == NO_TIMEOUT_MS
    if before != "unknown":
        with pytest.raises(ProducerFencedError):
            send_one(old, topic, b"late")
    send_one(new, topic, b"new")
    new.commit_transaction(timeout=LIMIT)
    assert committed(topic) == ([b"committed", b"new"] if before == "committed" else [b"new"])


class InterleavedCoordinator(WireTransactionCoordinator):
    """A real coordinator's connections; another process acts right before the first EndTxn that is sent through them."""

    somebody_else: Callable[[], Any] | None = None

    def end_transaction(self, *arguments: Any, **more: Any) -> Any:
        act, self.somebody_else = self.somebody_else, None
        if act is not None:
            act()
        return super().end_transaction(*arguments, **more)


def test_concurrent_claimants_never_share_an_epoch(
    broker: DevCluster, new_native: NewProducer, new_name: NewName, committed: Committed
) -> None:
    """Both abort the same epoch and get the same answer: with a shared epoch, a batch would be acknowledged but not stored."""
    first, topic = ready(new_native()), new_name("topic")
    send_one(first, topic, b"before")
    first.commit_transaction(timeout=LIMIT)
    config = KafkaConfig.of(broker.bootstrap_servers)
    coordinator = InterleavedCoordinator(config)
    winner = new_native(first.kafka_transactional_id)
    coordinator.somebody_else = lambda: winner.init_transactions(keep_prepared_txn=True, timeout=LIMIT)
    late = NativeProducer(config, first.kafka_transactional_id, coordinator)
    try:
        late.init_transactions(keep_prepared_txn=True, timeout=LIMIT)
        assert winner.state is late.state is ProducerState.READY
        assert late.identity != winner.identity
        send_one(late, topic, b"late")
        with pytest.raises(ProducerFencedError):
            send_one(winner, topic, b"winner")
        late.commit_transaction(timeout=LIMIT)
    finally:
        late.close()
        coordinator.close()
    assert committed(topic) == [b"before", b"late"]


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kafka_id", ["", None, 5])
def test_an_invalid_id_is_refused(kafka_id: Any) -> None:
    with pytest.raises(InvalidTransactionalIdError):
        NativeProducer(KafkaConfig.of("127.0.0.1:1"), kafka_id)


def test_a_transaction_timeout_and_two_phase_commit_exclude_each_other(new_native: NewProducer) -> None:
    with pytest.raises(ConfigurationError, match=r"(?s)transaction\.timeout\.ms.*KIP-939"):
        new_native(two_phase=True, transaction_timeout_ms=5_000)


def test_a_timeout_that_the_broker_refuses_is_a_configuration_error(new_native: NewProducer) -> None:
    producer = new_native(transaction_timeout_ms=900_001)
    for take in (ready, lambda p: p.create(timeout=LIMIT)):
        with pytest.raises(TransactionTimeoutRefusedError, match=r"transaction\.max\.timeout\.ms"):
            take(producer)
    assert producer.state is ProducerState.UNINITIALIZED


def test_a_broker_without_transaction_version_2_is_refused(broker_v4: DevCluster, new_name: NewName) -> None:
    producer = NativeProducer(KafkaConfig.of(broker_v4.bootstrap_servers), new_name("id"))
    for take in (
        ready,
        lambda p: p.create(timeout=LIMIT),
        lambda p: p.init_transactions(keep_prepared_txn=True, timeout=LIMIT),
    ):
        with pytest.raises(ConfigurationError, match=r"(?s)transaction\.version.*librdkafka"):
            take(producer)
    producer.close()


# --- settings, end to end ---------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("level", [-1, 9])
@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_every_compression_arrives(
    broker: DevCluster, new_native: NewProducer, new_name: NewName, committed: Committed, compression: str, level: int
) -> None:
    """Compressible, incompressible, and batches that must be split: the topic's limit is 200 kB, a batch has 1 MB."""
    topic, noise = new_name("topic"), random.Random(3)
    make_topic(broker, topic, max_message_bytes="200000")
    sent = [b"%d" % n * 20 for n in range(20_000)] + [noise.randbytes(1_000) for _ in range(2_000)]
    producer = ready(new_native(compression_type=compression, compression_level=-1 if compression == "snappy" else level))
    producer.begin_transaction()
    producer.send_many(topic, sent, partition=0)
    producer.commit_transaction(timeout=LIMIT)
    assert committed(topic) == sent


@pytest.mark.parametrize(
    "settings",
    [
        {"max_in_flight": 1},
        {"batch_size": 1},
        {"batch_size": 5_000, "queue_buffering_max_kbytes": 1},
        {"batch_size": 5_000, "queue_buffering_max_kbytes": 20},
        {"message_max_bytes": 3_000},
        {"topic_metadata_refresh_interval_ms": 0},
    ],
)
def test_any_setting_sends_everything_in_order(
    broker: DevCluster, new_native: NewProducer, new_name: NewName, settings: dict[str, Any]
) -> None:
    topic = new_name("topic")
    make_topic(broker, topic, 3)
    producer = ready(new_native(**settings))
    for part in range(2):
        producer.begin_transaction()
        for number in range(500):
            producer.send(topic, f"{part} {number:03}" + "." * 1_000, partition=number % 3)
        producer.commit_transaction(timeout=LIMIT)
    found = read_topic(broker.bootstrap_servers, topic)
    for partition in range(3):
        values = [(m.value() or b"")[:5].decode() for m in found if m.partition() == partition]
        assert values == [f"{part} {number:03}" for part in range(2) for number in range(partition, 500, 3)]


@pytest.mark.slow
def test_a_partition_that_the_newest_answer_does_not_have_is_not_waited_for(
    broker: DevCluster, new_native: NewProducer, new_name: NewName
) -> None:
    """A topic was made anew with fewer partitions: the next transaction spreads keys over those that it has."""
    topic, producer = new_name("topic"), ready(new_native())
    make_topic(broker, topic, 3)
    producer.begin_transaction()
    producer.send(topic, b"before", partition=2)
    producer.commit_transaction(timeout=LIMIT)
    admin = admin_client({"bootstrap.servers": broker.bootstrap_servers}, LIMIT)
    admin.delete_topics([topic], operation_timeout=LIMIT)[topic].result()
    make_topic(broker, topic, 1)
    producer.begin_transaction()
    producer.send(topic, b"v", partition=2)
    with pytest.raises(DeliveryError, match="no partition 2 any more; it has 1 partitions"):
        producer.prepare_transaction(timeout=LIMIT)
    producer.abort_transaction(timeout=LIMIT)
    producer.begin_transaction()
    for key in range(30):
        producer.send(topic, b"after", key=b"%d" % key)
    producer.commit_transaction(timeout=LIMIT)
    assert read_values(broker.bootstrap_servers, topic) == [b"after"] * 30


@pytest.mark.slow
@pytest.mark.parametrize("how", ["send", "send_many", "keyed"])
def test_a_partition_that_is_added_during_a_transaction_is_accepted_by_the_next_one(
    broker: DevCluster, new_native: NewProducer, new_name: NewName, how: str
) -> None:
    """Within a transaction the number of partitions does not change, so that a key always means the same partition."""
    topic, producer = new_name("topic"), ready(new_native())
    make_topic(broker, topic)
    admin = admin_client({"bootstrap.servers": broker.bootstrap_servers}, LIMIT)

    def add(partition: int) -> None:
        if how == "send":
            producer.send(topic, b"v", partition=partition)
        else:
            producer.send_many(topic, [b"v"], keys=None if how == "send_many" else [b"k"], partition=partition)

    producer.begin_transaction()
    add(0)
    admin.create_partitions([NewPartitions(topic, 2)])[topic].result()
    with pytest.raises(UnknownTopicError, match="has no partition 1"):
        add(1)
    producer.commit_transaction(timeout=LIMIT)
    producer.begin_transaction()
    add(1)
    producer.commit_transaction(timeout=LIMIT)
    assert sorted(message.partition() or 0 for message in read_topic(broker.bootstrap_servers, topic)) == [0, 1]


def test_a_message_of_megabytes_is_sent_if_all_three_limits_allow_it(
    broker: DevCluster, new_native: NewProducer, new_name: NewName, committed: Committed
) -> None:
    topic = new_name("topic")
    make_topic(broker, topic, max_message_bytes="9000000")
    producer = ready(new_native(message_max_bytes=8_000_000))
    producer.begin_transaction()
    sent = [b"a", random.Random(5).randbytes(7_900_000), b"b"]
    for value in sent:
        producer.send(topic, value)
    producer.commit_transaction(timeout=LIMIT)
    assert committed(topic) == sent


@pytest.mark.parametrize("partitioner", ["consistent", "consistent_random", "murmur2", "murmur2_random", "fnv1a_random"])
def test_both_producers_send_a_key_to_the_same_partition(
    broker: DevCluster, new_native: NewProducer, new_name: NewName, partitioner: str
) -> None:
    """With the same settings for confluent-kafka and the native producer."""
    topic = new_name("topic")
    make_topic(broker, topic, 7)
    keys = [b"key %d" % n for n in range(30)] + ["schlüssel".encode(), b"\0", b"\xff" * 40]
    with producing(broker.bootstrap_servers, {"partitioner": partitioner}) as produce:
        for key in keys:
            produce(topic, b"theirs", key)
    ours = ready(new_native(partitioner=partitioner))
    ours.begin_transaction()
    for key in keys:
        ours.send(topic, b"ours", key=key)
    ours.commit_transaction(timeout=LIMIT)
    where: dict[bytes, dict[bytes | None, int]] = {b"theirs": {}, b"ours": {}}
    for message in read_topic(broker.bootstrap_servers, topic):
        where[message.value() or b""][message.key()] = message.partition() or 0
    assert len(where[b"ours"]) == len(keys)
    assert where[b"ours"] == where[b"theirs"]


# --- logins -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("how", LOGINS)
def test_a_whole_transaction_over_every_protocol(strict_broker: DevCluster, new_name: NewName, how: str) -> None:
    """Large enough that answers arrive in parts, and one read returns several TLS records."""
    protocol, login = LOGINS[how]
    topic = new_name("topic")
    make_topic(strict_broker, topic, 2)
    config = KafkaConfig.of(settings_for(strict_broker, protocol, **login))
    producer = NativeProducer(config, new_name("id"), two_phase=True)
    sent = [b"%04d" % n + bytes(1_000) for n in range(5_000)]
    try:
        ready(producer)
        producer.begin_transaction()
        for number, value in enumerate(sent):
            producer.send(topic, value, partition=number % 2)
        assert producer.prepare_transaction(timeout=LIMIT) is not None
        producer.commit_transaction(timeout=LIMIT)
    finally:
        producer.close()
    found = read_values(strict_broker.bootstrap_servers, topic)
    assert found == sent[::2] + sent[1::2]


# --- consumers of confluent-kafka ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("instance", [None, "static-1", "größe"])
@pytest.mark.parametrize("assigned", [False, True])
def test_a_consumer_group_is_serialized_as_by_librdkafka(
    broker: DevCluster, new_name: NewName, instance: str | None, assigned: bool
) -> None:
    topic, group = new_name("topic"), new_name("gruppe-ß")
    make_topic(broker, topic)
    settings = {"bootstrap.servers": broker.bootstrap_servers, "group.id": group}
    consumer = Consumer(settings if instance is None else {**settings, "group.instance.id": instance})
    try:
        if assigned:
            consumer.subscribe([topic])
            pace.until(lambda: consumer.poll(0.1) or consumer.assignment(), "an assignment", pause=0)
        written: Any = consumer.consumer_group_metadata()
        found = GroupMetadata.from_librdkafka(written)
        assert (found.group_id, found.group_instance_id) == (group, instance)
        assert (found.generation_id > 0, bool(found.member_id)) == (assigned, assigned)
        assert found.for_librdkafka() == written
    finally:
        consumer.close()
