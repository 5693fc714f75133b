"""Defaults of a relay that depend on its database: time limits, and the hash that divides rows into shards."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from dualwrite.errors import ConfigurationError
from dualwrite.outbox.layout import OutboxLayout
from dualwrite.outbox.outbox_sql import MYSQL
from dualwrite.settings import Timeouts
from dualwrite.stores.base import TxnStateStore
from dualwrite.stores.sql import SqlStateStore

_DELIVERY_TO_FILE: Final = 2.0
"""The default of `Timeouts.delivery` on SQLite, where others wait for the transaction: sqlite3 gives up after 5 s."""


def relay_timeouts(given: Timeouts, store: TxnStateStore) -> Timeouts:
    """The time limits, with a shorter default for `delivery` than a writer's, since rows are locked as long as it waits."""
    if given.delivery is None and store.is_local:
        return replace(given, delivery=_DELIVERY_TO_FILE)
    return given.in_pool()


def key_hash(layout: OutboxLayout, store: SqlStateStore) -> str:
    """The hash of the key in SQL."""
    dialect, quote = store.engine.dialect.name, store.engine.dialect.identifier_preparer.quote
    if layout.key is None:
        raise ConfigurationError("Rows without a key have no shard.", next_step="give shard_by=…, or use one shard")
    if dialect == "postgresql":
        return f"hashtext({quote(layout.key)}::text)"
    if dialect in MYSQL:
        return f"crc32({quote(layout.key)})"
    raise ConfigurationError(
        "SQLite has no function for a hash of the key.",
        next_step="use one shard: SQLite lets only one transaction write at a time; or give shard_by=…",
    )
