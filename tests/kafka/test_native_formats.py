"""The native producer's formats tested with real clients: a broker and librdkafka's consumer read its batches, and
librdkafka's producer sends every key to the same partition.
"""

from __future__ import annotations

import random
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
from confluent_kafka import KafkaError, Message, Producer

from dualwrite.devcluster import DevCluster
from dualwrite.kafka.client.brokers import Network
from dualwrite.kafka.client.config import KafkaConfig
from dualwrite.kafka.client.messages_generated import EndTxnRequest, InitProducerIdRequest, ProduceRequest
from dualwrite.kafka.native.compression import NAMES as COMPRESSIONS
from dualwrite.kafka.native.compression import compression_by_name
from dualwrite.kafka.native.partitioners import partitioner_by_name
from dualwrite.kafka.native.records import BatchBuilder, split
from fixtures.broker import make_topic, read_topic
from fixtures.pace import LIMIT
from fixtures.raw_producer import answered, produced_code

NewName = Callable[[str], str]
Record = tuple[bytes | None, bytes | None, list[tuple[str, bytes | None]], int]

PARTITIONS = 7
NOW = int(time.time() * 1000)  # retention uses the timestamps: a broker deletes old records


def commit(servers: str, transactional_id: str, topic: str, make_batch: Callable[[int, int], bytes]) -> None:
    """One transaction with the batch that `make_batch` returns for (producer id, epoch), on partition 0."""
    network = Network(KafkaConfig.of(servers))
    try:
        begun = answered(
            lambda: network.coordinator(transactional_id).call(
                InitProducerIdRequest(
                    version=4,
                    transactional_id=transactional_id,
                    transaction_timeout_ms=60_000,
                    producer_id=-1,
                    producer_epoch=-1,
                )
            ),
            lambda answer: int(answer.error_code),
        )
        batch = make_batch(begun.producer_id, begun.producer_epoch)
        data = ProduceRequest.TopicProduceData
        answered(
            lambda: network.any_broker().call(  # the only one, so the leader
                ProduceRequest(
                    version=12,
                    transactional_id=transactional_id,
                    acks=-1,
                    timeout_ms=10_000,
                    topic_data=[data(name=topic, partition_data=[data.PartitionProduceData(index=0, records=batch)])],
                )
            ),
            produced_code,
        )
        answered(
            lambda: network.coordinator(transactional_id).call(
                EndTxnRequest(
                    version=5,
                    transactional_id=transactional_id,
                    producer_id=begun.producer_id,
                    producer_epoch=begun.producer_epoch,
                    committed=True,
                )
            ),
            lambda answer: int(answer.error_code),
        )
    finally:
        network.close()


def filled(records: list[Record]) -> BatchBuilder:
    builder = BatchBuilder()
    for record in records:
        builder.append(*record)
    return builder


def as_read(message: Message) -> Any:
    return message.key(), message.value(), message.headers() or [], message.timestamp()[1]


def all_kinds() -> list[Record]:
    """1.5 MB, so more than one block of every codec: partly compressible, partly not."""
    noise = random.Random(5)
    return [
        (None, b"plain", [], NOW),
        (b"", b"", [], NOW - 5_000),
        (b"key", None, [], NOW + 100_000),
        ("schlüssel".encode(), "größe".encode(), [("größe", "ß".encode()), ("", b"")], NOW),
        (b"k", b"v", [("twice", b"1"), ("twice", None), ("twice", b"1")], NOW),
        (b"large", bytes(1_100_000), [], NOW),
        (b"noise", noise.randbytes(100_000), [], NOW),
        *((b"key-%d" % n, b'{"order": %d, "amount": %d}' % (n, n * 31 % 977) * 3, [], NOW + n) for n in range(5_000)),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("level", [None, 9])
@pytest.mark.parametrize("name", COMPRESSIONS)
def test_a_broker_accepts_a_batch_and_a_consumer_reads_its_records(
    broker: DevCluster, new_name: NewName, name: str, level: int | None
) -> None:
    compression = compression_by_name(name, None if name == "snappy" else level)
    records = all_kinds()
    topic = new_name("topic")
    make_topic(broker, topic, max_message_bytes="3000000")

    def make_batch(producer_id: int, epoch: int) -> bytes:
        batch = filled(records).build(producer_id=producer_id, epoch=epoch, base_sequence=0, compression=compression)
        assert batch[22] & 7 == compression.code, "not compressed"
        return batch

    commit(broker.bootstrap_servers, new_name("id"), topic, make_batch)
    assert [as_read(message) for message in read_topic(broker.bootstrap_servers, topic)] == records


@pytest.mark.parametrize("name", COMPRESSIONS)
def test_the_parts_of_a_split_batch_are_batches(broker: DevCluster, new_name: NewName, name: str) -> None:
    compression = compression_by_name(name)
    records: list[Record] = [(b"%d" % n, b"v" * n, [("n", b"%d" % n)], NOW - n) for n in range(500)]
    topic = new_name("topic")
    make_topic(broker, topic)
    counts: list[int] = []

    def make_batch(producer_id: int, epoch: int) -> bytes:
        ids = {"producer_id": producer_id, "epoch": epoch, "base_sequence": 0}
        first, second = split(filled(records).build(**ids, compression=compression))
        counts.extend((first.count, second.count))
        return first.build(**ids, compression=compression)

    commit(broker.bootstrap_servers, new_name("id"), topic, make_batch)
    assert sum(counts) == len(records)
    assert [as_read(message) for message in read_topic(broker.bootstrap_servers, topic)] == records[: counts[0]]


# --- partitions -------------------------------------------------------------------------------------------------------

HASHED = ("consistent", "murmur2", "fnv1a")
PARTITIONERS = ("random", *HASHED, *(f"{name}_random" for name in HASHED))
SENT_AGAIN = 60  # the chance that all fall into the same of seven partitions is 10^-49


def keys() -> list[bytes]:
    some = random.Random(7)
    by_chance = [some.randbytes(length) for length in range(1, 150)]
    long = [some.randbytes(length) for length in (1000, 1001, 1002, 1003, 50_000)]
    text = [f"schlüssel-{n}-ключ-鍵".encode() for n in range(50)]
    return [*by_chance, *long, *text, *(b"key-%d" % n for n in range(100)), b"\0", b"\0\0\0\0", b"\xff" * 4, b"\x80" * 7]


@pytest.fixture(scope="module")
def seven_partitions(broker: DevCluster) -> str:
    make_topic(broker, "seven-partitions", PARTITIONS)
    return "seven-partitions"


def partitions_of(
    servers: str, topic: str, partitioner: str, sent: list[bytes | None], sticky_ms: int = 0
) -> dict[bytes | None, list[int]]:
    """The partitions that librdkafka's producer chooses for these keys."""
    settings = {"bootstrap.servers": servers, "partitioner": partitioner, "sticky.partitioning.linger.ms": sticky_ms}
    producer = Producer(settings)
    producer.produce(topic, b"v", partition=0)
    assert producer.flush(LIMIT) == 0  # until it knows every partition's leader, librdkafka does not stick to a partition
    found: dict[bytes | None, list[int]] = defaultdict(list)

    def delivered(error: KafkaError | None, message: Any) -> None:
        assert error is None, error
        found[message.key()].append(message.partition())

    for key in sent:
        producer.produce(topic, b"v", key, on_delivery=delivered)
    assert producer.flush(LIMIT) == 0
    return found


@pytest.mark.parametrize("name", [name for name in PARTITIONERS if name != "random"])
def test_a_key_has_the_partition_of_librdkafka(broker: DevCluster, seven_partitions: str, name: str) -> None:
    sent = keys()
    expected = partitions_of(broker.bootstrap_servers, seven_partitions, name, list(sent))
    partition = partitioner_by_name(name)
    assert {key: [partition(key, PARTITIONS)] for key in sent} == expected


@pytest.mark.parametrize("key", [None, b"", b"key"])
@pytest.mark.parametrize("name", PARTITIONERS)
def test_keys_without_a_fixed_partition_are_those_that_librdkafka_spreads(
    broker: DevCluster, seven_partitions: str, name: str, key: bytes | None
) -> None:
    found = partitions_of(broker.bootstrap_servers, seven_partitions, name, [key] * SENT_AGAIN)
    (real,) = found.values()
    partition = partitioner_by_name(name)
    ours = {partition(key, PARTITIONS) for _ in range(SENT_AGAIN)}
    assert len(real) == SENT_AGAIN
    if len(set(real)) > 1:
        assert ours == {None} or len(ours) > 1
    else:
        assert ours == set(real)


@pytest.mark.parametrize(("name", "key"), [(name, key) for name in PARTITIONERS for key in (None, b"")])
def test_keys_left_to_the_producer_are_those_that_librdkafka_keeps_on_a_sticky_partition(
    broker: DevCluster, seven_partitions: str, name: str, key: bytes | None
) -> None:
    """As above, with librdkafka configured to stick to a partition for longer than the test takes."""
    found = partitions_of(broker.bootstrap_servers, seven_partitions, name, [key] * SENT_AGAIN, sticky_ms=900_000)
    spreads = len({partition for where in found.values() for partition in where}) > 1
    partition = partitioner_by_name(name)
    assert spreads is (len({partition(key, PARTITIONS) for _ in range(SENT_AGAIN)}) > 1)
