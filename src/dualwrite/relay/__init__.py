"""Rows that are messages, each published and removed in one dual write, so once: outboxes, the journal, and dead letters.

`Drain` is the engine, and knows nothing of leases and threads. What it drains is a `Source`: the outbox of a program by an
`OutboxLayout`, or the journal, whose last turn closes the gate. A `Drainer` is the thread around it: a shard of a `Relay`, or a
pool's `JournalKeeper`.
"""

from dualwrite.relay.dead_letters import DeadLetter, DeadLetters
from dualwrite.relay.drain import BatchOptions
from dualwrite.relay.layout import DEBEZIUM, GENERIC, OutboxLayout
from dualwrite.relay.notifier import Notifier
from dualwrite.relay.options import RelayOptions
from dualwrite.relay.outbox_table import create_table, table_sql
from dualwrite.relay.relay import Relay
from dualwrite.relay.shards import RelayStatus, Worker

__all__ = [
    "DEBEZIUM",
    "GENERIC",
    "BatchOptions",
    "DeadLetter",
    "DeadLetters",
    "Notifier",
    "OutboxLayout",
    "Relay",
    "RelayOptions",
    "RelayStatus",
    "Worker",
    "create_table",
    "table_sql",
]
