"""How a row becomes a message, and which layouts are refused; without a database."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualwrite.cli.relay import Outbox
from dualwrite.errors import ConfigurationError, InvalidMessageError, StoredStateError
from dualwrite.kafka.base import Message
from dualwrite.relay.dead_letters import row_from, row_text
from dualwrite.relay.layout import DEBEZIUM, GENERIC, OutboxLayout
from dualwrite.relay.poison import PoisonSearch
from fixtures.tables import table

PLAIN: dict[str, Any] = {
    "id": 1, "topic": "t", "key": b"k", "value": b"v", "headers": None, "partition_number": None
}  # fmt: skip


def test_a_row_of_the_generic_layout() -> None:
    row = PLAIN | {"headers": '{"a": "b", "n": 3, "none": null}', "partition_number": 2}
    assert GENERIC.message(row) == Message("t", b"v", b"k", [("a", b"b"), ("n", b"3"), ("none", None)], 2, None)


def test_a_row_of_debeziums_layout() -> None:
    identity = UUID("406c07f3-26f0-4eea-a50c-109940064b8f")
    row = {"id": identity, "aggregatetype": "Order", "aggregateid": 7, "payload": '{"id": 1}'}
    headers = [("id", str(identity).encode())]
    assert DEBEZIUM.message(row) == Message("outbox.event.Order", b'{"id": 1}', b"7", headers, None, None)


def test_a_time_is_a_timestamp_in_milliseconds() -> None:
    layout = OutboxLayout("outbox", timestamp="at", key=None)
    assert layout.message(PLAIN | {"at": datetime(1970, 1, 1, 0, 0, 2, tzinfo=UTC)}).timestamp == 2000
    assert layout.message(PLAIN | {"at": Decimal(5)}).timestamp == 5
    assert layout.message(PLAIN | {"at": None}).timestamp is None
    assert layout.message(PLAIN | {"at": datetime(2026, 1, 1, 0, 0, 1, 1999)}).timestamp == 1_767_225_601_001  # noqa: DTZ001  (without a time zone it is in UTC)
    assert layout.message(PLAIN | {"at": "1970-01-01 00:00:02.5"}).timestamp == 2500
    assert layout.message(PLAIN | {"at": "1970-01-01T01:00:02+01:00"}).timestamp == 2000
    with pytest.raises(InvalidMessageError, match="yesterday"):
        layout.message(PLAIN | {"at": "yesterday"})


@pytest.mark.parametrize("value", ["", " \n", b"", b" "])
def test_an_empty_value_is_a_tombstone_if_the_layout_says_so(value: Any) -> None:
    row = PLAIN | {"value": value}
    assert GENERIC.message(row).value == (value if isinstance(value, bytes) else value.encode())
    assert replace(GENERIC, empty_is_tombstone=True).message(row).value is None
    assert replace(GENERIC, empty_is_tombstone=True).message(PLAIN).value == b"v"


def test_headers_of_the_command_line_are_added_to_those_of_the_layout() -> None:
    assert Outbox(layout="debezium", header=["eventType=type"]).chosen().header_columns == {"id": "id", "eventType": "type"}
    assert Outbox(layout="debezium", header=["id=", "eventType=type"]).chosen().header_columns == {"eventType": "type"}


@table(
    ("column", "value"),
    [
        ("topic", None),
        ("topic", ""),
        ("topic", "a b"),
        ("headers", "3"),
        ("headers", "{"),
        ("headers", "[1]"),
        ("partition_number", -1),
        ("partition_number", "1"),
        ("value", object()),
        ("key", "\ud800"),
    ],
)
def test_a_row_that_is_no_message(column: str, value: Any) -> None:
    with pytest.raises(InvalidMessageError):
        GENERIC.message(PLAIN | {column: value})


@table("changes", [{"id": ""}, {"topic": "x{}"}, {"topic": ""}, {"header_columns": {"a": ""}}])
def test_a_layout_that_names_no_column(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError):
        OutboxLayout("outbox", **changes)


VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(),
    st.binary(),
    st.datetimes(timezones=st.just(UTC)),
    st.decimals(allow_nan=False, allow_infinity=False),
    st.uuids(),
    st.dictionaries(st.text(), st.integers()),
    st.lists(st.text()),
)


@given(st.dictionaries(st.text(), VALUES))
def test_a_row_survives_as_text(row: dict[str, Any]) -> None:
    assert row_from(row_text(row)) == row


def test_a_text_that_is_no_row() -> None:
    for text in ("", "3", '{"a": {"$type": "new", "value": 1}}'):
        with pytest.raises(StoredStateError):
            row_from(text)


@given(st.integers(1, 200), st.sets(st.integers(0, 199), min_size=1, max_size=5), st.booleans())
def test_the_search_blames_exactly_the_rows_that_fail_and_keeps_the_order(rows: int, bad: set[int], tells: bool) -> None:
    """A model of a drain: a batch fails if it has a bad row, and the producer may say at which row it has failed."""
    search, left, done, blamed = PoisonSearch(), list(range(rows)), [], []
    for _ in range(10_000):
        if not left:
            break
        batch = left[: search.limit(50)]
        failing = [index for index, row in enumerate(batch) if row in bad]
        if failing and len(batch) == 1:
            blamed += batch
        elif failing:
            search.failed(len(batch), suspect=failing[0] if tells else None)
            continue
        else:
            done += batch
        search.succeeded(len(batch))
        left = left[len(batch) :]
    assert not left
    assert done == [row for row in range(rows) if row not in bad]
    assert blamed == sorted(row for row in bad if row < rows)
