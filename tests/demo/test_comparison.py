"""Made-up evidence with one disagreement at a time: exactly that one must be found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualwrite.demo.flights import Flight, share_of
from dualwrite.demo.verdict import Evidence, Findings, Message, compare

AIRCRAFT = ("N1", "N2", "N3")


def evidence(departed: list[bool], aircraft: list[str]) -> Evidence:
    """The state after a perfect run, with a partition for each aircraft."""
    flights = [
        Flight(number, f"UA{number}", plane, "EWR", "IAH", "2013-01-01 05:15", "05:17" if flies else None, 3 if flies else None)
        for number, (flies, plane) in enumerate(zip(departed, aircraft, strict=True), start=1)
    ]
    planes: dict[str, dict[str, int]] = {}
    rows: list[dict[str, Any]] = []
    for flight in flights:
        plane = planes.setdefault(flight.aircraft, {"departures": 0, "cancelled": 0, "delay": 0, "last_flight": 0})
        plane["departures"] += not flight.cancelled
        plane["cancelled"] += flight.cancelled
        plane["delay"] += flight.delay or 0
        plane["last_flight"] = flight.number
        if not flight.cancelled:
            rows.append({**asdict(flight), "count": plane["departures"]})
    messages = [Message(share_of(row["aircraft"], 3), row["aircraft"], dict(row)) for row in rows]
    messages.sort(key=lambda message: message.partition)
    return Evidence(flights, rows, messages, planes)


@pytest.fixture
def perfect() -> Evidence:
    departed = [True, True, False, True, True, True, True, False]
    return evidence(departed, ["N1", "N2", "N1", "N1", "N1", "N2", "N1", "N3"])


def messages_of(found: Evidence, aircraft: str) -> list[int]:
    return [place for place, message in enumerate(found.messages) if message.key == aircraft]


def numbered(found: Evidence, number: int) -> int:
    return next(p for p, m in enumerate(found.messages) if m.content is not None and m.content["number"] == number)


def only(**expected: list[Any]) -> Findings:
    return Findings(**expected)


flights = st.lists(st.tuples(st.booleans(), st.sampled_from(AIRCRAFT)), max_size=40)


@given(flights)
def test_a_perfect_run_agrees(made: list[tuple[bool, str]]) -> None:
    found = compare(evidence([flies for flies, _ in made], [plane for _, plane in made]))
    assert found == Findings()
    assert found.agree


@pytest.mark.slow
@given(flights.filter(lambda made: any(flies for flies, _ in made)), st.data())
def test_each_lost_and_duplicated_message_and_each_phantom_is_counted(
    made: list[tuple[bool, str]], data: st.DataObject
) -> None:
    whole = evidence([flies for flies, _ in made], [plane for _, plane in made])
    copies = data.draw(st.lists(st.integers(0, 3), min_size=len(whole.messages), max_size=len(whole.messages)))
    messages = [message for message, times in zip(whole.messages, copies, strict=True) for _ in range(times)]
    found = compare(replace(whole, messages=messages))
    numbers = [message.content["number"] for message in whole.messages if message.content]
    assert sorted(found.lost) == sorted(n for n, times in zip(numbers, copies, strict=True) if times == 0)
    assert sorted(found.duplicated) == sorted(n for n, times in zip(numbers, copies, strict=True) for _ in range(times - 1))
    assert replace(found, lost=[], duplicated=[]) == Findings()
    assert found.agree == (set(copies) == {1})


@given(flights.filter(lambda made: any(flies for flies, _ in made)), st.data())
def test_every_change_of_the_order_of_an_aircraft_is_found(made: list[tuple[bool, str]], data: st.DataObject) -> None:
    whole = evidence([flies for flies, _ in made], ["N1" for _ in made])
    shuffled = data.draw(st.permutations(whole.messages))
    found = compare(replace(whole, messages=shuffled))
    assert bool(found.out_of_order) == (shuffled != whole.messages)
    assert found == only(out_of_order=found.out_of_order)


def test_lost(perfect: Evidence) -> None:
    del perfect.messages[numbered(perfect, 4)]  # type: ignore[attr-defined]
    assert compare(perfect) == only(lost=[4])


def test_row_missing_is_a_phantom_and_not_done(perfect: Evidence) -> None:
    rows = [row for row in perfect.rows if row["number"] != 2]
    assert compare(replace(perfect, rows=rows)) == only(phantom=[2], not_done=[2], wrong_aircraft=["N2"])


def test_message_of_a_flight_that_never_departed_is_a_phantom(perfect: Evidence) -> None:
    phantom = Message(0, "N1", {**perfect.rows[0], "number": 3})
    assert compare(replace(perfect, messages=[*perfect.messages, phantom])) == only(phantom=[3])


def test_message_that_is_not_a_departure_is_a_phantom(perfect: Evidence) -> None:
    messages = [*perfect.messages, Message(0, "N1", None), Message(0, "N1", {"number": "1"})]
    assert compare(replace(perfect, messages=messages)) == only(phantom=[0, 0])


def test_flight_written_twice_on_both_sides_is_found(perfect: Evidence) -> None:
    rows = [*perfect.rows, perfect.rows[0]]
    messages = [*perfect.messages, perfect.messages[0]]
    twice = compare(replace(perfect, rows=rows, messages=messages))
    assert twice == only(repeated=[1], wrong_aircraft=["N1"])


def test_flight_twice_in_the_database_with_one_message_lost_one(perfect: Evidence) -> None:
    found = compare(replace(perfect, rows=[*perfect.rows, perfect.rows[0]]))
    assert found == only(lost=[1], repeated=[1], wrong_aircraft=["N1"])


@pytest.mark.parametrize(
    "change",
    [
        lambda message: replace(message, key="N2"),
        lambda message: replace(message, content={**message.content, "delay": 4}),
        lambda message: replace(message, content={**message.content, "more": 1}),
        lambda message: replace(message, content={k: v for k, v in message.content.items() if k != "delay"}),
    ],
    ids=["key", "value", "more", "less"],
)
def test_unequal_content(perfect: Evidence, change: Callable[[Message], Message]) -> None:
    place = numbered(perfect, 5)
    messages = [change(each) if p == place else each for p, each in enumerate(perfect.messages)]
    assert compare(replace(perfect, messages=messages)) == only(unequal=[5])


def test_out_of_order(perfect: Evidence) -> None:
    messages = list(perfect.messages)
    first, second = messages_of(perfect, "N1")[:2]
    messages[first], messages[second] = messages[second], messages[first]
    assert compare(replace(perfect, messages=messages)) == only(out_of_order=[1])


def test_a_message_in_another_partition_is_out_of_order(perfect: Evidence) -> None:
    place = numbered(perfect, 7)
    messages = [replace(each, partition=99) if p == place else each for p, each in enumerate(perfect.messages)]
    assert compare(replace(perfect, messages=messages)) == only(out_of_order=[7])


@pytest.mark.parametrize("column", ["departures", "cancelled", "delay", "last_flight"])
def test_wrong_aircraft(perfect: Evidence, column: str) -> None:
    aircraft = {**perfect.aircraft, "N1": {**perfect.aircraft["N1"], column: 99}}
    assert compare(replace(perfect, aircraft=aircraft)) == only(wrong_aircraft=["N1"])


def test_missing_and_unknown_aircraft(perfect: Evidence) -> None:
    aircraft = {name: row for name, row in perfect.aircraft.items() if name != "N3"}
    assert compare(replace(perfect, aircraft=aircraft)) == only(wrong_aircraft=["N3"])
    aircraft = {**perfect.aircraft, "N9": perfect.aircraft["N1"]}
    assert compare(replace(perfect, aircraft=aircraft)) == only(wrong_aircraft=["N9"])
