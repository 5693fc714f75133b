"""Partitioners compared with librdkafka's own producer: every key has the same partition."""

from __future__ import annotations

import random
from collections import defaultdict
from typing import Any

import pytest
from confluent_kafka import KafkaError, Producer

from dualwrite.devcluster import DevCluster
from dualwrite.kafka.native.partitioners import partitioner_by_name
from fixtures.broker import make_topic
from fixtures.pace import LIMIT

PARTITIONS = 7
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
