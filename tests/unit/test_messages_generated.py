"""The generated messages beside kafka-python's: the same bytes for the same fields, and the same fields for the same bytes."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from typing import Any

import kafka_messages
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kafka.protocol import admin, consumer, metadata, producer, sasl
from kafka.protocol.api_message import ApiMessage
from kafka_messages import DATA, MESSAGES, Field, Generator, Structure

from dualwrite.kafka.client import messages_generated
from dualwrite.kafka.client.broker_connection import Framing
from dualwrite.kafka.client.fields import Fields, KafkaProtocolError
from dualwrite.kafka.client.messages_generated import InitProducerIdRequest, ListTransactionsRequest

CLIENT = "dualwrite"
_message: Any = ApiMessage


OWN = {
    file.stem: type(_message)(file.stem, (_message,), {}, load_json="schemas")
    for file in sorted((kafka_messages.HERE / "schemas").glob("*.json"))
}
"""Messages, or versions of them, that kafka-python does not have: its classes, of our copies of the definitions."""

DESCRIBED_GROUP: Any = OWN["ConsumerGroupDescribeResponse"].DescribedGroup


def theirs(name: str) -> Any:
    return OWN.get(name) or next(getattr(m, name) for m in (admin, consumer, metadata, producer, sasl) if hasattr(m, name))


# --- fields -------------------------------------------------------------------------------------------------------------------

texts = st.sampled_from(["", "name", "n\u00e4me", "\U0001f600", "long" * 50, "long" * 5000])
INTEGERS = {"int8": 8, "int16": 16, "int32": 32, "int64": 64}
SIMPLE: Mapping[str, st.SearchStrategy[Any]] = {
    "bool": st.booleans(),
    "string": texts,
    "bytes": st.binary(max_size=9) | st.just(b"long" * 50),
    "records": st.binary(max_size=9) | st.just(b"long" * 50),
    "uuid": st.uuids(),
    **{kind: st.integers(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) for kind, bits in INTEGERS.items()},
}


def of_field(one: Field, version: int) -> st.SearchStrategy[Any]:
    made = SIMPLE[one.element] if one.struct is None else of_structure(one.struct, version)
    if one.is_array:
        made = st.lists(made, max_size=3)
    return st.none() | made if one.is_nullable else made


def of_structure(made: Structure, version: int) -> st.SearchStrategy[dict[str, Any]]:
    """The fields that the structure has in a version, by name."""
    return st.fixed_dictionaries({one.name: of_field(one, version) for one in made.fields if one.versions.among([version])})


@cache
def of_message(name: str, versions: range) -> tuple[Structure, st.SearchStrategy[tuple[int, dict[str, Any]]]]:
    made = kafka_messages.structure(kafka_messages.definition(name), versions)
    return made, st.sampled_from(versions).flatmap(lambda version: st.tuples(st.just(version), of_structure(made, version)))


def as_ours(made: Structure, kind: Any, fields: Mapping[str, Any]) -> Any:
    def value(one: Field) -> Any:
        given = fields[one.name]
        if one.struct is None or given is None:
            return given
        inner, nested = one.struct, getattr(kind, one.element)
        return [as_ours(inner, nested, each) for each in given] if one.is_array else as_ours(inner, nested, given)

    return kind(**{one.name: value(one) for one in made.fields if one.name in fields})


def as_theirs(made: Structure, kind: Any, fields: Mapping[str, Any], **more: Any) -> Any:
    """kafka-python shortens the names of the operations that are allowed, and has them as a set."""
    arguments = {}
    for one in made.fields:
        if one.name not in fields:
            continue
        given, name = fields[one.name], one.name
        if one.struct is not None and given is not None:
            inner, nested = one.struct, getattr(kind, one.element)
            given = [as_theirs(inner, nested, each) for each in given] if one.is_array else as_theirs(inner, nested, given)
        elif name.endswith("authorized_operations") and kind is not DESCRIBED_GROUP and one.number == "i":
            name = "authorized_operations"
            given = {bit for bit in range(32) if given & 1 << bit}
        arguments[name] = given
    return kind(**arguments, **more)


def assert_has(made: Structure, read: Any, fields: Mapping[str, Any]) -> None:
    for one in made.fields:
        if one.name not in fields:
            continue
        found, given = getattr(read, one.name), fields[one.name]
        if one.is_array and given is not None:
            assert len(found) == len(given), one.name
            for each, other in zip(found, given, strict=True):
                if one.struct is None:
                    assert each == other
                else:
                    assert_has(one.struct, each, other)
        elif one.struct is not None and given is not None:
            assert_has(one.struct, found, given)
        else:
            assert found == given, one.name


# --- tests --------------------------------------------------------------------------------------------------------------------


def test_the_module_is_what_the_tool_generates() -> None:
    """Run `python tools/kafka_messages.py` after a change of it."""
    assert kafka_messages.MODULE.read_text(encoding="utf-8") == Generator().module()


@pytest.mark.parametrize("name", MESSAGES)
@settings(deadline=None, max_examples=25)
@given(data=st.data())
def test_a_request_has_the_bytes_of_kafka_python(name: str, data: st.DataObject) -> None:
    made, some = of_message(f"{name}Request", MESSAGES[name])
    version, fields = data.draw(some)
    request = as_theirs(made, theirs(made.name), fields, version=version)
    request.with_header(correlation_id=1, client_id=CLIENT)
    ours = as_ours(made, getattr(messages_generated, made.name), fields)
    assert Framing(CLIENT).request(ours, version) == (1, request.encode(framed=True, header=True))


def encoded(made: Structure, version: int, fields: Mapping[str, Any]) -> bytes:
    """kafka-python's bytes for a response without its header."""
    response = as_theirs(made, theirs(made.name), fields, version=version)
    if made.name in DATA:
        return bytes(response.encode(version=version, header=False))
    return bytes(response.encode(version=version))


def read(name: str, version: int, data: bytes) -> Any:
    fields = Fields(data)
    found = getattr(messages_generated, name).read(fields, version)
    fields.end()
    return found


READ = {**{f"{name}Response": versions for name, versions in MESSAGES.items()}, **DATA}


@pytest.mark.parametrize("name", READ)
@settings(deadline=None, max_examples=25)
@given(data=st.data())
def test_a_response_has_the_fields_that_kafka_python_wrote(name: str, data: st.DataObject) -> None:
    """And what a broken broker sends, cut off, too long or changed, causes nothing but KafkaProtocolError."""
    made, some = of_message(name, READ[name])
    version, fields = data.draw(some)
    written = encoded(made, version, fields)
    assert_has(made, read(name, version, written), fields)
    cut, noise = data.draw(st.integers(0, len(written) - 1)), data.draw(st.binary(max_size=20))
    for wrong in (written + b"\0", written[:cut]):
        with pytest.raises(KafkaProtocolError):
            read(name, version, wrong)
    for broken in (noise, written[:cut] + noise + written[cut + len(noise) :]):  # a message or KafkaProtocolError
        with suppress(KafkaProtocolError):
            read(name, version, broken)


@pytest.mark.parametrize("length", [b"\xff\xff\xff\xff\x0f", b"\xff\xff\xff\xff\xff\x7f", b"\x80\x80\x80\x80\x80\x01", b"\0"])
def test_a_count_that_no_message_can_have_is_an_error_at_once(length: bytes) -> None:
    throttle_and_error = struct.pack(">ih", 0, 0)
    with pytest.raises(KafkaProtocolError):
        read("ListTransactionsResponse", 0, throttle_and_error + length + b"\1\1\0" * 10)


@pytest.mark.parametrize("tags", [b"\x02\x00\x03abc\x81\x01\x00", b"\x01\x07\x00"])  # 0 of 3 bytes, 129 and 7 of none
def test_tagged_fields_that_are_not_known_are_skipped(tags: bytes) -> None:
    """A broker names the new leader in one (KIP-951)."""
    found = read("EndTxnResponse", 5, struct.pack(">ihqh", 0, 48, 5, 6) + tags)
    assert (found.error_code, found.producer_id, found.producer_epoch) == (48, 5, 6)
    with pytest.raises(KafkaProtocolError):
        read("EndTxnResponse", 5, struct.pack(">ihqh", 0, 48, 5, 6) + tags[:-1])


def test_a_tagged_field_must_have_its_length() -> None:
    """ApiVersions names the features in them."""
    empty = struct.pack(">h", 0) + b"\1" + struct.pack(">i", 0)
    assert read("ApiVersionsResponse", 3, empty + b"\x01\x02\x01\x01").finalized_features == []
    with pytest.raises(KafkaProtocolError, match="ends at byte"):
        read("ApiVersionsResponse", 3, empty + b"\x01\x02\x02\x01\x00")


def test_a_value_that_a_version_can_not_carry_is_an_error() -> None:
    """Without `enable2Pc`, the transaction would end by a timeout."""
    for version, request in [
        (4, InitProducerIdRequest("id", 1, enable2_pc=True)),
        (1, ListTransactionsRequest(transactional_id_pattern="id.*")),
    ]:
        with pytest.raises(ValueError, match=f"Request v{version} has no field"):
            Framing(CLIENT).request(request, version)
    assert Framing(CLIENT).request(InitProducerIdRequest("id", 1), 4)


def test_a_message_shows_its_fields() -> None:
    found = read("EndTxnResponse", 3, struct.pack(">ih", 0, 48) + b"\0")
    assert repr(found) == "EndTxnResponse(throttle_time_ms=0, error_code=48, producer_id=-1, producer_epoch=-1)"
