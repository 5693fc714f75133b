"""What commands print: facts as JSON, and the same facts as a table, which can be read at any width.

No word of a table is broken, and a table that does not fit the terminal becomes a list of its rows.
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
from typing import Any, Final

import typer
from rich.cells import cell_len
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from dualwrite.admin import BrokerProblem, PartitionEnd, PartitionProducers
from dualwrite.admin.facts import Search
from dualwrite.diagnosis.facts import Fact, Facts, Record
from dualwrite.errors import BrokerError, DualWriteError
from dualwrite.state import Delivery, PreparedTxnState
from dualwrite.texts import error_text, printable, state_words, time_text

FOUND: Final = 1
"""The exit code of a search that has found something, or from which something is missing."""

_FILE_WIDTH: Final = 100_000
_GAP: Final = 2
_FOLDS: Final = re.compile(r"(?<=[,#])")  # where a word may be folded that is longer than a line: lists, ids at Kafka

VERSION: Final = 1
"""Version of the schema of all commands."""

_USAGE: Final[type[typer.BadParameter]] = next(  # the base class of usage errors, which typer does not export
    kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "UsageError"
)

_is_due: ContextVar[bool] = ContextVar("is_due", default=False)
"""Whether a document must still be printed if the command fails."""


def show_facts(facts: Facts, subjects: Iterable[Any], columns: Sequence[str] = (), *, empty: str | None = None) -> None:
    """Print a table of the facts about each subject; only some of its columns if these are named.

    If there is no subject, print the text `empty`, if one is given.
    """
    ones = list(subjects)
    if ones or empty is None:
        show_table(*facts.table(ones, columns))
    else:
        say(empty)


def show_table(headings: Iterable[str], rows: Iterable[Iterable[Any]]) -> None:
    """Print a table; None is an empty cell. To a file or a pipe each row is one line, on a terminal it fits the width."""
    console = Console(markup=False, highlight=False)
    if not console.is_terminal:
        console.width = _FILE_WIDTH
    console.print(table_of(headings, rows, terminal_width()), soft_wrap=True)


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


def say(text: str, *, err: bool = False) -> None:
    """Print a line, also if names in it have characters that are not printable."""
    typer.echo(printable(text), err=err)


def print_records(command: str, name: str, records: Sequence[Record], *, as_json: bool) -> None:
    """Print a few records with all that they have: as a document, or each value on a line."""
    if as_json:
        print_json(command, {name: records})
        return
    for key, value in (item for record in records for item in record.items()):
        say(f"{key}: {value}")


def print_json(command: str, fields: Mapping[str, Any]) -> None:
    """Print the document of a command, which is named as it is typed after `dualwrite`."""
    _print({"command": command, **fields})


def _print(document: Mapping[str, Any]) -> None:
    _is_due.set(False)
    typer.echo(json.dumps({"version": VERSION, **document}, indent=2, default=_plain))


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
        "message": f"{error}",
    }


def print_document(
    command: str,
    found: Record,
    *,
    complete: bool,
    problems: Iterable[BrokerProblem] = (),
    hidden: Iterable[DualWriteError] = (),
) -> None:
    """Print the document of a command: whether nothing is missing, the command's own fields, and what is missing."""
    missing = {"problems": [asdict(one) for one in problems], "hidden": list(hidden)}
    print_json(command, {"complete": complete, **found, **missing})


def conclude(
    command: str,
    found: Record,
    show: Callable[[], object],
    search: Search,
    *,
    complete: bool | None = None,
    as_json: bool,
    failed: bool = False,
) -> None:
    """Print what a search has found, as a document or with `show`, and what is missing.

    Exits with code 1 if it has `failed`, or a broker did not respond. `complete` is whether nothing is missing, if the search
    alone does not know it.
    """
    if as_json:
        is_complete = search.complete if complete is None else complete
        print_document(command, found, complete=is_complete, problems=search.problems, hidden=search.hidden)
    else:
        show()
        show_missing(search)
    if failed or search.problems:
        raise typer.Exit(FOUND)


def show_missing(search: Search) -> None:
    """Print the brokers that did not respond, and the missing ACLs."""
    for problem in search.problems:
        say(f"{'Note' if problem.covered else 'The output is incomplete'}: {problem}", err=True)
    for error in search.hidden:
        typer.echo(error_text(error).replace("Error:", "Something may be missing:", 1), err=True)


UNREADABLE: Final = Facts(
    Fact("topic"),
    Fact("partition", value=lambda found: None if found.partition < 0 else found.partition),
    Fact("broker"),
    Fact("error", value="problem"),
)
"""The facts about a partition or topic that could not be described."""


def show_unreadable(found: Iterable[PartitionProducers | PartitionEnd]) -> None:
    """The errors of partitions that could not be described."""
    for one in found:
        if one.problem is not None:
            typer.echo(error_text(one.problem), err=True)


def show_error(error: DualWriteError) -> None:
    """Print an error that ends the command: its text to standard error, and with `--json` also the document."""
    typer.echo(error_text(error), err=True)
    print_error_document(error_json(error))


def print_error_document(error: dict[str, Any]) -> None:
    """Print the document of a failing command, with `--json` and if it has not printed its own."""
    if _is_due.get():
        _print({"error": error})


def usage_error(message: str) -> dict[str, Any]:
    """The `error` object of a usage error."""
    return {"kind": "UsageError", "code": None, "message": message}


def fold_long_words() -> None:
    """From now on, break a word that is longer than its column, such as a variable in help: rich's tables would cut it."""
    add_row = Table.add_row

    def add_folding_row(table: Table, *cells: Any, **options: Any) -> None:
        add_row(table, *cells, **options)
        for column in table.columns:
            column.overflow = "fold"

    Table.add_row = add_folding_row  # type: ignore[method-assign, assignment]  # typer has no setting for it


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
