"""Columns as JSON: every row, parsed by another JSON parser, must give the values of the columns."""

from __future__ import annotations

import base64
import json
import math
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dualwrite.errors import ConfigurationError
from dualwrite.jobs.frame.json_values import json_problem, json_values

MOMENT = datetime(2026, 1, 31, 12, 30, 15, 123456, UTC)


def texts(**columns: pa.Array) -> list[str]:
    found = json_values(pa.record_batch(columns), list(columns))
    assert found.null_count == 0
    listed: list[str] = found.to_pylist()
    return listed


def one(value: Any, kind: pa.DataType) -> str:
    (text,) = texts(c=pa.array([value], kind))
    return text.removeprefix('{"c":').removesuffix("}")


@pytest.mark.parametrize(
    ("value", "kind", "text"),
    [
        (7, pa.int8(), "7"),
        (-(2**63), pa.int64(), "-9223372036854775808"),
        (True, pa.bool_(), "true"),
        (1.0, pa.float64(), "1.0"),
        (-0.0, pa.float64(), "-0.0"),
        (0.1, pa.float32(), "0.1"),
        (1e300, pa.float64(), "1e+300"),
        (math.nan, pa.float64(), '"NaN"'),
        (math.inf, pa.float64(), '"Infinity"'),
        (-math.inf, pa.float32(), '"-Infinity"'),
        (Decimal("1.50"), pa.decimal128(10, 2), "1.50"),
        (Decimal(-3), pa.decimal128(10, 0), "-3"),
        ('a "b" \\ /', pa.string(), '"a \\"b\\" \\\\ /"'),
        ("\b\t\n\f\r\0\x1b\x7f", pa.string(), '"\\b\\t\\n\\f\\r\\u0000\\u001B\x7f"'),
        ("Žluťoučký 🐎 \u2028", pa.large_string(), '"Žluťoučký 🐎 \u2028"'),
        (date(2026, 1, 31), pa.date32(), '"2026-01-31"'),
        (MOMENT, pa.timestamp("us", "UTC"), '"2026-01-31T12:30:15.123456Z"'),
        (MOMENT.replace(microsecond=123000), pa.timestamp("us", "UTC"), '"2026-01-31T12:30:15.123Z"'),
        (MOMENT.replace(microsecond=0), pa.timestamp("us", "UTC"), '"2026-01-31T12:30:15.000Z"'),
        (MOMENT, pa.timestamp("us", "Europe/Berlin"), '"2026-01-31T12:30:15.123456Z"'),
        (MOMENT, pa.timestamp("ns", "UTC"), '"2026-01-31T12:30:15.123456Z"'),
        (MOMENT.replace(tzinfo=None), pa.timestamp("us"), '"2026-01-31T12:30:15.123456"'),
        (datetime(1969, 7, 20, 20, 17, 40, 1, UTC), pa.timestamp("us", "UTC"), '"1969-07-20T20:17:40.000001Z"'),
        (time(12, 30, 15, 5), pa.time64("us"), '"12:30:15.000005"'),
        (time(12, 30, 10), pa.time64("us"), '"12:30:10"'),
        (time(0, 0, 0), pa.time32("s"), '"00:00:00"'),
        (b"\xff\x00", pa.binary(), '"/wA="'),
        ({"a": 1, "b": None}, pa.struct([("a", pa.int32()), ("b", pa.string())]), '{"a":1}'),
        ({"a": None}, pa.struct([("a", pa.int32())]), "{}"),
        ([1, None, 3], pa.list_(pa.int32()), "[1,null,3]"),
        ([], pa.list_(pa.int32()), "[]"),
        ([1, 2], pa.list_(pa.int32(), 2), "[1,2]"),
        ([[1], None, []], pa.list_(pa.list_(pa.int32())), "[[1],null,[]]"),
        ([("a", 1), ('b"', None)], pa.map_(pa.string(), pa.int32()), '{"a":1,"b\\"":null}'),
        ([(1, "x")], pa.map_(pa.int32(), pa.string()), '{"1":"x"}'),
        ([(date(2026, 1, 31), [{"x": 1}])], pa.map_(pa.date32(), pa.list_(pa.struct([("x", pa.int8())]))),
         '{"2026-01-31":[{"x":1}]}'),
    ],
)  # fmt: skip
def test_a_value_is_encoded_as_by_spark(value: Any, kind: pa.DataType, text: str) -> None:
    assert one(value, kind) == text


def test_a_null_field_is_left_out_in_every_position() -> None:
    assert texts(a=pa.array([None, 1, 1, None]), b=pa.array(["x", None, "y", None])) == [
        '{"b":"x"}',
        '{"a":1}',
        '{"a":1,"b":"y"}',
        "{}",
    ]


def test_a_column_without_a_type_is_left_out() -> None:
    assert texts(a=pa.nulls(2), b=pa.array([1, 2])) == ['{"b":1}', '{"b":2}']


def test_only_the_given_columns_in_the_given_order() -> None:
    batch = pa.record_batch({"a": pa.array([1]), "b": pa.array([2]), "c": pa.array([3])})
    assert json_values(batch, ["c", "a"]).to_pylist() == ['{"c":3,"a":1}']


def test_a_name_is_escaped_too() -> None:
    assert texts(**{'say "é"': pa.array([1])}) == ['{"say \\"é\\"":1}']


def test_a_dictionary_column_is_its_values() -> None:
    assert texts(a=pa.array(["x", None, "x"]).dictionary_encode()) == ['{"a":"x"}', "{}", '{"a":"x"}']


def test_a_batch_without_rows_gives_no_values() -> None:
    kind = pa.struct([("l", pa.list_(pa.string())), ("m", pa.map_(pa.string(), pa.float64()))])
    assert texts(a=pa.array([], kind), t=pa.array([], pa.timestamp("us", "UTC"))) == []


def test_every_column_that_cannot_be_encoded_is_named() -> None:
    batch = pa.record_batch({"d": pa.array([timedelta(1)], pa.duration("us"))})
    with pytest.raises(ConfigurationError, match=r"no column 'x'.*column 'd': duration\[us\] can't be written as JSON"):
        json_values(batch, ["x", "d"])
    assert json_problem(pa.list_(pa.duration("us")))
    twice = pa.struct([pa.field("a", pa.int8()), pa.field("a", pa.int8())])
    assert "'a' is twice" in str(json_problem(pa.list_(twice)))  # a reader would see only the last one
    assert json_problem(pa.map_(pa.struct([("a", pa.int8())]), pa.int8()))
    assert json_problem(pa.struct([("a", pa.list_(pa.int8()))])) is None


# --- any rows at all --------------------------------------------------------------------------------------------------


text_values = st.text(st.characters(exclude_categories=["Cs"]))
moments = st.datetimes(datetime(1, 1, 1), datetime(9999, 12, 31), timezones=st.just(UTC))  # noqa: DTZ001  (hypothesis wants so)
KINDS: dict[str, tuple[pa.DataType, st.SearchStrategy[Any]]] = {
    "int": (pa.int64(), st.integers(-(2**63), 2**63 - 1)),
    "float": (pa.float64(), st.floats(allow_nan=False, allow_infinity=False)),
    "bool": (pa.bool_(), st.booleans()),
    "text": (pa.string(), text_values),
    "binary": (pa.binary(), st.binary()),
    "date": (pa.date32(), st.dates()),
    "moment": (pa.timestamp("us", "UTC"), moments),
    "local": (pa.timestamp("us"), st.datetimes()),
    "decimal": (pa.decimal128(38, 9), st.decimals(-(10**20), 10**20, places=9)),
    "list": (pa.list_(pa.string()), st.lists(st.none() | text_values)),
    "struct": (
        pa.struct([("a", pa.int32()), ("b", pa.list_(pa.float64()))]),
        st.fixed_dictionaries(
            {"a": st.none() | st.integers(-(2**31), 2**31 - 1), "b": st.none() | st.lists(st.floats(-1e9, 1e9))}
        ),
    ),
    "map": (
        pa.map_(pa.string(), pa.string()),
        st.dictionaries(text_values, st.none() | text_values).map(lambda entries: list(entries.items())),
    ),
}


def read_back(kind: str, value: Any) -> Any:  # noqa: PLR0911  (a table)
    match kind:
        case "binary":
            return base64.b64encode(value).decode()
        case "date":
            return value.isoformat()
        case "moment":
            return value.astimezone(timezone.utc).replace(tzinfo=None)  # noqa: UP017
        case "local":
            return value
        case "struct":
            return {name: content for name, content in value.items() if content is not None}
        case "map":
            return dict(value)
    return value


def parsed(kind: str, value: Any) -> Any:
    if kind in ("moment", "local"):
        assert value.endswith("Z") == (kind == "moment")
        return datetime.fromisoformat(value.removesuffix("Z"))
    return value


@pytest.mark.slow
@settings(deadline=None, max_examples=300)
@given(st.data())
def test_each_row_survives_a_round_trip(data: st.DataObject) -> None:
    names = data.draw(st.lists(st.sampled_from(sorted(KINDS)), min_size=1, max_size=5, unique=True))
    size = data.draw(st.integers(1, 6))
    values = {name: data.draw(st.lists(st.none() | KINDS[name][1], min_size=size, max_size=size)) for name in names}
    batch = pa.record_batch({name: pa.array(values[name], KINDS[name][0]) for name in names})
    offset = data.draw(st.integers(0, size - 1))  # a part of a batch shares its memory
    found = json_values(batch.slice(offset), names).to_pylist()
    assert len(found) == size - offset
    for row, text in enumerate(found, offset):
        expected = {name: read_back(name, values[name][row]) for name in names if values[name][row] is not None}
        read = json.loads(text, parse_float=Decimal) if "decimal" in names else json.loads(text)
        read = {name: parsed(name, value) for name, value in read.items()}
        assert list(read) == [name for name in names if name in expected]
        for name, value in expected.items():
            if name == "float":
                assert float(read[name]) == value
            elif name == "struct" and "decimal" in names:
                assert json.loads(text)[name] == value
            else:
                assert read[name] == value
