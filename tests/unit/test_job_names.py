"""Ids of task attempts are read back exactly."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualwrite.errors import InvalidTransactionalIdError
from dualwrite.jobs.names import MAX_PREFIX_LENGTH, AttemptId, validate_prefix

PREFIXES = st.text(st.characters(codec="ascii", categories=["L", "N", "P"], exclude_characters="#~"), min_size=1, max_size=40)
NUMBERS = st.integers(0, 2**31)


@given(PREFIXES, NUMBERS, NUMBERS)
def test_an_id_is_read_back(prefix: str, partition: int, attempt: int) -> None:
    made = AttemptId(prefix, partition, attempt)
    assert AttemptId.parse(str(made)) == made


@pytest.mark.parametrize(
    ("text", "prefix"),
    [
        ("orders.0.0", "orders"),
        ("orders.eu.0.1", "orders.eu"),
        ("orders.0.1.2", "orders.0"),
        ("a.b.c.10.3", "a.b.c"),
        ("1.2.3", "1"),
    ],
)
def test_the_last_two_numbers_are_not_the_prefix(text: str, prefix: str) -> None:
    found = AttemptId.parse(text)
    assert found is not None
    assert found.prefix == prefix


@pytest.mark.parametrize(
    "text", ["orders", "orders.1", "orders.1.x", "orders.01.1", "orders.-1.1", ".1.2", "1.2", "", "orders.1.1~1"]
)
def test_what_is_no_attempt(text: str) -> None:
    assert AttemptId.parse(text) is None


@pytest.mark.parametrize("prefix", ["", "a#b", "a~b", "a\n", "x" * (MAX_PREFIX_LENGTH + 1)])
def test_what_is_no_prefix(prefix: str) -> None:
    with pytest.raises(InvalidTransactionalIdError):
        validate_prefix(prefix)


def test_the_longest_prefix_leaves_room_for_the_numbers() -> None:
    longest = validate_prefix("x" * MAX_PREFIX_LENGTH)
    assert len(str(AttemptId(longest, 2**31, 2**31))) <= 255
