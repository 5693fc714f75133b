"""The state of an outbox and of its relays, for people and for monitoring."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from dualwrite.outbox.dead_letters import DeadLetters
from dualwrite.outbox.outbox_table import OutboxTable
from dualwrite.stores.leases import Lease


@dataclass(frozen=True, slots=True)
class Worker:
    """Who works on a shard now: its id, the owner of the lease, and in how many seconds that ends unless it is renewed."""

    transactional_id: str
    owner: str
    ends_in: float


@dataclass(frozen=True, slots=True)
class RelayStatus:
    """The state of an outbox and of its relays.

    Args:
        name: The relays' name.
        table: The outbox.
        waiting: The rows that could be published now.
        later: The rows whose `not_before` is in the future.
        oldest: The age of the oldest row of `waiting` in seconds, if the layout has a column for it.
        dead: The number of dead letters.
        workers: Who works on the shards.
    """

    name: str
    table: str
    waiting: int
    later: int
    oldest: float | None
    dead: int
    workers: tuple[Worker, ...]


def status_of(name: str, table: OutboxTable, dead_letters: DeadLetters, leases: Iterable[Lease]) -> RelayStatus:
    """The state now; `leases` are those of the shards.

    Raises:
        StoreError: The database's own errors, translated.
    """
    waiting = table.waiting()
    workers = tuple(
        Worker(each.transactional_id, each.owner, each.seconds_left or 0.0) for each in leases if not each.has_ended
    )
    return RelayStatus(name, table.name, waiting.rows, waiting.later, waiting.oldest, dead_letters.count(), workers)
