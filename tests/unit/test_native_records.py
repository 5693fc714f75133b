"""Record batches compared with kafka-python's builder: the same bytes for any records."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kafka.record.default_records import DefaultRecordBatch, DefaultRecordBatchBuilder
from kafka.record.util import decode_varint, encode_varint

from dualwrite.errors import InvalidMessageError, UsageError
from dualwrite.kafka.client.compression import NAMES, compression_by_name
from dualwrite.kafka.native.records import (
    BATCH_OVERHEAD,
    SIGNED,
    SMALL,
    BatchBuilder,
    encoded_headers,
    next_sequence,
    signed_varint,
    split,
)
from fixtures.tables import table

Headers = list[tuple[str, bytes | None]]
Record = tuple[bytes | None, bytes | None, Headers, int]

NONE = compression_by_name("none")
TABLE_EDGES = [0, 63, 64, 127, 128, 8191, 8192, SMALL - 1, SMALL, SMALL + 1, 2**20 - 1, 2**20, 2**20 + 1]

text = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
small_content = st.none() | st.binary(max_size=300) | st.builds(bytes, st.sampled_from([0, 64, 8192]))
content = small_content | st.builds(bytes, st.sampled_from(TABLE_EDGES))
headers = st.lists(st.tuples(text, st.none() | st.binary(max_size=200)), max_size=5)
near_now = st.integers(1_700_000_000_000 - 20_000, 1_700_000_000_000 + 20_000)
timestamps = near_now | st.integers(0, 2**63 - 1)
records = st.lists(st.tuples(content, content, headers, timestamps), min_size=1, max_size=20)
small_records = st.lists(st.tuples(small_content, small_content, headers, timestamps), min_size=1, max_size=20)
"""Where lengths around the edges of their encodings make no difference, but megabytes take their time."""

ids = st.fixed_dictionaries(
    {"producer_id": st.integers(0, 2**63 - 1), "epoch": st.integers(0, 2**15 - 1), "base_sequence": st.integers(0, 2**31 - 1)}
)
SOME_IDS = {"producer_id": 7, "epoch": 3, "base_sequence": 11}


def filled(given_records: list[Record]) -> BatchBuilder:
    builder = BatchBuilder()
    for record in given_records:
        builder.append(*record)
    return builder


def kafka_pythons(given_records: list[Record], given_ids: dict[str, int]) -> bytes:
    """The same batch by kafka-python, which leaves the partition leader epoch 0 where Java writes -1."""
    builder = DefaultRecordBatchBuilder(
        magic=2,
        compression_type=0,
        is_transactional=1,
        producer_id=given_ids["producer_id"],
        producer_epoch=given_ids["epoch"],
        base_sequence=given_ids["base_sequence"],
        batch_size=2**31 - 1,
    )
    for offset, (key, value, given_headers, timestamp) in enumerate(given_records):
        assert builder.append(offset, timestamp, key, value, given_headers) is not None
    built = bytes(builder.build())
    return built[:12] + b"\xff\xff\xff\xff" + built[16:]


def read_back(batch: bytes) -> list[Record]:
    read = DefaultRecordBatch(batch)
    assert read.validate_crc()
    found = list(read)
    assert [record.offset for record in found] == list(range(len(found)))
    return [(record.key, record.value, record.headers, record.timestamp) for record in found]


# --- numbers of variable length ---------------------------------------------------------------------------------------


@given(st.integers(-(2**63), 2**63 - 1) | st.integers(-300, 300))
@example(2**63 - 1)
@example(-(2**63))
def test_a_signed_number_is_encoded_as_by_kafka_python(number: int) -> None:
    expected = bytearray()
    encode_varint(number, expected.append)
    assert signed_varint(number) == bytes(expected)
    assert decode_varint(bytearray(expected)) == (number, len(expected))


def test_the_table_equals_the_function() -> None:
    assert len(SIGNED) == SMALL
    assert all(SIGNED[number] == signed_varint(number) for number in range(SMALL))


# --- batches ----------------------------------------------------------------------------------------------------------


@given(records, ids)
@settings(deadline=None)
def test_a_batch_has_the_bytes_of_kafka_python(given_records: list[Record], given_ids: dict[str, int]) -> None:
    builder = filled(given_records)
    batch = builder.build(**given_ids, compression=NONE)
    assert batch == kafka_pythons(given_records, given_ids)
    assert builder.count == len(given_records)
    assert builder.size >= len(batch) - BATCH_OVERHEAD


@pytest.mark.slow
def test_more_records_than_the_table_has_numbers() -> None:
    many: list[Record] = [(b"%d" % n, b"v", [], 1_700_000_000_000 + n) for n in range(SMALL + 100)]
    assert filled(many).build(**SOME_IDS, compression=NONE) == kafka_pythons(many, SOME_IDS)


def test_more_headers_than_the_table_has_numbers() -> None:
    many: list[Record] = [(None, None, [(f"n{n}", b"x" * (n % 3)) for n in range(SMALL + 1)], 5)]
    assert filled(many).build(**SOME_IDS, compression=NONE) == kafka_pythons(many, SOME_IDS)


@table("length", TABLE_EDGES)
def test_lengths_at_the_limits_of_their_encodings(length: int) -> None:
    there: list[Record] = [(bytes(length), bytes(length), [("n" * length, bytes(length))], 5)]
    assert filled(there).build(**SOME_IDS, compression=NONE) == kafka_pythons(there, SOME_IDS)


@table(
    "times",
    [
        [5, 4],
        [5, 9, 0],
        [SMALL, 0],
        [0, SMALL - 1, SMALL, SMALL + 1],
        [2**63 - 1, 0],
        [0, 2**63 - 1],
        [5, 5 - SMALL, 5 - 2 * SMALL],
    ],
)
def test_timestamps_may_decrease_and_differ_widely(times: list[int]) -> None:
    there: list[Record] = [(None, b"v", [], time) for time in times]
    batch = filled(there).build(**SOME_IDS, compression=NONE)
    assert batch == kafka_pythons(there, SOME_IDS)
    header = DefaultRecordBatch(batch)
    assert (header.first_timestamp, header.max_timestamp) == (times[0], max(times))


def test_no_headers_may_be_none_or_empty() -> None:
    built = []
    ways: list[Any] = [None, [], ()]
    for no_headers in ways:
        builder = BatchBuilder()
        builder.append(b"k", b"v", no_headers, 5)
        built.append(builder.build(**SOME_IDS, compression=NONE))
    assert built[0] == built[1] == built[2]


# --- headers ----------------------------------------------------------------------------------------------------------


class OtherMapping(Mapping[str, Any]):
    """A mapping that is no dict, and whose names have two characters."""

    def __init__(self, given: dict[str, Any]) -> None:
        self._given = given

    def __getitem__(self, name: str) -> Any:
        return self._given[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._given)

    def __len__(self) -> int:
        return len(self._given)


given_content = st.none() | st.binary(max_size=200) | text | st.binary(max_size=9).map(bytearray)
FORMS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "dict": dict,
    "list": lambda given: list(given.items()),
    "tuple": lambda given: tuple(given.items()),
    "lists": lambda given: [list(pair) for pair in given.items()],
    "mapping": OtherMapping,
}


@pytest.mark.parametrize("form", FORMS.values(), ids=list(FORMS))
@given(st.dictionaries(text, given_content, max_size=4), text)
@settings(max_examples=30)
def test_headers_of_every_form_are_encoded_alike(
    form: Callable[[dict[str, Any]], Any], given_headers: dict[str, Any], value: str
) -> None:
    wanted = {"ab": value, **given_headers}
    listed: Headers = [(name, v.encode() if isinstance(v, str) else v and bytes(v)) for name, v in wanted.items()]
    expected = kafka_pythons([(None, b"v", listed, 5)], SOME_IDS)
    for _ in range(2):  # the second time the names are known
        builder = BatchBuilder()
        builder.append(None, b"v", form(wanted), 5)
        assert builder.build(**SOME_IDS, compression=NONE) == expected


@table("headers", [5, ["a"], [("a",)], [(1, b"x")], [(["a"], b"x")], [("a", 5)], {"a": {}}, {"\ud800": b"x"}])
def test_invalid_headers_are_refused(headers: Any) -> None:
    for known in ([("a", b"x")], [("b", b"x")]):
        encoded_headers(known)
        with pytest.raises(InvalidMessageError):
            encoded_headers(headers)


def test_a_view_of_numbers_is_as_long_as_its_bytes() -> None:
    encoded_headers({"n": b""})
    assert encoded_headers({"n": memoryview(array("i", [1, 2]))}) == encoded_headers({"n": array("i", [1, 2]).tobytes()})  # type: ignore[dict-item]  # accepted as bytes are


# --- compressed batches -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@given(given_records=small_records, given_ids=ids)
@settings(deadline=None, max_examples=50)
def test_a_compressed_batch_differs_only_in_length_checksum_and_codec(
    name: str, given_records: list[Record], given_ids: dict[str, int]
) -> None:
    compression = compression_by_name(name)
    batch = filled(given_records).build(**given_ids, compression=compression)
    plain = kafka_pythons(given_records, given_ids)
    attributes = int.from_bytes(batch[21:23])
    assert attributes in (0x10, 0x10 | compression.code)
    assert (batch[:8], batch[12:17], batch[23:BATCH_OVERHEAD]) == (plain[:8], plain[12:17], plain[23:BATCH_OVERHEAD])
    assert int.from_bytes(batch[8:12]) == len(batch) - 12
    assert DefaultRecordBatch(batch).validate_crc()
    if attributes & 7:
        assert len(batch) < len(plain)
        assert compression.decompress(batch[BATCH_OVERHEAD:]) == plain[BATCH_OVERHEAD:]
    else:
        assert batch == plain


@table("name", NAMES)
def test_records_are_compressed_only_if_that_makes_them_smaller(name: str) -> None:
    compression = compression_by_name(name)
    large = filled([(None, bytes(5000), [], 5)]).build(**SOME_IDS, compression=compression)
    assert int.from_bytes(large[21:23]) == 0x10 | compression.code
    small = filled([(None, b"v", [], 5)]).build(**SOME_IDS, compression=compression)
    assert small == kafka_pythons([(None, b"v", [], 5)], SOME_IDS)


# --- errors -----------------------------------------------------------------------------------------------------------


def test_a_batch_without_records_cannot_be_built() -> None:
    with pytest.raises(UsageError, match="at least one record"):
        BatchBuilder().build(**SOME_IDS, compression=NONE)


# --- sequences --------------------------------------------------------------------------------------------------------


@given(st.integers(0, 2**31 - 1), st.integers(1, 10_000_000))
def test_the_next_sequence_is_what_readers_of_the_batch_expect(base: int, count: int) -> None:
    header = DefaultRecordBatch(struct.pack(">qiibIhiqqqhii", 0, 49, -1, 2, 0, 0x10, count - 1, 0, 0, 1, 0, base, count))
    assert next_sequence(header.last_sequence, 1) == next_sequence(base, count)


# --- a batch that is too large ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@given(given_records=small_records)
@settings(deadline=None, max_examples=50)
def test_a_batch_is_split_into_its_records_in_order(name: str, given_records: list[Record]) -> None:
    compression = compression_by_name(name)
    builders = split(filled(given_records).build(**SOME_IDS, compression=compression))
    assert len(builders) == min(2, len(given_records))
    assert all(builder.count for builder in builders)
    found, sequence = [], 11
    for builder in builders:
        batch = builder.build(**{**SOME_IDS, "base_sequence": sequence}, compression=NONE)
        found += read_back(batch)
        sequence = next_sequence(sequence, builder.count)
    assert found == given_records
    assert sequence == 11 + len(given_records)


@pytest.mark.parametrize("sizes", [[1] * 9 + [5000], [5000] + [1] * 9, [1, 5000, 1], [0, 0]])
def test_one_large_record_is_split_from_the_others(sizes: list[int]) -> None:
    there: list[Record] = [(None, bytes(size), [], 5) for size in sizes]
    first, second = split(filled(there).build(**SOME_IDS, compression=NONE))
    assert first.count + second.count == len(sizes)
