"""What can be read at any moment, without an event: sizes, queues, ages. Pools, processors and relays offer such readings."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final, Protocol
from weakref import WeakSet


@dataclass(frozen=True, slots=True)
class Reading:
    """One number.

    Args:
        name: What it is, in the form of a metric: `pool_waiting_calls`.
        value: The number; seconds or a count.
        labels: What it is about, such as the prefix of a pool.
    """

    name: str
    value: float
    labels: dict[str, str] = field(default_factory=dict)


READINGS: Final = {
    "pool_writers": "Writers of a pool that can be used now.",
    "pool_busy_writers": "Writers of a pool that have a transaction.",
    "pool_waiting_calls": "Calls that wait for a group of a pool.",
    "pool_leases": "Ids that a pool has leased.",
    "journal_open": "1 while messages go into the journal, otherwise 0.",
    "journal_messages": "Messages to be published from the journal, when they were counted last; absent while it is closed.",
    "journal_bytes": "Bytes of these messages.",
    "journal_age_seconds": "Seconds for which its oldest message has waited; absent while it is closed.",
    "journal_later_messages": "Messages that wait for their time; absent while it is closed.",
    "processor_partitions": "Partitions that a processor has.",
    "processor_lag_messages": "Offsets up to the end of a partition that a processor has not processed yet.",
    "processor_lag_seconds": "Age of the last message that was processed, while there are newer ones; otherwise 0.",
    "processor_idle_seconds": "Seconds since a processor last asked for messages, or began an attempt at a batch.",
    "relay_shards": "Shards that a relay of this process has.",
    "relay_idle_seconds": "Seconds since a shard of a relay last looked for rows, of the slowest one; it grows in an outage.",
    "outage_open_seconds": "Seconds for which a side has not answered; 0 if it does.",
    "kafka_throttled_seconds": "Seconds for which quotas of Kafka have held back requests of this process, in all.",
}
"""All readings, and what each means."""


def side_of(name: str) -> str:
    """The value of a label `side` for a side, such as Kafka at an address."""
    return "kafka" if name.startswith("Kafka") else "database"


class ReadingSource(Protocol):
    """Something that offers readings while it exists."""

    def readings(self) -> Iterable[Reading]:
        """Its readings now; must not wait for anything."""


_sources: Final[WeakSet[ReadingSource]] = WeakSet()


def add_source(source: ReadingSource) -> None:
    """Offer the readings of an object from now on, until it is removed or collected."""
    _sources.add(source)


def remove_source(source: ReadingSource) -> None:
    """Offer the readings of an object no longer."""
    _sources.discard(source)


def current_readings() -> Iterator[Reading]:
    """The readings of all pools, processors and relays of this process."""
    for source in list(_sources):
        yield from source.readings()
