"""Records encoded by column compared with records encoded one by one: the same bytes, split into full batches."""

from __future__ import annotations

from itertools import pairwise

import pyarrow as pa
from hypothesis import example, given
from hypothesis import strategies as st

from dualwrite.kafka.client.compression import NAMES, compression_by_name
from dualwrite.kafka.native.arrow_records import RecordColumns
from dualwrite.kafka.native.records import RECORD_OVERHEAD, SMALL, BatchBuilder
from fixtures.tables import table

EDGES = [0, 63, 64, 127, 128, 8191, 8192, SMALL - 200]
SOME_IDS = {"producer_id": 7, "epoch": 3, "base_sequence": 11}
NOW = 1_700_000_000_000

content = st.none() | st.binary(max_size=100) | st.builds(bytes, st.sampled_from(EDGES))
key = st.none() | st.binary(max_size=70)
columns = st.lists(st.tuples(key, content), min_size=1, max_size=70)


def column_of(values: list[bytes | None], skipped: int) -> pa.Array:
    """An array that does not begin at the start of its buffer, like a slice."""
    return pa.array([b"skipped"] * skipped + values, pa.binary())[skipped:]


@given(columns, st.booleans(), st.integers(1, 20_000), st.integers(0, 3), st.sampled_from(NAMES))
@example([(b"k", b"v")] * (SMALL + 2), True, 2**31, 0, "none")
@example([(None, None)] * (SMALL + 2), True, 2**31, 1, "none")
def test_columns_encode_to_the_same_bytes_as_records(
    messages: list[tuple[bytes | None, bytes | None]], keyed: bool, limit: int, skipped: int, name: str
) -> None:
    compression = compression_by_name(name)
    keys = column_of([key for key, _ in messages], skipped) if keyed else None
    found = RecordColumns.of(column_of([value for _, value in messages], skipped), keys)
    assert found is not None
    limit = max(limit, found.longest)
    cuts = list(found.batches(limit))
    assert (cuts[0][0], cuts[-1][1]) == (0, len(messages))
    assert all(first[1] == second[0] for first, second in pairwise(cuts))
    for begin, end in cuts:
        builder = BatchBuilder()
        for key, value in messages[begin:end]:
            builder.append(key if keyed else None, value, None, NOW)
        made = found.encoded(begin, end, NOW)
        assert made.build(compression=compression, **SOME_IDS) == builder.build(compression=compression, **SOME_IDS)
        assert (made.count, made.size) == (builder.count, builder.size)
        assert made.size <= limit
        assert made.count <= SMALL
        if end < len(messages) and made.count < SMALL:
            _, value = messages[end]
            one_more = RECORD_OVERHEAD + len((messages[end][0] if keyed else None) or b"") + len(value or b"")
            assert made.size + one_more > limit


@given(st.lists(st.tuples(st.binary(max_size=5), st.integers(0, 6)), min_size=1))
def test_each_partition_has_its_messages_in_order(messages: list[tuple[bytes, int]]) -> None:
    values = pa.array([b"%d" % number for number in range(len(messages))])
    found = RecordColumns.of(values, pa.array([key for key, _ in messages], pa.binary()))
    assert found is not None
    parts = dict(found.by_partition([index for _, index in messages]))
    assert parts.keys() == {index for _, index in messages}
    for index, part in parts.items():
        expected = BatchBuilder()
        for number, (key, chosen) in enumerate(messages):
            if chosen == index:
                expected.append(key, b"%d" % number, None, NOW)
        made = part.encoded(0, len(part), NOW)
        none = compression_by_name("none")
        assert made.build(compression=none, **SOME_IDS) == expected.build(compression=none, **SOME_IDS)
        assert part.size == expected.size
    assert sum(part.size for part in parts.values()) == found.size


@table(
    ("values", "keys"),
    [
        (pa.array(["text"]), None),
        (pa.chunked_array([[b"v"], [b"v"]]), None),
        (pa.array([b"v"]).dictionary_encode(), None),
        (pa.array([b"v"], pa.large_binary()), None),
        (pa.array([b"v"]), pa.array([b"k"], pa.large_binary())),
        (pa.array([bytes(SMALL)]), None),
        (pa.array([b"v"]), pa.array([bytes(SMALL)])),
    ],
)
def test_columns_that_are_encoded_one_by_one(values: pa.Array, keys: pa.Array | None) -> None:
    assert RecordColumns.of(values, keys) is None
