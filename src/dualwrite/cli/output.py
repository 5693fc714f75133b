"""What commands print: a record's fields as JSON, and the same fields as a table, which can be read at any width.

A record is the mapping that `--json` prints; its values may be times, states, errors and enums. The columns of a table name
fields of it. No word of a table is broken, and a table that does not fit the terminal becomes a list of its rows.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict
from datetime import datetime
from enum import Enum
from functools import reduce
from typing import Any, Final

import typer
from rich.cells import cell_len
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from dualwrite.errors import BrokerError, DualWriteError
from dualwrite.state import Delivery, PreparedTxnState
from dualwrite.texts import error_text, printable, state_words, time_text

_FILE_WIDTH: Final = 100_000
_GAP: Final = 2
_FOLDS: Final = re.compile(r"(?<=[,#])")  # where a word may be folded that is longer than a line: lists, ids at Kafka

Record = Mapping[str, Any]
Columns = Mapping[str, str | Callable[[Any], Any]]
"""By heading: a field of the record, with dots for one of a nested record; or a function of the record."""

VERSION: Final = 1
"""Version of the schema of all commands."""

_USAGE: Final[type[typer.BadParameter]] = next(  # the base class of usage errors, which typer does not export
    kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "UsageError"
)

_is_due: ContextVar[bool] = ContextVar("is_due", default=False)
"""Whether a document must still be printed if the command fails."""


def show_records(columns: Columns, records: Iterable[Record]) -> None:
    """Print a table of records."""
    show_table(columns, cells(columns, records))


def cells(columns: Columns, records: Iterable[Record]) -> list[list[Any]]:
    """What a table shows of each record."""
    return [[each(one) if callable(each) else _field(one, each) for each in columns.values()] for one in records]


def _field(record: Record, path: str) -> Any:
    return reduce(lambda found, name: None if found is None else found[name], path.split("."), record)


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
    return tuple(printable(_text(each)) for each in (cell if isinstance(cell, tuple) else (cell,)))


def _text(value: Any) -> str:
    if isinstance(value, datetime):
        value = time_text(value)
    elif isinstance(value, PreparedTxnState):
        value = state_words(value)
    elif isinstance(value, Enum):
        value = value.value
    return "" if value is None else str(value)


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


def versioned(command: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """The document of a command, by its name as it is typed after `dualwrite`."""
    return {"version": VERSION, "command": command, **fields}


def print_json(document: Mapping[str, Any]) -> None:
    """Print the command's document."""
    _is_due.set(False)
    typer.echo(json.dumps(document, indent=2, default=_plain))


def _plain(value: Any) -> Any:
    """A value of a record that is not one of JSON's own."""
    if isinstance(value, DualWriteError):
        return error_json(value)
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, Delivery):
        return asdict(value)
    return value.value if isinstance(value, Enum) else str(value)


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
    """While the block runs, an error that ends the command is also printed as a document if `enabled`."""
    before = _is_due.set(enabled)
    try:
        yield
    except _USAGE as error:
        print_error_document(usage_error(error.format_message()))
        raise
    except typer.Abort:
        print_error_document({"kind": "Aborted", "code": None, "message": "The user did not confirm."})
        raise
    except DualWriteError as error:
        print_error_document(error_json(error))
        raise
    finally:
        _is_due.reset(before)
