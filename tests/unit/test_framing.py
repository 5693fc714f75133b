"""The frames on a connection: responses in any chunks, and what is no response to the request."""

from __future__ import annotations

import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kafka.protocol import metadata, producer

from dualwrite.kafka.client.broker_connection import Framing
from dualwrite.kafka.client.fields import KafkaProtocolError, Request
from dualwrite.kafka.client.messages_generated import (
    ApiVersionsRequest,
    EndTxnRequest,
    MetadataRequest,
    ProduceRequest,
    SaslHandshakeRequest,
)
from fixtures.tables import table

CLIENT = "dualwrite"
END_TXN = EndTxnRequest("id", 1, 2, committed=True)


def sent(request: Request[Any]) -> Framing:
    framing = Framing(CLIENT)
    framing.request(request, request.NEWEST)
    return framing


def written(response: Any, version: int, number: int) -> bytes:
    """kafka-python's encoding of a response."""
    response.API_VERSION = version
    response.with_header(correlation_id=number)
    data: bytes = response.encode(header=True, framed=True)
    return data


def frame(body: bytes) -> bytes:
    return struct.pack(">i", len(body)) + body


@given(cuts=st.lists(st.integers(0, 400), max_size=8))
def test_responses_are_decoded_from_any_chunks(cuts: list[int]) -> None:
    framing = Framing(CLIENT)
    data, expected = b"", []
    for place in range(5):
        if place % 2:
            number, _ = framing.request(END_TXN, 5)
            data += written(producer.EndTxnResponse(error_code=place, producer_id=1, producer_epoch=2), 5, number)
        else:
            number, _ = framing.request(MetadataRequest(), 12)
            data += written(metadata.MetadataResponse(cluster_id=str(place), brokers=[], topics=[]), 12, number)
        expected.append((number, place))
    found = []
    for begin, end in zip([0, *sorted(cuts)], [*sorted(cuts), len(data)], strict=True):
        found += framing.responses(data[begin:end])
    told = [(number, read.error_code if hasattr(read, "producer_id") else int(read.cluster_id)) for number, read in found]
    assert told == expected


def test_the_tagged_fields_of_a_header_are_skipped() -> None:
    tags = b"\x02\x00\x03abc\x81\x01\x00"  # tag 0 of 3 bytes, tag 129 of none
    body = struct.pack(">i", 1) + tags + struct.pack(">ihqh", 0, 48, 5, 6) + tags
    ((number, found),) = sent(END_TXN).responses(frame(body))
    assert (number, found.error_code, found.producer_id, found.producer_epoch) == (1, 48, 5, 6)


def test_the_response_to_a_version_of_api_versions_that_the_broker_does_not_know_is_in_the_oldest() -> None:
    """With the versions that it does know (KIP-511)."""
    body = struct.pack(">ihi", 1, 35, 1) + struct.pack(">hhh", ApiVersionsRequest.API_KEY, 0, 3)
    ((_, found),) = sent(ApiVersionsRequest("dualwrite", "1")).responses(frame(body))
    assert (found.error_code, [(a.api_key, a.max_version) for a in found.api_keys]) == (35, [(18, 3)])


def broken(size: int, number: int, rest: bytes = b"") -> bytes:
    return struct.pack(">ii", size, number) + rest


@table("request_", [END_TXN, ProduceRequest("id", -1, 1), MetadataRequest(), SaslHandshakeRequest("PLAIN")])
def test_an_invalid_response_is_an_error(request_: Request[Any]) -> None:
    """The connection closes on a KafkaProtocolError; any other exception would propagate to the caller."""
    for data in (
        broken(4, 7),  # of another request
        broken(5, 1, b"\0"),  # too short
        broken(6, 1, b"\xff\xff"),
        broken(-1, 1),
        broken(2**31 - 1, 1),
        broken(2, 1),
        broken(104, 1, b"\0" * 100),  # too long
    ):
        with pytest.raises(KafkaProtocolError):
            sent(request_).responses(data)


def test_an_error_says_what_is_wrong_with_a_response() -> None:
    with pytest.raises(KafkaProtocolError, match="without a request"):
        Framing(CLIENT).responses(broken(4, 1))
    with pytest.raises(KafkaProtocolError, match="end within a field of 126 bytes"):
        sent(ProduceRequest("id", -1, 1)).responses(frame(struct.pack(">i", 1) + b"\x00\x02\x7f" + b"abc" + b"\0" * 4))
