"""What all transactions of one SQL store share: its engine, dialect and connections, and the statements that they execute."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import Connection, Engine, Select, Update, bindparam, select, update
from sqlalchemy.exc import SQLAlchemyError

from dualwrite.stores.sql.async_handles import AsyncConnection
from dualwrite.stores.sql.dialect import MergedStatements, Record, StoreDialect
from dualwrite.stores.sql.engines import kept_connections
from dualwrite.stores.sql.guard import Batch, Guard, GuardedConnection
from dualwrite.stores.sql.session_text import SessionEffects
from dualwrite.stores.sql.sql_errors import ErrorMap
from dualwrite.stores.sql.tables import state_table as t
from dualwrite.stores.store_transaction import TransactionThread

if TYPE_CHECKING:
    from dualwrite.stores.sql.orm import SessionFactory, SessionSource


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

    savepoint: str = "begin_nested"
    """The handle's method for a savepoint."""

    def connect(self, guard: Guard) -> GuardedConnection:
        """A connection for one transaction; `close` returns it to the pool, `invalidate` closes it for good."""
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


NEWEST_CLAIM: Final = select(t.c.fence, t.c.owner, t.c.store_id).where(t.c.transactional_id == bindparam("id"))


@dataclass(frozen=True)
class StoreContext:
    """Built once for a store, so that SQLAlchemy can cache the SQL of the statements.

    Args:
        engine: Where connections come from.
        dialect: The database's dialect.
        errors: Translates its errors.
        access: Gives transactions their connections.
        session: What the user creates ORM sessions from, or None.
    """

    engine: Engine
    dialect: StoreDialect
    errors: ErrorMap
    access: Access
    session: SessionSource | None = None
    effects: SessionEffects = field(init=False)
    merged: Callable[[Connection], MergedStatements] | None = field(init=False)
    check_fence: Select[Any] = field(init=False)
    record: Update = field(init=False)
    driver_errors: tuple[type[BaseException], ...] = field(init=False)

    def __post_init__(self) -> None:
        mark = self.dialect.marking_column()
        check = NEWEST_CLAIM if mark is None else NEWEST_CLAIM.add_columns(mark)
        record = (
            update(t)
            .where(
                t.c.transactional_id == bindparam("id"),
                t.c.fence == bindparam("fence_"),
                t.c.store_id == bindparam("store_id_"),  # rule QN
            )
            .values(
                prepared_transaction_state=bindparam("state"),
                prepared_generation=bindparam("generation_"),
                transaction_number=bindparam("number"),
                delivery=bindparam("delivery_"),
                updated_at=bindparam("now"),
            )
        )
        marked = self.dialect.marked_condition()
        object.__setattr__(self, "effects", SessionEffects(self.dialect.family))
        object.__setattr__(self, "merged", self.dialect.merged_statements(self.engine))
        object.__setattr__(self, "check_fence", check)
        object.__setattr__(self, "record", record if marked is None else record.where(marked))
        dbapi = self.engine.dialect.dbapi
        object.__setattr__(self, "driver_errors", (SQLAlchemyError, *([dbapi.Error] if dbapi is not None else [])))

    @functools.cached_property
    def sessions(self) -> SessionFactory:
        """Creates the ORM sessions; the ORM is loaded only when it is used."""
        from dualwrite.stores.sql.orm import SessionFactory  # noqa: PLC0415  (only when it is used)

        return SessionFactory(self.session)


def parameters_of(record: Record) -> dict[str, Any]:
    """The parameters of `StoreContext.record`."""
    return {
        "id": record.transactional_id,
        "fence_": record.fence,
        "store_id_": record.store_id,
        "state": record.state,
        "delivery_": record.delivery,
        "generation_": record.generation,
        "number": record.number,
        "now": record.now,
        "token": record.token,
    }
