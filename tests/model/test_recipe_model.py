"""The recipe keeps its promise in every interleaving of small scenes, on wrong clusters and with shared ids as well."""

from __future__ import annotations

from dataclasses import replace

import pytest

from model.recipe_scenes import NEEDS, SMALL, search
from model.recipe_state import RULES


@pytest.mark.parametrize("name", SMALL)
def test_no_interleaving_breaks_the_promise(name: str) -> None:
    found = search(SMALL[name])
    assert not found.violation, "\n".join((found.violation, *found.trace))
    assert found.is_complete


def test_every_rule_has_a_scene_that_shows_it() -> None:
    assert set(NEEDS) == set(RULES)


@pytest.mark.parametrize("rule", RULES)
def test_without_a_rule_the_promise_is_broken(rule: str) -> None:
    need = NEEDS[rule]
    assert search(need.without(rule), wanted=need.violation).violation == need.violation


def test_recovery_on_another_cluster_loses_what_was_committed() -> None:
    scene = replace(SMALL["recovery on another cluster"], without=frozenset({"CL", "UC"}))
    loss = "after recovery a committed transaction is aborted without a timeout"
    assert search(scene, wanted=loss).violation == loss
