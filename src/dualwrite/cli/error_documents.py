"""The JSON document that a failing command prints with `--json`: see docs/reference/transactions-json.md."""

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
"""Version of the JSON schema of `dualwrite transactions` and `stuck`."""

_as_json: ContextVar[bool] = ContextVar("as_json", default=False)


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
    """Print the document of a failing command if JSON output is enabled."""
    if _as_json.get():
        typer.echo(json.dumps({"version": VERSION, "error": error}, indent=2))


def usage_error(message: str) -> dict[str, Any]:
    """The `error` object of a usage error."""
    return {"kind": "UsageError", "code": None, "message": message}


@contextmanager
def json_errors(*, enabled: bool) -> Iterator[None]:
    """While the block runs, errors are also printed as documents if `enabled`."""
    before = _as_json.set(enabled)
    try:
        yield
    finally:
        _as_json.reset(before)
