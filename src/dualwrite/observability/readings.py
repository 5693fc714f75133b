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
    "journal_open": "1 while messages go into the journal, otherwise 0.",
    "processor_lag_messages": "Messages of a partition that a processor has not processed yet.",
    "processor_lag_seconds": "Age of the last message that a processor has processed, while there are newer ones.",
    "relay_shards": "Shards that a relay of this process has.",
}
"""All readings, and what each means."""


class Source(Protocol):
    """Something that offers readings while it exists."""

    def readings(self) -> Iterable[Reading]:
        """Its readings now; must not wait for anything."""


_sources: Final[WeakSet[Source]] = WeakSet()


def add_source(source: Source) -> None:
    """Offer the readings of an object from now on, until it is removed or collected."""
    _sources.add(source)


def remove_source(source: Source) -> None:
    """Offer the readings of an object no longer."""
    _sources.discard(source)


def current_readings() -> Iterator[Reading]:
    """The readings of all pools, processors and relays of this process."""
    for source in list(_sources):
        yield from source.readings()
