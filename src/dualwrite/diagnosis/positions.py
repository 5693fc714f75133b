"""The positions of consumer groups in a database, with where their partitions end at Kafka, and the facts about them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import groupby
from operator import itemgetter
from typing import Final

from dualwrite.admin import PartitionEnd, TransactionAdmin
from dualwrite.diagnosis.facts import Fact, Facts
from dualwrite.kafka.inspect import topic_ids
from dualwrite.settings import Settings
from dualwrite.stores.base import TxnStateStore
from dualwrite.stores.positions import Partition, Position, Positions
from dualwrite.texts import in_natural_order


@dataclass(frozen=True)
class ShownPosition:
    """A group's position, and if Kafka was queried, where its partition ends, and whether its topic was created again since."""

    group: str
    position: Position
    end: PartitionEnd | None = None
    replaced: bool = False

    @property
    def labels(self) -> tuple[str, str, str]:
        """The group, topic and partition, as labels of a metric."""
        return self.group, self.position.topic, str(self.position.partition)

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


POSITIONS: Final = Facts(
    Fact("group", "group"),
    Fact("topic", "topic", "position.topic"),
    Fact("partition", "partition", "position.partition"),
    Fact("offset", "position", "position.offset"),
    Fact("topic_id", value=lambda one: one.position.topic_id or None),
    Fact("updated_at", "updated", "position.updated_at"),
    Fact("last_stable_offset", value="end.last_stable_offset"),
    Fact("high_watermark", value="end.high_watermark"),
    Fact("behind", "behind"),
    Fact("held_back", "held back"),
    Fact("replaced", "", words=lambda replaced: "the topic was recreated: see on_new_topic" if replaced else None),
    columns=("group", "topic", "partition", "offset", "behind", "held_back", "updated_at", "replaced"),
)
"""The facts about one position."""


def read_shown(positions: Positions, groups: Iterable[str]) -> list[ShownPosition]:
    """The stored positions of groups, sorted within each."""
    return [ShownPosition(group, one) for group in groups for one in sorted(positions.read(group).values())]


def with_kafka(found: list[ShownPosition], settings: Settings, timeout: float = 30.0) -> list[ShownPosition]:
    """The same, with the state of their partitions at Kafka, read within `timeout` seconds for each query.

    Raises:
        BrokerError: Kafka does not respond.
    """
    topics = sorted({one.position.topic for one in found})
    with TransactionAdmin(settings=settings, timeout=timeout) as admin:
        ends: Mapping[Partition, PartitionEnd] = {(end.topic, end.partition): end for end in admin.ends(topics)}
    ids = topic_ids(settings.kafka, topics, timeout=timeout)
    return [replace(one, end=ends.get(one.position.key), replaced=is_replaced(one.position, ids)) for one in found]


def is_replaced(position: Position, ids: Mapping[str, str]) -> bool:
    """Whether the topic was created again since the position was stored."""
    return bool(position.topic_id) and ids.get(position.topic, "") not in ("", position.topic_id)


# --- groups ---------------------------------------------------------------------------------------------------------------


def shown_of(store: TxnStateStore, prefix: str = "") -> list[ShownPosition]:
    """The positions of the groups whose id starts with `prefix`; empty if the store has no positions."""
    return [] if store.positions is None else read_shown(store.positions, store.positions.groups(prefix))


def groups_of(found: Iterable[ShownPosition]) -> list[tuple[str, list[ShownPosition]]]:
    """The positions by group, sorted."""
    groups = [(name, list(ones)) for name, ones in groupby(found, lambda one: one.group)]
    return sorted(groups, key=lambda group: in_natural_order(group[0]))


GROUPS: Final = Facts(
    Fact("group", "consumer group", itemgetter(0)),
    Fact("topics", "topics", lambda group: sorted({one.position.topic for one in group[1]}), ", ".join),
    Fact("partitions", "partitions", lambda group: len(group[1])),
    Fact("behind", "behind", lambda group: _sum(one.behind for one in group[1])),
    Fact("held_back", "held back", lambda group: _sum(one.held_back for one in group[1])),
    Fact("updated_at", "updated", lambda group: _updated(group[1])),
)
"""The facts about a group, by its name and positions."""


def _sum(found: Iterable[int | None]) -> int | None:
    """The sum over all partitions; None if it is not known for one of them."""
    numbers = list(found)
    return None if None in numbers else sum(filter(None, numbers))


def _updated(found: Iterable[ShownPosition]) -> datetime | None:
    """When a position was last updated, in whole seconds."""
    latest = max((at for one in found if (at := one.position.updated_at) is not None), default=None)
    return None if latest is None else latest.replace(microsecond=0)
