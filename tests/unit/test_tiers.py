"""Thinning a product of cases: each case is in one tier, and only existing cases can be named."""

from __future__ import annotations

from typing import Any

import pytest

from fixtures.tables import table
from fixtures.tiers import thinned

CASES = [("a", 1), ("a", 2), ("b", 1), ("b", 2)]


def tiers(found: list[Any]) -> list[str]:
    """The marks of each case."""
    return ["".join(mark.name for mark in case.marks) for case in found]


def test_cases_that_are_not_kept_are_soak() -> None:
    found = thinned(CASES, kept=[("a", 1), ("b", 2)])
    assert [case.values for case in found] == CASES
    assert tiers(found) == ["", "soak", "soak", ""]


def test_cases_that_are_kept_and_not_quick_are_slow() -> None:
    assert tiers(thinned(CASES, kept=CASES[:3], quick=[("a", 2)])) == ["slow", "", "slow", "soak"]
    assert tiers(thinned(CASES, kept=CASES[:1], quick=[])) == ["slow", "soak", "soak", "soak"]


def test_without_kept_nothing_is_soak() -> None:
    assert tiers(thinned(["x", "y"], quick=["y"])) == ["slow", ""]


@table("named", [{"kept": [("c", 1)]}, {"quick": [("c", 1)]}])
def test_an_unknown_case_is_refused(named: dict[str, Any]) -> None:
    with pytest.raises(AssertionError, match=r"not among the cases: \[\('c', 1\)\]"):
        thinned(CASES, **named)
