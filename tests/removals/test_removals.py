"""Each rule, removed from a copy of the source: the tests named after it fail, so they show what they say.

`pytest -m soak tests/removals`: about 20 minutes on two cores. The quick tests here keep the list up to date.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from promises import PROMISES
from protocol import PROTOCOL
from removal import PACKAGE, Removal, copy_of_the_package, failed_tests

from fixtures.pace import limit
from fixtures.rules_page import SECTIONS, functions
from fixtures.tables import table
from surroundings import SURROUNDINGS

RULES = (*PROTOCOL, *PROMISES, *SURROUNDINGS)
every_rule = table("removal", RULES, ids=lambda removal: removal.rule)
each_rule = pytest.mark.parametrize("removal", RULES, ids=lambda removal: removal.rule)
in_minutes = pytest.mark.timeout(1200)


@every_rule
def test_the_rule_is_there_once_and_can_be_removed(removal: Removal) -> None:
    source = (PACKAGE / removal.module).read_text(encoding="utf-8")
    assert removal.removed_from(source) != source


@every_rule
def test_its_tests_exist(removal: Removal) -> None:
    for test in removal.tests:
        file, _, function = test.partition("::")
        assert function in functions(f"tests/{file}"), test


def test_each_rule_is_listed_once() -> None:
    assert [rule for rule, count in Counter(removal.rule for removal in RULES).items() if count > 1] == []


def test_every_rule_of_the_protocol_is_listed() -> None:
    assert {removal.rule.partition(" ")[0] for removal in PROTOCOL} == set(SECTIONS)


@pytest.mark.soak
@in_minutes
def test_all_tests_pass_in_an_unchanged_copy(tmp_path: Path) -> None:
    copy_of_the_package(tmp_path)
    failed, printed = failed_tests(tmp_path, dict.fromkeys(test for removal in RULES for test in removal.tests))
    assert not failed, printed


@pytest.mark.soak
@in_minutes
@each_rule
def test_without_the_rule_its_tests_fail(tmp_path: Path, removal: Removal) -> None:
    copy_of_the_package(tmp_path, removal)
    failed, printed = failed_tests(tmp_path, removal.tests, *(("--timeout", str(limit(20))) if removal.hangs else ()))
    passed = set(removal.tests) - set(failed)
    assert not passed, f"passed without the rule: {passed}\n{printed}"
