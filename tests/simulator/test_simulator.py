"""The simulator: thousands of seeds keep the promise, a seed repeats, and rules that are taken out are missed."""

from __future__ import annotations

import re

import pytest
import simulate

from simulator.choices import shrunk
from simulator.run import run


def test_seeds_keep_the_promise() -> None:
    assert next(simulate.failing(range(1000)), None) is None


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_many_seeds_keep_the_promise() -> None:
    assert next(simulate.failing(range(1_000_000, 1_200_000)), None) is None


def test_a_seed_repeats_step_by_step() -> None:
    for seed in range(40):
        _, first = run(seed, trace=True)
        _, second = run(seed, trace=True)
        _, played = run(seed, first.choices.made, trace=True)
        assert first.world.trace == second.world.trace == played.world.trace, seed


def test_a_failing_run_is_shrunk() -> None:
    def fails(choices: list[int]) -> bool:
        return sum(choices) >= 3

    assert sum(shrunk([0, 1, 0, 1, 1, 0, 1, 1, 0], fails)) == 3


@pytest.mark.parametrize("rule", ["F3", "KU"])
def test_a_rule_that_is_removed_is_missed(rule: str, capsys: pytest.CaptureFixture[str]) -> None:
    simulate.without([rule], range(2000), processes=1)
    assert re.search(rf"^\| {rule} [^|]*\| \d+ \| transaction", capsys.readouterr().out, re.MULTILINE)


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_every_rule_that_the_simulator_sees_is_missed() -> None:
    assert simulate.without([], range(100_000), processes=2) == 0
