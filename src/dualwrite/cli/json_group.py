"""The group of commands with `--json`: whatever happens, they print one document."""

from __future__ import annotations

from typing import Any, Final

import typer
from typer.core import TyperGroup

from dualwrite.cli.json_documents import error_json, json_errors, print_error_document, usage_error
from dualwrite.errors import DualWriteError

JSON: Final = "--json"
_USAGE: Final[type[typer.BadParameter]] = next(  # the base class of usage errors, which typer does not export
    kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "UsageError"
)


class JsonGroup(TyperGroup):
    """With `--json`, an error that ends a command is also printed as a document."""

    _as_json = False

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        """Parse the group's arguments, or all of a command without subcommands."""
        self._as_json = JSON in args
        with json_errors(enabled=self._as_json):
            try:
                return super().make_context(info_name, args, parent, **extra)
            except _USAGE as error:
                print_error_document(usage_error(error.format_message()))
                raise

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        with json_errors(enabled=self._as_json):
            try:
                return super().invoke(ctx)
            except _USAGE as error:
                print_error_document(usage_error(error.format_message()))
                raise
            except typer.Abort:
                print_error_document({"kind": "Aborted", "code": None, "message": "The user did not confirm."})
                raise
            except DualWriteError as error:
                print_error_document(error_json(error))
                raise
