"""The stored form of a transaction's messages: round trips, bounded size, always with a place that proves the outcome."""

from __future__ import annotations

import dataclasses
from datetime import UTC, datetime

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dualwrite.errors import StoredStateError
from dualwrite.state import MAX_DELIVERY_LENGTH, MAX_PLACES, ConsumedOffset, Delivery, GroupOffsets, Place, delivery_text
from fixtures.tables import table

NOON = datetime(2026, 11, 23, 12, 0, 0, 5000, tzinfo=UTC)

topics = st.sampled_from(["orders", "payments", 'a "b" \\ ü'])
partitions = st.integers(0, 2**31 - 1)
offsets = st.none() | st.integers(0, 2**63 - 1)
counts = st.integers(1, 2**31)
others = st.none() | st.lists(partitions, max_size=5).map(tuple)
places = st.builds(Place, topics, partitions, offsets, counts) | st.builds(
    Place, topics, partitions, offsets, counts, st.just(True), others
)
moments = st.datetimes(timezones=st.just(UTC)).map(lambda moment: moment.replace(microsecond=moment.microsecond // 1000 * 1000))

ids = st.sampled_from(["", "6f1d8f0e-8a44-4b0f-9c59-0f9f4be8d2a1"])
consumed = st.builds(ConsumedOffset, topics, partitions, st.integers(0, 2**63 - 1), st.integers(-1, 2**31 - 1), st.text(), ids)
groups = st.builds(
    GroupOffsets,
    st.text(min_size=1),
    st.lists(consumed, max_size=5).map(lambda listed: tuple(sorted(listed, key=lambda one: (one.topic, one.topic_id)))),
)


@settings(max_examples=50)
@given(st.lists(places, max_size=20), moments, st.lists(groups, max_size=3))
def test_a_stored_delivery_is_read_back(listed: list[Place], moment: datetime, offsets: list[GroupOffsets]) -> None:
    delivery = Delivery(sum(p.messages for p in listed), tuple(listed), moment, tuple(offsets))
    assert Delivery.parse(delivery.text()) == delivery


def test_offsets_alone_are_a_delivery_without_messages() -> None:
    made = Delivery.of([], [GroupOffsets("orders", (ConsumedOffset("in", 0, 17, 3, "note"), ConsumedOffset("in", 2, 5)))])
    assert made is not None
    assert made.messages == 0
    assert str(made).startswith("0 messages; offsets of group orders (2 partitions); prepared at ")
    assert '"places":[],"offsets":[["orders",["in",0,17,3,"note",2,5,-1,""]]],' in made.text()


def test_too_many_offsets_are_left_out_and_the_group_is_kept() -> None:
    wide = GroupOffsets("orders", tuple(ConsumedOffset("in", index, 10**12, 3, "note") for index in range(1000)))
    made = Delivery.of([Place("orders", 0, 17, 1)], [wide])
    assert made is not None
    stored = Delivery.parse(made.text())
    assert stored is not None
    assert stored.offsets == (GroupOffsets("orders", ()),)
    assert stored.places == made.places


def test_a_copy_keeps_the_name_of_its_original() -> None:
    copy = Delivery(1, (Place("orders", 0, 17, 1),), datetime(2026, 11, 27, tzinfo=UTC), copy_of="2 7:5")
    assert Delivery.parse(copy.text()) == copy


def test_no_messages_give_no_delivery() -> None:
    assert Delivery.of([]) is None
    assert delivery_text(None) == ""
    assert Delivery.parse("") is None


def test_every_place_of_a_wide_transaction_is_stored() -> None:
    wide = tuple(Place("orders", index, 10**10 + index, 1000) for index in range(MAX_PLACES))
    made = Delivery(1000 * MAX_PLACES, wide, NOON)
    assert Delivery.parse(made.text()) == made
    assert len(made.text()) < MAX_DELIVERY_LENGTH


def test_of_many_places_a_few_are_shown_and_prove_the_outcome_one_of_each_topic_first() -> None:
    listed = [Place("orders", index, 3, 1) for index in range(50)] + [Place("hidden", 0, None, 1), Place("refunds", 0, 5, 7)]
    made = Delivery(58, tuple(listed), NOON)
    assert {place.topic for place in made.proofs[:2]} == {"orders", "refunds"}
    assert len(made.proofs) == len(set(made.proofs)) == 16
    assert "orders-15 from offset 3 (1 message) and 42 elsewhere; prepared at" in str(made)
    few = Delivery(2, tuple(listed[49:]), NOON)
    assert few.proofs == (listed[49], listed[51])


WIDE = [Place("orders", index, None, 2) for index in range(MAX_PLACES)]
LONG = [Place(f"{index:x}" + "t" * 240, 0, None, 2) for index in range(200)]
TOPICS = [Place("orders", 0, None, 2, in_topic=True, others=tuple(range(10**9, 10**9 + 5000)))]


@table("listed", [WIDE, LONG, TOPICS, [*LONG, *TOPICS, *WIDE]])
def test_long_lists_of_places_are_shortened_but_keep_the_count_and_a_proof(listed: list[Place]) -> None:
    proof = Place("proof", 7, 17, 1)
    made = Delivery.of([*listed, proof])
    assert made is not None
    stored = Delivery.parse(made.text())
    assert stored is not None
    assert len(stored.places) <= MAX_PLACES
    assert len(made.text()) <= MAX_DELIVERY_LENGTH
    assert stored.messages == sum(p.messages for p in listed) + 1
    assert stored.proofs == (proof,)
    assert {dataclasses.replace(place, others=()) for place in stored.places} <= {
        dataclasses.replace(place, others=()) for place in (*listed, proof)
    }
    assert all(place.others is None for place in stored.places if place.in_topic)


def test_the_text_shows_messages_places_and_time() -> None:
    delivery = Delivery(6, (Place("orders", 0, 17, 1), Place("payments", 2, None, 3)), NOON)
    assert str(delivery) == (
        "6 messages: orders-0 from offset 17 (1 message), payments-2 (3 messages) and 2 elsewhere; "
        "prepared at 2026-11-23 12:00:00 UTC"
    )


def test_counts_known_by_topic_are_shown_by_topic() -> None:
    listed = (Place("orders", 3, 17, 5, in_topic=True), Place("refunds", 0, None, 2, in_topic=True))
    shown = str(Delivery(8, (*listed, Place("payments", 2, 9, 1, in_topic=True)), NOON))
    assert "orders (5 messages, the first in orders-3 at offset 17), refunds (2 messages, the first in refunds-0)" in shown
    assert "payments-2 from offset 9 (1 message)" in shown


@table(
    "text",
    [
        "{",
        "[]",
        "{}",
        '{"messages":1,"places":[["t",0]],"prepared_at":"2026-11-23"}',
        '{"messages":1,"places":[["t",0,1,2,3]],"prepared_at":"2026-11-23"}',
        '{"messages":1,"places":[["t",0,1,2,3,4]],"prepared_at":"2026-11-23"}',
        '{"messages":1,"places":[["t"]],"prepared_at":"2026-11-23"}',
        '{"messages":1,"places":[[3,0,1,2]],"prepared_at":"2026-11-23"}',
        '{"messages":1,"places":[],"prepared_at":"x"}',
        '{"messages":0,"places":[],"offsets":[["g",["t",0,1,2]]],"prepared_at":"2026-11-23"}',
        '{"messages":0,"places":[],"offsets":[7],"prepared_at":"2026-11-23"}',
    ],
)
def test_an_invalid_delivery_is_an_error_with_the_text(text: str) -> None:
    with pytest.raises(StoredStateError) as refused:
        Delivery.parse(text)
    assert refused.value.facts["text"] == text
