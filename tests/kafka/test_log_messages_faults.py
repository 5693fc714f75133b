"""Reading aborted messages while brokers fail, without ACLs, after time-outs and repairs, after compaction, and large ones."""

from __future__ import annotations

import threading
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from confluent_kafka import Producer

from dualwrite.admin import TransactionAdmin
from dualwrite.devcluster import DevCluster
from dualwrite.errors import BrokerUnavailableError, MessagesChangedError
from dualwrite.kafka.client import log_reader
from dualwrite.kafka.client.config import KafkaConfig
from dualwrite.kafka.client.coordinator import WireTransactionCoordinator
from dualwrite.kafka.client.log_reader import LogNotReadableError
from dualwrite.kafka.librdkafka.librdkafka_producer import LibrdkafkaProducer
from dualwrite.kafka.native.native_producer import NativeProducer
from dualwrite.state import Delivery, FoundPlace, PreparedTxnState, TransactionStatus
from fixtures import acls
from fixtures.acls import Operation, Resource
from fixtures.broker import make_topic, started, wait_for_markers
from fixtures.logins import login_as
from fixtures.pace import LIMIT, until

pytestmark = pytest.mark.slow

NewName = Callable[[str], str]
Kind = type[NativeProducer] | type[LibrdkafkaProducer]

both = pytest.mark.parametrize("kind", [NativeProducer, LibrdkafkaProducer], ids=["native", "librdkafka"])


@contextmanager
def coordinator_of(config: DevCluster | dict[str, Any]) -> Iterator[WireTransactionCoordinator]:
    given = {"bootstrap.servers": config.bootstrap_servers} if isinstance(config, DevCluster) else config
    made = WireTransactionCoordinator(KafkaConfig.of(given), timeout=LIMIT)
    try:
        yield made
    finally:
        made.close()


@contextmanager
def prepared(
    kind: Kind, cluster: DevCluster, topic: str, values: list[bytes], *, partitions: int = 3, **settings: Any
) -> Iterator[tuple[Any, PreparedTxnState, Delivery]]:
    """A producer with a prepared transaction, with the values in turn in each partition."""
    config = {"bootstrap.servers": cluster.bootstrap_servers, **{n.replace("_", "."): v for n, v in settings.items()}}
    with coordinator_of(cluster) as coordinator:
        producer = kind(KafkaConfig.of(config), f"{topic}-id", coordinator)
        try:
            producer.init_transactions(timeout=LIMIT)
            producer.begin_transaction()
            for number, value in enumerate(values):
                producer.send(topic, value, key=str(number), partition=number % partitions)
            state = producer.prepare_transaction(timeout=LIMIT)
            assert state is not None
            assert producer.delivery is not None
            yield producer, state, producer.delivery
        finally:
            producer.close()


def in_turn(values: list[bytes], partitions: int = 3) -> list[bytes]:
    return [value for partition in range(partitions) for value in values[partition::partitions]]


VALUES = [f"value {number}".encode() for number in range(30)]


@both
def test_an_abort_by_time_out(kind: Kind, prompt_broker: DevCluster, new_name: NewName) -> None:
    topic = new_name("topic")
    make_topic(prompt_broker, topic, 3)
    with (
        prepared(kind, prompt_broker, topic, VALUES, transaction_timeout_ms=1000) as (_, state, delivery),
        coordinator_of(prompt_broker) as coordinator,
    ):
        _wait_for_abort(coordinator, f"{topic}-id")
        found = coordinator.find_messages(state, delivery)
        assert found.is_complete
        assert [message.value for message in coordinator.read_messages(state, found)] == in_turn(VALUES)


@both
def test_an_abort_by_an_operator(kind: Kind, broker: DevCluster, new_name: NewName) -> None:
    topic = new_name("topic")
    make_topic(broker, topic, 3)
    with prepared(kind, broker, topic, VALUES) as (_, state, delivery), coordinator_of(broker) as coordinator:
        with TransactionAdmin(broker.bootstrap_servers, timeout=LIMIT) as admin:
            admin.force_terminate(f"{topic}-id", producer_id=state.producer_id, epoch=state.epoch)
        _wait_for_abort(coordinator, f"{topic}-id")
        found = coordinator.find_messages(state, delivery)
        assert found.is_complete
        assert [message.value for message in coordinator.read_messages(state, found)] == in_turn(VALUES)


@both
def test_an_open_transaction_is_waited_for(kind: Kind, broker: DevCluster, new_name: NewName) -> None:
    topic = new_name("topic")
    make_topic(broker, topic, 3)
    with prepared(kind, broker, topic, VALUES) as (producer, state, delivery), coordinator_of(broker) as coordinator:
        with pytest.raises(BrokerUnavailableError, match="has nothing at offset 10 yet"):
            coordinator.find_messages(state, delivery, timeout=0.5)
        with _writing(broker, topic), pytest.raises(BrokerUnavailableError):  # others' messages are no progress
            coordinator.find_messages(state, delivery, timeout=0.5)
        producer.abort_transaction(timeout=LIMIT)
        assert coordinator.find_messages(state, delivery).is_complete


@both
def test_a_missing_acl_is_named(kind: Kind, guarded: DevCluster, new_name: NewName) -> None:
    topic, readable = new_name("topic"), new_name("topic")
    for each in (topic, readable):
        make_topic(guarded, each, 3)
    acls.grant(guarded, "reader", Operation.READ, Resource.TOPIC, readable)
    with (
        prepared(kind, guarded, topic, VALUES) as (producer, state, delivery),
        coordinator_of(login_as(guarded, "reader")) as reader,
        coordinator_of(guarded) as coordinator,
    ):
        producer.abort_transaction(timeout=LIMIT)
        found = reader.find_messages(state, delivery)
        needed = f"the principal may not read topic {topic}: grant it Read on the topic"
        assert set(found.missing) == {needed}
        assert found.places == ()
        with pytest.raises(MessagesChangedError, match="TOPIC_AUTHORIZATION_FAILED"):
            list(reader.read_messages(state, coordinator.find_messages(state, delivery)))
        acls.grant(guarded, "reader", Operation.READ, Resource.TOPIC, topic)
        until(lambda: reader.find_messages(state, delivery).is_complete, "the ACL is known to the broker")


@pytest.mark.soak
@pytest.mark.parametrize("kind", [NativeProducer, LibrdkafkaProducer], ids=["native", "librdkafka"])
def test_a_leader_that_moves_while_messages_are_read(kind: Kind, three_brokers: DevCluster, new_name: NewName) -> None:
    topic = new_name("topic")
    make_topic(three_brokers, topic, 3, min_insync_replicas="1")
    values = [bytes([number]) * 200_000 for number in range(60)]
    with (
        prepared(kind, three_brokers, topic, values) as (producer, state, delivery),
        coordinator_of(three_brokers) as coordinator,
    ):
        producer.abort_transaction(timeout=LIMIT)
        wait_for_markers(three_brokers.bootstrap_servers)
        found = coordinator.find_messages(state, delivery)
        assert found.is_complete
        reading = coordinator.read_messages(state, found)
        read = [next(reading).value]
        listed = Producer({"bootstrap.servers": three_brokers.bootstrap_servers}).list_topics(topic, timeout=LIMIT)
        leader = listed.topics[topic].partitions[0].leader  # most of this partition is still to be fetched
        three_brokers.kill(leader)
        read += [next(reading).value for _ in range(25)]
        three_brokers.start(leader, timeout=LIMIT)
        read += [message.value for message in reading]
        assert read == in_turn(values)


def test_errors_that_pass_are_retried(broker: DevCluster, new_name: NewName, monkeypatch: pytest.MonkeyPatch) -> None:
    topic = new_name("topic")
    make_topic(broker, topic, 3)
    fetched, calls = log_reader.fetched, 0

    def sometimes(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls % 3:
            raise LogNotReadableError("Fetch returned NOT_LEADER_OR_FOLLOWER")
        return fetched(*arguments, **options)

    with prepared(NativeProducer, broker, topic, VALUES) as (producer, state, delivery), coordinator_of(broker) as coordinator:
        producer.abort_transaction(timeout=LIMIT)
        monkeypatch.setattr(log_reader, "fetched", sometimes)
        found = coordinator.find_messages(state, delivery)
        assert [message.value for message in coordinator.read_messages(state, found)] == in_turn(VALUES)
        assert calls >= 18


def test_offsets_that_were_not_acknowledged_are_searched(broker: DevCluster, new_name: NewName) -> None:
    """For a duplicate that is too old, a broker acknowledges no offset."""
    topic = new_name("topic")
    make_topic(broker, topic, 3)
    with prepared(NativeProducer, broker, topic, VALUES) as (producer, state, delivery), coordinator_of(broker) as coordinator:
        producer.abort_transaction(timeout=LIMIT)
        text = delivery.text().replace(f'["{topic}",0,0,10,1,0,10', f'["{topic}",0,0,10,1,null,10')
        unknown = Delivery.parse(text)
        assert unknown is not None
        assert unknown != delivery
        assert coordinator.find_messages(state, unknown) == coordinator.find_messages(state, delivery)


@pytest.mark.soak
def test_compaction_that_has_removed_messages_is_noticed(new_name: NewName) -> None:
    with started(config={"log.cleaner.backoff.ms": "100"}) as cluster, coordinator_of(cluster) as coordinator:
        topic = new_name("topic")
        settings = {"cleanup_policy": "compact", "min_cleanable_dirty_ratio": "0.001", "segment_ms": "200"}
        make_topic(cluster, topic, 3, **settings)
        with prepared(NativeProducer, cluster, topic, VALUES) as (producer, state, delivery):
            producer.abort_transaction(timeout=LIMIT)

            def compacted() -> bool:
                with prepared(NativeProducer, cluster, topic, VALUES) as (other, *_):  # closes the segment
                    other.commit_transaction(timeout=LIMIT)
                return len(coordinator.find_messages(state, delivery).missing) == 3

            until(compacted, "the cleaner", pause=0.5)
            found = coordinator.find_messages(state, delivery)
            assert found.places == ()
            # The cleaner keeps a producer's last batch, emptied, while it believes that the producer may go on.
            removed = ("compaction has removed the messages of", "compaction has removed 10 of 10 messages of")
            assert all(each.startswith(removed) for each in found.missing), found.missing


@pytest.mark.soak
def test_a_large_transaction_is_streamed(broker: DevCluster, new_name: NewName) -> None:
    topic = new_name("topic")
    make_topic(broker, topic, 3)
    values = [b"%0800d" % number for number in range(50_000)]
    with prepared(NativeProducer, broker, topic, values) as (producer, state, delivery), coordinator_of(broker) as coordinator:
        producer.abort_transaction(timeout=LIMIT)
        tracemalloc.start()
        try:
            found = coordinator.find_messages(state, delivery)
            count = sum(message.value is not None for message in coordinator.read_messages(state, found))
            most = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert (found.is_complete, count) == (True, len(values))
        assert most < 20_000_000, "of 40 MB of messages"
        assert found.places[0] == FoundPlace(topic, 0, 0, found.places[0].messages, found.places[0].messages)


@contextmanager
def _writing(cluster: DevCluster, topic: str) -> Iterator[None]:
    """Another producer writes to the topic all the time."""
    over = threading.Event()
    plain = Producer({"bootstrap.servers": cluster.bootstrap_servers, "linger.ms": 0})

    def write() -> None:
        while not over.wait(0.01):
            plain.produce(topic, b"another", partition=0)
            plain.poll(0)

    thread = threading.Thread(target=write)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(LIMIT)
        plain.flush(LIMIT)


def _wait_for_abort(coordinator: WireTransactionCoordinator, kafka_id: str) -> None:
    def ended() -> bool:
        described = coordinator.describe(kafka_id)
        return described is not None and described.status is TransactionStatus.COMPLETE_ABORT

    until(ended, "the abort")
