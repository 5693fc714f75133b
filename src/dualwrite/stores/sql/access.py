"""Where a transaction's connection comes from, and what the user's block writes with."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Engine

from dualwrite.stores.sql.guard import Guard, GuardedConnection


class Access:
    """The usual one: a connection of the engine, by SQLAlchemy.

    Args:
        engine: The store's.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def use(self, engine: Engine) -> None:
        """Make connections by this engine instead: one over the same pool, for tables in a schema."""
        self._engine = engine

    def guard(self, transactional_id: str) -> Guard:
        """What the handles of one transaction share."""
        return Guard(transactional_id)

    def connect(self, guard: Guard) -> GuardedConnection:
        """A connection for one transaction; closing it gives it back, invalidating it ends it for good."""
        return GuardedConnection(self._engine, guard)

    def handle(self, connection: GuardedConnection) -> Any:
        """What the user writes with on that connection."""
        return connection

    def check(self) -> None:
        """See that transactions and claims meet the same table."""

    def close(self) -> None:
        """Release what this opened itself."""
