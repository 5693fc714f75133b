"""Where a transaction's connection comes from, and what the user's block writes with."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, Engine

from dualwrite.stores.sql.async_connection import AsyncConnection
from dualwrite.stores.sql.engines import kept_connections
from dualwrite.stores.sql.guard import Batch, Guard, GuardedConnection
from dualwrite.stores.sql.home import look_up_tables
from dualwrite.stores.transaction import TransactionThread


class Access:
    """The default: a SQLAlchemy connection of the engine.

    Args:
        engine: The store's engine.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def use(self, engine: Engine) -> None:
        """Make connections from this engine instead: one with the same pool, which knows where our tables are."""
        self._engine = engine

    def guard(self, transactional_id: str) -> Guard:
        """The guard that the handles of one transaction share."""
        return Guard(transactional_id)

    def connect(self, guard: Guard) -> GuardedConnection:
        """A connection for one transaction; `close` returns it to the pool, `invalidate` closes it for good."""
        look_up_tables(self._engine)
        return GuardedConnection(self._engine, guard)

    def handle(self, connection: GuardedConnection) -> Any:
        """What the user writes with on that connection."""
        return connection

    def renew(self, handle: Any) -> None:
        """Forget what the user has set on a handle, or on None, apart from SQLAlchemy's connection."""

    def batch(self, connection: GuardedConnection) -> Batch | None:
        """Begin to send the user's statements without waiting for the response to each; None if that is not possible."""
        del connection
        return None

    def async_handle(self, connection: GuardedConnection, thread: TransactionThread) -> Any:
        """What a coroutine writes with on that connection; see StoreTransaction."""
        return AsyncConnection(connection, thread)

    @property
    def connections(self) -> int:
        """How many connections of transactions are kept open."""
        return kept_connections(self._engine)

    can_replace: bool = True
    """Whether another connection can be made in place of one that is closed."""

    def check(self, own: Connection) -> None:
        """Check that the connections of transactions mean the same table as `own`, on which claims are made."""

    def close(self) -> None:
        """Release what this opened itself."""
