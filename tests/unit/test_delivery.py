"""The stored form of a transaction's messages: round trips, bounded size, always with a place that proves the outcome."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dualwrite.errors import StoredStateError
from dualwrite.state import MAX_PLACES, Delivery, Place, delivery_text
from fixtures.tables import table

NOON = datetime(2026, 11, 23, 12, 0, 0, 5000, tzinfo=UTC)

places = st.builds(
    Place,
    topic=st.text(min_size=1, max_size=249),
    partition=st.integers(0, 2**31 - 1),
    first_offset=st.none() | st.integers(0, 2**63 - 1),
    messages=st.integers(1, 2**31),
    in_topic=st.booleans(),
)
moments = st.datetimes(timezones=st.just(UTC)).map(lambda moment: moment.replace(microsecond=moment.microsecond // 1000 * 1000))


@settings(max_examples=30)
@given(st.lists(places, min_size=1, max_size=MAX_PLACES), moments)
def test_a_stored_delivery_is_read_back(listed: list[Place], moment: datetime) -> None:
    delivery = Delivery(sum(p.messages for p in listed), tuple(listed), moment)
    assert Delivery.parse(delivery.text()) == delivery


def test_no_messages_give_no_delivery() -> None:
    assert Delivery.of([]) is None
    assert delivery_text(None) == ""
    assert Delivery.parse("") is None


@settings(max_examples=30)
@given(st.lists(places, min_size=MAX_PLACES + 1, max_size=3 * MAX_PLACES))
def test_long_lists_of_places_are_shortened_but_keep_the_count_and_a_proof(listed: list[Place]) -> None:
    made = Delivery.of(listed)
    assert made is not None
    stored = Delivery.parse(made.text())
    assert stored is not None
    assert len(stored.places) == MAX_PLACES
    assert stored.messages == sum(p.messages for p in listed)
    assert (not stored.proofs) == all(p.first_offset is None for p in listed)
    assert set(stored.places) <= set(listed)


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
        '{"messages":1,"places":[],"prepared_at":"x"}',
    ],
)
def test_an_invalid_delivery_is_an_error_with_the_text(text: str) -> None:
    with pytest.raises(StoredStateError) as refused:
        Delivery.parse(text)
    assert refused.value.facts["text"] == text
