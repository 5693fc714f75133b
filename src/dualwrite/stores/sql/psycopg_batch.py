"""A batch of statements on a psycopg connection, sent through libpq's pipeline."""

from __future__ import annotations

from contextlib import ExitStack

from dualwrite.stores.sql.guard import Guard
from dualwrite.stores.sql.psycopg_view import RecipeConnection


class PipelineBatch:
    """See Batch. The cursors of the guarded connection wait for a response when the user reads something from it.

    Args:
        connection: The connection, in a transaction.
        guard: The guard of the transaction, which the cursors use too.
    """

    def __init__(self, connection: RecipeConnection, guard: Guard) -> None:
        self._guard = guard
        self._open = ExitStack()
        self._pipeline = self._open.enter_context(connection.pipeline())

    def sync(self) -> None:
        """See Batch."""
        self._pipeline.sync()

    def end(self) -> None:
        """See Batch. May be called more than once."""
        self._guard.batch = None
        self._open.close()
