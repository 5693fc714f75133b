"""When a group does without savepoints."""

from __future__ import annotations

import random

from dualwrite.pool.group import SavepointPolicy


def groups(savepoint_policy: SavepointPolicy, *failed: bool) -> str:
    """How each group was tried: `h`opefully or `c`arefully."""
    tried = ""
    for has_failed in failed:
        tried += "h" if savepoint_policy.allow() else "c"
        savepoint_policy.note(has_failed=has_failed)
    return tried


def test_units_that_succeed_need_no_savepoints() -> None:
    assert groups(SavepointPolicy(), *[False] * 10) == "hhhhhhhhhh"


def test_after_a_failure_the_next_group_uses_savepoints() -> None:
    assert groups(SavepointPolicy(), True, False, False) == "hch"


def test_each_further_failure_adds_groups_with_savepoints() -> None:
    savepoint_policy = SavepointPolicy()
    assert groups(savepoint_policy, True, False, True, False, False, True) == "hchcch"
    assert groups(savepoint_policy, *[False] * 5) == "cccch"


def test_successes_count_too() -> None:
    savepoint_policy = SavepointPolicy()
    groups(savepoint_policy, True, False, True, False, False)
    assert groups(savepoint_policy, False, False, True, False, False) == "hhhch"


def test_units_that_always_fail_hardly_ever_share_a_savepoint() -> None:
    assert groups(SavepointPolicy(), *[True] * 1000).count("h") == 1


def test_units_that_often_fail_rarely_run_twice() -> None:
    chance, savepoint_policy = random.Random(1), SavepointPolicy()
    failed = [chance.random() < 0.5 for _ in range(2000)]
    tried = groups(savepoint_policy, *failed)
    twice = sum(1 for how, has_failed in zip(tried, failed, strict=True) if how == "h" and has_failed)
    assert twice < 200
