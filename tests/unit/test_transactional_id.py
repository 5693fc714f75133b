"""Transactional ids: limits, lanes, the ids that Kafka sees, round trips."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualwrite.errors import ConfigurationError, InvalidTransactionalIdError
from dualwrite.transactional_id import (
    MAX_TRANSACTIONAL_ID_LENGTH,
    TransactionalId,
    lanes_of,
    name_of,
    validate_transactional_id,
)
from fixtures.tables import table

logical_ids = st.text(st.characters(exclude_characters="#~", exclude_categories=["C", "Z"]), min_size=1, max_size=20)


@table("good", ["a", "x" * MAX_TRANSACTIONAL_ID_LENGTH, "orders-1", "größe", "a b", "a/b:c.d"])
def test_a_valid_transactional_id_is_returned(good: str) -> None:
    assert validate_transactional_id(good) == good


@table("bad", ["", "x" * (MAX_TRANSACTIONAL_ID_LENGTH + 1), "a#1", "a~1", "#", "a\nb", "a\x00", "a\x7f", None, 5, b"a"])
def test_an_invalid_transactional_id_is_refused(bad: str) -> None:
    with pytest.raises(InvalidTransactionalIdError) as caught:
        validate_transactional_id(bad)
    assert isinstance(caught.value, ConfigurationError)


def test_the_error_for_a_long_id_does_not_repeat_all_of_it() -> None:
    with pytest.raises(InvalidTransactionalIdError, match="300 characters; 255 is the limit") as caught:
        validate_transactional_id("y" * 300)
    assert "y" * 100 not in str(caught.value)


@table(("lanes", "limit"), [(1, 255), (2, 253), (10, 253), (11, 252), (100, 252)])
def test_an_id_leaves_room_for_the_numbers_of_its_lanes(lanes: int, limit: int) -> None:
    longest = "x" * limit
    assert validate_transactional_id(longest, lanes=lanes) == longest
    assert max(len(TransactionalId(longest, lane).row) for lane in range(lanes)) <= MAX_TRANSACTIONAL_ID_LENGTH
    with pytest.raises(InvalidTransactionalIdError, match=f"{limit} is the limit"):
        validate_transactional_id(longest + "x", lanes=lanes)


@given(st.text(st.sampled_from("ab~#01\n")))
def test_every_text_is_exactly_one_lane_of_one_id(text: str) -> None:
    assert TransactionalId.of_row(text).row == text


@table(
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
def test_ids_that_resemble_lanes_are_not_lanes(other: str) -> None:
    assert TransactionalId.of_row(other).logical != "orders-0"
    assert lanes_of([other, "orders-0~1"], "orders-0") == ["orders-0~1"]


def test_lanes_of_an_id_are_found_and_sorted_by_number() -> None:
    listed = ["orders-0~10", "orders-0", "orders-0~2", "orders-00", "orders-0-x", "orders-0~1", "orders-0~9"]
    assert lanes_of(listed, "orders-0") == ["orders-0", "orders-0~1", "orders-0~2", "orders-0~9", "orders-0~10"]
    assert lanes_of(listed, "orders") == []
    assert lanes_of(listed, "orders-0~1") == []


def test_an_id_names_row_store_and_generation() -> None:
    assert [str(TransactionalId("orders-0", lane)) for lane in range(2)] == ["orders-0", "orders-0~1"]
    named = TransactionalId("orders", 2, 12, "0123456789ab")
    assert str(named) == "orders~2#0123456789ab.12"
    assert named.row == "orders~2"
    assert TransactionalId.of_kafka(str(named)) == named
    for other in ("orders", "orders~2", "orders#probe", "orders#12", "orders#0123456789ab.0"):
        assert TransactionalId.of_kafka(other) is None


stores = st.sampled_from(["0123456789ab", "1", "12"])


@given(logical_ids, st.integers(0, 200), st.integers(1, 99), stores)
def test_an_id_is_read_back(logical: str, lane: int, generation: int, store_id: str) -> None:
    named = TransactionalId(logical, lane, generation, store_id)
    assert TransactionalId.of_kafka(str(named)) == named
    assert TransactionalId.of_row(named.row) == TransactionalId(logical, lane)


short_ids = st.text(st.sampled_from("a1-"), min_size=1, max_size=2)
places = st.tuples(short_ids, st.integers(0, 11), st.integers(1, 11), stores)


@given(places, places)
def test_different_lanes_generations_and_stores_never_share_a_kafka_id(
    one: tuple[str, int, int, str], other: tuple[str, int, int, str]
) -> None:
    first, second = (str(TransactionalId(name, lane, number, store)) for name, lane, number, store in (one, other))
    assert (first == second) == (one == other)


@table(
    ("row_id", "name"),
    [
        *((each, "shop") for each in ("shop", "shop~2", "shop.1", "shop.12~2", "shop.journal", "shop.journal.3", "shop.4.0")),
        ("shop-1", "shop-1"),
        ("shop.x.1", "shop.x"),
        ("shop.1x", "shop.1x"),
        ("shop1.1", "shop1"),
        ("relay.outbox.2", "relay.outbox"),
        (".1", ".1"),
        ("1.1", "1"),
        ("a\n.1", "a\n"),
    ],
)
def test_ids_of_a_prefix_differ_in_numbers_only(row_id: str, name: str) -> None:
    assert name_of(row_id) == name
