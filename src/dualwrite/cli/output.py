"""Tables that can be read at any width: no word is broken, and a table that does not fit becomes a list of its rows."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final

import typer
from rich.cells import cell_len
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from dualwrite.cli.texts import error_text, printable
from dualwrite.errors import BrokerError, DualWriteError

_FILE_WIDTH: Final = 100_000
_GAP: Final = 2
_FOLDS: Final = re.compile(r"(?<=[,#])")  # where a word may be folded that is longer than a line: lists, ids at Kafka


def show_table(headings: Iterable[str], rows: Iterable[Iterable[Any]]) -> None:
    """Print a table; None is an empty cell. To a file or a pipe each row is one line, on a terminal it fits the width."""
    show(table_of(headings, rows, terminal_width()))


def show(table: RenderableType) -> None:
    """Print what `table_of` returns."""
    console = Console(markup=False, highlight=False)
    if not console.is_terminal:
        console.width = _FILE_WIDTH
    console.print(table, soft_wrap=True)


def terminal_width() -> int | None:
    """The terminal's columns; None if the output goes to a file or a pipe."""
    console = Console()
    return console.width if console.is_terminal else None


def table_of(headings: Iterable[str], rows: Iterable[Iterable[Any]], width: int | None) -> RenderableType:
    """A table, or if that is wider than `width`, a list with the cells of each row below each other.

    Args:
        headings: One for each column. The first column is what the row is about.
        rows: None is an empty cell. Only a cell that is a tuple has lines of its own.
        width: The columns of the terminal; None means unlimited.
    """
    names, cells = list(headings), [[_lines(cell) for cell in row] for row in rows]
    columns = [max(map(cell_len, (name, *(line for row in cells for line in row[at])))) for at, name in enumerate(names)]
    if width is not None and sum(columns) + _GAP * (len(names) - 1) > width:
        return Text("\n").join(Text("\n".join(_below_each_other(names, row, width))) for row in cells)
    table = Table(box=None, padding=(0, _GAP, 0, 0), pad_edge=False, header_style="dim")
    for name, size in zip(names, columns, strict=True):
        table.add_column(name, no_wrap=True, min_width=size)
    for row in cells:
        table.add_row(*(Text("\n".join(lines)) for lines in row))
    return table


def _lines(cell: Any) -> tuple[str, ...]:
    texts = cell if isinstance(cell, tuple) else ("" if cell is None else cell,)
    return tuple(printable(str(text)) for text in texts)


def _below_each_other(names: Sequence[str], row: Sequence[tuple[str, ...]], width: int) -> Iterator[str]:
    """The lines of a row: what it is about, and below it the name and text of each other cell that is not empty."""
    yield from (line for text in row[0] for line in folded(f"{names[0]} {text.strip()}".strip(), width))
    shown = [(name, texts) for name, texts in zip(names[1:], row[1:], strict=True) if any(texts)]
    column = max((cell_len(name) for name, _ in shown), default=0) + 2 * _GAP
    for name, texts in shown:
        label = f"{'':<{_GAP}}{name}"
        for line in (line for text in texts for line in folded(text, width - column)):
            yield f"{label:<{column}}{line}"
            label = ""


def folded(text: str, width: int) -> list[str]:
    """The lines of a text. Only a word that is longer than a line is folded, after a comma or `#`, or else left too long."""
    lines = [""]
    for word in text.split(" "):
        space = " " if lines[-1] else ""
        if cell_len(lines[-1] + space + word) <= width:
            lines[-1] += space + word
            continue
        for piece in [word] if cell_len(word) <= width else _FOLDS.split(word):
            if space or (lines[-1] and cell_len(lines[-1] + piece) > width):
                lines.append("")
                space = ""
            lines[-1] += piece
    return lines


VERSION: Final = 1
"""Version of the schema of all commands."""

_is_due: ContextVar[bool] = ContextVar("is_due", default=False)
"""Whether a document must still be printed if the command fails."""


def versioned(command: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """The document of a command, by its name as it is typed after `dualwrite`."""
    return {"version": VERSION, "command": command, **fields}


def print_json(document: Mapping[str, Any]) -> None:
    """Print the command's document."""
    _is_due.set(False)
    typer.echo(json.dumps(document, indent=2))


def error_json(error: DualWriteError) -> dict[str, Any]:
    """The error as an `error` object of that page."""
    return {
        "kind": type(error).__name__,
        "code": getattr(error, "name", None) if isinstance(error, BrokerError) else None,
        "message": str(error),
    }


def show_error(error: DualWriteError) -> None:
    """Print an error that ends the command: its text to standard error, and with `--json` also the document."""
    typer.echo(error_text(error), err=True)
    print_error_document(error_json(error))


def print_error_document(error: dict[str, Any]) -> None:
    """Print the document of a failing command, with `--json` and if it has not printed its own."""
    if _is_due.get():
        print_json({"version": VERSION, "error": error})


def usage_error(message: str) -> dict[str, Any]:
    """The `error` object of a usage error."""
    return {"kind": "UsageError", "code": None, "message": message}


@contextmanager
def json_errors(*, enabled: bool) -> Iterator[None]:
    """While the block runs, errors are also printed as documents if `enabled`."""
    before = _is_due.set(enabled)
    try:
        yield
    finally:
        _is_due.reset(before)
