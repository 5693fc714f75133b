"""Each anomaly, put into a history that has none, is found by its name; a history without one is never accused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import check_history
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from history.correct_histories import INPUT, PARTITIONS, TOPIC, Simulation, Unit

EXAMPLES = 20
"""Histories for each test."""


@contextmanager
def folder() -> Iterator[Path]:
    with TemporaryDirectory() as made:
        yield Path(made)


def names(simulation: Simulation) -> set[str]:
    """The anomalies of a simulated history."""
    with folder() as at:
        found = check_history.check(simulation.write(at))["anomalies"]
    return {name for name, anomaly in found.items() if anomaly["count"]}


# --- one way to break a simulated history for each name ---------------------------------------------------------------


def some(simulation: Simulation, of: Callable[[Unit], object]) -> Unit:
    """A unit with some property; the example is not one if there is none."""
    units = [unit for unit in simulation.units if of(unit)]
    assume(units)
    return simulation.chance.choice(units)


def take_out(simulation: Simulation, value: str) -> None:
    """Remove a message from the topic, and from what consumers got."""
    log, index = simulation.place_of(value)
    _, key, _ = log.pop(index)
    for line in simulation.lines:
        if line[0] == "c":
            flat = line[4]
            parts = [flat[at : at + 3] for at in range(0, len(flat), 3)]
            line[4] = [part for message in parts if message[1:] != [key, value] for part in message]


def put_in(simulation: Simulation, key: str, value: str) -> None:
    log = simulation.logs[TOPIC, simulation.chance.randrange(PARTITIONS)]
    log.append((simulation.end_of(log), key, value))


def lose(simulation: Simulation) -> None:
    unit = some(simulation, lambda unit: unit.outcome == "o" and unit.messages)
    take_out(simulation, simulation.chance.choice(unit.messages)[1])


def lose_a_row(simulation: Simulation) -> None:
    unit = some(simulation, lambda unit: unit.outcome == "o" and not unit.messages)
    simulation.rows.remove(simulation.chance.choice(unit.rows))


def invent(simulation: Simulation) -> None:
    if simulation.chance.random() < 0.5:
        simulation.rows.append(-1)
    else:
        put_in(simulation, "0", "never sent")


def double(simulation: Simulation) -> None:
    unit = some(simulation, lambda unit: unit.is_committed and unit.messages)
    put_in(simulation, *simulation.chance.choice(unit.messages))


def double_a_row(simulation: Simulation) -> None:
    simulation.rows.append(some(simulation, lambda unit: unit.is_committed and unit.rows).rows[0])


def process_twice(simulation: Simulation) -> None:
    unit = some(simulation, lambda unit: unit.is_committed and unit.move)
    number = len(simulation.units) + 1
    simulation.lines += [["i", number, 98, simulation.now, [], {}, [unit.move]], ["o", number, simulation.now]]


def tear(simulation: Simulation) -> None:
    read = {row for line in simulation.lines if line[0] == "r" for row in line[4]}
    unit = some(
        simulation, lambda u: u.outcome in {"u", ""} and u.is_committed and u.messages and not read.intersection(u.rows)
    )
    take_out(simulation, simulation.chance.choice(unit.messages)[1])


def read_half(simulation: Simulation) -> None:
    unit = some(simulation, lambda unit: unit.is_committed and len(unit.rows) == 2)
    simulation.lines.append(["r", simulation.now, simulation.now, unit.rows, unit.rows[:1]])


def show_aborted(simulation: Simulation) -> None:
    unit = some(simulation, lambda unit: unit.outcome == "f")
    if unit.messages:
        put_in(simulation, *unit.messages[0])
    else:
        simulation.rows.append(unit.rows[0])


def show_replaced(simulation: Simulation) -> None:
    assume(simulation.replaced)
    value, _ = simulation.chance.choice(sorted(simulation.replaced.items()))
    key = next(
        flat[flat.index(value) - 1]
        for line in simulation.lines
        if line[0] == "i" and line[5]
        for flat in line[5].values()
        if value in flat
    )
    put_in(simulation, key, value)


def see_aborted(simulation: Simulation) -> None:
    unit = some(simulation, lambda unit: unit.outcome == "f")
    number = len(simulation.units) + 1
    simulation.lines += [["i", number, 98, simulation.now, [], {}, [], [unit.rows[0]]], ["f", number, simulation.now, "Error"]]


def reorder(simulation: Simulation) -> None:
    """Exchange two messages of a key whose operations did not overlap."""
    of_unit = {value: unit for unit in simulation.units if unit.is_committed for _, value in unit.messages}
    pairs = [
        (log, first, second)
        for log in simulation.logs.values()
        for first, (_, key, value) in enumerate(log)
        for second in range(first + 1, len(log))
        if key == log[second][1] and value in of_unit and log[second][2] in of_unit
        if of_unit[value] is of_unit[log[second][2]]
        or (of_unit[value].outcome == "o" and (of_unit[value].ended or 0) < of_unit[log[second][2]].began)
    ]
    assume(pairs)
    log, first, second = simulation.chance.choice(pairs)
    (a, key, value), (b, _, later) = log[first], log[second]
    log[first], log[second] = (a, key, later), (b, key, value)
    simulation.lines = [line for line in simulation.lines if line[0] not in "cr"]


def put_effect_before_cause(simulation: Simulation) -> None:
    """A unit that ran beside another one has seen its row, and has its message before it."""
    log = simulation.logs[TOPIC, 0]
    offset, now, number = simulation.end_of(log), simulation.now, len(simulation.units) + 1
    for unit, row, value, seen in ((number, -1, "cause", []), (number + 1, -2, "effect", [-1])):
        simulation.lines.append(["i", unit, unit, now, [row], {TOPIC: [value, value]}, [], seen])
        simulation.rows.append(row)
    log += [(offset, "effect", "effect"), (offset + 1, "cause", "cause")]


def move_back(simulation: Simulation) -> None:
    assume(simulation.position)
    simulation.position -= 1


def pass_over(simulation: Simulation) -> None:
    waiting = [offset for offset, *_ in simulation.logs[INPUT, 0] if offset >= simulation.position]
    assume(waiting)
    simulation.position = waiting[-1] + 1


def lose_rows_of_messages(simulation: Simulation) -> None:
    unit = some(simulation, lambda unit: unit.is_committed and unit.messages and unit.rows)
    simulation.rows = [row for row in simulation.rows if row not in unit.rows]


def show_message_first(simulation: Simulation) -> None:
    """A read that begins after a consumer has got a message does not have its row."""
    unit = some(simulation, lambda unit: unit.is_committed and unit.messages)
    log, index = simulation.place_of(unit.messages[0][1])
    (place,) = (place for place, each in simulation.logs.items() if each is log)
    simulation.lines += [
        ["c", simulation.now - 2, *place, [*log[index]]],
        ["r", simulation.now - 1, simulation.now, unit.rows, []],
    ]


INJECTIONS: dict[Callable[[Simulation], None], str] = {
    lose: "lost",
    lose_a_row: "lost",
    invent: "phantom",
    double: "duplicate",
    double_a_row: "duplicate",
    process_twice: "duplicate",
    tear: "torn",
    read_half: "torn",
    show_aborted: "aborted read",
    show_replaced: "aborted read",
    see_aborted: "aborted read",
    reorder: "reordered",
    put_effect_before_cause: "reordered",
    move_back: "effect without position",
    pass_over: "position without effect",
    lose_rows_of_messages: "time travel",
    show_message_first: "time travel",
}


def test_each_anomaly_is_injected() -> None:
    assert set(INJECTIONS.values()) == set(check_history.ANOMALIES)


@settings(max_examples=EXAMPLES)
@given(st.integers(0, 2**32))
def test_a_correct_history_has_no_anomaly(seed: int) -> None:
    assert names(Simulation(Random(seed))) == set()


@pytest.mark.parametrize("inject", INJECTIONS, ids=lambda inject: inject.__name__)
def test_one_change_is_found_by_its_name(inject: Callable[[Simulation], None]) -> None:
    @settings(max_examples=EXAMPLES)
    @given(st.integers(0, 2**32))
    def any_history(seed: int) -> None:
        simulation = Simulation(Random(seed))
        inject(simulation)
        assert names(simulation) == {INJECTIONS[inject]}

    any_history()
