"""The group of the commands that examine a cluster's transactions: their options, exit codes, and Apache's command line.

Apache's `kafka-transactions.sh` has `--bootstrap-server` before the command's name; here options may be on either side of it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any, Final

import typer

from dualwrite.admin import TransactionAdmin
from dualwrite.cli.options import JSON, USAGE_ERROR, Database, Given, JsonGroup, KafkaSettings
from dualwrite.cli.output import show_error
from dualwrite.errors import ConfigurationError, DualWriteError, RepairRefusedError, TransactionChangedError
from dualwrite.texts import error_text

FOUND: Final = 1
TIMEOUT: Final = 30.0

Kafka = Annotated[
    str | None,
    typer.Option(
        "--kafka",
        "--bootstrap-server",
        metavar="HOST:PORT",
        help="Bootstrap servers.",
        show_default="DUALWRITE_KAFKA_BOOTSTRAP_SERVERS",
    ),
]
Topic = Annotated[str, typer.Option("--topic", help="The topic.")]
Partition = Annotated[int, typer.Option("--partition", min=0, help="The partition.")]
Partitions = Annotated[list[int] | None, typer.Option("--partition", min=0, help="A partition of the topic; repeatable.")]
Broker = Annotated[
    int | None, typer.Option("--broker", "--broker-id", help="Query this broker about its replicas, instead of the leaders.")
]
WithoutDatabase = Annotated[
    bool,
    typer.Option(
        "--without-database",
        help="Abort it although no database knows it; if a database has committed it, consumers miss its messages.",
    ),
]
Timeout = Annotated[float, typer.Option("--timeout", min=0.1, help="Seconds to wait for Kafka.")]


@dataclass(frozen=True, kw_only=True)
class Cluster(Given):
    """The options of a command that queries only Kafka."""

    kafka: Kafka = None
    kafka_config: KafkaSettings = None
    timeout: Timeout = TIMEOUT

    @contextmanager
    def admin(self) -> Iterator[TransactionAdmin]:
        """The admin client. An error ends the command: with exit code 1 if a repair was refused, otherwise with 2."""
        try:
            with TransactionAdmin(settings=self.settings(), timeout=self.timeout) as admin:
                yield admin
        except DualWriteError as error:
            show_error(error)
            refused = isinstance(error, RepairRefusedError | TransactionChangedError)
            raise typer.Exit(FOUND if refused else USAGE_ERROR) from error


@dataclass(frozen=True, kw_only=True)
class ClusterAndDatabase(Cluster, Database):
    """The options of a command that also looks into a database, if one is given."""


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
            raise typer.Exit(USAGE_ERROR if isinstance(error, ConfigurationError) else FOUND) from error


def _flags(command: Any) -> list[str]:
    return [name for each in command.params if getattr(each, "is_flag", False) for name in each.opts]


def in_our_order(args: list[str], commands: Collection[str], flags: Collection[str] = (JSON,)) -> list[str]:
    """The arguments after the group's name, with the command's name first; `flags` are the options without a value."""
    at = 0
    while at < len(args) and args[at].startswith("-"):
        if args[at] in ("--help", "--"):
            return args
        at += 1 if "=" in args[at] or args[at] in flags else 2
    if at >= len(args) or args[at] not in commands:
        return args
    return [args[at], *args[:at], *args[at + 1 :]]


def end(*, found: bool) -> None:
    """Exit with code 1 if something was found, or something is missing."""
    if found:
        raise typer.Exit(FOUND)
