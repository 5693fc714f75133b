"""`dualwrite stuck`: which open transactions block `read_committed` consumers, where, and what the database decided.

Exit codes: 0 nothing is stuck, 1 something is stuck, or the output is incomplete, 2 usage error, or Kafka can't be reached.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Final

import typer
from rich.console import RenderableType

from dualwrite.admin import StuckPartition
from dualwrite.admin.decisions import Decided, is_made_by_dualwrite
from dualwrite.cli.journal_output import waiting_lines, waiting_record
from dualwrite.cli.options import LONGER, AsJson, Given, Longer, Wide, decisions_for, grouped, say, store_for
from dualwrite.cli.output import Columns, Record, cells, show, table_of, terminal_width
from dualwrite.cli.tool_options import ClusterAndDatabase, ToolGroup, end
from dualwrite.cli.transactions_output import (
    print_document,
    show_problems,
    show_unreadable,
    unreadable_record,
)
from dualwrite.diagnosis.stuck import decision_text, groups_words, holder_words, look
from dualwrite.errors import BrokerUnavailableError, StoreError
from dualwrite.outbox.journal_state import JournalState, open_journals
from dualwrite.settings import Settings
from dualwrite.texts import counted, error_text, now_ms, seconds_text

Topic = Annotated[str | None, typer.Option("--topic", help="Only this topic.", show_default="all")]
Group = Annotated[str | None, typer.Option("--group", help="Only where this consumer group reads.", show_default="all")]

app = typer.Typer(cls=ToolGroup)


@dataclass(frozen=True, kw_only=True)
class Where:
    """Which transactions to look for."""

    topic: Topic = None
    group: Group = None
    longer: Longer = LONGER


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
    journals = Journals() if settings.database_url is None else _open_journals(settings)
    with cluster.admin() as admin, _shown_without_kafka(journals, cluster, as_json=as_json), ExitStack() as opened:
        decisions = cache(lambda: opened.enter_context(decisions_for(settings)))  # opened on first use
        seen = look(
            admin,
            None if settings.database_url is None else decisions,
            topic=where.topic,
            group=where.group,
            longer_than=where.longer,
        )
    found, is_complete = seen.found, seen.complete and journals.unread is None
    commands = [next_command(one, seen.decided, cluster) for one in found.partitions]
    records = seen.records(now_ms())
    if as_json:
        fields = {
            "searched_partitions": found.searched,
            "stuck": [{**one, "next_command": command} for one, command in zip(records, commands, strict=True)],
            "journals": [waiting_record(each, cluster, kafka_answers=True) for each in journals.states],
            "unreadable": [unreadable_record(one) for one in found.unreadable],
        }
        print_document("stuck", fields, complete=is_complete, problems=found.problems, hidden=found.hidden)
    else:
        if found.partitions:
            show(_table(records, wide=wide))
            for command in dict.fromkeys(commands):
                completes = command.startswith("dualwrite transactions complete")
                say(f"Next{', if its writer is gone' if completes else ''}: {command}")
        else:
            partitions = counted(found.searched, "partition")
            typer.echo(f"No consumer waits in {partitions} for a transaction older than {where.longer:g} s.")
        journals.show(cluster, kafka_answers=True)
        show_unreadable(found.unreadable)
        show_problems(found.problems, found.hidden)
    if seen.unread is not None:
        typer.echo(f"The positions of groups in the database are missing: {error_text(seen.unread)}", err=True)
    if journals.unread is not None:
        typer.echo(f"The journals in the database are missing: {error_text(journals.unread)}", err=True)
    end(found=bool(found.partitions or found.problems or journals.states) or not is_complete)


def next_command(one: StuckPartition, decided: Mapping[str, Decided], given: Given) -> str:
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
    database = decided.get(holder.transactional_id)
    if database is None and is_made_by_dualwrite(holder.transactional_id):
        return f"{given.command('stuck')} --url URL"  # of the database that decides
    does = "describe" if database is None or database.plan is None or database.error is not None else "complete"
    return given.command("transactions", does, holder.transactional_id)


# --- journals ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Journals:
    """The journals of the database that are open, or have entries; `unread` if they could not be read."""

    states: tuple[JournalState, ...] = ()
    unread: StoreError | None = None

    def show(self, given: Given, *, kafka_answers: bool | None) -> None:
        """Say what each waits for, and for whom."""
        for state in self.states:
            for line in waiting_lines(state, given, kafka_answers=kafka_answers):
                say(line)


def _open_journals(settings: Settings) -> Journals:
    with store_for(settings) as store:
        try:
            return Journals(open_journals(store))
        except StoreError as error:
            return Journals(unread=error)


@contextmanager
def _shown_without_kafka(journals: Journals, given: Given, *, as_json: bool) -> Iterator[None]:
    """If Kafka does not answer, show at least the journals, which then wait for it."""
    try:
        yield
    except BrokerUnavailableError:
        if not as_json:
            journals.show(given, kafka_answers=False)
        raise


# --- the table --------------------------------------------------------------------------------------------------------


_COLUMNS: Final[Columns] = {
    "Topic": "topic",
    "Partition": "partition",
    "LastStableOffset": "last_stable_offset",
    "HighWatermark": "high_watermark",
    "Records": "records_behind",
    "Duration(s)": lambda one: seconds_text(one["age_ms"]),
    "TransactionalId": "transactional_id",
    "ProducerId": "producer_id",
    "ProducerEpoch": "producer_epoch",
    "State": holder_words,
    "Groups": groups_words,
}
_FOR_WIDE: Final = frozenset({"LastStableOffset", "HighWatermark", "ProducerId", "ProducerEpoch"})


def _table(records: list[Record], *, wide: bool) -> RenderableType:
    """The table, with all columns or only the most important ones."""
    columns = {name: column for name, column in _COLUMNS.items() if wide or name not in _FOR_WIDE}
    if any(one["database"] is not None for one in records):
        columns["Database"] = lambda one: one["database"] and decision_text(one["database"])
    return table_of(columns, cells(columns, records), terminal_width())
