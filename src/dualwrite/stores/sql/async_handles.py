"""The connection and the session of a coroutine: SQLAlchemy's asyncio methods, whose work is done in the transaction's thread.

They have the methods of `sqlalchemy.ext.asyncio.AsyncConnection` and `AsyncSession`, but are none: those need an asynchronous
driver and greenlets, which switch at every call of the driver. Here a whole statement with its rows is one call in a thread
that waits anyway, with the drivers that the recipe uses.

Most methods are those of the synchronous object, by their names: `_at_once` for what does not use the database, `_in_thread`
for what does, `refused` for what would end the transaction.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine, Generator, Iterator, Mapping
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Concatenate, Final, Generic, NoReturn, ParamSpec, Self, TypeVar

from sqlalchemy import Connection, CursorResult, Dialect, Engine, PoolProxiedConnection, Result, ScalarResult
from sqlalchemy.engine.cursor import FullyBufferedCursorFetchStrategy
from sqlalchemy.orm import Session

from dualwrite.errors import UsageError
from dualwrite.stores.sql.guard import Guard, GuardedConnection
from dualwrite.stores.store_transaction import TransactionThread, refused

P = ParamSpec("P")
T = TypeVar("T")
S = TypeVar("S", bound=Connection | Session)
R = TypeVar("R", bound=Result[Any])
Call = Callable[..., Coroutine[Any, Any, Any]]

BUFFERED: Final = "execute(), whose rows are read at once; for too many rows read parts of them inside run_sync()"

_READ_AT_ONCE: Final = {"prebuffer_rows": True}
"""The option with which SQLAlchemy's own AsyncSession makes the ORM load all objects before `execute` returns."""


# --- methods ------------------------------------------------------------------------------------------------------------------


def _at_once(method: Callable[Concatenate[Any, P], T]) -> Callable[Concatenate[Any, P], T]:
    """The method of the synchronous object."""

    @functools.wraps(method)
    def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        result: T = getattr(self._sync, method.__name__)(*args, **kwargs)
        return result

    call.__doc__ = f"As {method.__qualname__}."
    return call


def _in_thread(method: Callable[Concatenate[Any, P], T]) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]:
    """The method of the synchronous object, awaited."""

    @functools.wraps(method)
    async def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        result: T = await self._call(getattr(self._sync, method.__name__), *args, **kwargs)
        return result

    call.__doc__ = f"As {method.__qualname__}."
    return call


def _attribute(name: str) -> Any:
    """The attribute of the synchronous object: `_attribute("Session.new")`."""
    attribute = name.rpartition(".")[2]
    return property(
        lambda self: getattr(self._sync, attribute),
        lambda self, value: setattr(self._sync, attribute, value),
        doc=f"As {name}.",
    )


def _refused_later(call: str) -> Callable[..., Coroutine[Any, Any, NoReturn]]:
    async def refuse(self: _AsyncHandle[Any], *_: Any, **__: Any) -> NoReturn:
        self._refuse(call)

    refuse.__doc__ = "Refused."
    return refuse


def _no_stream(call: str) -> Callable[..., NoReturn]:
    """Refuse a result whose rows would be read one by one."""

    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise UsageError(f"{call} is not possible in a transaction of dualwrite.aio.", next_step=f"use {BUFFERED}")

    refuse.__doc__ = "Refused."
    return refuse


def buffered(result: R) -> R:
    """The result, with its rows read and its cursor closed, so that the driver is not called from the event loop's thread."""
    if isinstance(result, CursorResult) and result.returns_rows:
        rows = result.cursor_strategy.fetchall(result, result.cursor)
        result.cursor_strategy = FullyBufferedCursorFetchStrategy(None, initial_buffer=rows)
    return result


# --- the handles --------------------------------------------------------------------------------------------------------------


class AsyncSavepoint(Generic[T]):
    """A savepoint: `async with tx.db.begin_nested():`, or `savepoint = await tx.db.begin_nested()`.

    Args:
        call: Runs a function in the transaction's thread.
        begin: Begins the savepoint.

    Attributes:
        sync_transaction: SQLAlchemy's object, once it has begun.
    """

    def __init__(self, call: Call, begin: Callable[[], T], sync_transaction: T | None = None) -> None:
        self._call = call
        self._begin = begin
        self.sync_transaction = sync_transaction

    @property
    def is_active(self) -> bool:
        """Whether it has neither been released nor rolled back."""
        return bool(self._begun.is_active)

    @property
    def is_valid(self) -> bool:
        """Whether it is active, and its connection works."""
        return bool(self._begun.is_valid)

    async def start(self) -> Self:
        """Begin the savepoint, as `await` does; if the coroutine is cancelled meanwhile, it is rolled back."""
        await self._started(self._begun_now, lambda _: self._begun.rollback())
        return self

    async def commit(self) -> None:
        """Release the savepoint."""
        await self._call(self._begun.commit)

    async def rollback(self) -> None:
        """Roll back to the savepoint."""
        await self._call(self._begun.rollback)

    async def close(self) -> None:
        """Roll back to the savepoint, if it is active."""
        await self._call(self._begun.close)

    def __await__(self) -> Generator[Any, Any, Self]:
        return self.start().__await__()

    async def __aenter__(self) -> Self:
        await self._started(lambda: self._begun_now().__enter__(), lambda error: self._begun.__exit__(type(error), error, None))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._call(self._begun.__exit__, kind, error, trace)

    async def _started(self, begin: Callable[[], Any], undo: Callable[[BaseException], Any]) -> None:
        try:
            await self._call(begin)
        except asyncio.CancelledError as error:
            if self.sync_transaction is not None:  # it has begun, and nobody else ends it
                await self._call(undo, error)
            raise

    def _begun_now(self) -> Any:
        self.sync_transaction = self._begin()
        return self.sync_transaction

    @property
    def _begun(self) -> Any:
        if self.sync_transaction is None:
            raise UsageError("The savepoint has not begun.", next_step="use `async with`, or await it")
        return self.sync_transaction


class _AsyncHandle(Generic[S]):
    """What a connection and a session have in common."""

    def __init__(self, sync: S, guard: Guard, thread: TransactionThread) -> None:
        self._sync = sync
        self._guard = guard
        self._thread = thread

    async def _call(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a function in the transaction's thread."""
        return await self._thread.call(function, *args, **kwargs)

    def _refuse(self, call: str) -> NoReturn:
        self._guard.refuse(call)

    async def run_sync(self, fn: Callable[Concatenate[S, P], T], /, *arg: P.args, **kw: P.kwargs) -> T:
        """Run a plain function with the synchronous object, in the transaction's thread."""
        return await self._call(fn, self._sync, *arg, **kw)

    stream = _no_stream("stream()")
    stream_scalars = _no_stream("stream_scalars()")

    # --- savepoints -------------------------------------------------------------------------------------------------------

    def begin_nested(self) -> AsyncSavepoint[Any]:
        """A savepoint: `async with tx.db.begin_nested():`, or of `tx.session`."""
        return AsyncSavepoint(self._call, self._sync.begin_nested)

    def get_nested_transaction(self) -> AsyncSavepoint[Any] | None:
        """The innermost savepoint."""
        nested = self._sync.get_nested_transaction()
        return None if nested is None else AsyncSavepoint(self._call, self._sync.begin_nested, nested)

    # --- what would end the transaction -------------------------------------------------------------------------------------

    begin = refused("begin()")
    get_transaction = refused("get_transaction()")  # could only be used to commit or roll back
    commit = _refused_later("commit()")
    rollback = _refused_later("rollback()")
    close = _refused_later("close()")
    aclose = _refused_later("aclose()")
    invalidate = _refused_later("invalidate()")

    async def __aexit__(self, *_: object) -> None:
        """Never called: `__aenter__` refuses."""


class AsyncConnection(_AsyncHandle[Connection]):
    """A SQLAlchemy Connection for a coroutine, in a transaction that only the pool can end; used by one task at a time.

    `execute`, `scalar`, `scalars`, `exec_driver_sql`, `begin_nested`, `run_sync` and the others are those of
    `sqlalchemy.ext.asyncio.AsyncConnection`. All rows of a result have been read when the call returns. `commit`, `rollback`,
    `close` and everything else that would end the transaction raise TransactionControlError.

    Args:
        connection: The connection in the thread.
        thread: The transaction's thread.

    Attributes:
        sync_connection: The connection in the thread, for `run_sync` and listeners.
    """

    def __init__(self, connection: GuardedConnection, thread: TransactionThread) -> None:
        super().__init__(connection, connection.guard, thread)
        self.sync_connection = connection

    async def execute(self, statement: Any, parameters: Any = None, *, execution_options: Any = None) -> CursorResult[Any]:
        """As Connection.execute; the rows have been read."""
        execute = self.sync_connection.execute
        return await self._call(lambda: buffered(execute(statement, parameters, execution_options=execution_options)))

    async def scalar(self, statement: Any, parameters: Any = None, *, execution_options: Any = None) -> Any:
        """As Connection.scalar."""
        return (await self.execute(statement, parameters, execution_options=execution_options)).scalar()

    async def scalars(self, statement: Any, parameters: Any = None, *, execution_options: Any = None) -> ScalarResult[Any]:
        """As Connection.scalars."""
        return (await self.execute(statement, parameters, execution_options=execution_options)).scalars()

    async def exec_driver_sql(self, statement: str, parameters: Any = None, execution_options: Any = None) -> CursorResult[Any]:
        """As Connection.exec_driver_sql; the rows have been read."""
        execute = self.sync_connection.exec_driver_sql
        return await self._call(lambda: buffered(execute(statement, parameters, execution_options)))

    in_transaction = _at_once(Connection.in_transaction)
    in_nested_transaction = _at_once(Connection.in_nested_transaction)
    get_isolation_level = _in_thread(Connection.get_isolation_level)
    dialect: Dialect = _attribute("Connection.dialect")
    info: Any = _attribute("Connection.info")
    closed: bool = _attribute("Connection.closed")
    invalidated: bool = _attribute("Connection.invalidated")
    default_isolation_level: Any = _attribute("Connection.default_isolation_level")

    @property
    def sync_engine(self) -> Engine:
        """The engine, which is a synchronous one."""
        return self.sync_connection.engine

    async def execution_options(self, **opt: Any) -> Self:
        """As Connection.execution_options."""
        await self._call(self.sync_connection.execution_options, **opt)
        return self

    async def get_raw_connection(self) -> PoolProxiedConnection:
        """The driver's connection in SQLAlchemy's proxy, for use inside `run_sync`."""
        return await self._call(lambda: self.sync_connection.connection)

    __aenter__ = _refused_later("`async with` on the connection (it would close it)")


class AsyncSession(_AsyncHandle[Session]):
    """A SQLAlchemy ORM Session for a coroutine, in a transaction that only the pool can end; used by one task at a time.

    Its methods are those of `sqlalchemy.ext.asyncio.AsyncSession`. All objects of a result have been loaded when the call
    returns. An attribute that is not loaded can't be loaded by reading it: use an option such as `selectinload()`, `refresh`,
    or `run_sync`. What would end the transaction raises TransactionControlError.

    Args:
        session: The session in the thread.
        connection: Its connection.
        thread: The transaction's thread.

    Attributes:
        sync_session: The session in the thread, for `run_sync` and listeners.
    """

    def __init__(self, session: Session, connection: GuardedConnection, thread: TransactionThread) -> None:
        super().__init__(session, connection.guard, thread)
        self.sync_session = session
        self._connection = connection

    async def _call(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a function in the transaction's thread, outside of a batch: SQLAlchemy reads each response."""

        def call() -> T:
            self._guard.end_batch()
            return function(*args, **kwargs)

        return await self._thread.call(call)

    def _refuse(self, call: str) -> NoReturn:
        self._guard.refuse(call if call.startswith("`") else f"session.{call}")

    async def execute(
        self, statement: Any, params: Any = None, *, execution_options: Mapping[str, Any] | None = None, **options: Any
    ) -> Result[Any]:
        """As Session.execute; the rows have been read."""
        reading = {**(execution_options or {}), **_READ_AT_ONCE}
        execute = self.sync_session.execute
        return await self._call(lambda: buffered(execute(statement, params, execution_options=reading, **options)))

    async def scalar(
        self, statement: Any, params: Any = None, *, execution_options: Mapping[str, Any] | None = None, **options: Any
    ) -> Any:
        """As Session.scalar."""
        return (await self.execute(statement, params, execution_options=execution_options, **options)).scalar()

    async def scalars(
        self, statement: Any, params: Any = None, *, execution_options: Mapping[str, Any] | None = None, **options: Any
    ) -> ScalarResult[Any]:
        """As Session.scalars."""
        return (await self.execute(statement, params, execution_options=execution_options, **options)).scalars()

    async def connection(self, **options: Any) -> AsyncConnection:
        """The connection of the session, which is that of `tx.db`."""
        await self._call(self.sync_session.connection, **options)
        return AsyncConnection(self._connection, self._thread)

    # --- objects ----------------------------------------------------------------------------------------------------------

    get = _in_thread(Session.get)
    get_one = _in_thread(Session.get_one)
    refresh = _in_thread(Session.refresh)
    merge = _in_thread(Session.merge)
    delete = _in_thread(Session.delete)  # it may load related objects
    flush = _in_thread(Session.flush)  # at the end of the unit or block it happens by itself
    add = _at_once(Session.add)
    add_all = _at_once(Session.add_all)
    expire = _at_once(Session.expire)
    expire_all = _at_once(Session.expire_all)
    expunge = _at_once(Session.expunge)
    expunge_all = _at_once(Session.expunge_all)
    is_modified = _at_once(Session.is_modified)
    in_transaction = _at_once(Session.in_transaction)
    in_nested_transaction = _at_once(Session.in_nested_transaction)
    new: Any = _attribute("Session.new")
    dirty: Any = _attribute("Session.dirty")
    deleted: Any = _attribute("Session.deleted")
    identity_map: Any = _attribute("Session.identity_map")
    info: Any = _attribute("Session.info")
    is_active: bool = _attribute("Session.is_active")
    autoflush: bool = _attribute("Session.autoflush")
    no_autoflush: AbstractContextManager[Any] = _attribute("Session.no_autoflush")

    def __contains__(self, instance: object) -> bool:
        return instance in self.sync_session

    def __iter__(self) -> Iterator[object]:
        return iter(self.sync_session)

    reset = _refused_later("reset()")
    __aenter__ = _refused_later("`async with` on the session (it would close it)")
