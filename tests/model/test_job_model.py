"""The job protocol keeps its promise in every interleaving of small scenes, and each of its rules is needed for that."""

from __future__ import annotations

import pytest

from model.job_search import search
from model.job_state import RULES
from model.scenes import NEEDS, SMALL


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
    assert search(need.without(rule, need.spare), wanted=need.violation).violation == need.violation


@pytest.mark.slow
@pytest.mark.parametrize("rule", [rule for rule in RULES if NEEDS[rule].spare])
def test_of_two_rules_that_guard_the_same_each_is_enough(rule: str) -> None:
    need = NEEDS[rule]
    for alone in (rule, need.spare):
        found = search(need.without(alone), wanted=need.violation)
        assert not found.violation
        assert found.is_complete
