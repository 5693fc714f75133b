"""Options of a relay: the outbox's layout, batches, waiting, shards, and rows that can't be sent."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Final, Literal

from dualwrite.errors import ConfigurationError
from dualwrite.relay.drain import BatchOptions
from dualwrite.relay.layout import GENERIC, OutboxLayout
from dualwrite.settings import Timeouts, check_count, check_seconds
from dualwrite.stores.base import TxnStateStore

_DELIVERY_TO_FILE: Final = 2.0
"""The default of `Timeouts.delivery` on SQLite, where others wait for the transaction: sqlite3 gives up after 5 s."""

OnPoison = Literal["dead_letter", "stop"]


@dataclass(frozen=True, slots=True)
class RelayOptions:
    """Options of a Relay.

    Args:
        layout: The outbox: its table, its columns, and what each is in a message.
        batch: The limits of one transaction.
        on_poison: What to do with a row that can't be sent, because it is not valid, its topic does not exist, or Kafka refuses
            its message: "dead_letter" moves it to the table `dualwrite_dead_letter` and continues with the next row; "stop"
            raises the error, and publishes nothing until somebody has corrected or deleted the row.
        poll: Seconds between two looks at an outbox that has just become empty; doubled after each further one.
        longest_poll: The maximum number of seconds between two looks.
        listen: A channel on which PostgreSQL notifies the relay of new rows (`LISTEN`), so that it looks at once.
        pause: Seconds before the first retry after a transient error; doubled after each further one.
        longest_pause: The maximum number of seconds between two retries.
        lease: Seconds after which another relay takes over from one that has died. Leases are renewed at a third of that.
        shards: The number of parts of the outbox, which relays share. With one, one relay works, and the others wait for its
            lease.
        shard_by: With several shards: an integer in SQL that is the same for all rows of a key, which says to which shard a row
            belongs. By default the key's hash: `hashtext(key::text)` on PostgreSQL, `crc32(key)` on MariaDB and MySQL.

    Raises:
        ConfigurationError: A value is not allowed.
    """

    layout: OutboxLayout = GENERIC
    batch: BatchOptions = field(default_factory=BatchOptions)
    on_poison: OnPoison = "dead_letter"
    poll: float = 0.05
    longest_poll: float = 1.0
    listen: str | None = None
    pause: float = 0.1
    longest_pause: float = 10.0
    lease: float = 15.0
    shards: int = 1
    shard_by: str | None = None

    def __post_init__(self) -> None:
        for name in ("poll", "longest_poll", "pause", "longest_pause", "lease"):
            check_seconds(name, getattr(self, name))
        check_count("shards", self.shards, most=1000)
        if self.on_poison not in ("dead_letter", "stop"):
            raise ConfigurationError(f"on_poison must be dead_letter or stop, not {self.on_poison!r}.")
        if self.shards == 1 and self.shard_by is not None:
            raise ConfigurationError("shard_by has no meaning with one shard.", next_step="give shards=…, or leave it out")


def relay_timeouts(given: Timeouts, store: TxnStateStore) -> Timeouts:
    """The time limits, with a shorter default for `delivery` than a writer's, since rows are locked as long as it waits."""
    if given.delivery is None and store.is_local:
        return replace(given, delivery=_DELIVERY_TO_FILE)
    return given.in_pool()
