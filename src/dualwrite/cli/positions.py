"""Positions of consumer groups as commands show them: as stored, and compared with their partitions at Kafka."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from itertools import groupby
from typing import Any, Final

from dualwrite.admin import PartitionEnd, TransactionAdmin
from dualwrite.cli.natural_order import in_natural_order
from dualwrite.cli.options import refuse
from dualwrite.cli.tables import show_table
from dualwrite.cli.times import time_text
from dualwrite.kafka.inspect.topic_metadata import topic_ids
from dualwrite.kafka.librdkafka.idle_group import IdleGroup
from dualwrite.settings import Settings
from dualwrite.stores.base import TxnStateStore
from dualwrite.stores.positions import Partition, Position, Positions

TIMEOUT: Final = 30.0
"""Seconds to wait for Kafka."""


@dataclass(frozen=True)
class Shown:
    """A position, and the state of its partition at Kafka.

    Args:
        group: The consumer group.
        position: What is stored.
        end: Where the partition ends, if Kafka was queried.
        replaced: Whether the topic was deleted and created again since.
    """

    group: str
    position: Position
    end: PartitionEnd | None = None
    replaced: bool = False

    @property
    def behind(self) -> int | None:
        """How many offsets the group has not read yet, not counting those at and after an open transaction."""
        if self.replaced or self.end is None or self.end.last_stable_offset is None:
            return None
        return max(self.end.last_stable_offset - self.position.offset, 0)

    @property
    def held_back(self) -> int | None:
        """How many more offsets there are from the first open transaction on, which the group can't read yet."""
        if self.replaced or self.end is None or self.end.high_watermark is None or self.end.last_stable_offset is None:
            return None
        return self.end.records_behind

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        position = self.position
        return {
            "group": self.group,
            "topic": position.topic,
            "partition": position.partition,
            "offset": position.offset,
            "topic_id": position.topic_id or None,
            "updated_at": None if position.updated_at is None else position.updated_at.isoformat(),
            "last_stable_offset": None if self.end is None else self.end.last_stable_offset,
            "high_watermark": None if self.end is None else self.end.high_watermark,
            "behind": self.behind,
            "held_back": self.held_back,
            "replaced": self.replaced,
        }


def read_shown(positions: Positions, groups: Iterable[str]) -> list[Shown]:
    """The stored positions of groups, sorted within each."""
    return [Shown(group, one) for group in groups for one in sorted(positions.read(group).values())]


def with_kafka(found: list[Shown], settings: Settings) -> list[Shown]:
    """The same, with the state of their partitions at Kafka.

    Raises:
        BrokerError: Kafka does not respond.
    """
    topics = sorted({one.position.topic for one in found})
    with TransactionAdmin(settings=settings, timeout=TIMEOUT) as admin:
        ends: Mapping[Partition, PartitionEnd] = {(end.topic, end.partition): end for end in admin.ends(topics)}
    ids = topic_ids(settings.kafka, topics, timeout=TIMEOUT)
    return [
        Shown(
            one.group,
            one.position,
            ends.get(one.position.key),
            replaced=_is_replaced(one.position, ids),
        )
        for one in found
    ]


def _is_replaced(position: Position, ids: Mapping[str, str]) -> bool:
    return bool(position.topic_id) and ids.get(position.topic, "") not in ("", position.topic_id)


def commit_to_kafka(settings: Settings, group: str, stored: Mapping[Partition, Position]) -> None:
    """Set a group's offsets at Kafka to its positions, so that a consumer that uses these offsets continues where it stopped.

    Positions in topics that were deleted, or deleted and created again, are left out. Exits with a usage error if the group
    has members, or an offset that is ahead of its position.

    Raises:
        BrokerError: Kafka does not respond.
    """
    with IdleGroup(settings.kafka, group, TIMEOUT) as idle:
        members = idle.members()
        if members:
            refuse(
                f"The group {group!r} is consuming, with {members} member(s) at Kafka. Stop its processors first; a processor "
                "that died remains a member until its session times out."
            )
        ids = topic_ids(settings.kafka, {topic for topic, _ in stored}, timeout=TIMEOUT)
        places = {key: one.offset for key, one in stored.items() if key[0] in ids and not _is_replaced(one, ids)}
        committed = idle.committed(places)
        ahead = sorted(key for key, offset in committed.items() if offset > places[key])
        if ahead:
            topic, number = key = ahead[0]
            refuse(
                f"The offset of the group {group!r} at Kafka is ahead of its position on {topic}-{number}: {committed[key]} "
                f"and {places[key]}. A consumer with offsets at Kafka has continued from there, or the position was reset. "
                "--force forgets the positions, and leaves the offsets at Kafka unchanged."
            )
        idle.commit(places)


# --- groups in `dualwrite status` -----------------------------------------------------------------------------------------


def shown_of(store: TxnStateStore, prefix: str = "") -> list[Shown]:
    """The positions of the groups whose id starts with `prefix`; empty if the store has no positions."""
    return [] if store.positions is None else read_shown(store.positions, store.positions.groups(prefix))


def show_groups(found: Iterable[Shown]) -> None:
    """Print a row for each group."""
    rows = [
        (name, ", ".join(_topics(ones)), len(ones), _sum(ones, "behind"), _sum(ones, "held_back"), time_text(_updated(ones)))
        for name, ones in _by_group(found)
    ]
    show_table(("consumer group", "topics", "partitions", "behind", "held back", "updated"), rows)


def groups_json(found: Iterable[Shown]) -> list[dict[str, Any]]:
    """The groups, as JSON values."""
    return [
        {
            "group": name,
            "topics": _topics(ones),
            "partitions": len(ones),
            "behind": _sum(ones, "behind"),
            "held_back": _sum(ones, "held_back"),
            "updated_at": None if (at := _updated(ones)) is None else at.isoformat(timespec="seconds"),
        }
        for name, ones in _by_group(found)
    ]


def _by_group(found: Iterable[Shown]) -> list[tuple[str, list[Shown]]]:
    groups = [(name, list(ones)) for name, ones in groupby(found, lambda one: one.group)]
    return sorted(groups, key=lambda group: in_natural_order(group[0]))


def _topics(found: list[Shown]) -> list[str]:
    return sorted({one.position.topic for one in found})


def _sum(found: list[Shown], name: str) -> int | None:
    """The sum over all partitions; None if it is not known for one of them."""
    numbers = [getattr(one, name) for one in found]
    return None if None in numbers else sum(numbers)


def _updated(found: list[Shown]) -> datetime | None:
    return max((at for one in found if (at := one.position.updated_at) is not None), default=None)
