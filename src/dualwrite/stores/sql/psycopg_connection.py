"""The store on the user's psycopg connections: an open connection, a pool, or a function that makes connections.

SQLAlchemy runs the recipe on a view of the connection with plain tuples and default adapters, unaffected by the user's
settings. The user writes through a second view, which is their connection except that it can't end the transaction.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NoReturn, TypeGuard, cast
from weakref import WeakKeyDictionary

import psycopg
from sqlalchemy import URL, Connection, Engine, create_engine, event
from sqlalchemy.pool import NullPool, Pool, QueuePool

from dualwrite.errors import ConfigurationError, UsageError
from dualwrite.stores.sql.dialect import driver_connection
from dualwrite.stores.sql.engines import KEPT_CONNECTIONS
from dualwrite.stores.sql.guard import Guard, GuardedConnection, StatementBatch
from dualwrite.stores.sql.home import SHARED_CONNECTIONS, given_schema, home_of
from dualwrite.stores.sql.postgresql import is_behind_pooler
from dualwrite.stores.sql.psycopg_guard import GuardedPsycopgConnection
from dualwrite.stores.sql.psycopg_sources import (
    CONNECT_AGAIN,
    ConnectionSource,
    CreatedConnections,
    PipelineBatch,
    PooledConnections,
    Psycopg,
    PsycopgPool,
    RecipeConnection,
    SingleConnection,
    UnpreparedCursor,
    checked_connection,
    has_no_encoding,
    recipe_adapters,
    view_of,
)
from dualwrite.stores.sql.sql_context import Access, StoreContext
from dualwrite.stores.sql.tables import TABLE_NAME
from dualwrite.stores.store_transaction import TransactionThread

Source = Psycopg | PsycopgPool | Callable[[], Psycopg]

_SAVEPOINT: Final = "transaction()"


class PsycopgAccess(Access):
    """Transactions on connections that are checked out of a source; the engine is for the store's own, such as claims.

    Args:
        transaction_pool: Where the connections for transactions come from, if not from the engine's pool.
        source: Closed with the store, if it has something to close.
        connections: How many connections the source has, unless the engine's pool keeps them.
    """

    savepoint = _SAVEPOINT

    def __init__(
        self,
        *,
        transaction_pool: Pool | None = None,
        source: CreatedConnections | None = None,
        connections: int | None = None,
    ) -> None:
        self._connections = connections
        self._transaction_pool = transaction_pool
        self._source = source

    def connect(self, context: StoreContext, guard: Guard) -> GuardedConnection:
        context.home.look_up()  # before a connection is taken: it may be the only one
        pooled = None if self._transaction_pool is None else self._transaction_pool.connect()
        return GuardedConnection(context.engine, guard, pooled)

    def batch(self, connection: GuardedConnection) -> StatementBatch | None:
        """None behind a pooler, and if a function makes the cursors, since these would not wait for responses."""
        raw = _recipe_connection(connection)
        if raw.plain_cursor is UnpreparedCursor or not isinstance(raw.original.cursor_factory, type):
            return None
        return PipelineBatch(raw, connection.guard)

    def handle(self, connection: GuardedConnection) -> GuardedPsycopgConnection:
        """The user's own connection, guarded."""
        raw = _recipe_connection(connection)
        guarded = view_of(GuardedPsycopgConnection, raw.original)
        guarded.guard, guarded.owner = connection.guard, connection
        guarded.own, guarded.handlers = {}, []
        guarded.prepared = guarded.prepare_threshold, guarded.prepared_max
        return guarded

    def renew(self, handle: GuardedPsycopgConnection | None) -> None:
        if handle is not None:
            handle.restore()

    def async_handle(self, connection: GuardedConnection, thread: TransactionThread) -> NoReturn:
        """Refused: psycopg's connection blocks, and its asynchronous one can't be made from it."""
        del connection, thread
        raise UsageError(
            "A coroutine can't use a store of psycopg connections through `tx.db`: every statement would block the event loop.",
            next_step="run the statements in a plain function, which gets psycopg's connection as tx.db: `await "
            "tx.run_sync(function)`; or use `tx.session`; or make the pool with a URL or an Engine",
        )

    def connections(self, engine: Engine) -> int:
        return super().connections(engine) if self._connections is None else self._connections

    @property
    def can_replace(self) -> bool:  # type: ignore[override]  # a plain attribute of the others
        return self._transaction_pool is None

    def check(self, own: Connection) -> None:
        """See Access; the store's own connections do not have a `SET search_path` or `SET ROLE` of the user's connection.

        Raises:
            ConfigurationError: The store's own connections see another table.
        """
        if self._transaction_pool is None:
            return
        ours = own.exec_driver_sql(_query(home_of(own.engine).name()).replace("%", "%%")).scalar()
        users = self._transaction_pool.connect()
        try:
            cursor = users.cursor()
            cursor.execute(_query(TABLE_NAME if given_schema(own.engine) is None else home_of(own.engine).name()))
            theirs = (cursor.fetchone() or (None,))[0]
        finally:
            users.close()
        if theirs is not None and ours != theirs:
            raise ConfigurationError(
                f"The psycopg connection and the store's own connections see different tables {TABLE_NAME}.",
                cause="a setting of the connection was changed after it was made (search_path, role) and can't be read back",
                next_step="put it into the connection's parameters (options='-c search_path=…'), or pass a callable that makes "
                "such connections; or name the schema that both shall use: schema=…",
            )

    def close(self) -> None:
        if self._source is not None:
            self._source.close()


def psycopg_access(source: Source, own_parameters: dict[str, Any]) -> tuple[Engine, Access]:
    """The engine for a store on the user's connections, and the access to them; see `SqlStateStore.from_psycopg`.

    The store's own connections have `own_parameters`, unless the user's connection has others.

    Raises:
        ConfigurationError: `source` has another type, or is a closed connection.
    """
    if isinstance(source, psycopg.Connection):
        if source.closed:
            raise ConfigurationError("The psycopg connection is closed.", next_step=CONNECT_AGAIN)
        single, engine = SingleConnection(source), _engine_like(source, own_parameters)
        pool = NullPool(_views(single), dialect=engine.dialect)
        _close_when_invalidated(pool, single)
        return engine, PsycopgAccess(transaction_pool=pool, connections=1)
    if _is_pool(source):
        pooled = PooledConnections(source)
        sample = pooled.check_out()
        try:
            options = {SHARED_CONNECTIONS: True}
            engine = create_engine(_address(sample), creator=_views(pooled), poolclass=NullPool, execution_options=options)
        finally:
            pooled.check_in(sample)
        _close_when_invalidated(engine.pool, pooled)
        return engine, PsycopgAccess(connections=pooled.most - 1)  # leases and claims need one, too
    if not callable(source):
        raise ConfigurationError(
            f"A {type(source).__name__} is not a psycopg connection.",
            next_step="pass a psycopg.Connection, a psycopg_pool.ConnectionPool, or a function that returns a new connection",
        )
    first = checked_connection(source())
    made = CreatedConnections(source, first)
    engine = create_engine(_address(first), creator=_views(made), poolclass=QueuePool, pool_size=KEPT_CONNECTIONS)
    _close_when_invalidated(engine.pool, made)
    return engine, PsycopgAccess(source=made)


def _query(table: str) -> str:
    name = table.replace("'", "''")
    return f"SELECT pg_catalog.to_regclass('{name}')::oid"


def _recipe_connection(connection: GuardedConnection) -> RecipeConnection:
    raw = driver_connection(connection)
    assert isinstance(raw, RecipeConnection)
    return raw


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
    """The address for messages: without password, and never used to connect."""
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


def _views(source: ConnectionSource) -> Callable[[], Any]:
    adapters, decoding = recipe_adapters(), recipe_adapters(decodes=True)
    cursors: WeakKeyDictionary[Psycopg, type[psycopg.Cursor[Any]]] = WeakKeyDictionary()

    def make() -> RecipeConnection:
        original = source.check_out()
        view = view_of(RecipeConnection, original)
        view.original, view.source, view.returned = original, source, False
        view.adapters_map = decoding if has_no_encoding(original) else adapters
        if original not in cursors:  # this costs a query; once per connection is enough
            try:
                cursors[original] = UnpreparedCursor if is_behind_pooler(original) else psycopg.Cursor
            except BaseException as error:
                original.pgconn.finish()
                source.invalidated(error)
                view.close()
                raise
        view.plain_cursor = cursors[original]
        return view

    return make


def _close_when_invalidated(pool: Pool, source: ConnectionSource) -> None:
    """Close an invalidated connection, whatever its state: its transaction might still be open."""

    def invalidated(raw: Any, _record: Any, error: BaseException | None) -> None:
        raw.pgconn.finish()
        source.invalidated(error)

    def outdated(raw: Any, _record: Any, error: BaseException | None) -> None:
        source.outdated(raw.original, error)

    event.listen(pool, "invalidate", invalidated)
    event.listen(pool, "soft_invalidate", outdated)
