"""Validation of topics, values, keys, headers and numbers before anything is sent."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualwrite.errors import InvalidMessageError
from dualwrite.kafka.messages import MAX_TOPIC_LENGTH, Columns, as_bytes, check_number, check_topic, header_list
from fixtures.tables import table


@table("topic", ["a", "orders.v1_x-y", "A" * MAX_TOPIC_LENGTH, "...", "_", "-"])
def test_a_valid_topic_name_is_returned(topic: str) -> None:
    assert check_topic(topic) == topic


@table("topic", ["", ".", "..", "a" * (MAX_TOPIC_LENGTH + 1), "a b", "a/b", "a\n", "größe", "a#1", "\u0661", None, 5, b"a"])
def test_an_invalid_topic_name_is_refused(topic: Any) -> None:
    with pytest.raises(InvalidMessageError):
        check_topic(topic)


@given(st.binary())
def test_bytes_of_every_kind_are_sent_unchanged(content: bytes) -> None:
    for form in (content, bytearray(content), memoryview(content)):
        assert as_bytes("value", form) == content
        assert type(as_bytes("value", form)) is bytes


@given(st.text(st.characters(blacklist_categories=["Cs"])))
def test_text_is_encoded_in_utf8(content: str) -> None:
    assert as_bytes("value", content) == content.encode("utf-8")
    assert as_bytes("value", None) is None, "a tombstone"


@table("content", [5, 1.5, True, {}, [], object(), ("a",)])
def test_another_type_is_refused_with_its_name_and_the_next_step(content: Any) -> None:
    with pytest.raises(
        InvalidMessageError, match=f"(?s)value must be bytes, str or None, not {type(content).__name__}.*serialise"
    ):
        as_bytes("value", content)


def test_text_without_utf8_encoding_is_refused() -> None:
    with pytest.raises(InvalidMessageError, match="key can't be encoded as UTF-8"):
        as_bytes("key", "\ud800")
    with pytest.raises(InvalidMessageError, match="header name can't be encoded as UTF-8"):
        header_list({"\ud800": "x"})


def test_headers_are_pairs_in_order() -> None:
    assert header_list(None) is None
    assert header_list({}) == []
    assert header_list({"b": "x", "a": None}) == [("b", b"x"), ("a", None)]
    assert header_list([("a", "x"), ("a", b"y")]) == [("a", b"x"), ("a", b"y")]


@table(
    ("headers", "why"),
    [
        *((not_pairs, None) for not_pairs in (5, ["a"], [("a",)], [("a", "b", "c")], "abc", [5])),
        *((no_text, "header's name must be a str") for no_text in ({1: "x"}, [(None, "x")], [(b"a", "x")])),
        ({"trace": 5}, "header 'trace'"),
    ],
)
def test_headers_that_are_not_pairs_of_a_name_and_a_value_are_refused(headers: Any, why: str | None) -> None:
    with pytest.raises(InvalidMessageError, match=why):
        header_list(headers)


@given(st.integers(0, 10))
def test_a_number_within_its_range_is_returned(number: int) -> None:
    assert check_number("partition", number, 10) == number


@table("number", [-1, 11, True, False, 1.0, "1", None])
def test_any_other_number_is_refused(number: Any) -> None:
    with pytest.raises(InvalidMessageError, match="partition must be an int from 0 to 10"):
        check_number("partition", number, 10)


@table(("values", "keys"), [("lamp", None), (b"", None), ({"a": 1}, None), (["a"], "k")])
def test_a_single_text_is_no_series_of_messages(values: Any, keys: Any) -> None:
    """In a unit of a group, and in a coroutine."""
    with pytest.raises(InvalidMessageError, match="send_many must be a list"):
        Columns("t", values, keys=keys)
