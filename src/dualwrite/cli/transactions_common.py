"""The common parts of the commands that examine a cluster's transactions: options, the admin client, exit codes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Final

import typer

from dualwrite.admin import TransactionAdmin
from dualwrite.cli.json_documents import show_error
from dualwrite.cli.options import USAGE_ERROR, settings_for
from dualwrite.errors import DualWriteError, RepairRefusedError, TransactionChangedError

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
        help="Abort it although no database knows it; if a database has committed it, its messages are lost.",
    ),
]
Timeout = Annotated[float, typer.Option("--timeout", min=0.1, help="Seconds to wait for Kafka.")]


@contextmanager
def admin_tools(kafka: str | None, kafka_config: list[str] | None, timeout: float) -> Iterator[TransactionAdmin]:
    """The admin client. An error ends the command: with exit code 1 if a repair was refused, otherwise with 2."""
    try:
        with TransactionAdmin(settings=settings_for(None, kafka, kafka_config), timeout=timeout) as admin:
            yield admin
    except DualWriteError as error:
        show_error(error)
        refused = isinstance(error, RepairRefusedError | TransactionChangedError)
        raise typer.Exit(FOUND if refused else USAGE_ERROR) from error


def end(*, found: bool) -> None:
    """Exit with code 1 if something was found, or something is missing."""
    if found:
        raise typer.Exit(FOUND)
