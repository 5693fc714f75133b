"""The JSON document of a command that fails, if it was asked for JSON: see docs/reference/transactions-json.md."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final

import typer

from dualwrite.cli.errors import error_text
from dualwrite.errors import BrokerError, DualWriteError

VERSION: Final = 1
"""Of the JSON of `dualwrite transactions` and `stuck`."""

_as_json: ContextVar[bool] = ContextVar("as_json", default=False)


def error_json(error: DualWriteError) -> dict[str, Any]:
    """The error as an `error` of the page."""
    return {
        "kind": type(error).__name__,
        "code": getattr(error, "name", None) if isinstance(error, BrokerError) else None,
        "message": str(error),
    }


def show_error(error: DualWriteError) -> None:
    """Print an error that ends the command, in words and as a document."""
    typer.echo(error_text(error), err=True)
    print_error_document(error_json(error))


def print_error_document(error: dict[str, Any]) -> None:
    """Print the document of a command that fails, if JSON was asked for."""
    if _as_json.get():
        typer.echo(json.dumps({"version": VERSION, "error": error}, indent=2))


def usage_error(message: str) -> dict[str, Any]:
    """The error of a wrong usage."""
    return {"kind": "UsageError", "code": None, "message": message}


@contextmanager
def asked_for_json(*, asked: bool) -> Iterator[None]:
    """An error inside is printed as a document too, if JSON was asked for."""
    before = _as_json.set(asked)
    try:
        yield
    finally:
        _as_json.reset(before)
