"""The table of `dualwrite stuck` and `dualwrite watch`, the orders that it can have, and the next command for a row."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

from rich.console import RenderableType

from dualwrite.admin import Holder, StuckPartition, StuckSearch, WaitingGroup
from dualwrite.admin.guard import is_made_by_dualwrite
from dualwrite.cli.decided import Decided
from dualwrite.cli.next_command import GivenOptions
from dualwrite.cli.tables import table_of
from dualwrite.cli.times import seconds_text
from dualwrite.cli.transactions_view import decision_text

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
