"""Every rule that the code names is explained in docs/how-it-works/rules.md, with its code, its trace and its test."""

from __future__ import annotations

import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from fixtures.rules_page import HERE, PAGE, ROOT, RULE, SECTIONS, functions
from fixtures.tables import table
from model.job_state import RULES as JOB_RULES
from model.recipe_scenes import NEEDS
from model.recipe_state import RULES

_NAMED = re.compile(rf"\brules? ({RULE}(?:(?:,? (?:and|or|to) |, ){RULE})*)\b|\((F[1-9A-B]|[A-Z][0-9])\)|\bhas\(\"({RULE})\"\)")
_LINK = re.compile(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)")
_TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")

WITHOUT_TRACE = {"FB", "SG"}


@cache
def named() -> dict[str, str]:
    """Each rule that the code names, with a file that does."""
    found: dict[str, str] = {}
    for folder in ("src", "tests", "migrations", "examples", "benchmarks"):
        for file in sorted((ROOT / folder).rglob("*.py")):
            for groups in _NAMED.findall(file.read_text(encoding="utf-8")):
                for name in re.findall(RULE, " ".join(groups)):
                    found.setdefault(name, str(file.relative_to(ROOT)))
    return found


def test_every_rule_that_the_code_names_has_its_section() -> None:
    missing = {name: file for name, file in named().items() if name not in SECTIONS}
    assert not missing


def test_every_rule_of_the_page_is_named_in_the_code_that_follows_it() -> None:
    source = "".join(file.read_text(encoding="utf-8") for file in (ROOT / "src").rglob("*.py"))
    assert [name for name in SECTIONS if not re.search(rf"\b{name}\b", source)] == []


def test_the_page_begins_with_a_list_of_all_rules() -> None:
    assert re.findall(r"^\| \[(\w\w)\]\(#(\w\w)\)", PAGE, re.MULTILINE) == [(name, name.lower()) for name in SECTIONS]


def test_the_rules_of_the_model_are_those_of_the_page() -> None:
    assert set(RULES) == set(NEEDS) == set(SECTIONS) - WITHOUT_TRACE


@table("rule", SECTIONS)
def test_a_section_names_code_trace_and_test(rule: str) -> None:
    section = SECTIONS[rule]
    assert "{literalinclude} ../../src/dualwrite/" in section, "no code"
    if rule in WITHOUT_TRACE:
        assert "\nTrace: none" in section, "why there is no trace"
    else:
        assert f"[`python tests/model/check_recipe.py {rule}`](traces/{rule}.txt)" in section, "no trace"
    tests = _TEST.findall(section)
    assert tests, "no test"
    for file, name in tests:
        assert name in functions(file), f"there is no {file}::{name}"


@table("page", sorted(path.name for path in HERE.glob("*.md")))
def test_links_of_a_page_lead_to_existing_files(page: str) -> None:
    """Also by its plain links, which a repository viewer follows, and its mentions of test files."""
    text = (HERE / page).read_text(encoding="utf-8")
    targets = [HERE / link for link in _LINK.findall(text)]
    targets += [ROOT / file for file in re.findall(r"`((?:src|tests)/[\w/]+\.py)", text)]
    assert [str(target) for target in targets if not target.exists()] == []


def test_every_rule_of_jobs_is_in_their_table() -> None:
    table = (HERE / "jobs.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| `([a-z-]+)` \|", table, re.MULTILINE) == list(JOB_RULES)


def test_the_map_matches_the_imports() -> None:
    drawn = re.search(r"```mermaid\n(.*?)```", (HERE / "index.md").read_text(encoding="utf-8"), re.DOTALL)
    assert drawn is not None
    program = ROOT / "docs" / "import_graph.py"
    done = subprocess.run([sys.executable, program, "--mermaid"], capture_output=True, text=True, check=True)
    assert drawn[1] == done.stdout, "python docs/import_graph.py --mermaid prints the map as it is now"


@pytest.mark.parametrize("folder", ["src", "tests", "migrations", "examples", "benchmarks", "docs"])
def test_nothing_refers_to_a_file_outside_the_repository(folder: str) -> None:
    """Such as a design document: what it said stands in docs/."""
    outside = re.compile(r"\bDESIGN\b(?:\.md)?|\bshared/\w|§")
    found = [
        str(file.relative_to(ROOT))
        for file in (ROOT / folder).rglob("*.*")
        if file.suffix in (".py", ".md", ".toml")
        and file != Path(__file__)
        and outside.search(file.read_text(encoding="utf-8"))
    ]
    assert found == []
