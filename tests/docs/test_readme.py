"""README is true: its Python and its shell commands marked `<!-- run -->` run on a real broker, and its links exist."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable
from pathlib import Path

import pages
import pytest

from dualwrite.devcluster import DevCluster
from fixtures.tables import table

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_INSTALL = re.compile(r"pip install .*\"(?P<package>[\w.]+)\[(?P<extras>[\w,]+)\]\"")
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


def anchors(text: str) -> set[str]:
    """What links to the headings of a page end with: lower case, spaces as hyphens, no other punctuation."""
    headings = _HEADING.findall(re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.slow
def test_readme_runs(broker: DevCluster, committed: Callable[[str], list[bytes | None]], tmp_path: Path) -> None:
    """As it stands, from its first block on."""
    text = pages.substituted(README, {"broker": broker.bootstrap_servers})
    before = pages.messages_before(broker, "orders", committed)
    assert "shop.1" in pages.run_program(text, tmp_path, name="README.md")
    assert committed("orders")[before:] == [b"lamp"]
    assert pages.rows("sqlite:///shop.db", "SELECT item FROM orders", tmp_path) == [["lamp"]]


def test_every_mark_in_readme_is_read() -> None:
    assert pages.mistakes(README) == []


def test_the_two_set_up_commands_are_as_expected() -> None:
    commands = [block.text for block in pages.blocks(README) if block.language == "sh"]
    assert 'pip install ".[demo]" && dualwrite demo\n' in commands
    assert 'pip install --upgrade pip && pip install -e ".[all]" --group test && pytest\n' in commands


def test_each_set_up_installs_what_its_next_lines_need() -> None:
    """From a checkout, as dualwrite is on no index; `dualwrite dev` and `demo` need more than the command."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    files = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    texts = [block.text for file in files for block in pages.blocks(file.read_text(encoding="utf-8")) if block.language == "sh"]
    installs = [(text, found) for text in texts if (found := _INSTALL.search(text)) is not None]
    assert len(installs) >= 5
    for text, found in installs:
        assert found["package"] == ".", text
        named = set(found["extras"].split(","))
        assert named <= extras.keys(), text
        for command in ("dev", "demo"):
            assert f"dualwrite {command}" not in text or named & {command, "demo"}, text


def test_ci_runs_readmes_test_command() -> None:
    assert "\nstep pytest\n" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")


@table("link", sorted({link for link in _LINK.findall(README) if "://" not in link}))
def test_links_of_readme_lead_to_existing_files_and_headings(link: str) -> None:
    path, _, anchor = link.partition("#")
    file = ROOT / path
    assert file.is_file()
    if anchor:
        assert anchor in anchors(file.read_text(encoding="utf-8"))


def test_every_page_except_tables_of_contents_is_linked() -> None:
    """The pages of how-it-works are linked from their own index, and the pages behind a guide from the list of guides."""
    lists = [ROOT / "README.md", ROOT / "docs" / "guides" / "index.md"]
    links = [(file.parent, link) for file in lists for link in _LINK.findall(file.read_text(encoding="utf-8"))]
    linked = {(folder / link.partition("#")[0]).resolve() for folder, link in links}
    for folder in ("guides", "operations", "reference"):
        for page in (ROOT / "docs" / folder).glob("*.md"):
            assert page.name == "index.md" or page in linked
