"""The journal keeps the order by cause and publishes each message once, and each of its rules is needed for that."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest

from model.check_recipe import JOURNAL_TRACES, as_text
from model.journal_model import LEARNED_OTHERWISE, NEEDS, OVERTAKEN, RULES, SCENES, search, without

TRACES: Final = Path(__file__).parents[2] / "docs" / "how-it-works" / "traces"


@pytest.mark.parametrize("name", SCENES)
def test_no_interleaving_overtakes_a_cause_or_loses_or_doubles_a_message(name: str) -> None:
    found = search(SCENES[name])
    assert not found.violation, "\n".join((found.violation, *found.trace))
    assert found.is_complete


@pytest.mark.parametrize("rule", RULES)
def test_without_a_rule_of_the_journal_a_promise_is_broken(rule: str) -> None:
    assert without(rule).violation == NEEDS[rule][1]


@pytest.mark.parametrize("rule", JOURNAL_TRACES)
def test_the_documentation_shows_the_traces(rule: str) -> None:
    shown = (TRACES / f"{rule}.txt").read_text(encoding="utf-8")
    assert as_text(without(rule)) == shown, (
        "python tests/model/check_recipe.py --traces docs/how-it-works/traces writes them anew"
    )


def test_what_a_snapshot_learns_by_another_way_is_a_limit_of_the_promise() -> None:
    assert search(LEARNED_OTHERWISE).violation == OVERTAKEN
