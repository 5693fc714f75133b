"""`dualwrite stuck`: which open transactions block `read_committed` consumers, where, and what the database decided.

Exit codes: 0 nothing is stuck, 1 something is stuck, or the output is incomplete, 2 usage error, or Kafka can't be reached.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Final

import typer

from dualwrite.admin import StuckSearch, TransactionAdmin
from dualwrite.cli.decided import Decided, Decisions
from dualwrite.cli.errors import error_text
from dualwrite.cli.json_documents import print_json
from dualwrite.cli.next_command import GivenOptions
from dualwrite.cli.options import LONGER, AsJson, KafkaSettings, Longer, Schema, Url, Wide, counted, say, settings_for
from dualwrite.cli.stuck_view import next_command, stuck_table
from dualwrite.cli.tables import show, terminal_width
from dualwrite.cli.times import now_ms
from dualwrite.cli.tool_group import ToolGroup
from dualwrite.cli.transactions_common import TIMEOUT, Kafka, Timeout, admin_tools, end
from dualwrite.cli.transactions_json import document, stuck_json
from dualwrite.cli.transactions_view import show_problems, show_unreadable
from dualwrite.errors import StoreError, UnknownGroupError
from dualwrite.stores.positions import Partition

UNREAD: Final = "The positions of groups in the database are missing"

Topic = Annotated[str | None, typer.Option("--topic", help="Only this topic.", show_default="all")]
Group = Annotated[str | None, typer.Option("--group", help="Only where this consumer group reads.", show_default="all")]

app = typer.Typer(cls=ToolGroup)


@app.callback(invoke_without_command=True)
def stuck(
    *,
    topic: Topic = None,
    group: Group = None,
    longer: Longer = LONGER,
    url: Url = None,
    schema: Schema = None,
    kafka: Kafka = None,
    kafka_config: KafkaSettings = None,
    timeout: Timeout = TIMEOUT,
    wide: Wide = False,
    as_json: AsJson = False,
) -> None:
    """Show where `read_committed` consumers wait for an open transaction: since when, who owns it, and which groups wait.

    With a database, also show what it decided about the transaction, and the positions that groups keep there. The last lines
    are the commands to run next: `dualwrite transactions complete` ends a transaction as the database decided, `dualwrite
    transactions abort` one that hangs. Short transactions are left out: see `--longer-than`.
    """
    settings = settings_for(url, kafka, kafka_config, schema)
    with admin_tools(kafka, kafka_config, timeout) as admin, ExitStack() as opened:
        decisions = cache(lambda: opened.enter_context(Decisions(settings)))  # opened on first use
        seen = look(admin, None if settings.database_url is None else decisions, topic=topic, group=group, longer_than=longer)
    found = seen.found
    now = now_ms()
    given = GivenOptions(url, schema, kafka, tuple(kafka_config or ()))
    commands = [next_command(one, seen.decided, given) for one in found.partitions]
    if as_json:
        fields = stuck_json(found, seen.decided, commands, now)
        print_json(document("stuck", fields, complete=seen.complete, problems=found.problems, hidden=found.hidden))
    else:
        if found.partitions:
            show(stuck_table(found, seen.decided, now, wide=wide, width=terminal_width()))
            for command in dict.fromkeys(commands):
                completes = command.startswith("dualwrite transactions complete")
                say(f"Next{', if its writer is gone' if completes else ''}: {command}")
        else:
            typer.echo(
                f"No consumer waits in {counted(found.searched, 'partition')} for a transaction older than {longer:g} s."
            )
        show_unreadable(found.unreadable)
        show_problems(found.problems, found.hidden)
    if seen.unread is not None:
        typer.echo(f"{UNREAD}: {error_text(seen.unread)}", err=True)
    end(found=bool(found.partitions or found.problems) or not seen.complete)


@dataclass(frozen=True)
class Look:
    """The result of one search, with what the database knows about it.

    Args:
        found: What is stuck.
        decided: What the database decided, by transactional id; empty without a database.
        unread: The error that prevented reading the groups' positions in the database, if there was one.
    """

    found: StuckSearch
    decided: Mapping[str, Decided]
    unread: StoreError | None = None

    @property
    def complete(self) -> bool:
        """Whether nothing is missing."""
        return self.found.complete and self.unread is None and all(one.error is None for one in self.decided.values())


def look(
    admin: TransactionAdmin,
    decisions: Callable[[], Decisions] | None,
    *,
    topic: str | None,
    group: str | None,
    longer_than: float,
) -> Look:
    """Search once.

    Args:
        admin: The tools.
        decisions: Opens the database when it is needed; None if no database was given.
        topic: As for `TransactionAdmin.stuck`, like the others.
        group: The consumer group.
        longer_than: In seconds.

    Raises:
        StoreError: The group is unknown to Kafka, and its positions in the database can't be read.
        DualWriteError: As for `TransactionAdmin.stuck`.
    """
    if decisions is None:
        return Look(admin.stuck(topic=topic, group=group, longer_than=longer_than), {})
    unread: StoreError | None = None

    def stored(name: str) -> Mapping[Partition, int]:
        nonlocal unread
        try:
            return {} if unread is not None else decisions().positions(name)  # the next group would run into the same timeout
        except StoreError as error:
            unread = error
            return {}

    try:
        found = admin.stuck(topic=topic, group=group, longer_than=longer_than, stored=stored)
    except UnknownGroupError as error:
        raise unread or error from None
    names = dict.fromkeys(name for one in found.partitions if (name := one.holder.transactional_id) is not None)
    return Look(found, decisions().of_each(names) if names else {}, unread)
