"""Sources of psycopg connections, checked out and in: one connection of the user, a pool, or a function that makes them."""

from __future__ import annotations

import functools
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any, Final, Protocol, TypeVar

import psycopg
from psycopg.adapt import AdaptersMap, Buffer, Loader
from psycopg.pq import PipelineStatus, TransactionStatus
from psycopg.rows import tuple_row

from dualwrite import process
from dualwrite.errors import ConcurrentUseError, ConfigurationError, StoreError, UsageError
from dualwrite.stores.sql.guard import Guard

Psycopg = psycopg.Connection[Any]
CONNECT_AGAIN: Final = (
    "connect again and open a writer with the new connection; a callable or a psycopg_pool.ConnectionPool instead of a "
    "connection makes new ones automatically"
)


class PsycopgPool(Protocol):
    """The methods of `psycopg_pool.ConnectionPool` that are used."""

    def check(self) -> None:
        """Check all idle connections, and replace the broken ones."""

    def getconn(self) -> Psycopg:
        """A connection for exclusive use."""

    def putconn(self, conn: Psycopg) -> None:
        """Return a connection to the pool."""


class ConnectionSource(ABC):
    """Where connections that are ready for a transaction are checked out, and checked in after it."""

    def __init__(self) -> None:
        self._in_autocommit: set[int] = set()  # those that are checked out, by `id`

    def check_out(self) -> Psycopg:
        """A connection for exclusive use, without a transaction and not in autocommit; see `_taken` for the errors."""
        connection = self._taken()
        try:
            if connection.autocommit and not connection.closed:
                connection.autocommit = False
                self._in_autocommit.add(id(connection))
        except BaseException:
            self._give_back(connection)
            raise
        return connection

    def check_in(self, connection: Psycopg) -> None:
        """Return a connection after its transaction, open or closed, in autocommit if it was. Raises nothing."""
        try:
            if id(connection) in self._in_autocommit:
                self._in_autocommit.discard(id(connection))
                with suppress(psycopg.Error):
                    connection.autocommit = True
        finally:  # also after an interrupt: the user's only connection would stay in use for ever
            self._give_back(connection)

    @abstractmethod
    def _taken(self) -> Psycopg:
        """A connection for exclusive use, without a transaction."""

    @abstractmethod
    def _give_back(self, connection: Psycopg) -> None:
        """Return it."""

    def invalidated(self, error: BaseException | None) -> None:  # noqa: B027  (a function simply makes a new connection)
        """Note that a connection is being closed while it is checked out: it broke, or its transaction's outcome is unknown."""

    def outdated(self, connection: Psycopg, error: BaseException | None) -> None:  # noqa: B027  (the engine's pool acts on it)
        """Note that a connection that is checked out should be replaced once it is checked in, because of this error."""


class SingleConnection(ConnectionSource):
    """An open connection that the user owns; the store does not close it."""

    def __init__(self, connection: Psycopg) -> None:
        super().__init__()
        self._connection = connection
        self._in_use = threading.Lock()
        self._process = process.pid
        self._reason = "it was closed, or broke, outside of the writer's transactions"

    def _taken(self) -> Psycopg:
        """See ConnectionSource.

        Raises:
            StoreError: The connection is closed.
            ConcurrentUseError: Another transaction, or another thread, is using it.
            UsageError: It is in a transaction or a pipeline, or belongs to another process.
        """
        if process.pid != self._process:
            raise UsageError(
                "The psycopg connection was opened in another process, which still uses it.",
                next_step="open a connection, and a writer with it, in the process that uses them",
            )
        if not self._in_use.acquire(blocking=False):
            raise ConcurrentUseError(
                "The psycopg connection is in use by another transaction of this store.",
                next_step="end that transaction first; a psycopg_pool.ConnectionPool serves several threads",
            )
        try:
            self._check()
        except BaseException:
            self._in_use.release()
            raise
        return self._connection

    def _check(self) -> None:
        connection = self._connection
        if connection.closed:
            raise StoreError("The psycopg connection is closed.", cause=self._reason, next_step=CONNECT_AGAIN)
        if connection.pgconn.pipeline_status != PipelineStatus.OFF:
            raise UsageError(
                "The psycopg connection is in pipeline mode.", next_step="leave `with connection.pipeline()` first"
            )
        match connection.info.transaction_status:
            case TransactionStatus.IDLE:
                return
            case TransactionStatus.ACTIVE:
                raise ConcurrentUseError(
                    "The psycopg connection is running a statement, or a COPY or stream() that was not read to its end.",
                    next_step="use it from one thread at a time, and finish what is running before the writer's transaction",
                )
            case _:
                raise UsageError(
                    "The psycopg connection is already in a transaction.",
                    cause="a statement ran on it outside of the writer's transaction: psycopg begins a transaction with the "
                    "first statement, even a SELECT, unless the connection is in autocommit",
                    next_step="call commit() or rollback() before the writer's transaction begins, or set autocommit=True: the "
                    "writer still begins and ends its own transactions",
                )

    def _give_back(self, connection: Psycopg) -> None:
        del connection
        self._in_use.release()

    def invalidated(self, error: BaseException | None) -> None:
        if error is None:
            self._reason = "the answer to its last COMMIT never came, or its last rollback failed, so it was closed"
        else:
            self._reason = f"it broke: {type(error).__name__} {' '.join(str(error).split())}".rstrip()


class PooledConnections(ConnectionSource):
    """A `psycopg_pool.ConnectionPool` that the user owns; the store does not close it.

    Attributes:
        most: The maximum number of its connections; 0 if it does not say.
    """

    def __init__(self, pool: PsycopgPool) -> None:
        super().__init__()
        self.most = int(getattr(pool, "max_size", 0))
        self._pool = pool
        self._outdated: set[int] = set()

    def _taken(self) -> Psycopg:
        return checked_connection(self._pool.getconn())

    def _give_back(self, connection: Psycopg) -> None:
        """The pool replaces a closed connection."""
        if id(connection) in self._outdated:
            self._outdated.discard(id(connection))
            connection.close()
        self._pool.putconn(connection)

    def invalidated(self, error: BaseException | None) -> None:
        """A server's restart breaks all connections: the next attempt must not get another broken one."""
        if isinstance(error, psycopg.Error):
            with suppress(psycopg.Error):
                self._pool.check()

    def outdated(self, connection: Psycopg, error: BaseException | None) -> None:
        """See ConnectionSource; if the connection was read-only, then so may be all others, which psycopg_pool 3.3 replaces."""
        self._outdated.add(id(connection))
        if isinstance(error, psycopg.errors.ReadOnlySqlTransaction):
            drain = getattr(self._pool, "drain", None)
            if drain is not None:
                drain()


class CreatedConnections(ConnectionSource):
    """A function that makes connections, one of which it has already made; the store owns them, and keeps them for later."""

    def __init__(self, make: Callable[[], Psycopg], first: Psycopg) -> None:
        super().__init__()
        self._make = make
        self._made = [first]

    def _taken(self) -> Psycopg:
        try:
            connection = self._made.pop()
        except IndexError:
            connection = checked_connection(self._make())
        if not connection.closed:
            connection.rollback()  # what the function has executed on it is not ours to commit
        return connection

    def _give_back(self, connection: Psycopg) -> None:
        """The engine's pool does not need it any more."""
        connection.close()

    def close(self) -> None:
        """Close the connections that were never checked out."""
        while self._made:
            self._made.pop().close()


def checked_connection(made: object) -> Psycopg:
    """What the user's function or pool returned; ConfigurationError if it is not a connection."""
    if not isinstance(made, psycopg.Connection):
        raise ConfigurationError(
            f"The function or pool returned a {type(made).__name__}, not a psycopg.Connection.",
            next_step="for example: lambda: psycopg.connect('host=… dbname=…'); asynchronous connections are not supported",
        )
    return made


_TEXTS: Final = ("text", "varchar", "bpchar", "name", 0)
"""PostgreSQL's types of texts; 0 is for those that psycopg does not know."""

V = TypeVar("V", bound="ConnectionView")


class ConnectionView(psycopg.Connection[Any]):
    """A view of a psycopg connection: the same state, other methods. Made by `view_of`."""

    __slots__ = ()

    def check_use(self, gen: Any) -> None:
        """Called with what `wait` is about to run, before anything is sent; raises if that is refused."""

    def __del__(self, *_warn: Any) -> None:
        """Does nothing: psycopg's warns that a connection was left open, which the original connection does itself."""


def view_of(kind: type[V], connection: psycopg.Connection[Any]) -> V:
    """A view of `connection`; it keeps the methods of the user's own subclass of `psycopg.Connection`.

    The two share one `__dict__`, in which psycopg keeps all state of a connection: libpq's connection, the lock, the adapters,
    the prepared statements. So what is done through one is seen by the other; what belongs to the view alone is in its
    `__slots__`. One of the tests of other libraries' names fails if psycopg keeps its state elsewhere.
    """
    classes: Any = (kind, type(connection))
    view: V = object.__new__(_view_class(*classes))
    view.__dict__ = connection.__dict__
    return view


@functools.cache
def _view_class(kind: Any, of: Any) -> Any:
    return kind if of is psycopg.Connection else type(f"{kind.__name__}Of{of.__name__}", (kind, of), {"__slots__": ()})


class UnpreparedCursor(psycopg.Cursor[Any]):
    """Prepares no statements, whatever the connection's settings are."""

    __slots__ = ()

    def execute(self, query: Any, params: Any = None, **options: Any) -> Any:
        """As Cursor.execute."""
        return super().execute(query, params, **{**options, "prepare": False})


class _Utf8Loader(Loader):
    """Texts of a connection without an encoding, as str."""

    def load(self, data: Buffer) -> str:
        return bytes(data).decode()


def has_no_encoding(connection: psycopg.Connection[Any]) -> bool:
    """Whether the session's client_encoding is SQL_ASCII, as by default in such a database: psycopg returns texts as bytes."""
    return connection.pgconn.parameter_status(b"client_encoding") == b"SQL_ASCII"


def recipe_adapters(*, decodes: bool = False) -> AdaptersMap:
    """Psycopg's default adapters; with `decodes`, for connections without an encoding."""
    adapters = AdaptersMap(psycopg.adapters)
    for kind in _TEXTS if decodes else ():
        adapters.register_loader(kind, _Utf8Loader)
    return adapters


class RecipeConnection(ConnectionView):
    """A view that gives SQLAlchemy what it expects: tuples, plain cursors, psycopg's own adapters."""

    __slots__ = ("adapters_map", "original", "plain_cursor", "returned", "source")

    original: Psycopg
    source: ConnectionSource
    adapters_map: AdaptersMap
    plain_cursor: type[psycopg.Cursor[Any]]
    returned: bool

    @property
    def adapters(self) -> AdaptersMap:
        """The default adapters of psycopg, whatever the user has registered on the connection."""
        return self.adapters_map

    @property
    def row_factory(self) -> Any:  # type: ignore[override]  # set by nobody: a view is not initialised
        """Tuples."""
        return tuple_row

    @property
    def cursor_factory(self) -> Any:  # type: ignore[override]  # set by nobody: a view is not initialised
        """The plain cursor."""
        return self.plain_cursor

    @property
    def server_cursor_factory(self) -> Any:  # type: ignore[override]  # set by nobody: a view is not initialised
        """The plain server-side cursor."""
        return psycopg.ServerCursor

    def add_notice_handler(self, callback: Any) -> None:
        """Does nothing: SQLAlchemy's handlers would stay on the user's connection, one more with every transaction."""

    def close(self) -> None:
        """Return the connection to its source; if its transaction is still open, it is closed first."""
        if self.returned:
            return
        self.returned = True
        if not self.closed and self.info.transaction_status is not TransactionStatus.IDLE:
            self.pgconn.finish()
        self.source.check_in(self.original)

    def __del__(self, *_warn: Any) -> None:
        """Return the connection if an interrupt kept SQLAlchemy from doing so."""
        if not getattr(self, "returned", True):
            self.close()


class PipelineBatch:
    """See StatementBatch. The cursors of the guarded connection wait for a response when the user reads something from it."""

    def __init__(self, connection: RecipeConnection, guard: Guard) -> None:
        self._guard = guard
        self._open = ExitStack()
        self._pipeline = self._open.enter_context(connection.pipeline())

    def sync(self) -> None:
        self._pipeline.sync()

    def end(self) -> None:
        """May be called more than once."""
        self._guard.batch = None
        self._open.close()
