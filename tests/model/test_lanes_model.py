"""Of several writers with lanes on one id only one can continue, and each rule of their opening is needed for that."""

from __future__ import annotations

import pytest

from model.lanes_model import NEEDS, RULES, SCENES, search, without


@pytest.mark.slow
@pytest.mark.parametrize("name", SCENES)
def test_no_interleaving_leaves_two_writers_with_a_lane(name: str) -> None:
    found = search(SCENES[name])
    assert not found.violation, "\n".join((found.violation, *found.trace))
    assert found.is_complete


@pytest.mark.parametrize("rule", RULES)
def test_without_a_rule_of_opening_there_are_two(rule: str) -> None:
    assert without(rule).violation == NEEDS[rule][1]
