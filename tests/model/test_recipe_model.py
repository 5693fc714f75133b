"""The recipe keeps its promise in every interleaving of small scenes, and each of its rules is needed for that."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest

from fixtures.tiers import thinned
from model.check_recipe import as_text
from model.recipe_model import successors
from model.recipe_scenes import INSTEAD, LARGE, NEEDS, SMALL, search
from model.recipe_state import COPY, RULES, TRIED, Scene, State, first_state
from model.search import explore

TRACES: Final = Path(__file__).parents[2] / "docs" / "how-it-works" / "traces"


LONG: Final = (
    "published again by two recoverers",
    "acknowledged while it is published again",
    "published again, record with COMMIT",
    "published again by a recoverer",
    "librdkafka, an idle writer",
    "slow markers",
    "librdkafka, two published again",
    "an old broker, two recoverers",
    "no create-only request, an unknown COMMIT",
    "no create-only request, a recoverer",
)
"""Several seconds each; what they explore changes only with the model."""


@pytest.mark.slow
@pytest.mark.parametrize("name", thinned(SMALL, kept=[name for name in SMALL if name not in LONG]))
def test_no_interleaving_breaks_the_promise(name: str) -> None:
    found = search(SMALL[name])
    assert not found.violation, "\n".join((found.violation, *found.trace))
    assert found.is_complete


def test_every_rule_has_a_scene_that_shows_it() -> None:
    assert set(NEEDS) == set(RULES)


@pytest.mark.parametrize("rule", RULES)
def test_without_a_rule_the_promise_is_broken(rule: str) -> None:
    need = NEEDS[rule]
    found = search(need.without(rule), wanted=need.violation)
    assert found.violation == need.violation
    shown = (TRACES / f"{rule}.txt").read_text(encoding="utf-8")
    assert as_text(found) == shown, "python tests/model/check_recipe.py --traces docs/how-it-works/traces writes them anew"


@pytest.mark.parametrize("change", TRIED)
def test_a_change_that_was_tried_breaks_the_promise(change: str) -> None:
    rule, need = INSTEAD[change]
    assert search(need.without(rule), wanted=need.violation).violation == need.violation


def test_what_no_timeout_has_aborted_is_not_reported_as_lost() -> None:
    """No scene above breaks this part of the promise; without rule UG it breaks."""
    reported = "a transaction is reported as lost, and no timeout has aborted it"
    assert search(NEEDS["UG"].without("UG"), wanted=reported).violation == reported


def _reached(scene: Scene, wanted: Callable[[State], bool]) -> bool:
    """Whether the scene has such a state."""
    return explore(first_state(scene), lambda s: successors(scene, s), lambda s: "reached" if wanted(s) else "").violation != ""


@pytest.mark.parametrize(
    "name", ["published again by a recoverer", "librdkafka, published again", "an old broker, published again"]
)
def test_what_is_lost_twice_is_published_again(name: str) -> None:
    assert _reached(SMALL[name], lambda s: len(s.timed_out) == 2 and any(txn >= COPY for txn in s.visible))


def test_a_writer_whose_commit_came_too_late_says_that_it_is_committed() -> None:
    assert _reached(SMALL["published again by its writer"], lambda s: 0 in s.timed_out and 0 in s.confirmed)


def test_an_acknowledged_transaction_is_not_published_although_its_copy_was_prepared() -> None:
    acknowledged = "may not record: transaction 0 is not in the row any more"
    scene = SMALL["acknowledged while it is published again"]
    found = explore(
        first_state(scene), lambda s: successors(scene, s), lambda s: "a copy is aborted" if _copy_aborted(s) else ""
    )
    assert any(acknowledged in step for step in found.trace)


def test_after_a_repeated_commit_of_a_copy_the_next_copy_needs_a_new_session_too() -> None:
    scene = replace(SMALL["librdkafka, two published again"], without=frozenset({"F9"}))
    assert _reached(scene, lambda s: any(txn >= COPY for txn in s.visible - s.committed))


def test_a_copy_whose_commit_is_refused_has_an_unknown_outcome_too() -> None:
    scene = replace(LARGE["published again: two writers and a recoverer"], without=frozenset({"KU"}))
    assert _reached(scene, lambda s: any(txn >= COPY for txn in s.visible & s.reported))


def _copy_aborted(s: State) -> bool:
    return any(txn >= COPY and txn not in s.timed_out | s.committed for txn in s.aborted) and bool(s.acknowledged)


def test_a_joined_transaction_checks_its_fencing_token_before_its_first_message() -> None:
    """What a user's transaction has read may be older than a successor's claim: only the record's UPDATE is a check."""
    without = replace(SMALL["a joined transaction"], without=frozenset({"F2"}))
    assert search(without, wanted="after recovery a transaction is open").violation


def test_recovery_on_another_cluster_loses_what_was_committed() -> None:
    scene = replace(SMALL["recovery on another cluster"], without=frozenset({"CL", "UC"}))
    loss = "after recovery a committed transaction is aborted without a timeout"
    assert search(scene, wanted=loss).violation == loss
