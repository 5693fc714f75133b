"""`dualwrite stuck`: which open transactions block `read_committed` consumers, where, and what the database decided.

Exit codes: 0 nothing is stuck, 1 something is stuck, or the output is incomplete, 2 usage error, or Kafka can't be reached.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Final

import typer

from dualwrite.admin.decisions import is_made_by_dualwrite
from dualwrite.cli.journal import say_what_waits, waiting_record
from dualwrite.cli.options import AsJson, ClusterAndDatabase, Given, Longer, ToolGroup, Wide, decisions_for, grouped, store_for
from dualwrite.cli.output import FOUND, UNREADABLE, print_document, say, show_facts, show_missing, show_unreadable
from dualwrite.diagnosis.needs import LONGER_SECONDS
from dualwrite.diagnosis.stuck import STUCK, Stuck, decided_search
from dualwrite.errors import BrokerUnavailableError, StoreError
from dualwrite.relay.journal_state import JournalState, open_journals
from dualwrite.settings import Settings
from dualwrite.texts import counted, error_text

Topic = Annotated[str | None, typer.Option("--topic", help="Only this topic.", show_default="all")]
Group = Annotated[str | None, typer.Option("--group", help="Only where this consumer group reads.", show_default="all")]

_COLUMNS: Final = (
    *("topic", "partition", "last_stable_offset", "high_watermark", "records_behind", "age_ms"),
    *("transactional_id", "producer_id", "producer_epoch", "state", "groups", "database"),
)
_FOR_WIDE: Final = ("last_stable_offset", "high_watermark", "producer_id", "producer_epoch")

app = typer.Typer(cls=ToolGroup)


@dataclass(frozen=True, kw_only=True)
class Where:
    """Which transactions to look for."""

    topic: Topic = None
    group: Group = None
    longer: Longer = LONGER_SECONDS


@app.callback(invoke_without_command=True)
@grouped
def stuck(*, where: Where, cluster: ClusterAndDatabase, wide: Wide = False, as_json: AsJson = False) -> None:
    """Show where `read_committed` consumers wait for an open transaction: since when, who owns it, and which groups wait.

    With a database, also show what it decided about the transaction, the positions that groups keep there, and open journals:
    what they wait for, and for whom. The last lines are the commands to run next: `dualwrite transactions complete` ends a
    transaction as the database decided, `dualwrite transactions abort` one that hangs. Short transactions are left out: see
    `--longer-than`.
    """
    settings = cluster.settings()
    journals, unread = _open_journals(settings)
    with cluster.admin() as admin, _shown_without_kafka(journals, cluster, as_json=as_json):
        seen = decided_search(
            admin,
            None if settings.database_url is None else lambda: decisions_for(settings),
            topic=where.topic,
            group=where.group,
            longer_than=where.longer,
        )
    found, is_complete = seen.found, seen.complete and unread is None
    commands = [next_command(one, cluster) for one in seen.stuck]
    if as_json:
        fields = {
            "searched_partitions": found.searched,
            "stuck": [STUCK.record(one) | {"next_command": command} for one, command in zip(seen.stuck, commands, strict=True)],
            "journals": [waiting_record(each, cluster, kafka_answers=True) for each in journals],
            "unreadable": UNREADABLE.records(found.unreadable),
        }
        print_document("stuck", fields, complete=is_complete, problems=found.problems, hidden=found.hidden)
    else:
        if found.partitions:
            has_database = any(one.decided is not None for one in seen.stuck)
            columns = [name for name in _COLUMNS if (wide or name not in _FOR_WIDE) and (has_database or name != "database")]
            show_facts(STUCK, seen.stuck, columns)
            for command in dict.fromkeys(commands):
                completes = command.startswith("dualwrite transactions complete")
                say(f"Next{', if its writer is gone' if completes else ''}: {command}")
        else:
            partitions = counted(found.searched, "partition")
            typer.echo(f"No consumer waits in {partitions} for a transaction older than {where.longer:g} s.")
        say_what_waits(journals, cluster, kafka_answers=True)
        show_unreadable(found.unreadable)
        show_missing(found)
    if seen.unread is not None:
        typer.echo(f"The positions of groups in the database are missing: {error_text(seen.unread)}", err=True)
    if unread is not None:
        typer.echo(f"The journals in the database are missing: {error_text(unread)}", err=True)
    if found.partitions or found.problems or journals or not is_complete:
        raise typer.Exit(FOUND)


def next_command(one: Stuck, given: Given) -> str:
    """The command that ends the transaction, or shows more about it if what is known is not enough."""
    end, holder = one.end, one.holder
    place = ("--topic", end.topic, "--partition", str(end.partition))
    if holder.hanging is not None and holder.hanging.is_conclusive:
        start = str(holder.opened.producer.transaction_start_offset)
        return given.command("transactions", "abort", *place, "--start-offset", start)
    if holder.hanging is not None:
        return given.command("transactions", "find-hanging", *place, with_database=False)
    if holder.transactional_id is None:
        return given.command("transactions", "describe-producers", *place, with_database=False)
    database = one.decided
    if database is None and is_made_by_dualwrite(holder.transactional_id):
        return f"{given.command('stuck')} --url URL"  # of the database that decides
    does = "describe" if database is None or database.plan is None or database.error is not None else "complete"
    return given.command("transactions", does, holder.transactional_id)


# --- journals ---------------------------------------------------------------------------------------------------------


def _open_journals(settings: Settings) -> tuple[tuple[JournalState, ...], StoreError | None]:
    """The journals of the database that wait for something, or have entries; or why they could not be read."""
    if settings.database_url is None:
        return (), None
    with store_for(settings) as store:
        try:
            found = open_journals(store)
            return tuple(each for each in found if each.waits_for(kafka_answers=None) is not None or each.is_left_over), None
        except StoreError as error:
            return (), error


@contextmanager
def _shown_without_kafka(journals: Iterable[JournalState], given: Given, *, as_json: bool) -> Iterator[None]:
    """If Kafka does not answer, show at least the journals, which then wait for it."""
    try:
        yield
    except BrokerUnavailableError:
        if not as_json:
            say_what_waits(journals, given, kafka_answers=False)
        raise
