"""The tables of commands at 80 columns: no word is broken, and none is missing."""

from __future__ import annotations

import io
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from cli.conftest import Scene
from dualwrite.cli import output
from dualwrite.stores.positions import Move, Position
from dualwrite.stores.registry import store_from_url
from fixtures.command import output_of
from fixtures.pace import LIMIT

WIDTH = 80
HEADINGS = ("transactional id", "consumer group", "leased id", "group ", "TransactionalId", "Topic", "Partition")
CHANGES = re.compile(r"\d+|\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ")  # ages and times differ from one run to the next


def printed(headings: list[str], rows: list[list[str]], width: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width, markup=False, highlight=False)
    console.print(output.table_of(headings, rows, width), soft_wrap=True)
    assert isinstance(console.file, io.StringIO)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def assert_fits(lines: list[str], width: int = WIDTH) -> None:
    """A line is longer only because of its last word, which can't be folded."""
    for line in lines:
        before, _, last = line.rpartition(" ")
        assert cell_len(line) <= width or (cell_len(before) < width // 2 < cell_len(last)), line


WORDS = st.lists(st.text("abc-.~#,é漢", min_size=1, max_size=30), max_size=12).map(" ".join)


@given(st.lists(st.lists(WORDS, min_size=3, max_size=3), min_size=1, max_size=3), st.integers(30, 120))
def test_every_word_of_every_cell_is_whole(rows: list[list[str]], width: int) -> None:
    lines = printed(["an id", "state", "because"], rows, width)
    text = "\n".join(lines)
    words = {word for row in rows for cell in row for word in cell.split()}
    whole = {word for word in words if cell_len(word) <= width - len("  because  ")}
    assert whole <= set(text.split())
    together = "".join(text.split())
    assert all(word in together for word in words - whole)  # folded after a comma or #, or too long


def test_a_list_names_the_cells_of_a_row() -> None:
    rows = [["shop.2", "", "the database committed it"], ["billing#abc.1", "open", "x" * 30]]
    assert printed(["id", "state", "because"], rows, 30) == [
        "id shop.2",
        "  because  the database",
        "           committed it",
        "id billing#abc.1",
        "  state    open",
        f"  because  {'x' * 30}",
    ]
    assert printed(["id", "state", "because"], rows, 80)[0].split() == ["id", "state", "because"]
    assert output.folded("shop.2#0123456789ab.17", 15) == ["shop.2#", "0123456789ab.17"]


@pytest.mark.parametrize("command", ["relay run", "doctor", "console"])
def test_help_cuts_no_name_at_80_columns(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    code, out, _ = output_of(capsys, *command.split(), "--help")
    assert (code, "…" in out) == (0, False)
    assert "(DUALWRITE_KAFKA_BOOTSTRAP_SERVERS)" in re.sub(r"\s+|│", "", out)


@pytest.mark.soak
def test_the_commands_fit_into_80_columns(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Real output of each command that prints a table, compared with that to a pipe, where each row is a line."""
    left = scene.crash("after_db_commit", lanes=2)
    hanging, group = scene.hang(), scene.new_name("billing")
    with store_from_url(scene.url) as store:
        assert store.positions is not None
        assert store.leases is not None
        store.positions.reset(group, [Move(None, Position(left.topic, 0, 0))])
        store.leases.acquire({f"{scene.new_name('pool')}.1"}, "pool host.example.com:4711 gunicorn 5f0c2a9b", seconds=LIMIT)
    database = scene.at
    commands = [
        ("status", *database, "--longer-than", "0"),
        ("status", *database, "--longer-than", "0", "--all", "--wide"),
        ("stuck", *database, "--topic", left.topic, "--longer-than", "0"),
        ("stuck", *database, "--topic", left.topic, "--longer-than", "0", "--wide"),
        ("stuck", "--topic", hanging),
        ("offsets", "list", *database),
        ("recover", "--dry-run", *database),
        ("recover", "--dry-run", "--wide", *database),
        ("doctor", *database, "--topic", left.topic),
        ("transactions", "list", "--pattern", f"{left.name}.*"),
        ("transactions", "describe", left.name, *database),
        ("transactions", "describe-producers", "--topic", left.topic),
        ("transactions", "find-hanging", "--topic", hanging),
        ("transactions", "abort", "--topic", hanging, "--partition", "0", "--start-offset", "0"),  # shows it, then asks
        ("transactions", "of", "--topic", left.topic, "--partition", "0", "--offset", "0"),
    ]
    for command in commands:
        wide = scene.call(*command)[1]
        with monkeypatch.context() as patch:
            patch.setattr(output, "terminal_width", lambda: WIDTH)
            narrow = scene.call(*command)[1]
        assert wide
        table_lines = [line for line in narrow.splitlines() if "dualwrite " not in line and not line.startswith("There is")]
        assert_fits(table_lines)
        cells = [line for line in wide.splitlines() if not line.startswith(HEADINGS)]  # a list does not name empty cells
        missing = {word for line in cells for word in line.split() if not CHANGES.fullmatch(word)} - set(narrow.split())
        assert not {word for word in missing if word not in "".join(narrow.split())}, command
        assert all(cell_len(word) > WIDTH // 2 for word in missing), command
