"""The group of the commands that examine a cluster's transactions: exit codes, Apache's command line.

Apache's `kafka-transactions.sh` has `--bootstrap-server` before the command's name; here options may be on either side of it.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Final

import typer

from dualwrite.cli.errors import error_text
from dualwrite.cli.json_group import JSON, JsonGroup
from dualwrite.errors import ConfigurationError, DualWriteError

_FOUND: Final = 1
_USAGE_ERROR: Final = 2


class ToolGroup(JsonGroup):
    """An invalid setting gives exit code 2, and Apache's order of the arguments is accepted."""

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        """Parse the group's arguments, or all of a command without subcommands."""
        flags = {name for each in self.commands.values() for name in _flags(each)}
        arguments = in_our_order(args, self.commands, flags) if self.commands else args
        return super().make_context(info_name, arguments, parent, **extra)

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except DualWriteError as error:
            typer.echo(error_text(error), err=True)
            raise typer.Exit(_USAGE_ERROR if isinstance(error, ConfigurationError) else _FOUND) from error


def _flags(command: Any) -> list[str]:
    return [name for each in command.params if getattr(each, "is_flag", False) for name in each.opts]


def in_our_order(args: list[str], commands: Collection[str], flags: Collection[str] = (JSON,)) -> list[str]:
    """The arguments with the command's name first.

    Args:
        args: The arguments after the group's name.
        commands: The names of the commands.
        flags: The options that have no value.
    """
    at = 0
    while at < len(args) and args[at].startswith("-"):
        if args[at] in ("--help", "--"):
            return args
        at += 1 if "=" in args[at] or args[at] in flags else 2
    if at >= len(args) or args[at] not in commands:
        return args
    return [args[at], *args[:at], *args[at + 1 :]]
