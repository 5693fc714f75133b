"""Ids that other programs have chosen can't erase what a command prints, or forge a line of it."""

from __future__ import annotations

import io
import shutil
import subprocess
import sys
from collections.abc import Callable

import pytest
import typer
from rich.console import Console

from dualwrite.cli.options import confirm
from dualwrite.cli.output import say, table_of
from dualwrite.errors import DualWriteError, shell_word
from dualwrite.texts import error_text, printable
from fixtures.tables import table

HOSTILE = [
    "a\x1b[2Kb",  # erases the line
    "a\x1b]0;title\x07b",
    "a\x9b2Kb",  # the same with a single character
    "a\u202eb",  # turns the direction of what follows
    "a\u2028b",
    "a\nTransaction  committed\nb",
    "a\rb",
    "a\x7fb",
    "a\x00b",
]


def in_a_table(name: str, capsys: pytest.CaptureFixture[str]) -> str:
    console = Console(file=io.StringIO(), width=200, force_terminal=True, color_system=None)
    console.print(table_of(["id"], [[name]], 200))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()[1]


def in_a_line(name: str, capsys: pytest.CaptureFixture[str]) -> str:
    say(name)
    return capsys.readouterr().out.removesuffix("\n")


def in_a_question(name: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(typer.Abort):
        confirm(f"Abort the transaction of {name}?", yes=False)
    return capsys.readouterr().err


def in_an_error(name: str, capsys: pytest.CaptureFixture[str]) -> str:
    return error_text(
        DualWriteError("Failed.", transactional_id=name, next_step=f"run dualwrite recover --id {shell_word(name)}")
    )


@pytest.fixture
def no(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal at which questions are answered by no."""
    terminal = io.StringIO("n\n")
    terminal.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stdin", terminal)


@pytest.mark.usefixtures("no")
@table("shown", [in_a_table, in_a_line, in_a_question, in_an_error])
@table("name", HOSTILE)
def test_a_name_is_shown_by_what_is_printable(
    name: str, shown: Callable[[str, pytest.CaptureFixture[str]], str], capsys: pytest.CaptureFixture[str]
) -> None:
    text = shown(name, capsys)
    lines = text.removesuffix("\n").split("\n")
    assert len(lines) == (2 if shown is in_an_error else 1)
    assert all(line.isprintable() for line in lines)
    if shown is not in_an_error:
        assert printable(name) in text


@table("name", ["orders", "größe", "注文", "a b", "\U0001f600"])
def test_a_printable_name_is_shown_as_it_is(name: str) -> None:
    assert printable(name) == name


def test_a_cell_of_several_lines_keeps_them() -> None:
    console = Console(file=io.StringIO(), width=200)
    console.print(table_of(["id"], [[("a", "b")]], 200))
    assert isinstance(console.file, io.StringIO)
    assert [line.strip() for line in console.file.getvalue().splitlines()] == ["id", "a", "b"]


def test_an_error_of_several_lines_keeps_them() -> None:
    assert error_text(DualWriteError("Failed.", cause="refused\n\tIs it running?")) == (
        "Error: Failed.\nCause: refused\n        Is it running?"
    )


@table("name", [*HOSTILE[:-1], "my orders", "it's \\ \x1b"])  # no argument has the character 0
def test_a_name_in_a_next_step_can_be_pasted_into_a_shell(name: str) -> None:
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("there is no bash")
    assert shell_word(name).isprintable()
    command = [bash, "-c", f"printf %s {shell_word(name)}"]
    done = subprocess.run(command, check=True, capture_output=True, env={"LC_ALL": "C.UTF-8"}, timeout=60)
    assert done.stdout.decode() == name
