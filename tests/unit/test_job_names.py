"""Ids of task attempts: they never collide."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualwrite.errors import InvalidTransactionalIdError
from dualwrite.jobs.rules import MAX_PREFIX_LENGTH, AttemptId, validate_prefix

PREFIXES = st.text(st.characters(codec="ascii", categories=["L", "N", "P"], exclude_characters="#~"), min_size=1, max_size=40)
NUMBERS = st.integers(0, 2**31)


@given(st.tuples(PREFIXES, NUMBERS, NUMBERS), st.tuples(PREFIXES, NUMBERS, NUMBERS))
def test_no_two_attempts_share_an_id(one: tuple[str, int, int], other: tuple[str, int, int]) -> None:
    assert (str(AttemptId(*one)) == str(AttemptId(*other))) == (one == other)


@given(PREFIXES, NUMBERS, NUMBERS, NUMBERS, NUMBERS)
def test_prefixes_with_a_common_beginning_share_no_id(prefix: str, first: int, second: int, third: int, fourth: int) -> None:
    assert str(AttemptId(prefix, first, second)) != str(AttemptId(f"{prefix}.{first}", third, fourth))


@pytest.mark.parametrize("prefix", ["", "a#b", "a~b", "a\n", "x" * (MAX_PREFIX_LENGTH + 1)])
def test_invalid_prefixes_are_refused(prefix: str) -> None:
    with pytest.raises(InvalidTransactionalIdError):
        validate_prefix(prefix)


def test_the_longest_prefix_leaves_room_for_the_numbers() -> None:
    longest = validate_prefix("x" * MAX_PREFIX_LENGTH)
    assert len(str(AttemptId(longest, 2**31, 2**31))) <= 255
