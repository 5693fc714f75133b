"""README is true: its Python and its shell commands marked `<!-- run -->` run on a real broker, and its links exist."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from dualwrite.devcluster import DevCluster
from fixtures.broker import make_topic
from fixtures.pace import limit

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
SERVERS = "127.0.0.1:9092"  # README's broker; the tests put theirs in its place
_BLOCK = re.compile(r"^(<!-- run -->\n)?```(python|sh)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)

Run = Callable[..., str]


def blocks() -> list[tuple[str, bool, str]]:
    """Language, whether it is marked, and text of each block."""
    return [(found[2], found[1] is not None, found[3]) for found in _BLOCK.finditer(README)]


def anchors(text: str) -> set[str]:
    """What links to the headings of a page end with: lower case, spaces as hyphens, no other punctuation."""
    headings = _HEADING.findall(re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Runs a command in a folder of the test's own; what it prints."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("DUALWRITE_")}
    environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environ['PATH']}"

    def run(*command: str) -> str:
        done = subprocess.run(
            command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=limit(240), check=False
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    return run


@pytest.mark.slow
def test_readme_runs(broker: DevCluster, committed: Callable[[str], list[bytes | None]], run: Run) -> None:
    """The tables are made first, although README shows its example before that; the commands that look at it come last."""
    shell = [text.replace(SERVERS, broker.bootstrap_servers) for _, marked, text in blocks() if marked]
    (python,) = (text.replace(SERVERS, broker.bootstrap_servers) for language, _, text in blocks() if language == "python")
    upgrade, look = shell
    make_topic(broker, "orders")
    before = len(committed("orders"))

    run("bash", "-euc", upgrade)
    run(sys.executable, "-W", "ignore", "-c", python)
    assert "shop-1" in run("bash", "-euc", look)
    assert committed("orders")[before:] == [b'{"item": "lamp"}']
    rows = run(sys.executable, "-c", "import sqlite3; print(*sqlite3.connect('shop.db').execute('select item from orders'))")
    assert rows.strip() == "('lamp',)"


def test_the_two_set_up_commands_stand_there_as_they_are() -> None:
    commands = [text for language, _, text in blocks() if language == "sh"]
    assert 'pip install ".[demo]" && dualwrite demo\n' in commands
    assert 'pip install -e ".[test]" && pytest\n' in commands


def test_ci_runs_readmes_test_command() -> None:
    assert "\nstep pytest\n" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")


def test_readme_is_short() -> None:
    assert len(README.splitlines()) <= 200


@pytest.mark.parametrize("link", sorted({link for link in _LINK.findall(README) if "://" not in link}))
def test_a_link_of_readme_leads_to_a_file_and_a_heading_that_are_there(link: str) -> None:
    path, _, anchor = link.partition("#")
    file = ROOT / path
    assert file.is_file()
    if anchor:
        assert anchor in anchors(file.read_text(encoding="utf-8"))


def test_every_page_but_the_tables_of_contents_is_linked() -> None:
    """The pages of how-it-works are linked from their own index."""
    linked = {(ROOT / link.partition("#")[0]).resolve() for link in _LINK.findall(README) if "://" not in link}
    for folder in ("guides", "operations", "reference"):
        for page in (ROOT / "docs" / folder).glob("*.md"):
            assert page.name == "index.md" or page in linked


def test_every_file_that_readme_names_is_there() -> None:
    for name in ("docker-compose.yml", "constraints.txt", "examples"):
        assert name in README
        assert (ROOT / name).exists()
