"""PreparedTxnState and transactional ids: text forms, limits, round trips."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualwrite.errors import ConfigurationError, InvalidTransactionalIdError, StoredStateError
from dualwrite.state import (
    MAX_EPOCH,
    MAX_PRODUCER_ID,
    MAX_TRANSACTIONAL_ID_LENGTH,
    KafkaId,
    PreparedTxnState,
    is_lane_of,
    lane_id,
    lanes_of,
    split_lane_id,
    state_text,
    validate_transactional_id,
)

producer_ids = st.integers(0, MAX_PRODUCER_ID)
epochs = st.integers(0, MAX_EPOCH)
states = st.builds(PreparedTxnState, producer_ids, epochs, st.none() | st.integers(0, MAX_PRODUCER_ID))

logical_ids = st.text(st.characters(exclude_characters="#~", exclude_categories=["C", "Z"]), min_size=1, max_size=20)


@given(states)
def test_the_text_of_a_state_reads_back_as_the_state(state: PreparedTxnState) -> None:
    assert PreparedTxnState.parse(str(state)) == state
    assert PreparedTxnState.parse(state_text(state)) == state


@given(states, states)
def test_two_states_have_one_text_only_if_they_are_equal(one: PreparedTxnState, other: PreparedTxnState) -> None:
    assert (str(one) == str(other)) == (one == other)


def test_the_texts_are_those_of_the_design() -> None:
    assert str(PreparedTxnState(4711, 3)) == "4711:3"
    assert str(PreparedTxnState(4711, 3, 1700000000000)) == "4711:3@1700000000000"


def test_the_empty_text_is_no_state() -> None:
    assert PreparedTxnState.parse("") is None
    assert state_text(None) == ""


def test_only_a_state_without_start_time_has_an_epoch_of_its_own() -> None:
    assert PreparedTxnState(1, 2).has_own_epoch
    assert not PreparedTxnState(1, 2, 3).has_own_epoch
    assert not PreparedTxnState(1, 2, 0).has_own_epoch


@pytest.mark.parametrize(
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
def test_every_text_either_reads_back_unchanged_or_is_refused(text: str) -> None:
    try:
        state = PreparedTxnState.parse(text)
    except StoredStateError:
        return
    assert state_text(state) == text


@pytest.mark.parametrize(
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
def test_numbers_outside_their_limits_are_refused_when_the_state_is_made(
    numbers: tuple[int, int, int | None], named: str
) -> None:
    with pytest.raises(ValueError, match=named):
        PreparedTxnState(*numbers)


def test_the_limits_themselves_are_allowed() -> None:
    state = PreparedTxnState(MAX_PRODUCER_ID, MAX_EPOCH, MAX_PRODUCER_ID)
    assert PreparedTxnState.parse(str(state)) == state


@pytest.mark.parametrize("good", ["a", "x" * MAX_TRANSACTIONAL_ID_LENGTH, "orders-1", "größe", "a b", "a/b:c.d"])
def test_a_good_transactional_id_is_given_back(good: str) -> None:
    assert validate_transactional_id(good) == good


@pytest.mark.parametrize(
    "bad", ["", "x" * (MAX_TRANSACTIONAL_ID_LENGTH + 1), "a#1", "a~1", "#", "a\nb", "a\x00", "a\x7f", None, 5, b"a"]
)
def test_a_bad_transactional_id_is_refused(bad: str) -> None:
    with pytest.raises(InvalidTransactionalIdError) as caught:
        validate_transactional_id(bad)
    assert isinstance(caught.value, ConfigurationError)


def test_the_error_for_a_long_id_does_not_repeat_all_of_it() -> None:
    with pytest.raises(InvalidTransactionalIdError, match="300 characters; 255 is the limit") as caught:
        validate_transactional_id("y" * 300)
    assert "y" * 100 not in str(caught.value)


@pytest.mark.parametrize(("lanes", "limit"), [(1, 255), (2, 253), (10, 253), (11, 252), (100, 252)])
def test_an_id_leaves_room_for_the_numbers_of_its_lanes(lanes: int, limit: int) -> None:
    longest = "x" * limit
    assert validate_transactional_id(longest, lanes=lanes) == longest
    assert max(len(lane_id(longest, lane)) for lane in range(lanes)) <= MAX_TRANSACTIONAL_ID_LENGTH
    with pytest.raises(InvalidTransactionalIdError, match=f"{limit} is the limit"):
        validate_transactional_id(longest + "x", lanes=lanes)


def test_lane_0_is_the_logical_id_itself() -> None:
    assert lane_id("orders-0", 0) == "orders-0"
    assert lane_id("orders-0", 1) == "orders-0~1"


@given(logical_ids, st.integers(0, 200))
def test_the_id_of_a_lane_splits_into_what_it_was_made_of(transactional_id: str, lane: int) -> None:
    assert split_lane_id(lane_id(transactional_id, lane)) == (transactional_id, lane)
    assert is_lane_of(lane_id(transactional_id, lane), transactional_id)


@given(st.text(st.sampled_from("ab~#01\n")))
def test_every_text_is_one_lane_of_one_id(text: str) -> None:
    assert lane_id(*split_lane_id(text)) == text


@pytest.mark.parametrize(
    "other",
    [
        "orders",
        "orders-0x",
        "orders-0x~1",
        "orders-00~1",
        "xorders-0~1",
        "orders-0~",
        "orders-0~0",
        "orders-0~01",
        "orders-0~-1",
        "orders-0~1x",
        "orders-0~1 ",
        "orders-0~1\n",
        "orders-0~1~2",
        "orders-0~1#2",
        "orders-0#1~2",
        "orders-0~\u0661",  # ARABIC-INDIC DIGIT ONE
        "Orders-0~1",
        "~1",
    ],
)
def test_what_only_looks_like_a_lane_is_none(other: str) -> None:
    assert not is_lane_of(other, "orders-0")
    assert lanes_of([other, "orders-0~1"], "orders-0") == ["orders-0~1"]


def test_an_id_s_lanes_are_found_and_sorted_by_their_numbers() -> None:
    listed = ["orders-0~10", "orders-0", "orders-0~2", "orders-00", "orders-0-x", "orders-0~1", "orders-0~9"]
    assert lanes_of(listed, "orders-0") == ["orders-0", "orders-0~1", "orders-0~2", "orders-0~9", "orders-0~10"]
    assert lanes_of(listed, "orders") == []
    assert lanes_of(listed, "orders-0~1") == []


def test_the_ids_of_an_older_release() -> None:
    assert str(KafkaId("orders", 0)) == "orders"
    assert str(KafkaId("orders~2", 12)) == "orders~2#12"


def test_an_id_names_row_store_and_generation() -> None:
    named = KafkaId("orders~2", 12, "0123456789ab")
    assert str(named) == "orders~2#0123456789ab.12"
    assert (named.logical, named.lane) == ("orders", 2)
    assert KafkaId.parse("orders#probe") is None


stores = st.sampled_from(["", "0123456789ab", "1", "12"])


@given(logical_ids, st.integers(0, 3), st.integers(0, 99), stores)
def test_an_id_is_read_back(logical: str, lane: int, generation: int, store_id: str) -> None:
    named = KafkaId(lane_id(logical, lane), generation, store_id)
    assert KafkaId.parse(str(named)) == named


short_ids = st.text(st.sampled_from("a1-"), min_size=1, max_size=2)
places = st.tuples(short_ids, st.integers(0, 11), st.integers(0, 11), stores)


@given(places, places)
def test_different_lanes_generations_and_stores_never_meet_in_one_kafka_id(
    one: tuple[str, int, int, str], other: tuple[str, int, int, str]
) -> None:
    first, second = (str(KafkaId(lane_id(name, lane), number, store)) for name, lane, number, store in (one, other))
    assert (first == second) == (one == other)
