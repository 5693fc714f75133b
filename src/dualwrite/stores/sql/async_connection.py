"""The connection of a coroutine: SQLAlchemy's asyncio methods, whose work is done in the transaction's thread.

It has the methods of `sqlalchemy.ext.asyncio.AsyncConnection`, but is not one: that class needs an asynchronous driver and
greenlets, which switch at every call of the driver. Here a whole statement with its rows is one call in a thread that waits
anyway, with the drivers that the recipe uses.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from types import TracebackType
from typing import Any, Concatenate, Final, Generic, NoReturn, ParamSpec, Self, TypeVar

from sqlalchemy import Connection, CursorResult, Dialect, Engine, PoolProxiedConnection, Result, ScalarResult
from sqlalchemy.engine.cursor import FullyBufferedCursorFetchStrategy

from dualwrite.errors import UsageError
from dualwrite.stores.sql.guard import GuardedConnection
from dualwrite.stores.transaction import TransactionThread

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
