"""Publishing the rows of an outbox table, each once: `dualwrite.Relay`, its options, and layouts of outboxes."""

from dualwrite.outbox.dead_letters import DeadLetter, DeadLetters
from dualwrite.outbox.drain import BatchOptions
from dualwrite.outbox.layout import DEBEZIUM, GENERIC, OutboxLayout
from dualwrite.relay.options import RelayOptions
from dualwrite.relay.relay import Relay
from dualwrite.relay.status import RelayStatus, Worker
from dualwrite.relay.table_sql import create_table, table_sql

__all__ = [
    "DEBEZIUM",
    "GENERIC",
    "BatchOptions",
    "DeadLetter",
    "DeadLetters",
    "OutboxLayout",
    "Relay",
    "RelayOptions",
    "RelayStatus",
    "Worker",
    "create_table",
    "table_sql",
]
