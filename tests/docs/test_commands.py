"""Every `dualwrite` command, with its options, that documentation, help and errors name exists."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
import typer

from dualwrite import cli

ROOT = Path(__file__).parents[2]
_NAMED = re.compile(r"""(?:`|^|\$\ |"|')dualwrite\ ([a-z][a-z-]*(?:[ \\\n]+[^`\n|&;\#"']*)?)""", re.MULTILINE)
_OPTION = re.compile(r"--[a-z][a-z-]*")


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[str, ...], set[str]]:
    """The options of each command, by the words that call it."""
    monkeypatch.setenv(cli._COMPLETION_VARIABLE, "1")
    return dict(_tree(typer.main.get_command(cli._app([])), ()))


def _tree(command: click.Command, words: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], set[str]]]:
    """The options may come before the name of a command in a group, so a group has those of its commands."""
    options = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    for name, below in getattr(command, "commands", {}).items():
        found = dict(_tree(below, (*words, name)))
        yield from found.items()
        if words:
            options |= found[(*words, name)]
    yield words, options


def texts() -> Iterator[Path]:
    yield from ROOT.glob("*.md")
    for folder, kinds in (("docs", ["*.md"]), ("examples", ["*.py", "*.md", "*.yml"]), ("src", ["*.py", "*.html"])):
        for kind in kinds:
            yield from (ROOT / folder).rglob(kind)


def test_every_command_and_option_exists(commands: dict[tuple[str, ...], set[str]]) -> None:
    wrong, found = [], 0
    for path in texts():
        for named in _NAMED.finditer(path.read_text(encoding="utf-8")):
            words = named[1].split()
            command: tuple[str, ...] = ()
            while words and (*command, words[0]) in commands:
                command = (*command, words.pop(0))
            if command:  # else it is a sentence about dualwrite
                found += 1
                options = {option[0] for word in words if (option := _OPTION.match(word))}
                wrong += [f"{path.relative_to(ROOT)}: {' '.join(command)} {option}" for option in options - commands[command]]
    assert found > 300
    assert not wrong
