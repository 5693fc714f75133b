"""Topics with serializers on a real broker: confluent-kafka's own ones, and a processor that reads what they wrote.

The schema registry is confluent-kafka's mock of one: there is no package of a real one that tests could start.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import pydantic
import pytest
from confluent_kafka.schema_registry import SchemaRegistryClient
from confluent_kafka.schema_registry.avro import AvroDeserializer, AvroSerializer
from confluent_kafka.schema_registry.json_schema import JSONDeserializer, JSONSerializer
from confluent_kafka.schema_registry.protobuf import ProtobufDeserializer, ProtobufSerializer
from confluent_kafka.serialization import StringDeserializer, StringSerializer
from google.protobuf.wrappers_pb2 import StringValue
from processor_scene import ProcessorScene

import dualwrite
from dualwrite import Topic
from dualwrite.errors import SerializationError
from fixtures.broker import make_topic, read_topic

NewName = Callable[[str], str]


@dataclass
class Order:
    item: str
    amount: int


class OrderModel(pydantic.BaseModel):
    item: str
    amount: int


AVRO = json.dumps(
    {
        "type": "record",
        "name": "Order",
        "fields": [{"name": "item", "type": "string"}, {"name": "amount", "type": "int"}],
    }
)
JSON = json.dumps(
    {
        "title": "Order",
        "type": "object",
        "properties": {"item": {"type": "string"}, "amount": {"type": "integer"}},
        "required": ["item", "amount"],
        "additionalProperties": False,
    }
)


def to_dict(order: Order, _context: Any) -> dict[str, Any]:
    return asdict(order)


def from_dict(found: dict[str, Any], _context: Any) -> Order:
    return Order(**found)


def avro(name: str, registry: SchemaRegistryClient) -> Topic[Any, str]:
    return Topic(
        name,
        value_serializer=AvroSerializer(registry, AVRO, to_dict),
        value_deserializer=AvroDeserializer(registry, AVRO, from_dict),
        key_serializer=StringSerializer(),
        key_deserializer=StringDeserializer(),
    )


def json_schema(name: str, registry: SchemaRegistryClient) -> Topic[Any, str]:
    return Topic(
        name,
        value_serializer=JSONSerializer(JSON, registry, to_dict),
        value_deserializer=JSONDeserializer(JSON, from_dict, registry),
        key_deserializer=StringDeserializer(),
    )


def protobuf(name: str, registry: SchemaRegistryClient) -> Topic[Any, str]:
    return Topic(
        name,
        value_serializer=ProtobufSerializer(StringValue, registry, {"use.deprecated.format": False}),
        value_deserializer=ProtobufDeserializer(StringValue, {"use.deprecated.format": False}),
        key_deserializer=StringDeserializer(),
    )


def pydantic_models(name: str, registry: SchemaRegistryClient) -> Topic[Any, str]:
    del registry
    return Topic.of_models(name, OrderModel)


KINDS: dict[str, tuple[Callable[[str, SchemaRegistryClient], Topic[Any, str]], Any]] = {
    "avro": (avro, Order("lamp", 2)),
    "json schema": (json_schema, Order("lamp", 2)),
    "protobuf": (protobuf, StringValue(value="lamp")),
    "pydantic": (pydantic_models, OrderModel(item="lamp", amount=2)),
}


@pytest.fixture
def registry(new_name: NewName) -> SchemaRegistryClient:
    return SchemaRegistryClient.new_client({"url": f"mock://{new_name('registry')}"})


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_serialized_messages_are_read_back(scene: ProcessorScene, registry: SchemaRegistryClient, kind: str) -> None:
    make, order = KINDS[kind]
    topic = make(scene.source, registry)
    with scene.writer("sender") as writer, writer.transaction() as tx:
        topic.send(tx, order, key="17", partition=0)
        topic.send(tx, None, key="18", partition=0)
    found: list[tuple[Any, Any, int]] = []

    def book(message: Any, tx: dualwrite.Transaction[Any]) -> None:
        found.append((message.key(), message.value(), message.offset()))
        scene.events.write(tx.db, scene.group, message.offset())
        topic_of_answers.send(tx, message.value())

    topic_of_answers = make(scene.target, registry)
    with scene.running(book, topics=[topic]):
        scene.wait_for(range(2))
    assert found == [("17", order, 0), ("18", None, 1)]
    answers = read_topic(scene.broker.bootstrap_servers, scene.target)
    assert sorted((topic.deserialized("value", answer.value()) is None) for answer in answers) == [False, True]


def test_a_serializer_that_fails_fails_its_unit_only(scene: ProcessorScene, registry: SchemaRegistryClient) -> None:
    """Of units that share a commit, too."""
    topic = avro(scene.target, registry)

    def unit(tx: dualwrite.Transaction[Any], number: int, order: Any) -> None:
        scene.events.write(tx.db, scene.group, number)
        topic.send(tx, order)

    with scene.pool(size=1) as pool:
        waiting = [pool.submit(unit, number, Order("lamp", "two" if number == 3 else number)) for number in range(6)]  # type: ignore[arg-type]
        outcomes = [future.exception(60) for future in waiting]
    assert [type(outcome) for outcome in outcomes] == [type(None)] * 3 + [SerializationError] + [type(None)] * 2
    written = [0, 1, 2, 4, 5]
    assert sorted(scene.events.numbers(scene.group)) == written
    values = [
        topic.deserialized("value", answer.value()) for answer in read_topic(scene.broker.bootstrap_servers, scene.target)
    ]
    assert sorted(order.amount for order in values) == written


@pytest.mark.slow
def test_an_undeserializable_message_goes_to_the_dead_letter_topic_unchanged(
    scene: ProcessorScene, registry: SchemaRegistryClient, new_name: NewName
) -> None:
    dead = new_name("dead")
    make_topic(scene.broker, dead)
    topic = avro(scene.source, registry)
    with scene.writer("sender") as writer, writer.transaction() as tx:
        topic.send(tx, Order("lamp", 1), partition=0)
        tx.send(scene.source, b"\0nonsense", key=b"\xff", partition=0)
        topic.send(tx, Order("lamp", 2), partition=0)

    def book(message: Any, tx: dualwrite.Transaction[Any]) -> None:
        scene.events.write(tx.db, scene.group, message.value().amount)
        tx.send(scene.target, str(message.value().amount))

    with scene.running(book, topics=[topic], attempts=2, dead_letter_topic=dead):
        scene.wait_for([1, 2])
        letter = scene.letter(dead, b"\0nonsense")
    assert scene.agree() == [1, 2]
    assert (letter.key(), letter.value()) == (b"\xff", b"\0nonsense")
    assert dict(letter.headers())["dualwrite.error"] == b"DeserializationError"


@pytest.mark.slow
def test_an_unreachable_registry_costs_no_attempt(scene: ProcessorScene) -> None:
    """A stand-in for its client: nothing listens there for a while."""
    refused = iter([ConnectionRefusedError("nobody listens")] * 5)

    def deserialize(content: bytes, _context: Any) -> int:
        for error in refused:
            raise error
        return int(content)

    def book(message: Any, tx: dualwrite.Transaction[Any]) -> None:
        scene.events.write(tx.db, scene.group, message.value())
        tx.send(scene.target, str(message.value()))

    scene.produce(range(3))
    topic: Topic[int, bytes] = Topic(scene.source, value_deserializer=deserialize)
    with scene.running(book, topics=[topic], attempts=2):
        scene.wait_for(range(3))
    assert scene.agree() == [0, 1, 2]
