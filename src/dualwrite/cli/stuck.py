"""`dualwrite stuck`: which open transactions block `read_committed` consumers, where, and what the database decided.

Exit codes: 0 nothing is stuck, 1 something is stuck, or the output is incomplete, 2 usage error, or Kafka can't be reached.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Annotated, Any, Final

import typer
from rich.console import RenderableType

from dualwrite.admin import Holder, StuckPartition, StuckSearch, TransactionAdmin, WaitingGroup
from dualwrite.admin.decisions import is_made_by_dualwrite
from dualwrite.cli.options import (
    LONGER,
    AsJson,
    Decided,
    Decisions,
    GivenOptions,
    KafkaSettings,
    Longer,
    Schema,
    Url,
    Wide,
    counted,
    say,
    settings_for,
)
from dualwrite.cli.output import print_json, show, table_of, terminal_width
from dualwrite.cli.texts import error_text, now_ms, seconds_text
from dualwrite.cli.tool_options import TIMEOUT, Kafka, Timeout, ToolGroup, admin_tools, end
from dualwrite.cli.transactions_output import decision_text, document, show_problems, show_unreadable, stuck_json
from dualwrite.errors import StoreError, UnknownGroupError
from dualwrite.stores.positions import Partition

_HEADINGS: Final = (
    "Topic",
    "Partition",
    "LastStableOffset",
    "HighWatermark",
    "Records",
    "Duration(s)",
    "TransactionalId",
    "ProducerId",
    "ProducerEpoch",
    "State",
    "Groups",
)
_FOR_WIDE: Final = frozenset({"LastStableOffset", "HighWatermark", "ProducerId", "ProducerEpoch"})
_FEW: Final = 3

Order = Callable[[StuckPartition, int], Any]

ORDERS: Final[Mapping[str, Order]] = MappingProxyType(
    {
        "duration": lambda one, now: -(now if (age := one.holder.age_ms(now)) is None else age),
        "records": lambda one, _: -one.end.records_behind,
        "topic": lambda one, _: (one.end.topic, one.end.partition),
        "id": lambda one, _: one.holder.transactional_id or "",
        "groups": lambda one, _: -len(one.groups),
    }
)
"""The orders of the table, by name; the largest durations and numbers come first, and unknown durations before them."""


def stuck_table(
    found: StuckSearch,
    decided: Mapping[str, Decided],
    now_ms: int,
    *,
    order: str = "duration",
    backwards: bool = False,
    every_group: bool = True,
    wide: bool = False,
    width: int | None = None,
    rows: int | None = None,
) -> RenderableType:
    """The table.

    Args:
        found: What is stuck.
        decided: What the database decided, by transactional id; empty without a database.
        now_ms: Milliseconds since 1970.
        order: A key of ORDERS.
        backwards: Whether the order is reversed.
        every_group: Whether all groups are named, not only the first.
        wide: Whether to show all columns, not only the most important ones.
        width: The width of the terminal; None means unlimited.
        rows: The maximum number of rows; None for all.
    """
    shown = [name for name in _HEADINGS if wide or name not in _FOR_WIDE]
    by = ORDERS[order]
    lines = []
    for one in sorted(found.partitions, key=lambda each: by(each, now_ms), reverse=backwards)[:rows]:
        end, holder = one.end, one.holder
        values = (
            end.topic,
            end.partition,
            end.last_stable_offset,
            end.high_watermark,
            end.records_behind,
            seconds_text(holder.age_ms(now_ms)),
            holder.transactional_id,
            holder.opened.producer.producer_id,
            holder.opened.producer.epoch,
            _state(holder),
            _groups(one.groups, every=every_group),
        )
        cells: list[Any] = [value for name, value in zip(_HEADINGS, values, strict=True) if name in shown]
        if decided:
            database = decided.get(holder.transactional_id or "")
            cells.append(None if database is None else decision_text(database))
        lines.append(cells)
    return table_of((*shown, "Database") if decided else shown, lines, width)


def next_command(one: StuckPartition, decided: Mapping[str, Decided], given: GivenOptions) -> str:
    """The command that ends the transaction, or shows more about it if what is known is not enough."""
    end, holder = one.end, one.holder
    place = ("--topic", end.topic, "--partition", str(end.partition))
    if holder.hanging is not None and holder.hanging.is_conclusive:
        start = str(holder.opened.producer.transaction_start_offset)
        return given.command("transactions", "abort", *place, "--start-offset", start)
    if holder.hanging is not None:
        return given.of_kafka.command("transactions", "find-hanging", *place)
    if holder.transactional_id is None:
        return given.of_kafka.command("transactions", "describe-producers", *place)
    database = decided.get(holder.transactional_id)
    if database is None and is_made_by_dualwrite(holder.transactional_id):
        return f"{given.command('stuck')} --url URL"  # of the database that decides
    does = "describe" if database is None or database.plan is None or database.error is not None else "complete"
    return given.command("transactions", does, holder.transactional_id)


def _state(holder: Holder) -> str:
    if holder.hanging is not None:
        return f"{'hangs' if holder.hanging.is_conclusive else 'may hang'}: {holder.hanging.value}"
    return "" if holder.description is None else holder.description.status.value


def _groups(groups: tuple[WaitingGroup, ...], *, every: bool) -> str:
    shown = groups if every else groups[:_FEW]
    texts = [f"{one.group_id} ({_place(one)})" for one in shown]
    if len(groups) > len(shown):
        texts.append(f"{len(groups) - len(shown)} more")
    return ", ".join(texts)


def _place(group: WaitingGroup) -> str:
    if group.has_no_position:
        return "no position at Kafka"
    if group.offset is None:
        return "its offsets are pending"
    return f"at {group.offset}{' in the database' if group.is_stored else ''}"


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
