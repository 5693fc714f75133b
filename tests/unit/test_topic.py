"""Topic: what serializers get and return, and their errors. What is sent is only recorded here; tests/kafka has the broker."""

from __future__ import annotations

import errno
import json
import pickle
import socket
from typing import Annotated, Any

import pydantic
import pytest
from confluent_kafka.serialization import IntegerSerializer, MessageField, SerializationContext, StringDeserializer
from pydantic import AliasChoices, AliasPath
from pydantic.alias_generators import to_camel
from typing_extensions import TypeAliasType, TypedDict

import dualwrite
from dualwrite import Topic
from dualwrite.errors import (
    ConfigurationError,
    DeserializationError,
    InvalidMessageError,
    SchemaRegistryUnavailableError,
    SerializationError,
)
from dualwrite.kafka.topic import Field
from fixtures.tables import table


class Sent:
    """In place of a transaction: remembers what was sent."""

    def __init__(self) -> None:
        self.messages: list[tuple[Any, ...]] = []

    def send(
        self,
        topic: str,
        value: bytes | str | None,
        *,
        key: Any = None,
        headers: Any = None,
        partition: int | None = None,
        timestamp: int | None = None,
    ) -> None:
        self.messages.append((topic, value, key, headers, partition, timestamp))


@pytest.fixture
def tx() -> Sent:
    return Sent()


def as_json(value: Any, context: SerializationContext) -> bytes:
    return json.dumps([value, context.topic, str(context.field)]).encode()


def failing(error: Exception) -> Any:
    def fail(_content: Any, _context: SerializationContext) -> bytes:
        raise error

    return fail


def test_key_and_value_are_serialized(tx: Sent) -> None:
    Topic("orders", value_serializer=as_json, key_serializer=IntegerSerializer()).send(tx, {"a": 1}, key=7)
    assert tx.messages == [("orders", b'[{"a": 1}, "orders", "value"]', b"\0\0\0\7", None, None, None)]


def test_other_arguments_are_passed_on(tx: Sent) -> None:
    Topic("orders").send(tx, "lamp", key=b"k", headers={"a": "b"}, partition=3, timestamp=9)
    assert tx.messages == [("orders", "lamp", b"k", [("a", b"b")], 3, 9)]


def test_none_is_not_serialized(tx: Sent) -> None:
    Topic("orders", value_serializer=as_json, key_serializer=as_json).send(tx, None)
    assert tx.messages == [("orders", None, None, None, None, None)]


def test_a_serializer_may_add_headers(tx: Sent) -> None:
    def serialize(value: str, context: SerializationContext) -> str:
        assert context.field is MessageField.VALUE
        assert isinstance(context.headers, list)
        context.headers.append(("schema", b"1"))
        return value

    Topic("orders", value_serializer=serialize).send(tx, "lamp", headers=[("a", "b")])
    assert tx.messages[0][3] == [("a", b"b"), ("schema", b"1")]


def test_many_messages_at_once(tx: Sent) -> None:
    Topic("numbers", value_serializer=as_json).send_many(tx, (number for number in range(2)))
    assert [message[1] for message in tx.messages] == [b'[0, "numbers", "value"]', b'[1, "numbers", "value"]']


@pytest.mark.parametrize("values", ["text", b"bytes", {"a": 1}])
def test_many_messages_are_no_single_one(tx: Sent, values: Any) -> None:
    with pytest.raises(InvalidMessageError, match=r"(?s)values of send_many must be a list .*send a single message with send"):
        Topic("numbers", value_serializer=as_json).send_many(tx, values)
    assert tx.messages == []


@pytest.mark.parametrize("field", ["key", "value"])
def test_a_serializer_that_fails(tx: Sent, field: Field) -> None:
    topic: Topic[Any, Any] = Topic("orders", **{f"{field}_serializer": failing(ValueError("no such field"))})
    with pytest.raises(
        SerializationError, match=f"The {field} for topic 'orders' can't be serialized: ValueError: no such"
    ) as raised:
        topic.send(tx, "value", key="key")
    assert (raised.value.topic, raised.value.field, raised.value.retriable) == ("orders", field, False)
    assert isinstance(raised.value.__cause__, ValueError)
    assert isinstance(raised.value, InvalidMessageError)
    assert str(pickle.loads(pickle.dumps(raised.value))) == str(raised.value)
    assert tx.messages == []


def test_a_serializer_that_returns_something_else(tx: Sent) -> None:
    with pytest.raises(SerializationError, match="returned dict, not bytes or str"):
        Topic("orders", value_serializer=lambda value, _: value).send(tx, {})  # type: ignore[arg-type, return-value]
    assert tx.messages == []


@pytest.mark.parametrize(("field", "next_step"), [("value", "send None itself"), ("key", "pass key=None")])
def test_a_serializer_that_returns_none_sends_no_tombstone(tx: Sent, field: Field, next_step: str) -> None:
    """As a function without `return` does: in a compacted topic that would delete the key's last value."""
    topic: Topic[Any, Any] = Topic("orders", **{f"{field}_serializer": lambda _content, _context: None})
    with pytest.raises(SerializationError, match=f"(?s)The {field} for .*returned None") as raised:
        topic.send(tx, "value", key="key")
    assert next_step in str(raised.value)
    assert tx.messages == []


@pytest.mark.parametrize("field", ["key", "value"])
def test_deserializers_are_applied(field: Field) -> None:
    topic: Topic[Any, Any] = Topic("orders", **{f"{field}_deserializer": StringDeserializer()})
    assert topic.deserializes
    assert topic.deserialized(field, "Wörter".encode()) == "Wörter"
    assert topic.deserialized(field, None) is None
    other: Field = "key" if field == "value" else "value"
    assert topic.deserialized(other, b"bytes") == b"bytes"


def test_without_a_deserializer() -> None:
    assert not Topic("orders").deserializes


def test_content_that_cannot_be_deserialized() -> None:
    topic = Topic("orders", value_deserializer=StringDeserializer())
    with pytest.raises(
        DeserializationError, match=r"(?s)The value of a message in topic 'orders' can't be deserialized: .*utf"
    ) as raised:
        topic.deserialized("value", b"\xff")
    assert (raised.value.topic, raised.value.field, raised.value.retriable) == ("orders", "value", False)


class RegistryError(Exception):
    """Has the attribute of confluent-kafka's SchemaRegistryError."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.http_status_code = status


def wrapped(error: Exception) -> Exception:
    outer = RuntimeError("the client gave up")
    outer.__cause__ = error
    return outer


@pytest.mark.parametrize(
    ("error", "passes"),
    [
        (ConnectionRefusedError(), True),
        (wrapped(TimeoutError()), True),
        (RegistryError(503), True),
        (RegistryError(429), True),
        (RegistryError(404), False),
        (wrapped(KeyError("field")), False),
        (socket.gaierror(), True),
        (OSError(errno.EHOSTUNREACH, "no route"), True),
        (FileNotFoundError(errno.ENOENT, "order.avsc"), False),
        (wrapped(PermissionError()), False),
    ],
    ids=repr,
)
def test_an_unreachable_registry_is_distinguished_from_invalid_content(tx: Sent, error: Exception, passes: bool) -> None:
    topic: Topic[Any, Any] = Topic("orders", value_serializer=failing(error), value_deserializer=failing(error))
    with pytest.raises(SchemaRegistryUnavailableError if passes else SerializationError) as raised:
        topic.send(tx, "value")
    assert raised.value.retriable is passes
    with pytest.raises(SchemaRegistryUnavailableError if passes else DeserializationError):
        topic.deserialized("value", b"content")


def test_what_the_caller_was_handling_does_not_make_invalid_content_retriable(tx: Sent) -> None:
    topic: Topic[Any, Any] = Topic("failures", value_serializer=as_json, value_deserializer=failing(ValueError("no number")))
    try:
        failing(ConnectionError("another server's"))(None, None)
    except ConnectionError:
        with pytest.raises(SerializationError) as raised:
            topic.send(tx, object())
        with pytest.raises(DeserializationError):
            topic.deserialized("value", b"content")
    assert not raised.value.retriable


@pytest.mark.parametrize("suppressed", [False, True])
def test_an_outage_behind_the_error_of_a_serializer_counts_unless_it_is_suppressed(tx: Sent, suppressed: bool) -> None:
    def serialize(_content: Any, _context: SerializationContext) -> bytes:
        try:
            failing(ConnectionError("of an optional cache"))(None, None)
        except ConnectionError:
            if suppressed:
                raise TypeError("no such field") from None
            raise TypeError("no such field")  # noqa: B904  (what is tested)

    with pytest.raises(SerializationError if suppressed else SchemaRegistryUnavailableError):
        Topic("orders", value_serializer=serialize).send(tx, "value")


class Order(pydantic.BaseModel):
    item: str
    amount: int


def test_pydantic_models(tx: Sent) -> None:
    orders = Topic.of_models("orders", Order)
    orders.send(tx, Order(item="lamp", amount=2), key="17")
    _, value, key, *_ = tx.messages[0]
    assert (value, key) == ('{"item":"lamp","amount":2}', "17")
    assert orders.deserialized("value", value.encode()) == Order(item="lamp", amount=2)
    assert orders.deserialized("key", b"17") == "17"
    with pytest.raises(DeserializationError, match="amount"):
        orders.deserialized("value", b'{"item": "lamp"}')


class Place(pydantic.BaseModel):
    country: str = pydantic.Field("", alias="countryCode")


class Aliased(pydantic.BaseModel):
    first_name: str = pydantic.Field("", alias="firstName")
    place: Place | None = None


class Generated(pydantic.BaseModel, alias_generator=to_camel, validate_by_name=True, validate_by_alias=True):
    first_name: str = ""
    places: list[Place] = []


class ReadByName(pydantic.BaseModel, validate_by_alias=False, validate_by_name=True):
    first_name: str = pydantic.Field("", alias="firstName")


class Choices(pydantic.BaseModel):
    first_name: str = pydantic.Field("", validation_alias=AliasChoices("firstName", AliasPath("first_name")))


@pytest.mark.parametrize(
    ("model", "written"),
    [
        (Aliased(firstName="Ann", place=Place(countryCode="DE")), '{"firstName":"Ann","place":{"countryCode":"DE"}}'),
        (Generated(first_name="Ann", places=[Place(countryCode="DE")]), '{"firstName":"Ann","places":[{"countryCode":"DE"}]}'),
        (ReadByName.model_validate({"first_name": "Ann"}), '{"first_name":"Ann"}'),
        (Choices.model_validate({"firstName": "Ann"}), '{"first_name":"Ann"}'),
    ],
    ids=lambda given: type(given).__name__,
)
def test_models_with_aliases_are_read_as_they_were_written(tx: Sent, model: Any, written: str) -> None:
    """A field with a default would lose its value without an error."""
    topic = Topic.of_models("people", type(model))
    topic.send(tx, model)
    _, value, *_ = tx.messages[0]
    assert value == written
    assert topic.deserialized("value", value.encode()) == model


class Written(pydantic.BaseModel):
    first_name: str = pydantic.Field("", serialization_alias="firstName")


class OnlyRead(pydantic.BaseModel):
    first_name: str = pydantic.Field("", validation_alias=AliasPath("names", 0))


Several = TypeAliasType("Several", list[Written])


class OfAlias(pydantic.BaseModel):
    people: Several = []


@pydantic.dataclasses.dataclass
class Data:
    first_name: str = pydantic.Field("", serialization_alias="firstName")


class OfDataclass(pydantic.BaseModel):
    data: Data | None = None


class Keys(TypedDict, total=False):
    first_name: Annotated[str, pydantic.Field(serialization_alias="firstName")]


class OfTypedDict(pydantic.BaseModel):
    keys: Keys | None = None


class NotWritten(pydantic.BaseModel):
    person: Written | None = pydantic.Field(None, exclude=True)
    kind: type[Written] | None = None


class Nested(pydantic.BaseModel):
    itself: Nested | None = None
    people: dict[str, list[Written]] = {}


@table(
    ("model", "of"),
    [
        (Written, "Written"),
        (OnlyRead, "OnlyRead"),
        (Nested, "Written"),
        (OfAlias, "Written"),
        (OfDataclass, "Data"),
        (OfTypedDict, "Keys"),
    ],
)
def test_models_that_write_another_name_than_they_read_are_refused(model: type[pydantic.BaseModel], of: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"(?s){of}\.first_name .*alias="):
        Topic.of_models("people", model)


def test_models_that_are_not_written_may_have_any_names() -> None:
    assert Topic.of_models("people", NotWritten).name == "people"


class Early(pydantic.BaseModel):
    people: list[Later] = []


early = Topic.of_models("people", Early)


class Later(pydantic.BaseModel):
    first_name: str = pydantic.Field("", serialization_alias="firstName")


def test_a_model_that_names_a_later_one_is_checked_when_it_is_written(tx: Sent) -> None:
    Early.model_rebuild()
    with pytest.raises(SerializationError, match=r"Later\.first_name is written as 'firstName'"):
        early.send(tx, Early(people=[Later(first_name="Ada")]))
    assert tx.messages == []


@table("name", ["", "a b", ".", "x" * 250, 3])
def test_invalid_topic_names(name: Any) -> None:
    with pytest.raises(InvalidMessageError):
        dualwrite.Topic(name)
