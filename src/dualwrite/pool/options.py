"""PoolOptions: how a pool groups, when it answers, and for how long it leases its ids."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, get_args

from dualwrite.checks import check_count, check_seconds
from dualwrite.errors import ConfigurationError

Acknowledge = Literal["visible", "decided"]

MOST_UNITS: Final = 64
"""PostgreSQL caches 64 subtransactions of a transaction; a reader of its rows pays for each one beyond them."""


@dataclass(frozen=True, slots=True)
class PoolOptions:
    """How a pool groups, when it answers, and for how long it leases its ids.

    Args:
        acknowledge: When a call returns: "visible" after Kafka's commit, when consumers can read the messages; "decided" after
            the database's commit, after which neither side can be lost, only under two-phase commit.
        group_units: The most units of a group. Above 64, PostgreSQL's readers become slower; savepoints in a unit count too.
        group_bytes: The size of its messages in bytes at which a group accepts no more units.
        timeout: Seconds that a call waits for its turn, or `transaction()` for a writer.
        lease: Seconds for which the pool leases its ids; they are renewed three times as often. After so many seconds without
            a renewal, other pools of the prefix recover the ids of this one. In ZooKeeper the session's timeout counts instead.
        max_size: The most writers that `resize` allows.

    Raises:
        ConfigurationError: A value is out of range.
    """

    acknowledge: Acknowledge = "visible"
    group_units: int = MOST_UNITS
    group_bytes: int = 1_000_000
    timeout: float = 30.0
    lease: float = 30.0
    max_size: int = 64

    def __post_init__(self) -> None:
        if self.acknowledge not in get_args(Acknowledge):
            raise ConfigurationError(f"acknowledge is {self.acknowledge!r}.", next_step='use "visible" or "decided"')
        for name in ("group_units", "group_bytes", "max_size"):
            check_count(name, getattr(self, name))
        for name in ("timeout", "lease"):
            check_seconds(name, getattr(self, name))

    def check_size(self, size: int) -> None:
        """Refuse a number of writers.

        Raises:
            ConfigurationError: It is not from 1 to `max_size`.
        """
        limit = "each writer has a connection to the database and producers; PoolOptions(max_size=…) sets the limit"
        check_count("size", size, most=self.max_size, next_step=limit)
