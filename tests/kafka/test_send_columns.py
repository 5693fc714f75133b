"""Messages from columns: the broker gets the same as from `send_many`, whichever way the columns are encoded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest

from dualwrite.devcluster import DevCluster
from dualwrite.errors import InvalidMessageError, InvalidTransitionError, MessageTooLargeError, UnknownTopicError
from dualwrite.kafka.native import accumulator
from dualwrite.kafka.native.arrow_records import RecordColumns
from dualwrite.kafka.native.native_producer import NativeProducer
from fixtures.broker import make_topic, read_topic
from fixtures.pace import LIMIT

NewName = Callable[[str], str]
NewProducer = Callable[..., NativeProducer]

COUNT = 3_000
KEYS = [b"key %d" % (number % 700) for number in range(COUNT)]
VALUES = [None if number % 11 == 0 else b"%d " % number + b"." * (number % 300) for number in range(COUNT)]
PARTITIONS = 3


@pytest.fixture
def topic(broker: DevCluster, new_name: NewName) -> str:
    name = new_name("topic")
    make_topic(broker, name, PARTITIONS, retention_ms="-1")  # a test sends messages of 1970
    return name


@pytest.fixture
def by_column(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of messages encoded together, for each batch."""
    counts: list[int] = []
    encoded = RecordColumns.encoded

    def counted(self: RecordColumns, begin: int, end: int, timestamp_ms: int) -> Any:
        counts.append(end - begin)
        return encoded(self, begin, end, timestamp_ms)

    monkeypatch.setattr(RecordColumns, "encoded", counted)
    return counts


def begun(producer: NativeProducer) -> NativeProducer:
    producer.init_transactions(timeout=LIMIT)
    producer.begin_transaction()
    return producer


def by_partition(broker: DevCluster, topic: str) -> dict[int, list[tuple[bytes | None, bytes | None]]]:
    found: dict[int, list[tuple[bytes | None, bytes | None]]] = {number: [] for number in range(PARTITIONS)}
    for message in read_topic(broker.bootstrap_servers, topic):
        found[message.partition() or 0].append((message.key(), message.value()))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"partitioner": "murmur2_random"},
        {"partitioner": "fnv1a"},
        {"compression_type": "gzip"},
        {"batch_size": 2_000},
        {"batch_size": 5_000, "queue_buffering_max_kbytes": 1},
        {"batch_size": 5_000, "max_in_flight": 1},
    ],
)
def test_keyed_messages_go_to_the_partitions_of_send(
    broker: DevCluster, new_native: NewProducer, topic: str, new_name: NewName, by_column: list[int], settings: dict[str, Any]
) -> None:
    one_by_one, producer = new_name("topic"), begun(new_native(**settings))
    make_topic(broker, one_by_one, PARTITIONS)
    for key, value in zip(KEYS, VALUES, strict=True):
        producer.send(one_by_one, value, key=key)
    producer.send(topic, "before", key="key 1")
    for begin in (0, COUNT // 2):  # two calls
        half = slice(begin, begin + COUNT // 2)
        producer.send_columns(topic, pa.array(VALUES[half]), keys=pa.array(KEYS[half]))
        producer.send(topic, "between", key="key 1")
    producer.commit_transaction(timeout=LIMIT)
    assert sum(by_column) == COUNT
    found, expected = by_partition(broker, topic), by_partition(broker, one_by_one)
    (marked,) = [number for number, messages in found.items() if (b"key 1", b"before") in messages]
    places = [place for place, (_, value) in enumerate(found[marked]) if value in (b"before", b"between")]
    assert (places[0], places[2]) == (0, len(found[marked]) - 1)
    for place in reversed(places):
        del found[marked][place]
    assert found == expected


@pytest.mark.parametrize("keys", [None, pa.array(KEYS), pa.array([None] * COUNT, pa.binary())])
def test_a_given_partition_gets_all_messages_in_order(
    broker: DevCluster, new_native: NewProducer, topic: str, by_column: list[int], keys: pa.Array | None
) -> None:
    producer = begun(new_native())
    producer.send_columns(topic, pa.array(VALUES), keys=keys, partition=1)
    producer.commit_transaction(timeout=LIMIT)
    assert sum(by_column) == COUNT - 1  # the first one begins the transaction
    found = by_partition(broker, topic)
    assert found[1] == list(zip([None] * COUNT if keys is None else keys.to_pylist(), VALUES, strict=True))
    assert found[0] == found[2] == []


def test_without_keys_batches_go_to_any_partition(
    broker: DevCluster, new_native: NewProducer, topic: str, by_column: list[int]
) -> None:
    producer = begun(new_native(batch_size=5_000))
    producer.send_columns(topic, pa.array(VALUES))
    producer.commit_transaction(timeout=LIMIT)
    assert sum(by_column) == COUNT - 1
    found = by_partition(broker, topic)
    assert all(found.values())
    assert sorted(value or b"" for messages in found.values() for _, value in messages) == sorted(v or b"" for v in VALUES)


@pytest.mark.parametrize(
    ("keys", "values"),
    [
        (pa.array([None, *KEYS[1:]]), pa.array(VALUES)),  # a key that does not determine the partition
        (pa.array([b"", *KEYS[1:]]), pa.array(VALUES)),  # as for librdkafka's default partitioner
        (pa.array(KEYS, pa.large_binary()), pa.array(VALUES)),
        (pa.array(KEYS).cast(pa.string()), pa.array(VALUES)),
        (pa.array(KEYS), pa.chunked_array([VALUES[:1000], VALUES[1000:]])),
        (pa.array(KEYS), pa.array([b"long" * 10_000, *VALUES[1:]])),
        (pa.array(KEYS[:50]), pa.array(VALUES[:50])),  # few
        (pa.array(KEYS[:0], pa.binary()), pa.array(VALUES[:0], pa.binary())),
    ],
)
def test_small_and_unsuitable_columns_are_sent_one_by_one(
    broker: DevCluster, new_native: NewProducer, topic: str, by_column: list[int], keys: pa.Array, values: pa.Array
) -> None:
    producer = begun(new_native())
    producer.send(topic, "first")
    producer.send_columns(topic, values, keys=keys)
    producer.commit_transaction(timeout=LIMIT)
    assert by_column == []
    sent = [(None, b"first"), *zip(keys.cast(pa.binary()).to_pylist(), values.to_pylist(), strict=True)]
    found = [message for messages in by_partition(broker, topic).values() for message in messages]
    assert sorted(found, key=str) == sorted(sent, key=str)


def test_a_batch_too_large_for_the_topic_is_split(
    broker: DevCluster, new_native: NewProducer, new_name: NewName, by_column: list[int]
) -> None:
    topic, producer = new_name("topic"), begun(new_native())
    make_topic(broker, topic, max_message_bytes="20000")
    producer.send_columns(topic, pa.array(VALUES), keys=pa.array(KEYS))
    producer.commit_transaction(timeout=LIMIT)
    assert max(by_column) * 40 > 20_000
    found = [(message.key(), message.value()) for message in read_topic(broker.bootstrap_servers, topic)]
    assert found == list(zip(KEYS, VALUES, strict=True))


def test_columns_that_cannot_be_sent(broker: DevCluster, new_native: NewProducer, topic: str) -> None:
    producer = new_native(message_max_bytes=1_000)
    with pytest.raises(InvalidTransitionError, match="send_columns"):
        producer.send_columns(topic, pa.array(VALUES))
    begun(producer)
    with pytest.raises(InvalidMessageError, match="2 keys for 3000 values"):
        producer.send_columns(topic, pa.array(VALUES), keys=pa.array(KEYS[:2]))
    with pytest.raises(UnknownTopicError):
        producer.send_columns(topic, pa.array(VALUES), partition=PARTITIONS)
    producer.send(topic, "first")
    with pytest.raises(UnknownTopicError):
        producer.send_columns(topic, pa.array(VALUES), partition=PARTITIONS)
    with pytest.raises(MessageTooLargeError):
        producer.send_columns(topic, pa.array([*VALUES, bytes(1_000)]), partition=0)
    producer.abort_transaction(timeout=LIMIT)
    assert read_topic(broker.bootstrap_servers, topic) == []


def test_the_first_call_may_be_small(
    broker: DevCluster, new_native: NewProducer, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accumulator, "WORTHWHILE_BYTES", 0)
    producer = begun(new_native())
    for time, value in enumerate((b"1", b"2", b"3")):
        producer.send_many(topic, pa.array([value]), partition=2, timestamp=time)
    producer.commit_transaction(timeout=LIMIT)
    assert by_partition(broker, topic)[2] == [(None, b"1"), (None, b"2"), (None, b"3")]
    assert [message.timestamp()[1] for message in read_topic(broker.bootstrap_servers, topic)] == [0, 1, 2]
