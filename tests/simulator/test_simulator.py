"""The simulator: thousands of seeds keep the promise, a seed repeats, and rules that are taken out are missed."""

from __future__ import annotations

import re
from typing import Any

import pytest
import simulate
from protocol import PROTOCOL

from dualwrite.errors import ClusterMismatchError
from dualwrite.state import ProducerKind
from dualwrite.stores.base import Claim
from simulator.choices import Choices, shrunk
from simulator.databases import Database, MemoryStore
from simulator.rules import UNSEEN
from simulator.run import run
from simulator.world import Faults, World


def test_seeds_keep_the_promise() -> None:
    assert simulate.Part.of(range(1000)).failed is None


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_many_seeds_keep_the_promise() -> None:
    assert simulate.search(range(2_000_000, 2_200_000), processes=2) == 0


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
    assert len(re.findall(r"^\| [^|]*\| [\d,]+ \| transaction", capsys.readouterr().out, re.MULTILINE)) == 2


def test_a_claim_does_not_go_on_if_the_row_has_got_another_cluster_since_it_was_looked_at() -> None:
    """Rule CL on a store that can't look at a row and claim it at once."""
    world, database = World(Choices(0), Faults()), Database("first", "a" * 12)

    class LateStore(MemoryStore):
        def claim(self, transactional_id: str, owner: str, **details: Any) -> Claim:
            claim = super().claim(transactional_id, "another process", timeout=1)
            super().acquire_generation(claim, ProducerKind.NATIVE, cluster_id="kafka")
            return super().claim(transactional_id, owner, **details)

    store = LateStore(world, database, locks=False, begins_late=False)
    with pytest.raises(ClusterMismatchError):
        store.claim_lanes(["shop"], "late", timeout=1, cluster_id="another")


def test_what_is_not_seen_is_a_rule() -> None:
    assert {*UNSEEN} <= {each.rule for each in PROTOCOL}


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_each_rule_that_the_simulator_sees_is_missed() -> None:
    assert simulate.without([], range(100_000), processes=2) == 0
