"""PoolOptions: how a pool groups units, when its calls return, and for how long it leases its ids."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from dualwrite.checks import check_count, check_seconds
from dualwrite.settings import Acknowledge, validate_acknowledge

MOST_UNITS: Final = 64
"""PostgreSQL caches 64 subtransactions per transaction; with more, reading the transaction's rows becomes slower."""


@dataclass(frozen=True, slots=True)
class PoolOptions:
    """How a pool groups units, when its calls return, and for how long it leases its ids.

    Args:
        acknowledge: When a call returns: "visible" means after Kafka's commit, when consumers can read the messages; "decided"
            means after the database's commit, when neither side can be lost any more. "decided" requires two-phase commit.
        group_units: The maximum number of units in a group, including the savepoints that the units set themselves. Above 64,
            PostgreSQL's readers become slower.
        group_bytes: The total size of a group's messages, in bytes, at which the group accepts no more units.
        timeout: Seconds that `run` waits for its unit to start, or `transaction()` for a writer.
        lease: Seconds for which the pool leases its ids; it renews the leases at a third of that interval. If they are not
            renewed for that long, other pools with the prefix recover this pool's ids. In ZooKeeper the session timeout applies
            instead.
        max_size: The maximum number of writers.
        alone: Run each unit in a transaction of its own. Needed only for units that change settings of the session in a way
            that can't be seen (docs/guides/pool.md); `with_options(alone=True)` does it for single units.

    Raises:
        ConfigurationError: A value is out of range.
    """

    acknowledge: Acknowledge = "visible"
    group_units: int = MOST_UNITS
    group_bytes: int = 1_000_000
    timeout: float = 30.0
    lease: float = 30.0
    max_size: int = 64
    alone: bool = False

    def __post_init__(self) -> None:
        validate_acknowledge(self.acknowledge)
        for name in ("group_units", "group_bytes", "max_size"):
            check_count(name, getattr(self, name))
        for name in ("timeout", "lease"):
            check_seconds(name, getattr(self, name))

    def check_size(self, size: int) -> None:
        """Check a number of writers.

        Raises:
            ConfigurationError: It is not from 1 to `max_size`.
        """
        limit = "each writer has a connection to the database and producers; PoolOptions(max_size=…) sets the limit"
        check_count("size", size, most=self.max_size, next_step=limit)
