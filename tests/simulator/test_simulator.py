"""The simulator: thousands of seeds keep the promise, a seed repeats, and rules that are taken out are missed."""

from __future__ import annotations

import re

import pytest
import simulate
from protocol import PROTOCOL

from simulator.choices import shrunk
from simulator.rules import UNSEEN
from simulator.run import run


def test_seeds_keep_the_promise() -> None:
    assert next(simulate.failing(range(1000)), None) is None


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_many_seeds_keep_the_promise() -> None:
    assert next(simulate.failing(range(2_000_000, 2_200_000)), None) is None


def test_a_seed_repeats_step_by_step() -> None:
    for seed in range(20):
        _, first = run(seed, trace=True)
        _, second = run(seed, trace=True)
        _, played = run(seed, first.choices.made, trace=True)
        assert first.world.trace == second.world.trace == played.world.trace, seed


def test_a_failing_run_is_shrunk() -> None:
    def fails(choices: list[int]) -> bool:
        return sum(choices) >= 3

    assert sum(shrunk([0, 1, 0, 1, 1, 0, 1, 1, 0], fails)) == 3


def test_rules_that_are_removed_are_missed(capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate.without(["KU", "F7"], range(500), processes=1) == 0
    assert len(re.findall(r"^\| [^|]*\| \d+ \| transaction", capsys.readouterr().out, re.MULTILINE)) == 2


def test_what_is_not_seen_is_a_rule() -> None:
    assert set(UNSEEN) <= {each.rule for each in PROTOCOL}


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_each_rule_that_the_simulator_sees_is_missed() -> None:
    assert simulate.without([], range(100_000), processes=2) == 0
