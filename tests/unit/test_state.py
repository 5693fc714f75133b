"""PreparedTxnState: text forms, limits, round trips."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dualwrite.errors import StoredStateError
from dualwrite.state import MAX_EPOCH, MAX_PRODUCER_ID, PreparedTxnState, state_text
from fixtures.tables import table

producer_ids = st.integers(0, MAX_PRODUCER_ID)
epochs = st.integers(0, MAX_EPOCH)
states = st.builds(PreparedTxnState, producer_ids, epochs, st.none() | st.integers(0, MAX_PRODUCER_ID))


@example(PreparedTxnState(MAX_PRODUCER_ID, MAX_EPOCH, MAX_PRODUCER_ID))
@given(states)
def test_a_state_survives_a_round_trip(state: PreparedTxnState) -> None:
    assert PreparedTxnState.parse(str(state)) == state
    assert PreparedTxnState.parse(state_text(state)) == state


@given(states, states)
def test_two_states_have_one_text_only_if_they_are_equal(one: PreparedTxnState, other: PreparedTxnState) -> None:
    assert (str(one) == str(other)) == (one == other)


def test_the_text_form_is_fixed() -> None:
    assert PreparedTxnState.parse("") is None
    assert state_text(None) == ""
    assert str(PreparedTxnState(4711, 3)) == "4711:3"
    assert str(PreparedTxnState(4711, 3, 1700000000000)) == "4711:3@1700000000000"


def test_only_a_state_without_start_time_is_named_by_its_epoch() -> None:
    assert PreparedTxnState(1, 2).has_own_epoch
    assert not PreparedTxnState(1, 2, 3).has_own_epoch
    assert not PreparedTxnState(1, 2, 0).has_own_epoch


@table(
    "text",
    [
        " ",
        ":",
        "1",
        "1:",
        ":1",
        "1:2:3",
        "1:2@",
        "1:2@3@4",
        "@3",
        "1@3",
        " 1:2",
        "1:2 ",
        "1:2\n",
        "-1:2",
        "1:-1",
        "+1:2",
        "01:2",
        "1:02",
        "1:2@03",
        "1_0:2",
        "1:2@-1",
        "1.0:2",
        "1:32768",
        "1:99999",
        "9223372036854775808:0",
        "1:0@9223372036854775808",
        "99999999999999999999:0",
        "\u0661:2",  # ARABIC-INDIC DIGIT ONE: int() would accept it
        "none",
        "1:2\x00",
    ],
)
def test_a_text_of_another_form_is_refused_with_the_text_in_the_error(text: str) -> None:
    with pytest.raises(StoredStateError) as caught:
        PreparedTxnState.parse(text)
    assert caught.value.text == text
    assert repr(text) in str(caught.value)
    assert caught.value.next_step
    assert not caught.value.retriable


@given(st.text(max_size=30))
def test_every_text_is_read_back_unchanged_or_refused(text: str) -> None:
    try:
        state = PreparedTxnState.parse(text)
    except StoredStateError:
        return
    assert state_text(state) == text


@table(
    ("numbers", "named"),
    [
        ((-1, 0, None), "producer id -1"),
        ((MAX_PRODUCER_ID + 1, 0, None), "producer id"),
        ((0, -1, None), "epoch -1"),
        ((0, MAX_EPOCH + 1, None), "epoch 32768"),
        ((0, 0, -1), "start time -1"),
        ((0, 0, MAX_PRODUCER_ID + 1), "start time"),
    ],
)
def test_numbers_out_of_range_are_refused(numbers: tuple[int, int, int | None], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        PreparedTxnState(*numbers)
