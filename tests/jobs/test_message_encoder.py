"""Rows as messages, read back from a real broker; and the checks of a frame's columns."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa
import pytest

from dualwrite.devcluster import DevCluster
from dualwrite.errors import ConfigurationError, InvalidMessageError
from dualwrite.kafka.client.config import KafkaConfig
from dualwrite.kafka.client.coordinator import WireTransactionCoordinator
from dualwrite.kafka.librdkafka.librdkafka_producer import LibrdkafkaProducer
from dualwrite.kafka.native.native_producer import NativeProducer
from dualwrite.spark.frame import MessageEncoder
from fixtures.broker import make_topic, read_topic, read_values
from fixtures.pace import LIMIT

HEADERS = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
MOMENT = datetime.now(UTC).replace(microsecond=123999) - timedelta(hours=1)  # retention deletes records older than a week


@pytest.fixture(params=["native", "librdkafka"])
def producer(request: pytest.FixtureRequest, broker: DevCluster, new_name: Callable[[str], str]) -> Iterator[Any]:
    config = KafkaConfig.of(broker.bootstrap_servers)
    coordinator = WireTransactionCoordinator(config)
    kind = NativeProducer if request.param == "native" else LibrdkafkaProducer
    made = kind(config, new_name("id"), coordinator)
    try:
        made.init_transactions(timeout=LIMIT)
        made.begin_transaction()
        yield made
    finally:
        made.close()
        coordinator.close()


@pytest.fixture
def topic(broker: DevCluster, new_name: Callable[[str], str]) -> str:
    name = new_name("topic")
    make_topic(broker, name, 3)
    return name


def send(producer: Any, *batches: pa.RecordBatch, **options: Any) -> int:
    encoder = MessageEncoder(batches[0].schema, **options)
    count = sum(encoder.send(batch, producer) for batch in batches)
    producer.prepare_transaction(timeout=LIMIT)
    producer.commit_transaction(timeout=LIMIT)
    return count


def test_keys_values_and_tombstones(broker: DevCluster, topic: str, producer: Any) -> None:
    batch = pa.record_batch({"key": pa.array(["a", "b", None, "ž"]), "value": pa.array([b"1", None, b"", b"\xff"])})
    assert send(producer, batch, topic=topic) == 4
    found = {message.key(): message.value() for message in read_topic(broker.bootstrap_servers, topic)}
    assert found == {b"a": b"1", b"b": None, None: b"", "ž".encode(): b"\xff"}


@pytest.mark.slow
def test_each_row_is_sent_to_its_topic_in_order(broker: DevCluster, producer: Any, new_name: Callable[[str], str]) -> None:
    topics = [new_name("topic") for _ in range(3)]
    for name in topics:
        make_topic(broker, name)
    count = 3000
    batch = pa.record_batch(
        {
            "topic": pa.array([topics[i * i % 3] for i in range(count)]),
            "value": pa.array([str(i) for i in range(count)]),
        }
    )
    assert send(producer, batch.slice(0, 1000), batch.slice(1000)) == count
    for number, name in enumerate(topics):
        expected = [str(i).encode() for i in range(count) if i * i % 3 == number]
        assert read_values(broker.bootstrap_servers, name) == expected


def test_the_option_takes_precedence_over_the_column(broker: DevCluster, topic: str, producer: Any) -> None:
    batch = pa.record_batch({"topic": pa.array([1, None]), "value": pa.array(["x", "y"])})
    assert send(producer, batch, topic=topic) == 2
    assert len(read_topic(broker.bootstrap_servers, topic)) == 2


def test_partition_headers_and_timestamp_of_each_row(broker: DevCluster, topic: str, producer: Any) -> None:
    batch = pa.record_batch(
        {
            "value": pa.array(["x", "y"]),
            "partition": pa.array([2, None], pa.int32()),
            "headers": pa.array([[{"key": "h", "value": b"1"}, {"key": "h", "value": None}], None], HEADERS),
            "timestamp": pa.array([MOMENT, None], pa.timestamp("us", "UTC")),
        }
    )
    nameless = pa.record_batch({"value": pa.array(["z"]), "headers": pa.array([[None]], HEADERS)})
    with pytest.raises(InvalidMessageError, match="A header's name must be a str, not NoneType"):
        MessageEncoder(nameless.schema, topic=topic).send(nameless, producer)
    send(producer, batch, topic=topic)
    first, second = sorted(read_topic(broker.bootstrap_servers, topic), key=lambda message: message.value())
    assert (first.partition(), first.headers()) == (2, [("h", b"1"), ("h", None)])
    assert first.timestamp()[1] == int(MOMENT.timestamp() * 1000)
    assert second.headers() is None
    assert second.timestamp()[1] > first.timestamp()[1]


def test_one_partition_for_all_rows(broker: DevCluster, topic: str, producer: Any) -> None:
    batch = pa.record_batch({"value": pa.array(["x", "y", "z"]), "partition": pa.array([1, 1, 1], pa.int32())})
    send(producer, batch, topic=topic)
    assert [(m.partition(), m.value()) for m in read_topic(broker.bootstrap_servers, topic)] == [
        (1, b"x"),
        (1, b"y"),
        (1, b"z"),
    ]


def test_no_rows_give_no_messages(producer: Any, topic: str) -> None:
    assert send(producer, pa.record_batch({"value": pa.array([], pa.string())}), topic=topic) == 0


def test_a_row_without_a_topic_is_named_and_nothing_of_its_batch_is_sent(broker: DevCluster, topic: str, producer: Any) -> None:
    schema = pa.schema([("topic", pa.string()), ("value", pa.string())])
    encoder = MessageEncoder(schema)
    encoder.send(pa.record_batch({"topic": [topic], "value": ["first"]}, schema), producer)
    with pytest.raises(InvalidMessageError, match="Row 3 of the task has no topic") as raised:
        encoder.send(pa.record_batch({"topic": [topic, None], "value": ["second", "third"]}, schema), producer)
    assert raised.value.row == 3
    producer.commit_transaction(timeout=LIMIT)
    assert read_values(broker.bootstrap_servers, topic) == [b"first"]


# --- schemas ----------------------------------------------------------------------------------------------------------


def problems(schema: dict[str, pa.DataType], **options: Any) -> str:
    with pytest.raises(ConfigurationError) as raised:
        MessageEncoder(pa.schema(list(schema.items())), **options)
    return raised.value.what


def test_every_problem_is_in_one_error() -> None:
    text = problems(
        {
            "key": pa.int64(),
            "topic": pa.binary(),
            "partition": pa.int64(),
            "headers": pa.map_(pa.string(), pa.binary()),
            "timestamp": pa.timestamp("us"),
        }
    )
    for part in (
        "the column value is missing",
        "column key must be a string or binary, not int64",
        "column topic must be a string, not binary",
        "column partition must be an int, not int64",
        "column headers must be array<struct<key:string,value:binary>>",
        "column timestamp must be a timestamp (with time zone",
    ):
        assert part in text


def test_a_missing_topic_is_refused() -> None:
    assert "neither the option topic nor a column topic" in problems({"value": pa.string()})


def test_a_duplicate_column() -> None:
    schema = pa.schema([("value", pa.string()), ("value", pa.string())])
    with pytest.raises(ConfigurationError, match="there are 2 columns named value"):
        MessageEncoder(schema, topic="t")


def test_accepts_what_the_kafka_sink_of_spark_accepts() -> None:
    schema = {"key": pa.large_binary(), "value": pa.large_string(), "topic": pa.string(), "headers": HEADERS, "x": pa.int8()}
    MessageEncoder(pa.schema(list(schema.items())))
