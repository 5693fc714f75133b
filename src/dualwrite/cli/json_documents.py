"""The JSON documents of commands, of which each prints exactly one: see docs/reference/json.md."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final

import typer

from dualwrite.cli.errors import error_text
from dualwrite.errors import BrokerError, DualWriteError

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
