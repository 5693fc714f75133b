"""The digest of a chunk depends on its rows, but not on their order or on Arrow's memory layout."""

from __future__ import annotations

import datetime as dt
import decimal
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualwrite.spark.chunks import arrow_chunks, cut
from dualwrite.spark.loading import table_digest

ROWS = st.lists(st.tuples(st.none() | st.integers(-(2**63), 2**63 - 1), st.none() | st.text(), st.none() | st.binary()))
SCHEMA = pa.schema([("number", pa.int64()), ("text", pa.string()), ("data", pa.binary())])


def table(rows: list[tuple[Any, ...]]) -> pa.Table:
    columns = list(zip(*rows, strict=True)) if rows else [(), (), ()]
    return pa.table([pa.array(column, kind) for column, kind in zip(columns, SCHEMA.types, strict=True)], schema=SCHEMA)


@given(ROWS, st.randoms(use_true_random=False))
def test_the_order_of_rows_does_not_matter(rows: list[tuple[Any, ...]], random: Any) -> None:
    shuffled = list(rows)
    random.shuffle(shuffled)
    assert table_digest(table(rows)) == table_digest(table(shuffled))


@pytest.mark.slow
@given(ROWS, ROWS)
def test_different_rows_have_different_digests(one: list[tuple[Any, ...]], other: list[tuple[Any, ...]]) -> None:
    def order(row: tuple[Any, ...]) -> str:
        return repr(row)

    same = sorted(one, key=order) == sorted(other, key=order)
    assert (table_digest(table(one)) == table_digest(table(other))) is same


@given(ROWS, st.integers(1, 5))
def test_batches_and_slices_do_not_matter(rows: list[tuple[Any, ...]], size: int) -> None:
    whole = table([(0, "before", b""), *rows]).slice(1)
    pieces = pa.Table.from_batches(whole.to_batches(max_chunksize=size), SCHEMA)
    assert table_digest(pieces) == table_digest(table(rows))


def test_bytes_under_a_null_do_not_matter() -> None:
    valid = pa.py_buffer(bytes([0b101]))
    one, other = (pa.py_buffer(b"".join(n.to_bytes(8, "little") for n in (1, hidden, 3))) for hidden in (2, 77))
    arrays = [pa.Array.from_buffers(pa.int64(), 3, [valid, data]) for data in (one, other)]
    assert table_digest(pa.table({"n": arrays[0]})) == table_digest(pa.table({"n": arrays[1]}))


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (pa.bool_(), [True, False, None]),
        (pa.int8(), [1, -1, None]),
        (pa.float32(), [1.5, float("nan"), float("inf"), -0.0, 0.0, None]),
        (pa.float64(), [0.1, 0.1 + 2**-56, 1e300, None]),
        (pa.decimal128(38, 18), [decimal.Decimal("1.1"), decimal.Decimal("-1.1"), None]),
        (pa.date32(), [dt.date(1969, 12, 31), dt.date(2026, 1, 1), None]),
        (pa.timestamp("us"), [dt.datetime(1, 1, 1), dt.datetime(2026, 1, 1, 0, 0, 0, 1), None]),  # noqa: DTZ001
        (pa.duration("us"), [dt.timedelta(microseconds=1), dt.timedelta(days=1), None]),
        (pa.large_string(), ["", "n", "1:n", None]),
        (pa.list_(pa.int32()), [[], [1], [None], [1, 2], None]),
        (pa.struct([("a", pa.int32()), ("b", pa.string())]), [{"a": 1, "b": None}, {"a": None, "b": "1"}, None]),
        (pa.map_(pa.string(), pa.int32()), [[("a", 1)], [("a", None)], [], None]),
    ],
    ids=str,
)
def test_every_type_of_spark_has_a_digest(kind: pa.DataType, values: list[Any]) -> None:
    digests = [table_digest(pa.table({"column": pa.array([value], kind)})) for value in values]
    assert len(set(digests)) == len(values)
    assert all(len(digest) == 32 for digest in digests)


def test_times_are_compared_as_instants() -> None:
    instant = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)
    zones = [pa.table({"t": pa.array([instant], pa.timestamp("us", zone))}) for zone in ("UTC", "Europe/Berlin")]
    assert table_digest(zones[0]) == table_digest(zones[1])


NESTED: dict[str, tuple[Callable[[pa.DataType], pa.DataType], Callable[[dt.datetime], Any]]] = {
    "list": (pa.list_, lambda time: [time, None]),
    "large list": (pa.large_list, lambda time: [time, None]),
    "list of two": (lambda kind: pa.list_(kind, 2), lambda time: [time, None]),
    "struct": (lambda kind: pa.struct([("a", pa.int32()), ("t", kind)]), lambda time: {"a": 1, "t": time}),
    "map": (lambda kind: pa.map_(kind, kind), lambda time: [(time, None)]),
    "all": (
        lambda kind: pa.map_(pa.string(), pa.list_(pa.struct([pa.field("t", kind, nullable=False)]))),
        lambda time: [("k", [{"t": time}])],
    ),
}


@pytest.mark.parametrize("nested", NESTED)
def test_times_inside_other_values_are_compared_as_instants(nested: str) -> None:
    """The session time zone of Spark is the time zone of the type, and may be another one in a rerun."""
    kind, value = NESTED[nested]

    def digest(zone: str, time: dt.datetime) -> str:
        column = pa.array([None, value(time), None], kind(pa.timestamp("us", zone)))
        return table_digest(pa.table({"column": column}).slice(1))

    instant = dt.datetime(2026, 10, 25, 0, 30, tzinfo=dt.UTC)
    assert digest("UTC", instant) == digest("Europe/Berlin", instant)
    hour = dt.timedelta(hours=1)
    assert digest("Europe/Berlin", instant) != digest("Europe/Berlin", instant + hour), "both are 02:30 there"


def test_column_boundaries_matter() -> None:
    one, other = pa.table({"a": ["1,1:2"], "b": ["3"]}), pa.table({"a": ["1"], "b": ["2,1:3"]})
    assert table_digest(one) != table_digest(other)
    assert table_digest(pa.table({"a": ["x"]})) != table_digest(pa.table({"b": ["x"]}))


def test_a_stored_digest_still_matches() -> None:
    """Markers of earlier releases are compared with these digests: if this fails, unfinished jobs would be refused."""
    rows = pa.table(
        {
            "n": [1, None],
            "x": [0.5, None],
            "s": ["é", None],
            "l": pa.array([[1], None], pa.list_(pa.int64())),
            "t": pa.array([0, None], pa.timestamp("us", "UTC")),
        }
    )
    assert table_digest(rows) == "089e5b5f4ca388d7ea1dd738fd067fb3"
    kind = pa.struct([("t", pa.timestamp("us")), ("m", pa.map_(pa.string(), pa.date32()))])
    rows = pa.table({"s": pa.array([{"t": 0, "m": [("k", 0)]}, {"t": None, "m": []}, None], kind)})
    assert table_digest(rows) == "16cb15d2eae85237f2f37ef9d62d2393"


@given(st.lists(st.integers(0, 9), max_size=12), st.none() | st.integers(1, 12))
def test_chunks_have_the_rows_of_a_transaction(sizes: list[int], rows: int | None) -> None:
    batches = [pa.record_batch({"n": pa.array([place] * size, pa.int64())}) for place, size in enumerate(sizes)]
    tables = list(cut(batches, rows))
    assert [n for each in tables for n in each["n"].to_pylist()] == [n for batch in batches for n in batch["n"].to_pylist()]
    if rows is None:
        assert len(tables) == (sum(sizes) > 0)
    else:
        assert all(each.num_rows == rows for each in tables[:-1])
        assert all(0 < each.num_rows <= rows for each in tables)


def test_arguments_of_the_function_are_made_lazily() -> None:
    made: list[int] = []
    batch = pa.record_batch({"n": [1, 2, 3]})
    chunks = list(arrow_chunks([batch], 2, lambda rows: made.append(rows.num_rows)))
    assert [chunk.rows for chunk in chunks] == [2, 1]
    assert made == []
    chunks[1].content()
    assert made == [1]
