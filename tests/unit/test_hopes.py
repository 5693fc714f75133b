"""When a group does without savepoints."""

from __future__ import annotations

import random

from dualwrite.pool.hopes import Hopes


def groups(hopes: Hopes, *failed: bool) -> str:
    """How each group was tried: `h`opefully or `c`arefully."""
    tried = ""
    for has_failed in failed:
        tried += "h" if hopes.allow() else "c"
        hopes.note(has_failed=has_failed)
    return tried


def test_units_that_succeed_pay_for_no_savepoints() -> None:
    assert groups(Hopes(), *[False] * 10) == "hhhhhhhhhh"


def test_after_a_failure_the_next_group_is_careful() -> None:
    assert groups(Hopes(), True, False, False) == "hch"


def test_each_further_failure_makes_more_groups_careful() -> None:
    hopes = Hopes()
    assert groups(hopes, True, False, True, False, False, True) == "hchcch"
    assert groups(hopes, *[False] * 5) == "cccch"


def test_successes_are_remembered_too() -> None:
    hopes = Hopes()
    groups(hopes, True, False, True, False, False)
    assert groups(hopes, False, False, True, False, False) == "hhhch"


def test_units_that_always_fail_are_hardly_ever_tried_hopefully() -> None:
    assert groups(Hopes(), *[True] * 1000).count("h") == 1


def test_units_that_often_fail_seldom_run_twice() -> None:
    chance, hopes = random.Random(1), Hopes()
    failed = [chance.random() < 0.5 for _ in range(2000)]
    tried = groups(hopes, *failed)
    twice = sum(1 for how, has_failed in zip(tried, failed, strict=True) if how == "h" and has_failed)
    assert twice < 200
