"""Thinning a product of cases: each case is in one tier, and only existing cases can be named."""

from __future__ import annotations

from typing import Any

import pytest

from fixtures.tables import table
from fixtures.tiers import is_main, thinned

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


@table(
    "parameters, expected",
    [
        ({}, True),
        ({"database": "postgresql", "producer": "native", "point": "after_begin"}, True),
        ({"database": "mariadb"}, False),
        ({"database_url": "sqlite"}, False),
        ({"producer": "librdkafka"}, False),
        ({"database": "mariadb", "driver": "asyncmy"}, True),
    ],
)
def test_a_case_on_another_database_is_a_repetition(parameters: dict[str, str], *, expected: bool) -> None:
    assert is_main(parameters) is expected


TESTS = """
import pytest

@pytest.mark.parametrize("database", ["postgresql", "mariadb", "sqlite", "rocksdb", "zookeeper", "six", "seven", "eight"])
def test_on_each(database):
    pass

@pytest.mark.every_variant
@pytest.mark.parametrize("producer", ["native", "librdkafka"])
def test_with_both(producer):
    pass

@pytest.mark.parametrize("database", ["mariadb", "sqlite"])
def test_without_the_main_one(database):
    pass
"""


def test_some_repetitions_run_in_ci(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(TESTS)
    pytester.makeini("[pytest]\nmarkers =\n soak: a\n slow: b\n every_variant: c")
    shown = [pytester.runpytest("-p", "fixtures.tiers", "--collect-only", "-q", "-m", tier) for tier in ("not soak", "soak")]
    in_ci, in_soak = ([line.partition("::")[2] for line in each.outlines if "::" in line] for each in shown)
    assert "test_on_each[postgresql]" in in_ci
    assert set(in_ci) >= {f"test_with_both[{producer}]" for producer in ("native", "librdkafka")}
    assert set(in_ci) >= {f"test_without_the_main_one[{database}]" for database in ("mariadb", "sqlite")}
    assert 0 < len(in_soak) < 8
    assert len([*in_ci, *in_soak]) == 12
