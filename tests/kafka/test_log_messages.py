"""The messages of an aborted transaction are found in the log and read again, exactly: for both producers, on real brokers."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient
from producer_cases import NATIVE

from dualwrite.devcluster import DevCluster
from dualwrite.errors import DualWriteError, MessagesChangedError, MessagesCommittedError
from dualwrite.kafka.base import Message, TransactionalProducer
from dualwrite.kafka.client.config import KafkaConfig
from dualwrite.kafka.client.coordinator import WireTransactionCoordinator
from dualwrite.kafka.librdkafka.librdkafka_producer import LibrdkafkaProducer
from dualwrite.kafka.native.native_producer import NativeProducer
from dualwrite.state import Delivery, FoundMessages, FoundPlace, PreparedTxnState
from fixtures.broker import make_topic, read_topic, wait_for_markers
from fixtures.pace import LIMIT, until

NewName = Callable[[str], str]
Open = Callable[..., TransactionalProducer]

CODECS = ("gzip", "snappy", "lz4", "zstd")

NOON = 1_700_000_000_000
SENT: tuple[dict[str, Any], ...] = (
    {"value": b"one", "key": b"k", "partition": 0, "headers": [("a", b"1"), ("a", None), ("b", b"")], "timestamp": NOON},
    {"value": b"two", "key": None, "partition": 1, "headers": None, "timestamp": NOON - 5},
    {"value": None, "key": b"gone", "partition": 2, "headers": [("naïve", b"\0\xff")], "timestamp": NOON + 7},  # a tombstone
    {"value": b"", "key": b"", "partition": 2, "headers": None, "timestamp": NOON + 1},
    {"value": b"three", "key": b"k", "partition": 0, "headers": None, "timestamp": NOON + 86_400_000},
)


@pytest.fixture
def coordinator(cluster: DevCluster) -> Iterator[WireTransactionCoordinator]:
    made = WireTransactionCoordinator(KafkaConfig.of(cluster.bootstrap_servers), timeout=LIMIT)
    yield made
    made.close()


@pytest.fixture
def open_producer(case: str, cluster: DevCluster, coordinator: WireTransactionCoordinator, new_name: NewName) -> Iterator[Open]:
    """Opens a producer of the case with additional settings."""
    kind: Any = NativeProducer if case == NATIVE else LibrdkafkaProducer
    opened: list[TransactionalProducer] = []

    def make(name: str | None = None, **settings: Any) -> TransactionalProducer:
        config = {"bootstrap.servers": cluster.bootstrap_servers, **{n.replace("_", "."): v for n, v in settings.items()}}
        made: TransactionalProducer = kind(KafkaConfig.of(config), name or new_name("id"), coordinator)
        opened.append(made)
        made.init_transactions(timeout=LIMIT)
        return made

    yield make
    for producer in opened:
        producer.close()


@pytest.fixture
def topic(cluster: DevCluster, new_name: NewName) -> str:
    name = new_name("topic")
    kept_topic(cluster, name, 3)
    return name


def prepared(
    producer: TransactionalProducer, topic: str, sent: Sequence[dict[str, Any]] = SENT
) -> tuple[PreparedTxnState, Delivery]:
    producer.begin_transaction()
    for each in sent:
        producer.send(topic, **each)
    state = producer.prepare_transaction(timeout=LIMIT)
    assert state is not None
    assert producer.delivery is not None
    return state, Delivery.parse(producer.delivery.text()) or producer.delivery


def aborted(
    producer: TransactionalProducer, topic: str, sent: Sequence[dict[str, Any]] = SENT
) -> tuple[PreparedTxnState, Delivery]:
    found = prepared(producer, topic, sent)
    producer.abort_transaction(timeout=LIMIT)
    return found


def plain(partition: int, *values: str) -> list[dict[str, Any]]:
    return [{"value": value.encode(), "partition": partition} for value in values]


def expected(topic: str, sent: Sequence[dict[str, Any]] = SENT) -> list[Message]:
    """What reading returns: by partition, in the order of sending."""
    made = [
        Message(topic, each["value"], each.get("key"), each.get("headers"), each["partition"], each.get("timestamp"))
        for each in sent
    ]
    return sorted(made, key=lambda message: message.partition or 0)


def without_times(messages: Sequence[Message]) -> list[Message]:
    return [message._replace(timestamp=None) for message in messages]


def values(messages: Sequence[Message]) -> list[bytes | None]:
    return [message.value for message in messages]


def test_the_messages_of_an_aborted_transaction_are_read_as_they_were_written(
    open_producer: Open, topic: str, coordinator: WireTransactionCoordinator, cluster: DevCluster
) -> None:
    state, delivery = aborted(open_producer(), topic)
    found = coordinator.find_messages(state, delivery)
    assert found == FoundMessages(
        (FoundPlace(topic, 0, 0, 2, 2), FoundPlace(topic, 1, 0, 1, 1), FoundPlace(topic, 2, 0, 2, 2)), ()
    )
    assert found.is_complete
    assert found.messages == len(SENT)
    assert list(coordinator.read_messages(state, found)) == expected(topic)
    raw = read_topic(cluster.bootstrap_servers, topic, isolation="read_uncommitted")
    assert [(m.partition(), m.key(), m.value(), m.timestamp()[1]) for m in raw] == [
        (m.partition, m.key, m.value, m.timestamp) for m in expected(topic)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("codec", CODECS)
def test_every_codec_can_be_read(open_producer: Open, topic: str, coordinator: WireTransactionCoordinator, codec: str) -> None:
    sent = [{**each, "value": each["value"] and each["value"] * 1000} for each in SENT] + plain(1, *map(str, range(2000)))
    state, delivery = aborted(open_producer(compression_type=codec), topic, sent)
    found = coordinator.find_messages(state, delivery)
    assert found.is_complete
    assert without_times(list(coordinator.read_messages(state, found))) == without_times(expected(topic, sent))


@pytest.mark.slow
@pytest.mark.parametrize("codec", CODECS)
def test_what_a_broker_has_compressed_can_be_read(
    open_producer: Open, topic: str, coordinator: WireTransactionCoordinator, cluster: DevCluster, codec: str
) -> None:
    other = f"{topic}-{codec}"
    kept_topic(cluster, other, 3, compression_type=codec)
    sent = [*SENT, *plain(1, "x" * 100_000, *map(str, range(100)))]
    state, delivery = aborted(open_producer(), other, sent)
    found = coordinator.find_messages(state, delivery)
    assert without_times(list(coordinator.read_messages(state, found))) == without_times(expected(other, sent))


@pytest.mark.slow
def test_with_log_append_time_the_timestamps_are_the_brokers(
    open_producer: Open, topic: str, coordinator: WireTransactionCoordinator, cluster: DevCluster
) -> None:
    other = f"{topic}-append"
    kept_topic(cluster, other, 3, message_timestamp_type="LogAppendTime")
    state, delivery = aborted(open_producer(), other)
    read = list(coordinator.read_messages(state, coordinator.find_messages(state, delivery)))
    assert without_times(read) == without_times(expected(other))
    raw = read_topic(cluster.bootstrap_servers, other, isolation="read_uncommitted")
    assert [message.timestamp for message in read] == [m.timestamp()[1] for m in raw]
    assert min(message.timestamp or 0 for message in read) > NOON + 86_400_000


@pytest.mark.slow
def test_only_the_messages_of_this_transaction_are_found(
    open_producer: Open, topic: str, coordinator: WireTransactionCoordinator, cluster: DevCluster
) -> None:
    """Before it the producer has committed and aborted in other partitions; another producer writes between its messages."""
    producer, other = open_producer(), open_producer()
    aborted(producer, topic, plain(0, "an earlier one"))
    prepared(producer, topic, plain(2, "a committed one"))
    producer.commit_transaction(timeout=LIMIT)
    aborted(producer, topic, plain(1, "an earlier one, here"))
    producer.begin_transaction()
    own = [f"own {number} " + "x" * 600_000 for number in range(4)]  # too large for one batch
    for number, value in enumerate(own):
        prepared(other, topic, plain(1, f"other {number}"))
        other.commit_transaction(timeout=LIMIT)
        producer.send(topic, value, partition=1)
        producer.send(topic, value, partition=2)
    state = producer.prepare_transaction(timeout=LIMIT)
    delivery = producer.delivery
    assert state is not None
    assert delivery is not None
    producer.abort_transaction(timeout=LIMIT)
    found = coordinator.find_messages(state, delivery)
    assert found.is_complete
    assert [(place.partition, place.messages) for place in found.places] == [(1, 4), (2, 4)]
    assert values(list(coordinator.read_messages(state, found))) == [value.encode() for value in 2 * own]


@pytest.mark.slow
def test_an_earlier_transaction_in_another_partition_is_not_taken_for_a_message_that_is_gone(
    open_producer: Open, topic: str, coordinator: WireTransactionCoordinator, cluster: DevCluster
) -> None:
    producer = open_producer()
    aborted(producer, topic, plain(0, "an earlier one"))
    state, delivery = aborted(producer, topic, plain(1, "first") + plain(2, "deleted"))
    delete(cluster, topic, 2, 2)
    found = coordinator.find_messages(state, delivery)
    assert not found.is_complete
    assert b"an earlier one" not in values(list(coordinator.read_messages(state, found)))


@pytest.mark.slow
def test_messages_that_retention_has_deleted_are_missing(
    open_producer: Open, topic: str, coordinator: WireTransactionCoordinator, cluster: DevCluster
) -> None:
    state, delivery = aborted(open_producer(), topic)
    complete = coordinator.find_messages(state, delivery)
    delete(cluster, topic, 0, 1)
    found = coordinator.find_messages(state, delivery)
    assert found.missing == (f"retention has deleted offset 0 of {topic}-0",)
    assert [place.partition for place in found.places] == ([1, 2] if state.has_own_epoch else [])
    assert list(coordinator.read_messages(state, found)) == [m for m in expected(topic) if state.has_own_epoch and m.partition]
    with pytest.raises(MessagesChangedError, match="could not be read again as they were found") as changed:
        list(coordinator.read_messages(state, complete))
    assert (changed.value.topic, changed.value.partition, changed.value.retriable) == (topic, 0, True)


@pytest.mark.slow
def test_the_messages_of_a_deleted_topic_are_missing(
    open_producer: Open, topic: str, coordinator: WireTransactionCoordinator, cluster: DevCluster
) -> None:
    kept = f"{topic}-kept"
    kept_topic(cluster, kept)
    producer = open_producer()
    producer.begin_transaction()
    producer.send(kept, "kept", partition=0)
    producer.send(topic, "deleted", partition=0)
    state = producer.prepare_transaction(timeout=LIMIT)
    delivery = producer.delivery
    assert state is not None
    assert delivery is not None
    producer.abort_transaction(timeout=LIMIT)
    remove_topic(cluster, topic)
    found = coordinator.find_messages(state, delivery)
    assert len(found.missing) == 1
    assert found.missing[0].startswith((f"topic {topic} does not exist", f"{topic}-0 does not exist"))
    assert values(list(coordinator.read_messages(state, found))) == [b"kept"]


@pytest.mark.slow
@pytest.mark.parametrize("others", [0, 1, 5])
def test_the_messages_of_a_topic_that_was_created_again_are_missing(
    open_producer: Open, topic: str, coordinator: WireTransactionCoordinator, cluster: DevCluster, others: int
) -> None:
    producer = open_producer()
    state, delivery = aborted(producer, topic, plain(1, "one", "two"))
    found = coordinator.find_messages(state, delivery)
    remove_topic(cluster, topic)
    until(lambda: _created(cluster, topic), "the topic, created again")
    if others:
        prepared(another := open_producer(), topic, plain(1, *map(str, range(others))))
        another.commit_transaction(timeout=LIMIT)
    (missing,) = coordinator.find_messages(state, delivery).missing
    assert "the topic was deleted and created again" in missing
    with pytest.raises(MessagesChangedError):
        list(coordinator.read_messages(state, found))


@pytest.mark.slow
def test_a_committed_transaction_is_never_read(
    open_producer: Open, topic: str, coordinator: WireTransactionCoordinator, cluster: DevCluster
) -> None:
    producer = open_producer()
    state, delivery = prepared(producer, topic)
    producer.commit_transaction(timeout=LIMIT)
    wait_for_markers(cluster.bootstrap_servers)
    with pytest.raises(MessagesCommittedError, match="has its COMMIT marker") as committed:
        coordinator.find_messages(state, delivery)
    assert committed.value.topic == topic
    with pytest.raises(MessagesCommittedError):
        list(coordinator.read_messages(state, FoundMessages((FoundPlace(topic, 0, 0, 2, 2),))))


@pytest.mark.slow
def test_what_differs_from_what_was_found_is_an_error(
    open_producer: Open, topic: str, coordinator: WireTransactionCoordinator
) -> None:
    state, delivery = aborted(open_producer(), topic)
    (first, *_) = coordinator.find_messages(state, delivery).places
    for changed in (
        dataclasses.replace(first, messages=1),
        dataclasses.replace(first, messages=3),
        dataclasses.replace(first, end_offset=1),
        dataclasses.replace(first, end_offset=3),
        dataclasses.replace(first, first_offset=1),
        dataclasses.replace(first, topic=f"{topic}-other"),
    ):
        with pytest.raises(MessagesChangedError):
            list(coordinator.read_messages(state, FoundMessages((changed,))))
    for other in (
        dataclasses.replace(state, producer_id=state.producer_id + 1),
        dataclasses.replace(state, epoch=state.epoch + 1),
    ):
        assert not coordinator.find_messages(other, delivery).places
        with pytest.raises(MessagesChangedError):
            list(coordinator.read_messages(other, FoundMessages((first,))))


@pytest.mark.slow
def test_numbers_that_do_not_fit_are_missing(open_producer: Open, topic: str, coordinator: WireTransactionCoordinator) -> None:
    state, delivery = aborted(open_producer(), topic)
    first, *rest = delivery.places
    more, fewer = (dataclasses.replace(first, messages=first.messages + each) for each in (1, -1))
    for place, words in ((more, "has removed 1 of"), (fewer, "messages of the transaction and not")):
        wrong = Delivery(place.messages + sum(each.messages for each in rest), (place, *rest), delivery.prepared_at)
        (missing,) = coordinator.find_messages(state, wrong).missing
        assert words in missing
    beyond = dataclasses.replace(delivery, messages=7)
    (missing,) = coordinator.find_messages(state, beyond).missing
    assert missing == "the places of 2 of the 7 messages were not stored"
    if first.in_topic:
        unknown = dataclasses.replace(delivery, places=(dataclasses.replace(first, others=None),))
        found = coordinator.find_messages(state, unknown)
        assert (found.places, found.missing) == ((), (f"the partitions of the 5 messages of {topic} were not stored",))
        incomplete = dataclasses.replace(delivery, places=(dataclasses.replace(first, others=(1,)),))
        (missing,) = coordinator.find_messages(state, incomplete).missing
        assert missing == f"retention or compaction has removed 2 of 5 messages of {topic}"


@pytest.mark.slow
def test_many_partitions_and_large_batches_are_found(
    open_producer: Open, topic: str, coordinator: WireTransactionCoordinator, cluster: DevCluster
) -> None:
    other = f"{topic}-wide"
    kept_topic(cluster, other, 40, max_message_bytes="8000000")
    sent = [each for index in range(40) for each in plain(index, f"one {index}", f"two {index}")]
    sent += plain(7, "x" * 3_000_000)  # more than one response
    state, delivery = aborted(open_producer(message_max_bytes=8_000_000), other, sent)
    found = coordinator.find_messages(state, delivery)
    assert found.is_complete
    assert len(found.places) == 40
    assert without_times(list(coordinator.read_messages(state, found))) == without_times(expected(other, sent))


def kept_topic(cluster: DevCluster, topic: str, partitions: int = 1, **config: str) -> None:
    """A topic whose records are not deleted because of their timestamps."""
    make_topic(cluster, topic, partitions, retention_ms="-1", **config)


def delete(cluster: DevCluster, topic: str, partition: int, before: int) -> None:
    """What retention does: delete the records of a partition before an offset."""
    admin = AdminClient({"bootstrap.servers": cluster.bootstrap_servers})
    where = TopicPartition(topic, partition, before)
    admin.delete_records([where])[where].result(LIMIT)


def remove_topic(cluster: DevCluster, topic: str) -> None:
    admin = AdminClient({"bootstrap.servers": cluster.bootstrap_servers})
    admin.delete_topics([topic])[topic].result(LIMIT)
    until(lambda: topic not in admin.list_topics(timeout=LIMIT).topics, "the deletion of the topic")


def _created(cluster: DevCluster, topic: str) -> bool:
    try:
        kept_topic(cluster, topic, 3)
    except DualWriteError:
        return False
    return True


@pytest.mark.slow
def test_random_histories_of_a_producer(
    open_producer: Open, topic: str, coordinator: WireTransactionCoordinator, cluster: DevCluster
) -> None:
    """What is found of the last transaction is its own, whatever the producer did before, and whatever was deleted then."""
    choice = random.Random(38)
    wide = f"{topic}-random"
    kept_topic(cluster, wide, 6)
    producer = open_producer()
    for number in range(40):
        chosen = choice.sample(range(6), choice.randint(1, 4))
        sent = [
            {
                "value": f"{number} {index}".encode(),
                "partition": choice.choice(chosen),
                "timestamp": choice.choice((NOON, 1, None)),
            }
            for index in range(choice.randint(1, 5))
        ]
        if choice.random() < 0.4:
            prepared(producer, wide, sent)
            producer.commit_transaction(timeout=LIMIT)
            continue
        state, delivery = aborted(producer, wide, sent)
        complete = coordinator.find_messages(state, delivery)
        assert complete.is_complete, (number, complete)
        assert values(list(coordinator.read_messages(state, complete))) == values(expected(wide, sent))
        if choice.random() < 0.3:
            place = choice.choice(complete.places)
            before = choice.randint(place.first_offset + 1, place.end_offset)
            delete(cluster, wide, place.partition, before)
            left = coordinator.find_messages(state, delivery)
            assert left.missing, (number, before, left)
            assert set(values(list(coordinator.read_messages(state, left)))) < set(values(expected(wide, sent)))
