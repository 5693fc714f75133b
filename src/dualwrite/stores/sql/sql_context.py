"""What all transactions of one SQL store share: its engine, dialect and connections, and the statements that they execute."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import ColumnElement, Connection, Dialect, Engine, Select, bindparam, literal, null, select, update
from sqlalchemy.exc import SQLAlchemyError

from dualwrite.stores.sql.dialect import StoreDialect
from dualwrite.stores.sql.engines import kept_connections
from dualwrite.stores.sql.guard import Guard, GuardedConnection, StatementBatch
from dualwrite.stores.sql.home import home_of
from dualwrite.stores.sql.isolation import SessionEffects
from dualwrite.stores.sql.local_settings import DeferredTriggers
from dualwrite.stores.sql.sql_errors import ErrorMap
from dualwrite.stores.sql.tables import gate_table
from dualwrite.stores.sql.tables import state_table as t
from dualwrite.stores.store_transaction import TransactionThread

if TYPE_CHECKING:
    from dualwrite.stores.sql.orm import SessionFactory, SessionSource

NEWEST_CLAIM: Final = select(t.c.fence, t.c.owner, t.c.store_id, t.c.transaction_number).where(
    t.c.transactional_id == bindparam("id")
)

_EPOCH: Final = select(gate_table.c.epoch).where(gate_table.c.prefix == bindparam("gate")).scalar_subquery()
NEWEST_CLAIM_AND_GATE: Final = NEWEST_CLAIM.add_columns(_EPOCH.label("epoch"))


class RecordStatements:
    """What records the state of a transaction in the row of its id; see StateRecord.

    Args:
        marked: The condition that the transaction is the marked one, or None.
    """

    def __init__(self, marked: ColumnElement[bool] | None) -> None:
        row = update(t).where(
            t.c.transactional_id == bindparam("id"),
            t.c.fence == bindparam("held_fence"),
            t.c.store_id == bindparam("held_store"),  # rule QN
        )
        row = row if marked is None else row.where(marked)
        self.record = row.values(
            prepared_transaction_state=bindparam("state"),
            prepared_generation=bindparam("of_generation"),
            transaction_number=bindparam("number"),
            delivery=bindparam("delivered"),
            updated_at=bindparam("now"),
        )
        # with a journal: see JournaledTransaction
        self.record_at_gate = self.record.where(bindparam("seen_epoch") == _EPOCH)
        self.record_number = row.values(transaction_number=bindparam("number"), updated_at=bindparam("now"))


class Access:
    """How transactions get their connections: by default SQLAlchemy's, from the store's engine."""

    savepoint: str = "begin_nested"
    """The handle's method for a savepoint."""

    def connect(self, context: StoreContext, guard: Guard) -> GuardedConnection:
        """A connection for one transaction; `close` returns it to the pool, `invalidate` closes it for good."""
        return GuardedConnection(context.engine, guard)

    def handle(self, connection: GuardedConnection) -> Any:
        """What the user writes with on that connection."""
        return connection

    def renew(self, handle: Any) -> None:
        """Forget what the user has set on a handle, or on None, apart from SQLAlchemy's connection."""

    def batch(self, connection: GuardedConnection) -> StatementBatch | None:
        """Begin to send the user's statements without waiting for the response to each; None if that is not possible."""
        del connection
        return None

    def async_handle(self, connection: GuardedConnection, thread: TransactionThread) -> Any:
        """What a coroutine writes with on that connection; see StoreTransaction."""
        from dualwrite.stores.sql.async_handles import AsyncConnection  # noqa: PLC0415  (the ORM, only when it is used)

        return AsyncConnection(connection, thread)

    def connections(self, engine: Engine) -> int:
        """How many connections of transactions are kept open."""
        return kept_connections(engine)

    can_replace: bool = True
    """Whether another connection can be made in place of one that is closed."""

    def check(self, own: Connection) -> None:
        """Check that the connections of transactions mean the same table as `own`, on which claims are made."""

    def close(self) -> None:
        """Release what this opened itself."""


class StoreContext:
    """Built once for a store, so that SQLAlchemy can cache the SQL of the statements."""

    def __init__(
        self, engine: Engine, dialect: StoreDialect, errors: ErrorMap, session: SessionSource | None, access: Access
    ) -> None:
        self.engine = engine
        self.home = home_of(engine)
        self.dialect = dialect
        self.errors = errors
        self.access = access
        self.session = session
        self.effects = SessionEffects(dialect.family)
        self.deferred_triggers = DeferredTriggers()
        self.users_engines: dict[tuple[Dialect, bool], Engine] = {}  # of `joined_transaction`
        dbapi = engine.dialect.dbapi
        self.driver_errors: tuple[type[BaseException], ...] = (SQLAlchemyError, *([dbapi.Error] if dbapi is not None else []))
        mark, marked = dialect.marking_column(), dialect.marked_condition()
        self.check_fence: Select[Any] = NEWEST_CLAIM if mark is None else NEWEST_CLAIM.add_columns(mark)
        self.begin_unclaimed: Select[Any] | None = None
        if mark is not None:
            own_id = null() if dialect.own_id is None else dialect.own_id
            texts = literal("").label("owner"), literal("").label("store_id")
            self.begin_unclaimed = select(own_id.label("fence"), *texts, literal(0).label("transaction_number"), mark)
        # with a journal: see JournaledTransaction
        self.check_fence_and_gate = self.check_fence.add_columns(_EPOCH.label("epoch"))
        self.lock = NEWEST_CLAIM.with_for_update()
        self.lock_with_gate = NEWEST_CLAIM_AND_GATE.with_for_update()
        statements = RecordStatements(marked)
        self.record, self.record_at_gate = statements.record, statements.record_at_gate
        self.record_number = statements.record_number

    @functools.cached_property
    def sessions(self) -> SessionFactory:
        """Creates the ORM sessions; the ORM is loaded only when it is used."""
        from dualwrite.stores.sql.orm import SessionFactory  # noqa: PLC0415  (only when it is used)

        return SessionFactory(self.session)
