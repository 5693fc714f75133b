"""Made-up evidence with one disagreement at a time: exactly that one must be found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualwrite.demo.flights import Flight, share_of
from dualwrite.demo.verdict import Evidence, Findings, TopicMessage, compare
from fixtures.tables import table

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
    messages = [TopicMessage(share_of(row["aircraft"], 3), row["aircraft"], dict(row)) for row in rows]
    messages.sort(key=lambda message: message.partition)
    return Evidence(flights, rows, messages, planes)


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
    assert found == Findings(out_of_order=found.out_of_order)


class Run:
    """The state after a perfect run of eight flights, to change."""

    def __init__(self) -> None:
        departed = [True, True, False, True, True, True, True, False]
        whole = evidence(departed, ["N1", "N2", "N1", "N1", "N1", "N2", "N1", "N3"])
        self.flights = whole.flights
        self.rows = list(whole.rows)
        self.messages = list(whole.messages)
        self.aircraft = {name: dict(row) for name, row in whole.aircraft.items()}

    def place(self, number: int) -> int:
        """The place of the flight's message."""
        return next(place for place, each in enumerate(self.messages) if each.content and each.content["number"] == number)

    def change(self, number: int, **changes: Any) -> None:
        """Change the flight's message."""
        self.messages[self.place(number)] = replace(self.messages[self.place(number)], **changes)

    def write_again(self, messages: int = 0) -> None:
        """Flight 1: its row, and so many messages."""
        self.rows.append(self.rows[0])
        self.messages += [self.messages[self.place(1)]] * messages

    def swap(self, first: int, second: int) -> None:
        one, other = self.place(first), self.place(second)
        self.messages[one], self.messages[other] = self.messages[other], self.messages[one]


ROW = Run().rows[3]
"""That of flight 5."""

CASES: list[tuple[str, Callable[[Run], object], Findings]] = [
    ("lost", lambda run: run.messages.pop(run.place(4)), Findings(lost=[4])),
    ("row missing", lambda run: run.rows.pop(1), Findings(phantom=[2], not_done=[2], wrong_aircraft=["N2"])),
    ("never departed", lambda run: run.messages.append(TopicMessage(0, "N1", {**ROW, "number": 3})), Findings(phantom=[3])),
    (
        "no departures",
        lambda run: run.messages.extend([TopicMessage(0, "N1", None), TopicMessage(0, "N1", {"number": "1"})]),
        Findings(phantom=[0, 0]),
    ),
    (
        "twice on both sides",
        lambda run: run.write_again(messages=1),
        Findings(repeated=[1], wrong_aircraft=["N1"]),
    ),
    ("twice, with one message", Run.write_again, Findings(lost=[1], repeated=[1], wrong_aircraft=["N1"])),
    ("another key", lambda run: run.change(5, key="N2"), Findings(unequal=[5])),
    ("another value", lambda run: run.change(5, content={**ROW, "delay": 4}), Findings(unequal=[5])),
    ("a value more", lambda run: run.change(5, content={**ROW, "more": 1}), Findings(unequal=[5])),
    ("a value less", lambda run: run.change(5, content={k: ROW[k] for k in ROW if k != "delay"}), Findings(unequal=[5])),
    ("out of order", lambda run: run.swap(1, 4), Findings(out_of_order=[1])),
    ("in another partition", lambda run: run.change(7, partition=99), Findings(out_of_order=[7])),
    ("wrong departures", lambda run: run.aircraft["N1"].update(departures=99), Findings(wrong_aircraft=["N1"])),
    ("wrong cancelled", lambda run: run.aircraft["N1"].update(cancelled=99), Findings(wrong_aircraft=["N1"])),
    ("wrong delay", lambda run: run.aircraft["N1"].update(delay=99), Findings(wrong_aircraft=["N1"])),
    ("wrong last flight", lambda run: run.aircraft["N1"].update(last_flight=99), Findings(wrong_aircraft=["N1"])),
    ("no aircraft", lambda run: run.aircraft.pop("N3"), Findings(wrong_aircraft=["N3"])),
    ("unknown aircraft", lambda run: run.aircraft.update(N9=run.aircraft["N1"]), Findings(wrong_aircraft=["N9"])),
]


@table("name, change, expected", CASES)
def test_exactly_the_disagreement_is_found(name: str, change: Callable[[Run], object], expected: Findings) -> None:
    run = Run()
    change(run)
    assert compare(Evidence(run.flights, run.rows, run.messages, run.aircraft)) == expected, name
