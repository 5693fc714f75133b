"""How many groups a pool runs side by side, on model machines."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest

from dualwrite.pool.scaling import SERIAL, Measured, Scaling

STEP = 0.6


@dataclass
class Machine:
    """A pool with callers that call again as soon as they have an answer; all times in milliseconds.

    Args:
        callers: How many there are.
        rtt: A round trip to database and Kafka.
        unit: Processor time of a unit.
        group: Processor time of a group besides its units.
        held: Time for which a unit keeps others from their work, such as a lock that all of them need.
    """

    callers: int
    rtt: float
    unit: float = 0.25
    group: float = 0.6
    held: float = 0.0
    now: float = 0.0
    seen: list[int] = field(default_factory=list)

    def look(self, groups: int) -> Measured:
        side_by_side = 1.2 if groups == SERIAL else min(groups, self.callers)
        units = max(1.0, self.callers / (2 if groups == SERIAL else side_by_side))
        waiting = (4 + units) * self.rtt
        working = units * self.unit + self.group
        seconds = max(waiting + working, side_by_side * working, side_by_side * units * self.held)
        rate = side_by_side * units / seconds
        self.now += STEP
        self.seen.append(groups)
        return Measured(self.callers, self.callers / rate / 1000, rate * (self.unit + self.group / units))

    def run(self, scaling: Scaling, steps: int = 100) -> list[int]:
        for _ in range(steps):
            scaling.decide(self.look(scaling.groups))
        return self.seen


def scaled(machine: Machine, most: int = 64) -> Scaling:
    return Scaling(most, clock=lambda: machine.now)


@pytest.mark.parametrize("callers", [8, 32, 128])
def test_a_network_away_there_are_several_within_a_few_steps(callers: int) -> None:
    machine = Machine(callers, rtt=1.0)
    scaling = scaled(machine)
    machine.run(scaling, 5)
    assert scaling.groups >= 4
    machine.run(scaling)
    best = min(range(3, 33), key=lambda groups: Machine(callers, 1.0).look(groups).seconds)
    chosen = Machine(callers, 1.0).look(scaling.groups).seconds
    assert chosen <= 1.2 * Machine(callers, 1.0).look(best).seconds


def test_next_to_the_database_one_runs_after_another() -> None:
    machine = Machine(32, rtt=0.02)
    assert set(machine.run(scaled(machine))) == {SERIAL}


def test_a_single_caller_needs_no_others() -> None:
    machine = Machine(1, rtt=1.0)
    assert set(machine.run(scaled(machine))) == {SERIAL}


def test_what_brings_nothing_is_tried_less_and_less_often() -> None:
    machine = Machine(32, rtt=1.0, held=2.0)  # the units wait for each other, however many groups there are
    seen = machine.run(scaled(machine), 400)
    tried = [place for place, groups in enumerate(seen) if groups != SERIAL]
    assert 2 <= len(tried) <= 10
    assert tried[-1] - tried[-2] > 2 * (tried[1] - tried[0])


def test_fewer_are_enough_when_the_network_becomes_faster() -> None:
    machine = Machine(32, rtt=2.0)
    scaling = scaled(machine)
    machine.run(scaling)
    before = scaling.groups
    machine.rtt = 0.02
    machine.run(scaling, 400)
    assert scaling.groups < before


def test_a_slow_beginning_is_no_reason_for_more() -> None:
    machine = Machine(8, rtt=0.02)
    scaling = scaled(machine)
    for _ in range(2):
        slow = Machine(8, rtt=0.02, unit=5.0).look(scaling.groups)
        scaling.decide(replace(slow, cpu=0.5))
    assert machine.run(scaling)[-20:] == [SERIAL] * 20


def test_many_callers_have_several_groups_though_the_processor_is_busy() -> None:
    scaling = Scaling(64)
    scaling.decide(Measured(callers=128, seconds=0.05, cpu=1.0))
    assert scaling.groups == 4


def test_calls_that_take_longer_because_there_are_more_of_them_are_no_reason_to_go_back() -> None:
    scaling = Scaling(64)
    scaling.decide(Measured(callers=8, seconds=0.02, cpu=0.2))
    assert scaling.groups == 4
    scaling.decide(Measured(callers=32, seconds=0.06, cpu=0.9))
    assert scaling.groups == 4


def test_the_limit_holds() -> None:
    machine = Machine(128, rtt=2.0)
    scaling = scaled(machine, most=5)
    assert max(machine.run(scaling)) == 5
    scaling.limit(2)
    assert scaling.groups == SERIAL


def far(now: list[float]) -> Scaling:
    scaling = Scaling(8, clock=lambda: now[0])
    machine = Machine(32, rtt=1.0)
    for _ in range(4):
        scaling.decide(machine.look(scaling.groups))
    assert scaling.groups > SERIAL
    return scaling


def after(scaling: Scaling, now: list[float], seconds: float) -> int:
    now[0] += seconds
    for _ in range(2):
        scaling.decide(Machine(32, rtt=1.0).look(scaling.groups))
    return scaling.groups


def test_after_a_conflict_groups_run_one_after_another_for_a_while() -> None:
    now = [0.0]
    scaling = far(now)
    scaling.conflicted()
    assert scaling.groups == SERIAL
    assert after(scaling, now, 0.9) == SERIAL
    assert after(scaling, now, 0.2) > SERIAL


def test_conflicts_that_come_back_make_it_longer() -> None:
    now = [0.0]
    scaling = far(now)
    pauses = []
    for _ in range(4):
        scaling.conflicted()
        began = now[0]
        while after(scaling, now, 0.5) == SERIAL:
            pass
        pauses.append(now[0] - began)
    assert pauses == sorted(set(pauses))
    now[0] += 60
    scaling.conflicted()
    assert after(scaling, now, 1.1) > SERIAL, "seldom conflicts are forgotten"


def test_after_a_rest_it_begins_with_one_after_another() -> None:
    now = [0.0]
    scaling = far(now)
    scaling.rest()
    assert scaling.groups == SERIAL
    assert after(scaling, now, 1) > SERIAL
