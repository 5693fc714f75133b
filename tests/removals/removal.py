"""A rule that can be removed from a copy of the source, to see that tests fail without it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from xml.etree import ElementTree as ET

import dualwrite
from fixtures.pace import limit
from fixtures.rules_page import ROOT

PACKAGE: Final = Path(dualwrite.__file__).parent

_OURS: Final = ("CI", "PYTEST_ADDOPTS", "PYTEST_XDIST_WORKER", "PYTEST_CURRENT_TEST")
"""Variables of this run that must not reach the other one: in it a failed test must not run again, for example."""

_OPTIONS: Final = ("-q", "-n", "0", "-m", "", "-p", "no:cacheprovider", "--tb=native")


@dataclass(frozen=True)
class Removal:
    """One rule, and the tests that notice its absence.

    Args:
        rule: What holds with the rule.
        module: The module that has it, relative to the package.
        text: The part of the module that is the rule; it is there once.
        without: What replaces it.
        tests: `file::function`, relative to `tests`: of each function, at least one case must fail.
        hangs: Whether they wait for minutes without the rule. Each is ended after `limit(20)` seconds then.
    """

    rule: str
    module: str
    text: str
    without: str
    tests: tuple[str, ...]
    hangs: bool = False

    def removed_from(self, source: str) -> str:
        """The module's source without the rule."""
        count = source.count(self.text)
        assert count == 1, f"{self.module} has changed: {self.text!r} is in it {count} times"
        changed = source.replace(self.text, self.without)
        compile(changed, self.module, "exec")
        return changed


def copy_of_the_package(folder: Path, removal: Removal | None = None) -> None:
    """Copy dualwrite and its migrations, without the rule if one is given; arranged in the folder as in the repository."""
    package = folder / "src" / PACKAGE.name
    shutil.copytree(PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "migrations", folder / "migrations")
    if removal is not None:
        module = package / removal.module
        module.write_text(removal.removed_from(module.read_text(encoding="utf-8")), encoding="utf-8")


def failed_tests(folder: Path, tests: Collection[str], *options: str) -> tuple[Collection[str], str]:
    """Run tests on the copy in the folder; those of which a case failed, and what pytest printed."""
    report = folder / "report.xml"
    environment = {name: value for name, value in os.environ.items() if name not in _OURS}
    source = str(folder / "src")
    environment |= {"PYTHONPATH": source, "MYPYPATH": source, "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", *_OPTIONS, f"--junit-xml={report}"]
    done = subprocess.run(
        [*command, *options, *(f"tests/{test}" for test in tests)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=limit(600),
        check=False,
    )
    printed = done.stdout + done.stderr
    assert done.returncode in (0, 1), printed  # 2 and more: the tests did not run
    cases = [case for case in ET.parse(report).iter("testcase") if case.find("skipped") is None]
    failed = {_name(case) for case in cases if case.find("failure") is not None}
    broken = {_name(case) for case in cases if case.find("error") is not None} - failed  # a failed test may not clean up
    assert not broken, f"not failed, but broken: {broken}\n{printed}"
    missing = set(tests) - set(map(_name, cases))
    assert not missing, f"did not run: {missing}\n{printed}"
    return failed, printed


def _name(case: ET.Element) -> str:
    """`file::function` of a test case in a report."""
    module = case.get("classname", "").removeprefix("tests.").replace(".", "/")
    return f"{module}.py::{case.get('name', '').partition('[')[0]}"
