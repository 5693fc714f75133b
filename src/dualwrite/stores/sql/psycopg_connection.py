"""The store on psycopg connections of the user's: one that is open already, a pool, or a function that makes them.

SQLAlchemy runs the recipe on a view of the connection that has plain tuples and default adapters, so that nothing of the user's
settings can get between. The user writes through a second view, which is their connection but for ending the transaction.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeGuard, cast
from weakref import WeakKeyDictionary

import psycopg
from psycopg.adapt import AdaptersMap
from sqlalchemy import URL, Engine, create_engine, event
from sqlalchemy.pool import NullPool, Pool, QueuePool

from dualwrite.errors import ConfigurationError
from dualwrite.stores.sql.access import Access
from dualwrite.stores.sql.guard import Guard, GuardedConnection
from dualwrite.stores.sql.postgresql import is_behind_pooler
from dualwrite.stores.sql.psycopg_guard import GuardedPsycopgConnection
from dualwrite.stores.sql.psycopg_lenders import (
    CONNECT_AGAIN,
    FromPool,
    Lender,
    MadeOnDemand,
    OneConnection,
    Psycopg,
    PsycopgPool,
    checked_connection,
)
from dualwrite.stores.sql.psycopg_view import RecipeConnection, UnpreparedCursor, view_of
from dualwrite.stores.sql.schema import full_name
from dualwrite.stores.sql.table import TABLE_NAME

Source = Psycopg | PsycopgPool | Callable[[], Psycopg]

_SAVEPOINT: Final = "transaction()"
_TABLE: Final = "SELECT to_regclass('{}')::oid"


class PsycopgAccess(Access):
    """Transactions on the connections of a lender.

    Args:
        engine: The store's, for claims and the like.
        apart: The pool of transactions' connections, where they are not the engine's.
        lender: Closed with the store, where it has something to close.
    """

    def __init__(self, engine: Engine, *, apart: Pool | None = None, lender: MadeOnDemand | None = None) -> None:
        super().__init__(engine)
        self._apart = apart
        self._lender = lender

    def guard(self, transactional_id: str) -> Guard:
        """See Access."""
        return Guard(transactional_id, savepoint=_SAVEPOINT)

    def connect(self, guard: Guard) -> GuardedConnection:
        """See Access."""
        return GuardedConnection(self._engine, guard, None if self._apart is None else self._apart.connect())

    def handle(self, connection: GuardedConnection) -> GuardedPsycopgConnection:
        """See Access: the user's own connection, guarded."""
        raw = connection.connection.dbapi_connection
        assert isinstance(raw, RecipeConnection)
        guarded = view_of(GuardedPsycopgConnection, raw.original)
        guarded.guard = connection.guard
        return guarded

    def check(self) -> None:
        """See Access; `SET search_path` or `SET ROLE` on the user's connection is known to that connection alone.

        Raises:
            ConfigurationError: The store's own connections find another table.
        """
        if self._apart is None:
            return
        query = _TABLE.format(full_name(self._engine, TABLE_NAME).replace("'", "''"))
        with self._engine.connect() as own:
            ours = own.exec_driver_sql(query.replace("%", "%%")).scalar()
        users = self._apart.connect()
        try:
            cursor = users.cursor()
            cursor.execute(query)
            theirs = (cursor.fetchone() or (None,))[0]
        finally:
            users.close()
        if ours != theirs:
            raise ConfigurationError(
                f"The psycopg connection and the store's own connections see different tables {TABLE_NAME}.",
                cause="something was set on the connection after it was made (search_path, role), which can't be read back",
                next_step="put it into the connection's parameters (options='-c search_path=…'), or hand over a callable "
                "that makes such connections",
            )

    def close(self) -> None:
        """See Access."""
        if self._lender is not None:
            self._lender.close()


def psycopg_access(source: Source, own_parameters: dict[str, Any]) -> tuple[Engine, Access]:
    """The engine for a store on connections of the user's, and the access to these.

    Args:
        source: See `SqlStateStore.from_psycopg`.
        own_parameters: What connections of the store's own are made with, where the user's says nothing else.

    Raises:
        ConfigurationError: It is none of the kinds, or a connection that is closed.
    """
    if isinstance(source, psycopg.Connection):
        if source.closed:
            raise ConfigurationError("The psycopg connection is closed.", next_step=CONNECT_AGAIN)
        one, engine = OneConnection(source), _engine_like(source, own_parameters)
        apart = NullPool(_views(one), dialect=engine.dialect)
        _end_for_good(apart, one)
        return engine, PsycopgAccess(engine, apart=apart)
    if _is_pool(source):
        pooled = FromPool(source)
        looked_at = pooled.lend()
        try:
            engine = create_engine(_address(looked_at), creator=_views(pooled), poolclass=NullPool)
        finally:
            pooled.take_back(looked_at)
        _end_for_good(engine.pool, pooled)
        return engine, PsycopgAccess(engine)
    if not callable(source):
        raise ConfigurationError(
            f"A {type(source).__name__} is no psycopg connection.",
            next_step="a psycopg.Connection, a psycopg_pool.ConnectionPool, or a function that returns a new connection",
        )
    first = checked_connection(source())
    made = MadeOnDemand(source, first)
    engine = create_engine(_address(first), creator=_views(made), poolclass=QueuePool)
    _end_for_good(engine.pool, made)
    return engine, PsycopgAccess(engine, lender=made)


def _is_pool(source: object) -> TypeGuard[PsycopgPool]:
    return hasattr(source, "getconn") and hasattr(source, "putconn")


def _engine_like(connection: Psycopg, own_parameters: dict[str, Any]) -> Engine:
    """An engine whose connections are made with the parameters of `connection`."""
    info = connection.info
    parameters = {**own_parameters, **info.get_parameters()}
    if info.password:
        parameters["password"] = info.password  # also one that came from a password file

    def connect() -> Psycopg:
        made = psycopg.connect(**parameters)
        try:
            if is_behind_pooler(made):
                made.prepare_threshold = None
        except BaseException:
            made.close()
            raise
        return made

    return create_engine(_address(connection), creator=connect)


def _address(connection: Psycopg) -> URL:
    """For people: no password, and nothing connects by it."""
    info = connection.info
    host = info.host
    on_socket = host.startswith(("/", "@"))
    return URL.create(
        "postgresql+psycopg",
        username=info.user,
        host=None if on_socket else host or None,
        port=info.port,
        database=info.dbname,
        query=cast("dict[str, str]", {"host": host}) if on_socket else {},
    )


def _views(lender: Lender) -> Callable[[], Any]:
    adapters = AdaptersMap(psycopg.adapters)
    cursors: WeakKeyDictionary[Psycopg, type[psycopg.Cursor[Any]]] = WeakKeyDictionary()

    def make() -> RecipeConnection:
        original = lender.lend()
        view = view_of(RecipeConnection, original)
        view.original, view.lender, view.adapters_map, view.returned = original, lender, adapters, False
        if original not in cursors:  # a question to the server; each connection is asked once
            try:
                cursors[original] = UnpreparedCursor if is_behind_pooler(original) else psycopg.Cursor
            except BaseException as error:
                original.pgconn.finish()
                lender.broken(error)
                view.close()
                raise
        view.plain_cursor = cursors[original]
        return view

    return make


def _end_for_good(pool: Pool, lender: Lender) -> None:
    """An invalidated connection is closed whatever it is in: its transaction might live on."""

    def invalidated(raw: Any, _record: Any, error: BaseException | None) -> None:
        raw.pgconn.finish()
        lender.broken(error)

    event.listen(pool, "invalidate", invalidated)
