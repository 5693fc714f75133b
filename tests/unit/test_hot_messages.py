"""Produce and EndTxn as we encode and decode them, beside kafka-python's; and the frames on a connection."""

from __future__ import annotations

import struct
from dataclasses import astuple
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kafka.errors import KafkaError
from kafka.protocol import metadata, producer

from dualwrite.kafka.client.framing import Framing
from dualwrite.kafka.client.hot_messages import EndTxn, Produce
from fixtures.tables import table

CLIENT = "dualwrite"
_Topic = producer.ProduceRequest.TopicProduceData
_Stored = producer.ProduceResponse.TopicProduceResponse
_Partition = _Stored.PartitionProduceResponse

texts = st.text(max_size=300).filter(lambda text: len(text.encode()) < 30000)
int16, int32, int64 = (st.integers(-(2**bits), 2**bits - 1) for bits in (15, 31, 63))
topics = st.dictionaries(texts, st.lists(st.tuples(int32, st.binary(max_size=500)), max_size=4), max_size=4)


def framed(request: Any) -> bytes:
    return Framing(CLIENT).request(request)[1]


def written(response: Any, version: int, number: int) -> bytes:
    """kafka-python's encoding of an answer."""
    response.API_VERSION = version
    response.with_header(correlation_id=number)
    data: bytes = response.encode(header=True, framed=True)
    return data


@given(transactional_id=texts, acks=int16, timeout=int32, data=topics)
def test_produce_is_encoded_as_by_kafka_python(transactional_id: str, acks: int, timeout: int, data: dict[str, Any]) -> None:
    topic_data = [
        _Topic(
            name=topic, partition_data=[_Topic.PartitionProduceData(index=index, records=records) for index, records in found]
        )
        for topic, found in data.items()
    ]
    theirs = producer.ProduceRequest(
        version=12, transactional_id=transactional_id, acks=acks, timeout_ms=timeout, topic_data=topic_data
    )
    assert framed(Produce(transactional_id, acks, timeout, data)) == framed(theirs)


@pytest.mark.parametrize("version", [3, 4, 5])
@given(transactional_id=texts, producer_id=int64, epoch=int16, committed=st.booleans())
def test_end_txn_is_encoded_as_by_kafka_python(
    version: int, transactional_id: str, producer_id: int, epoch: int, committed: bool
) -> None:
    theirs = producer.EndTxnRequest(
        version=version,
        transactional_id=transactional_id,
        producer_id=producer_id,
        producer_epoch=epoch,
        committed=committed,
    )
    assert framed(EndTxn(version, transactional_id, producer_id, epoch, committed)) == framed(theirs)


@pytest.mark.parametrize("version", [3, 4, 5])
@given(error=int16, producer_id=int64, epoch=int16)
def test_end_txn_response_is_decoded(version: int, error: int, producer_id: int, epoch: int) -> None:
    framing = Framing(CLIENT)
    number, _ = framing.request(EndTxn(version, "id", 1, 2, True))
    answer = producer.EndTxnResponse(
        throttle_time_ms=7, error_code=error, producer_id=producer_id, producer_epoch=epoch, version=version
    )
    ((answered, read),) = framing.responses(written(answer, version, number))
    assert answered == number
    assert read == (error, *((producer_id, epoch) if version == 5 else (-1, -1)))


partitions = st.builds(
    _Partition,
    index=int32,
    error_code=int16,
    base_offset=int64,
    log_append_time_ms=int64,
    log_start_offset=int64,
    record_errors=st.lists(
        st.builds(_Partition.BatchIndexAndErrorMessage, batch_index=int32, batch_index_error_message=st.none() | texts),
        max_size=3,
    ),
    error_message=st.none() | texts,
)


@given(found=st.lists(st.builds(_Stored, name=texts, partition_responses=st.lists(partitions, max_size=3)), max_size=3))
def test_produce_response_is_decoded(found: list[Any]) -> None:
    framing = Framing(CLIENT)
    number, _ = framing.request(Produce("id", -1, 1, {}))
    answer = producer.ProduceResponse(responses=found, throttle_time_ms=3, version=12)
    ((_, read),) = framing.responses(written(answer, 12, number))
    assert [(topic.name, [*map(astuple, topic.partition_responses)]) for topic in read.responses] == [
        (
            topic.name,
            [(part.index, part.error_code, part.base_offset, part.error_message) for part in topic.partition_responses],
        )
        for topic in found
    ]


def test_tagged_fields_are_skipped() -> None:
    """A broker names the new leader in one (KIP-951)."""
    framing = Framing(CLIENT)
    number, _ = framing.request(EndTxn(5, "id", 1, 2, True))
    tags = b"\x02\x00\x03abc\x81\x01\x00"  # tag 0 of 3 bytes, tag 129 of none
    body = struct.pack(">i", number) + tags + struct.pack(">ihqh", 0, 48, 5, 6) + tags
    assert framing.responses(struct.pack(">i", len(body)) + body) == [(number, (48, 5, 6))]


@given(cuts=st.lists(st.integers(0, 400), max_size=8))
def test_answers_are_decoded_from_any_chunks(cuts: list[int]) -> None:
    framing = Framing(CLIENT)
    data, expected = b"", []
    for place in range(5):
        if place % 2:
            number, _ = framing.request(EndTxn(5, "id", 1, 2, True))
            data += written(producer.EndTxnResponse(error_code=place, producer_id=1, producer_epoch=2, version=5), 5, number)
        else:
            number, _ = framing.request(metadata.MetadataRequest(version=9, topics=[]))
            data += written(metadata.MetadataResponse(cluster_id=str(place), version=9), 9, number)
        expected.append((number, place))
    found = []
    for begin, end in zip([0, *sorted(cuts)], [*sorted(cuts), len(data)], strict=True):
        found += framing.responses(data[begin:end])
    told = [(number, read.error_code if hasattr(read, "producer_id") else int(read.cluster_id)) for number, read in found]
    assert told == expected


def broken(size: int, number: int, rest: bytes = b"") -> bytes:
    return struct.pack(">ii", size, number) + rest


@table(
    "data",
    [
        broken(4, 7),  # of another request
        broken(5, 1, b"\0"),  # too short
        broken(6, 1, b"\xff\xff"),
        broken(-1, 1),
        broken(2**31 - 1, 1),
        broken(2, 1),
    ],
)
def test_an_invalid_answer_is_a_kafka_error(data: bytes) -> None:
    """The connection closes on a KafkaError; any other exception would propagate to the caller."""
    for request in (EndTxn(5, "id", 1, 2, True), Produce("id", -1, 1, {}), metadata.MetadataRequest(version=9, topics=[])):
        framing = Framing(CLIENT)
        framing.request(request)
        with pytest.raises(KafkaError):
            framing.responses(data)


def test_an_answer_without_a_request_is_a_kafka_error() -> None:
    with pytest.raises(KafkaError):
        Framing(CLIENT).responses(broken(4, 1))


def test_a_string_longer_than_its_message_is_an_error() -> None:
    framing = Framing(CLIENT)
    number, _ = framing.request(Produce("id", -1, 1, {}))
    body = struct.pack(">i", number) + b"\x00\x02\x7fabc"
    with pytest.raises(KafkaError):
        framing.responses(struct.pack(">i", len(body)) + body)
