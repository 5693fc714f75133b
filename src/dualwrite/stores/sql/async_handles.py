"""The connection of a coroutine: SQLAlchemy's asyncio methods, whose work is done in the transaction's thread.

It has the methods of `sqlalchemy.ext.asyncio.AsyncConnection`, but is not one: that class needs an asynchronous driver and
greenlets, which switch at every call of the driver. Here a whole statement with its rows is one call in a thread that waits
anyway, with the drivers that the recipe uses.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Concatenate, Final, Generic, NoReturn, ParamSpec, Self, TypeVar

from sqlalchemy import Connection, CursorResult, Dialect, Engine, PoolProxiedConnection, Result, ScalarResult
from sqlalchemy.engine.cursor import FullyBufferedCursorFetchStrategy
from sqlalchemy.orm import Session

from dualwrite.errors import UsageError
from dualwrite.stores.sql.guard import GuardedConnection
from dualwrite.stores.store_transaction import TransactionThread

P = ParamSpec("P")
T = TypeVar("T")

BUFFERED: Final = "execute(), whose rows are read at once; for too many rows read parts of them inside run_sync()"


class AsyncSavepoint(Generic[T]):
    """A savepoint: `async with tx.db.begin_nested():`, or `savepoint = await tx.db.begin_nested()`.

    Args:
        thread: The transaction's thread.
        begin: Begins the savepoint.

    Attributes:
        sync_transaction: SQLAlchemy's object, once it has begun.
    """

    def __init__(self, thread: TransactionThread, begin: Callable[[], T]) -> None:
        self._thread = thread
        self._begin = begin
        self.sync_transaction: T | None = None

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
        await self._thread.call(self._begun.commit)

    async def rollback(self) -> None:
        """Roll back to the savepoint."""
        await self._thread.call(self._begun.rollback)

    async def close(self) -> None:
        """Roll back to the savepoint, if it is active."""
        await self._thread.call(self._begun.close)

    def __await__(self) -> Generator[Any, Any, Self]:
        return self.start().__await__()

    async def __aenter__(self) -> Self:
        await self._started(lambda: self._begun_now().__enter__(), lambda error: self._begun.__exit__(type(error), error, None))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._thread.call(self._begun.__exit__, kind, error, trace)

    async def _started(self, begin: Callable[[], Any], undo: Callable[[BaseException], Any]) -> None:
        try:
            await self._thread.call(begin)
        except asyncio.CancelledError as error:
            if self.sync_transaction is not None:  # it has begun, and nobody else ends it
                await self._thread.call(undo, error)
            raise

    def _begun_now(self) -> Any:
        self.sync_transaction = self._begin()
        return self.sync_transaction

    @property
    def _begun(self) -> Any:
        if self.sync_transaction is None:
            raise UsageError("The savepoint has not begun.", next_step="use `async with`, or await it")
        return self.sync_transaction


class AsyncConnection:
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
        self.sync_connection = connection
        self._thread = thread

    # --- statements -------------------------------------------------------------------------------------------------------

    async def execute(self, statement: Any, parameters: Any = None, *, execution_options: Any = None) -> CursorResult[Any]:
        """As Connection.execute; the rows have been read."""

        def execute() -> CursorResult[Any]:
            return buffered(self.sync_connection.execute(statement, parameters, execution_options=execution_options))

        return await self._thread.call(execute)

    async def scalar(self, statement: Any, parameters: Any = None, *, execution_options: Any = None) -> Any:
        """As Connection.scalar."""
        return (await self.execute(statement, parameters, execution_options=execution_options)).scalar()

    async def scalars(self, statement: Any, parameters: Any = None, *, execution_options: Any = None) -> ScalarResult[Any]:
        """As Connection.scalars."""
        return (await self.execute(statement, parameters, execution_options=execution_options)).scalars()

    async def exec_driver_sql(self, statement: str, parameters: Any = None, execution_options: Any = None) -> CursorResult[Any]:
        """As Connection.exec_driver_sql; the rows have been read."""

        def execute() -> CursorResult[Any]:
            return buffered(self.sync_connection.exec_driver_sql(statement, parameters, execution_options))

        return await self._thread.call(execute)

    async def run_sync(self, fn: Callable[Concatenate[Connection, P], T], /, *arg: P.args, **kw: P.kwargs) -> T:
        """Run a plain function with the synchronous Connection, in the transaction's thread."""
        return await self._thread.call(fn, self.sync_connection, *arg, **kw)

    def stream(self, statement: Any, parameters: Any = None, *, execution_options: Any = None) -> NoReturn:
        """Refused."""
        del statement, parameters, execution_options
        raise no_streams("stream()")

    def stream_scalars(self, statement: Any, parameters: Any = None, *, execution_options: Any = None) -> NoReturn:
        """Refused."""
        del statement, parameters, execution_options
        raise no_streams("stream_scalars()")

    # --- savepoints -------------------------------------------------------------------------------------------------------

    def begin_nested(self) -> AsyncSavepoint[Any]:
        """A savepoint: `async with tx.db.begin_nested():`."""
        return AsyncSavepoint(self._thread, self.sync_connection.begin_nested)

    def in_transaction(self) -> bool:
        """As Connection.in_transaction."""
        return self.sync_connection.in_transaction()

    def in_nested_transaction(self) -> bool:
        """Whether there is a savepoint."""
        return self.sync_connection.in_nested_transaction()

    def get_nested_transaction(self) -> AsyncSavepoint[Any] | None:
        """The innermost savepoint."""
        nested = self.sync_connection.get_nested_transaction()
        if nested is None:
            return None
        savepoint = AsyncSavepoint(self._thread, self.sync_connection.begin_nested)
        savepoint.sync_transaction = nested
        return savepoint

    # --- what the connection is -------------------------------------------------------------------------------------------

    @property
    def sync_engine(self) -> Engine:
        """The engine, which is a synchronous one."""
        return self.sync_connection.engine

    @property
    def dialect(self) -> Dialect:
        """SQLAlchemy's dialect."""
        return self.sync_connection.dialect

    @property
    def info(self) -> Any:
        """As Connection.info."""
        return self.sync_connection.info

    @property
    def closed(self) -> bool:
        """As Connection.closed."""
        return self.sync_connection.closed

    @property
    def invalidated(self) -> bool:
        """As Connection.invalidated."""
        return self.sync_connection.invalidated

    @property
    def default_isolation_level(self) -> Any:
        """As Connection.default_isolation_level."""
        return self.sync_connection.default_isolation_level

    async def get_isolation_level(self) -> Any:
        """As Connection.get_isolation_level."""
        return await self._thread.call(self.sync_connection.get_isolation_level)

    async def execution_options(self, **opt: Any) -> Self:
        """As Connection.execution_options."""
        await self._thread.call(self.sync_connection.execution_options, **opt)
        return self

    async def get_raw_connection(self) -> PoolProxiedConnection:
        """The driver's connection in SQLAlchemy's proxy, for use inside `run_sync`."""
        return await self._thread.call(getattr, self.sync_connection, "connection")

    # --- what would end the transaction: refused ------------------------------------------------------------------------

    def begin(self) -> NoReturn:
        """Refused."""
        self.sync_connection.guard.refuse("begin()")

    def get_transaction(self) -> NoReturn:
        """Refused: the result could only be used to commit or roll back. `get_nested_transaction` works."""
        self.sync_connection.guard.refuse("get_transaction()")

    async def commit(self) -> NoReturn:
        """Refused."""
        self.sync_connection.guard.refuse("commit()")

    async def rollback(self) -> NoReturn:
        """Refused."""
        self.sync_connection.guard.refuse("rollback()")

    async def close(self) -> NoReturn:
        """Refused."""
        self.sync_connection.guard.refuse("close()")

    async def aclose(self) -> NoReturn:
        """Refused."""
        self.sync_connection.guard.refuse("aclose()")

    async def invalidate(self, exception: BaseException | None = None) -> NoReturn:
        """Refused."""
        del exception
        self.sync_connection.guard.refuse("invalidate()")

    async def __aenter__(self) -> NoReturn:
        self.sync_connection.guard.refuse("`async with` on the connection (it would close it)")

    async def __aexit__(self, *_: object) -> None:
        """Never called."""


R = TypeVar("R", bound=Result[Any])


def buffered(result: R) -> R:
    """The result, with its rows read and its cursor closed, so that the driver is not called from the event loop's thread."""
    if isinstance(result, CursorResult) and result.returns_rows:
        rows = result.cursor_strategy.fetchall(result, result.cursor)
        result.cursor_strategy = FullyBufferedCursorFetchStrategy(None, initial_buffer=rows)
    return result


def no_streams(call: str) -> UsageError:
    """The error for a result whose rows would be read one by one."""
    return UsageError(f"{call} is not possible in a transaction of dualwrite.aio.", next_step=f"use {BUFFERED}")


E = TypeVar("E")

_READ_AT_ONCE: Final = {"prebuffer_rows": True}
"""The option with which SQLAlchemy's own AsyncSession makes the ORM load all objects before `execute` returns."""


class AsyncSession:
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
        self.sync_session = session
        self._connection = connection
        self._thread = thread

    # --- statements -------------------------------------------------------------------------------------------------------

    async def execute(
        self, statement: Any, params: Any = None, *, execution_options: Mapping[str, Any] | None = None, **options: Any
    ) -> Result[Any]:
        """As Session.execute; the rows have been read."""

        def execute() -> Result[Any]:
            reading = {**(execution_options or {}), **_READ_AT_ONCE}
            return buffered(self.sync_session.execute(statement, params, execution_options=reading, **options))

        return await self._thread.call(execute)

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

    async def run_sync(self, fn: Callable[Concatenate[Session, P], T], /, *arg: P.args, **kw: P.kwargs) -> T:
        """Run a plain function with the synchronous Session, in the transaction's thread."""
        return await self._thread.call(fn, self.sync_session, *arg, **kw)

    async def connection(self, **options: Any) -> AsyncConnection:
        """The connection of the session, which is that of `tx.db`."""
        await self._thread.call(self.sync_session.connection, **options)
        return AsyncConnection(self._connection, self._thread)

    def stream(self, statement: Any, params: Any = None, **options: Any) -> NoReturn:
        """Refused."""
        del statement, params, options
        raise no_streams("stream()")

    def stream_scalars(self, statement: Any, params: Any = None, **options: Any) -> NoReturn:
        """Refused."""
        del statement, params, options
        raise no_streams("stream_scalars()")

    # --- objects ----------------------------------------------------------------------------------------------------------

    async def get(self, entity: type[E], ident: Any, **options: Any) -> E | None:
        """As Session.get."""
        return await self._thread.call(lambda: self.sync_session.get(entity, ident, **options))

    async def get_one(self, entity: type[E], ident: Any, **options: Any) -> E:
        """As Session.get_one."""
        return await self._thread.call(lambda: self.sync_session.get_one(entity, ident, **options))

    async def refresh(
        self, instance: object, attribute_names: Iterable[str] | None = None, with_for_update: Any = None
    ) -> None:
        """As Session.refresh."""
        await self._thread.call(self.sync_session.refresh, instance, attribute_names, with_for_update)

    async def merge(self, instance: E, **options: Any) -> E:
        """As Session.merge."""
        return await self._thread.call(lambda: self.sync_session.merge(instance, **options))

    async def delete(self, instance: object) -> None:
        """As Session.delete, which may load related objects."""
        await self._thread.call(self.sync_session.delete, instance)

    async def flush(self, objects: Sequence[Any] | None = None) -> None:
        """As Session.flush; at the end of the unit or block it happens by itself."""
        await self._thread.call(self.sync_session.flush, objects)

    # --- objects, without the database ------------------------------------------------------------------------------------

    def add(self, instance: object) -> None:
        """As Session.add."""
        self.sync_session.add(instance)

    def add_all(self, instances: Iterable[object]) -> None:
        """As Session.add_all."""
        self.sync_session.add_all(instances)

    def expire(self, instance: object, attribute_names: Iterable[str] | None = None) -> None:
        """As Session.expire."""
        self.sync_session.expire(instance, attribute_names)

    def expire_all(self) -> None:
        """As Session.expire_all."""
        self.sync_session.expire_all()

    def expunge(self, instance: object) -> None:
        """As Session.expunge."""
        self.sync_session.expunge(instance)

    def expunge_all(self) -> None:
        """As Session.expunge_all."""
        self.sync_session.expunge_all()

    def is_modified(self, instance: object, include_collections: bool = True) -> bool:
        """As Session.is_modified."""
        return self.sync_session.is_modified(instance, include_collections)

    def __contains__(self, instance: object) -> bool:
        return instance in self.sync_session

    def __iter__(self) -> Iterator[object]:
        return iter(self.sync_session)

    @property
    def new(self) -> Any:
        """As Session.new."""
        return self.sync_session.new

    @property
    def dirty(self) -> Any:
        """As Session.dirty."""
        return self.sync_session.dirty

    @property
    def deleted(self) -> Any:
        """As Session.deleted."""
        return self.sync_session.deleted

    @property
    def identity_map(self) -> Any:
        """As Session.identity_map."""
        return self.sync_session.identity_map

    @property
    def info(self) -> Any:
        """As Session.info."""
        return self.sync_session.info

    @property
    def is_active(self) -> bool:
        """As Session.is_active."""
        return self.sync_session.is_active

    @property
    def autoflush(self) -> bool:
        """As Session.autoflush."""
        return self.sync_session.autoflush

    @autoflush.setter
    def autoflush(self, value: bool) -> None:
        self.sync_session.autoflush = value

    @property
    def no_autoflush(self) -> AbstractContextManager[Any]:
        """As Session.no_autoflush: `with tx.session.no_autoflush:`."""
        return self.sync_session.no_autoflush

    # --- savepoints -------------------------------------------------------------------------------------------------------

    def begin_nested(self) -> AsyncSavepoint[Any]:
        """A savepoint: `async with tx.session.begin_nested():`."""
        return AsyncSavepoint(self._thread, self.sync_session.begin_nested)

    def in_transaction(self) -> bool:
        """As Session.in_transaction."""
        return self.sync_session.in_transaction()

    def in_nested_transaction(self) -> bool:
        """Whether there is a savepoint."""
        return self.sync_session.in_nested_transaction()

    def get_nested_transaction(self) -> AsyncSavepoint[Any] | None:
        """The innermost savepoint of the session."""
        nested = self.sync_session.get_nested_transaction()
        if nested is None:
            return None
        savepoint = self.begin_nested()
        savepoint.sync_transaction = nested
        return savepoint

    # --- what would end the transaction: refused ------------------------------------------------------------------------

    def begin(self) -> NoReturn:
        """Refused."""
        self._refuse("begin()")

    def get_transaction(self) -> NoReturn:
        """Refused: the result could only be used to commit or roll back. `get_nested_transaction` works."""
        self._refuse("get_transaction()")

    async def commit(self) -> NoReturn:
        """Refused."""
        self._refuse("commit()")

    async def rollback(self) -> NoReturn:
        """Refused."""
        self._refuse("rollback()")

    async def close(self) -> NoReturn:
        """Refused."""
        self._refuse("close()")

    async def aclose(self) -> NoReturn:
        """Refused."""
        self._refuse("aclose()")

    async def reset(self) -> NoReturn:
        """Refused."""
        self._refuse("reset()")

    async def invalidate(self) -> NoReturn:
        """Refused."""
        self._refuse("invalidate()")

    async def __aenter__(self) -> NoReturn:
        self._connection.guard.refuse("`async with` on the session (it would close it)")

    async def __aexit__(self, *_: object) -> None:
        """Never called."""

    def _refuse(self, call: str) -> NoReturn:
        self._connection.guard.refuse(f"session.{call}")


class HookedThread:
    """A transaction's thread that runs a function of ours before each call.

    Args:
        before_call: The function.
        thread: The thread.
    """

    def __init__(self, before_call: Callable[[], None], thread: TransactionThread) -> None:
        self.ident = thread.ident
        self._before_call = before_call
        self._thread = thread

    async def call(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._thread.call(self._run, lambda: function(*args, **kwargs))

    def _run(self, function: Callable[[], T]) -> T:
        self._before_call()
        return function()
