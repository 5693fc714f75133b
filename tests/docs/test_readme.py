"""README does not rot: its Python runs, in order, and so do the shell commands marked `<!-- run -->`, on a real broker."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from dualwrite import failpoints, settings
from dualwrite.cli import COMMANDS
from dualwrite.devcluster import DevCluster
from fixtures.broker import make_topic

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
SERVERS = "127.0.0.1:9092"  # README's broker; the tests put theirs in its place
_BLOCK = re.compile(r"^(<!-- run -->\n)?```(python|sh)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks() -> list[tuple[str, bool, str]]:
    """Language, whether it is marked, and text of each block."""
    return [(found[2], found[1] is not None, found[3]) for found in _BLOCK.finditer(README)]


def test_readme_runs(broker: DevCluster, committed: Callable[[str], list[bytes | None]], tmp_path: Path) -> None:
    """One program of all Python blocks, in the order of the text; the marked shell blocks run where they stand."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("DUALWRITE_")}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    python, shell = "", []
    for language, marked, text in blocks():
        if language == "python":
            python += text.replace(SERVERS, broker.bootstrap_servers)
        elif marked:
            shell.append(text.replace(SERVERS, broker.bootstrap_servers))
    assert python
    assert len(shell) == 2
    make_topic(broker, "orders")
    before, after = shell

    def run(*command: str) -> str:
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    run("bash", "-euc", before)
    printed = run(sys.executable, "-W", "ignore", "-c", python)
    assert "committed on both sides" in printed
    assert "shop-1" in run("bash", "-euc", after)
    assert committed("orders") == [b'{"item": "lamp"}', b"carpet", b"lamp", b"chair", b"table"]
    rows = run(
        sys.executable, "-c", "import sqlite3; print(sqlite3.connect('shop.db').execute('select item from orders').fetchall())"
    )
    assert rows.strip() == "[('lamp',), ('chair',), ('table',)]"


def test_the_two_set_up_commands_stand_there_as_they_are() -> None:
    commands = [text for language, _, text in blocks() if language == "sh"]
    assert 'pip install ".[demo]" && dualwrite demo\n' in commands
    assert 'pip install -e ".[test]" && pytest\n' in commands


def test_ci_runs_readmes_test_command() -> None:
    assert "\nstep pytest\n" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_every_command_is_told(command: str) -> None:
    assert f"`dualwrite {command}" in README


@pytest.mark.parametrize("point", failpoints.NAMES)
def test_every_failpoint_is_told(point: str) -> None:
    assert f"`{point}`" in README


def test_every_environment_variable_is_told() -> None:
    assert settings.__doc__ is not None
    for variable in re.findall(r"DUALWRITE_[A-Z_]+", settings.__doc__):
        assert variable in README


def test_every_file_that_readme_names_is_there() -> None:
    for name in ("docker-compose.yml", "constraints.txt", "examples"):
        assert name in README
        assert (ROOT / name).exists()
