"""AsyncWriterPool: the pool for the coroutines of one event loop."""

from __future__ import annotations

import asyncio
import contextvars
import copy
import functools
import inspect
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Hashable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, suppress
from contextvars import ContextVar
from types import FunctionType, TracebackType
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    Final,
    Generic,
    NoReturn,
    ParamSpec,
    Protocol,
    Self,
    TypeVar,
    Unpack,
    cast,
    overload,
)

from dualwrite.aio.async_transaction import A, AsyncTransaction, plain, send_unsent
from dualwrite.aio.coroutine_threads import BorrowedThread, LoopCalls, finished, settle
from dualwrite.api import PoolArguments
from dualwrite.api import create_pool as create_writer_pool
from dualwrite.deadline import Deadline
from dualwrite.errors import NestedTransactionError, UsageError
from dualwrite.observability.health import CHECK_LIMIT, PoolHealth
from dualwrite.observability.readings import Reading
from dualwrite.opening import Database
from dualwrite.pool.declared import local_on_connection
from dualwrite.pool.pool import BoundPool, WriterPool, joining
from dualwrite.pool.scaling import PoolOptions
from dualwrite.settings import Settings
from dualwrite.stores.base import TxnStateStore
from dualwrite.transaction import Transaction, opened
from dualwrite.transactional import awaited, name_of, repeated_coroutine

if TYPE_CHECKING:
    from sqlalchemy import URL, Connection, Engine
    from sqlalchemy.ext.asyncio import AsyncEngine

    from dualwrite.stores.rocksdb import RocksDBStore
    from dualwrite.stores.rocksdb.rocksdb_batch import TransactionBatch
    from dualwrite.stores.sql.async_handles import AsyncConnection
    from dualwrite.stores.zookeeper import ZooKeeperStore
    from dualwrite.stores.zookeeper.zookeeper_transaction import ZooKeeperBatch


P = ParamSpec("P")
T = TypeVar("T")

_MAX_TRANSACTION_THREADS: Final = 64
"""The maximum number of threads for `transaction()`, unless `max_size` of the pool is higher: as many as can have a writer.

Each waits for a writer, or serves the coroutine that uses one.
"""

_in_units: ContextVar[tuple[tuple[WriterPool[Any], Handoff], ...]] = ContextVar("dualwrite_in_units", default=())
"""The units that the current coroutine is inside of, to detect nested calls."""


class _Decorator(Protocol[A]):
    """Makes a function a unit: what `transactional(attempts=…)` returns."""

    @overload
    def __call__(
        self, function: Callable[Concatenate[AsyncTransaction[A], P], Coroutine[Any, Any, T]], /
    ) -> Callable[P, Coroutine[Any, Any, T]]: ...

    @overload
    def __call__(self, function: Callable[Concatenate[Transaction, P], T], /) -> Callable[P, Coroutine[Any, Any, T]]: ...

    def __call__(self, function: Callable[..., Any], /) -> Any:
        """Return a function that runs the unit."""


class AsyncWriterPool(Generic[A]):
    """A WriterPool for the coroutines of one event loop: units share commits, like the units of threads.

    The parameter is the type of `tx.db` in a coroutine: `AsyncWriterPool[AsyncConnection]` for a SQL database.

    The recipe, and everything that blocks, runs in the pool's threads; coroutines run on the event loop, in the task of their
    caller. Whatever is cancelled, a transaction is never left open on either side.

    Args:
        pool: The pool; closed with this one. Threads may use it at the same time.
        key: See `WriterPool.with_options`.
        timeout: See `WriterPool.with_options`.
    """

    @overload
    def __init__(
        self: AsyncWriterPool[AsyncConnection],
        pool: WriterPool[Connection],
        *,
        key: Hashable = ...,
        timeout: float | None = ...,
    ) -> None: ...

    @overload
    def __init__(self, pool: WriterPool[A], *, key: Hashable = ..., timeout: float | None = ...) -> None: ...

    def __init__(self, pool: WriterPool[Any], *, key: Hashable = None, timeout: float | None = None) -> None:
        self._pool = pool
        self._bound: BoundPool[Any] = pool.with_options(key=key, timeout=timeout)
        self._calls = LoopCalls(asyncio.get_running_loop())
        self._threads = asyncio.Semaphore(max(_MAX_TRANSACTION_THREADS, pool.options.max_size))

    @overload
    async def run(
        self,
        unit: Callable[Concatenate[AsyncTransaction[A], P], Coroutine[Any, Any, T]],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T: ...

    @overload
    async def run(
        self: AsyncWriterPool[AsyncConnection],
        unit: Callable[Concatenate[Transaction[Connection], P], T],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T: ...

    @overload
    async def run(self, unit: Callable[Concatenate[Transaction[A], P], T], /, *args: P.args, **kwargs: P.kwargs) -> T: ...

    async def run(self, unit: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run a unit of work, sharing a commit with units of other coroutines and threads; see `WriterPool.run`.

        If the call is cancelled before the unit starts, the unit does not run. If it is cancelled while an `async def` unit
        runs, CancelledError is raised in the unit, its changes are undone, and the other units of its group are not affected. A
        plain unit that has started runs to its end, and a cancellation during the commit has no effect on the unit; then the
        caller does not learn whether the unit committed.

        Args:
            unit: An `async def` function, called with an AsyncTransaction, which runs in the caller's task; or a plain
                function, called with a Transaction, which runs in one of the pool's threads. It may run more than once.
            *args: Positional arguments of the unit after the transaction.
            **kwargs: Keyword arguments of the unit.

        Returns:
            What the unit returned; both sides are committed.

        Raises:
            UsageError: Called in an event loop other than the pool's.
            NestedTransactionError: Called from a unit of this pool.
            BaseException: As for `WriterPool.run`.
        """
        self._check("a unit")
        if _is_async(unit):
            return await self._run_here(unit, args, kwargs)
        return await self._run_in_thread(unit, args, kwargs)

    @overload
    def transactional(
        self, function: Callable[Concatenate[AsyncTransaction[A], P], Coroutine[Any, Any, T]], /
    ) -> Callable[P, Coroutine[Any, Any, T]]: ...

    @overload
    def transactional(self, function: Callable[Concatenate[Transaction, P], T], /) -> Callable[P, Coroutine[Any, Any, T]]: ...

    @overload
    def transactional(self, /, *, attempts: int = ..., alone: bool | None = ...) -> _Decorator[A]: ...

    def transactional(
        self, function: Callable[..., Any] | None = None, /, *, attempts: int = 1, alone: bool | None = None
    ) -> Any:
        """Run every call of a function as a unit, with `run`; see `WriterPool.transactional`.

        Use it as `@pool.transactional` or `@pool.transactional(attempts=3)`, on an `async def` or a plain function. Calls are
        awaited: `await place_order("lamp")`.
        """
        if function is None:
            return functools.partial(self._decorated, attempts=attempts, alone=alone)
        return self._decorated(function, attempts=attempts, alone=alone)

    def _decorated(
        self, unit: Callable[..., Any], *, attempts: int, alone: bool | None
    ) -> Callable[..., Coroutine[Any, Any, Any]]:
        @functools.wraps(unit)
        async def once(*args: Any, **kwargs: Any) -> Any:
            pool = self if alone is None else self.with_options(alone=alone)
            return await pool.run(unit, *args, **kwargs)

        return repeated_coroutine(once, attempts=attempts, is_retriable=self._bound.is_retriable)

    def join(self, session: Any) -> Transaction[Any]:
        """Send messages with a transaction that you begin and end yourself: see `WriterPool.join`.

        It is not awaited, and neither is `send` of what it returns. An AsyncSession or AsyncConnection does not block the loop
        when it commits; a synchronous one would, and its commit is refused. May be called in any thread: a framework may run
        its dependencies in one.
        """
        self._check_nesting("join()")
        return self._pool.join(session)

    @overload
    def transaction(
        self, *, timeout: float | None = None, local: Mapping[str, str] | None = None
    ) -> AbstractAsyncContextManager[AsyncTransaction[A]]: ...

    @overload
    def transaction(
        self, *, connection: object, timeout: float | None = None
    ) -> AbstractAsyncContextManager[Transaction[Any]]: ...

    def transaction(
        self, *, connection: Any = None, timeout: float | None = None, local: Mapping[str, str] | None = None
    ) -> AbstractAsyncContextManager[Any]:
        """Begin a separate transaction on a free writer: `async with pool.transaction() as tx`; see `WriterPool.transaction`.

        If the block is cancelled, both sides have been rolled back when CancelledError leaves it. A cancellation during the
        commit is raised when the commit has ended, as if it had come later; if the commit has failed, its error is the
        `__cause__`.

        Args:
            connection: A connection of yours, of asyncpg, psycopg (AsyncConnection), aiomysql, asyncmy or aiosqlite; see
                `WriterPool.transaction`.
                `tx.send` is not awaited then either.
            timeout: Seconds to wait for a writer, instead of the pool's `timeout`.
            local: As for `WriterPool.transaction`.

        Raises:
            PoolTimeoutError: No writer was free within the limit.
            UsageError: Called in an event loop other than the pool's; or as for `WriterPool.transaction`.
            NestedTransactionError: Called from a unit of this pool.
            DualWriteError: As for `DualWriter.transaction`.
        """
        self._check("transaction()")
        if connection is not None:
            if local:
                raise local_on_connection()
            return joining(self._pool).on_async_connection(connection, timeout)
        pool = self if timeout is None and not local else self.with_options(timeout=timeout, local=local)
        return self._transaction(pool._bound)  # noqa: SLF001  (of the same class)

    @asynccontextmanager
    async def _transaction(self, bound: BoundPool[Any]) -> AsyncIterator[AsyncTransaction[A]]:
        handoff = Handoff("transaction()", self._calls, self._pool)
        job = await self._begin(handoff, bound)
        try:
            tx = await handoff.receive(job)
        except BaseException:
            handoff.abandon()
            raise
        if tx is None:
            job.result()  # raises: it did not begin
        try:
            async with handoff.body():
                transaction = cast("AsyncTransaction[A]", tx)
                with opened(plain(transaction)).trace.current():
                    yield transaction
        except GeneratorExit:
            raise  # the loop has ended, and can't be waited for
        except BaseException as error:
            await self._calls.until_done(job)
            outcome = job.exception()
            if outcome is None or outcome is error or not isinstance(error, Exception):
                raise
            raise outcome from error
        try:
            await self._calls.until_done(job)
        except asyncio.CancelledError as cancelled:
            raise cancelled from job.exception()
        job.result()

    async def cancel(self, cancel_id: str) -> bool:
        """Cancel a message that waits for its time; see `WriterPool.cancel`."""
        self._check("cancel()")
        return await asyncio.to_thread(self._pool.cancel, cancel_id)

    def with_options(
        self,
        *,
        key: Hashable = None,
        timeout: float | None = None,
        alone: bool | None = None,
        local: Mapping[str, str] | None = None,
    ) -> AsyncWriterPool[A]:
        """This pool with an ordering key, or other options; see `WriterPool.with_options`.

        What is not given stays as it is for this pool.
        """
        self._check("with_options()")
        before = self._bound
        other = copy.copy(self)
        other._bound = self._pool.with_options(  # noqa: SLF001  (of the same class)
            key=before.key if key is None else key,
            timeout=before.timeout if timeout is None else timeout,
            alone=before.alone if alone is None else alone,
            local={**before.local, **(local or {})},
        )
        return other

    @property
    def store(self) -> TxnStateStore:
        """The pool's store."""
        return self._pool.store

    @property
    def settings(self) -> Settings:
        """See `WriterPool.settings`."""
        return self._pool.settings

    @property
    def size(self) -> int:
        """The number of writers that can be used."""
        return self._pool.size

    @property
    def transactional_ids(self) -> tuple[str, ...]:
        """The transactional ids of the writers that can be used now."""
        return self._pool.transactional_ids

    @property
    def waiting(self) -> int:
        """The number of calls that are waiting to be taken by a group."""
        return self._pool.waiting

    def readings(self) -> Iterator[Reading]:
        """Its size and its queue; see `WriterPool.readings`."""
        return self._pool.readings()

    async def check(self, timeout: float = CHECK_LIMIT) -> PoolHealth:  # noqa: ASYNC109  (it is the limit of the two sides)
        """Whether the pool can write now, for probes; see `WriterPool.check`."""
        return await asyncio.to_thread(self._pool.check, timeout)

    @property
    def options(self) -> PoolOptions:
        """How the pool groups units, and when its calls return."""
        return self._pool.options

    @property
    def is_closed(self) -> bool:
        """Whether the pool is closed, or is being closed."""
        return self._pool.is_closed

    async def resize(self, size: int | None) -> None:
        """Change the number of writers, without blocking the event loop; see `WriterPool.resize`.

        If the call is cancelled, CancelledError is raised when the change has ended.
        """
        self._check("resize()")
        await finished(lambda: self._pool.resize(size))

    async def close(self, *, timeout: float | None = None) -> None:  # noqa: ASYNC109  (the pool's own, as in WriterPool)
        """Finish the waiting units, and close the pool; see `WriterPool.close`.

        A coroutine that is still using a transaction after half of the pool's `timeout` is interrupted: it ends with
        WriterClosedError.
        """
        self._check_nesting("close()")
        await finished(lambda: self._pool.close(timeout=timeout))

    def __repr__(self) -> str:
        return f"<{type(self).__name__} on {self._pool!r}>"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    # --- units ------------------------------------------------------------------------------------------------------------

    async def _run_in_thread(self, unit: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        future = self._bound.submit(unit, *args, **kwargs)
        try:
            async with asyncio.timeout(self._bound.timeout):
                await self._calls.end_of(future)
        except TimeoutError:
            if future.cancel():
                raise self._bound.timed_out(unit) from None
            await self._calls.end_of(future)  # it has begun: its outcome is known only when it ends
        except asyncio.CancelledError:
            future.cancel()
            raise
        return self._bound.outcome(future)

    async def _run_here(self, unit: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """For the pool, the unit is a plain function that waits until this coroutine has run it."""
        handoff = Handoff(name_of(unit), self._calls, self._pool)

        def in_thread(transaction: Transaction[Any]) -> None:
            handoff.hand_over(transaction)

        in_thread.__qualname__ = name_of(unit)
        in_thread.__wrapped__ = unit  # type: ignore[attr-defined]  # as functools.wraps does; AloneUnits looks for it
        job = self._bound.submit(in_thread)
        handoff.ends_with(job)
        result: Any = None
        try:
            tx = await self._first_transaction(handoff, job, unit)
            while tx is not None:
                with suppress(Exception), _inside(self._pool, handoff):  # the thread gets its error, and the job the outcome
                    async with handoff.body():
                        with opened(plain(tx)).trace.current():
                            result = await awaited(unit(tx, *args, **kwargs), name_of(unit))
                tx = await handoff.receive(job)
        except BaseException:
            if not job.cancel():
                handoff.abandon()
            raise
        self._bound.outcome(job)
        return result

    async def _first_transaction(
        self, handoff: Handoff, job: Future[None], unit: Callable[..., Any]
    ) -> AsyncTransaction[Any] | None:
        try:
            async with asyncio.timeout(self._bound.timeout):
                return await handoff.receive(job)
        except TimeoutError:
            if job.cancel():
                raise self._bound.timed_out(unit) from None
        return await handoff.receive(job)  # its group has begun

    # --- separate transactions --------------------------------------------------------------------------------------------

    async def _begin(self, handoff: Handoff, bound: BoundPool[Any]) -> Future[None]:
        """Start a thread that waits for a writer and begins a transaction; the job ends with the transaction."""
        limit = Deadline.after(bound.timeout)
        try:
            async with asyncio.timeout(limit.left):
                await self._threads.acquire()
        except TimeoutError:
            raise bound.timed_out(self.transaction) from None
        job: Future[None] = Future()
        job.add_done_callback(lambda _: self._calls.add(self._threads.release))

        def run() -> None:
            with self._pool.transaction(timeout=limit, local=bound.local) as begun:
                handoff.hand_over(begun)

        in_context = contextvars.copy_context().run
        thread = threading.Thread(target=in_context, args=(settle, job, run), name="dualwrite transaction", daemon=True)
        try:
            thread.start()
        except BaseException as error:  # the system has no more threads
            job.set_exception(error)
            raise
        handoff.ends_with(job)
        return job

    # --- inside -----------------------------------------------------------------------------------------------------------

    def _check(self, what: str) -> None:
        if asyncio.get_running_loop() is not self._calls.loop:
            raise UsageError(
                "The pool belongs to another event loop.",
                next_step="make one in each loop: dualwrite.aio.AsyncWriterPool(pool) on one WriterPool, or aio.create_pool",
            )
        self._check_nesting(what)

    def _check_nesting(self, what: str) -> None:
        inside = _in_units.get()
        if inside and any(pool is self._pool and handoff.is_in_body for pool, handoff in inside):
            raise NestedTransactionError(
                f"{what} inside a unit of the same pool.",
                next_step="a unit acts only through its transaction: call functions with `tx`, and use savepoints",
            )


class Handoff:
    """The pool's threads call `hand_over` for each transaction; the coroutine awaits `receive`, and runs its code in `body`.

    The coroutine's code runs in the task of its caller, so that cancellation, time limits and context variables work as in any
    coroutine.

    Args:
        name: The unit.
        calls: Those of the pool's event loop.
        pool: The pool.
    """

    def __init__(self, name: str, calls: LoopCalls, pool: WriterPool[Any]) -> None:
        self._name = name
        self._pool = pool
        self._calls = calls
        self._offered: asyncio.Queue[tuple[BorrowedThread, AsyncTransaction[Any]] | None] = asyncio.Queue()
        self._thread: BorrowedThread | None = None
        self._is_abandoned = False

    @property
    def is_in_body(self) -> bool:
        """Whether the coroutine has a transaction."""
        return self._thread is not None and self._thread.is_open

    def hand_over(self, transaction: Transaction[Any]) -> None:
        """Let the coroutine use the transaction and this thread until the coroutine has ended.

        Raises:
            BaseException: What the coroutine has raised.
            asyncio.CancelledError: The coroutine no longer waits for a transaction.
            WriterClosedError: See `BorrowedThread.serve`.
            DualWriteError: A message of the coroutine was not sent.
        """
        thread = BorrowedThread(self._name, self._calls, self._pool)
        tx: AsyncTransaction[Any] = AsyncTransaction(transaction, thread)
        self._calls.add(self._offer, thread, tx)
        thread.serve()
        send_unsent(tx)

    # --- in the event loop ------------------------------------------------------------------------------------------------

    def ends_with(self, job: Future[Any]) -> None:
        """There are no more transactions when this job has ended."""
        job.add_done_callback(lambda _: self._calls.add(self._offered.put_nowait, None))

    async def receive(self, job: Future[Any]) -> AsyncTransaction[Any] | None:
        """Wait for a transaction; None if the job that should hand it over has ended."""
        offered = await self._offered.get()
        if offered is None or job.done():
            return None
        self._thread, tx = offered
        return tx

    def body(self) -> AbstractAsyncContextManager[None]:
        """See `BorrowedThread.body`; after `receive`."""
        assert self._thread is not None
        return self._thread.body()

    def abandon(self) -> None:
        """Receive no more transactions: those that a thread hands over are rolled back."""
        self._is_abandoned = True
        while not self._offered.empty():
            if (offered := self._offered.get_nowait()) is not None:
                offered[0].end(asyncio.CancelledError())

    def _offer(self, thread: BorrowedThread, tx: AsyncTransaction[Any]) -> None:
        if self._is_abandoned:
            thread.end(asyncio.CancelledError())
        else:
            self._offered.put_nowait((thread, tx))


@contextmanager
def _inside(pool: WriterPool[Any], handoff: Handoff) -> Iterator[None]:
    """Mark the current coroutine, and the tasks that it starts, as being inside a unit, as long as the unit runs."""
    token = _in_units.set((*_in_units.get(), (pool, handoff)))
    try:
        yield
    finally:
        with suppress(ValueError):  # the garbage collector has ended the coroutine, not its task
            _in_units.reset(token)


def _is_async(unit: Callable[..., Any]) -> bool:
    """Whether a unit is an `async def` function, a partial of one, or an object with an `async def __call__`."""
    if inspect.iscoroutinefunction(unit):
        return True
    return not isinstance(unit, FunctionType) and inspect.iscoroutinefunction(type(unit).__call__)


class OpeningPool(Generic[A]):
    """A pool that is not open yet: what `create_pool` returns. `await` opens it, and so does `async with`, which closes it."""

    def __init__(self, make: Callable[[], WriterPool[Any]]) -> None:
        self._make = make

    def __await__(self) -> Generator[Any, None, AsyncWriterPool[A]]:
        made = yield from finished(self._make, undo=lambda made: made.close()).__await__()
        return cast("AsyncWriterPool[A]", AsyncWriterPool(made))

    async def __aenter__(self) -> AsyncWriterPool[A]:
        self._pool = await self
        return self._pool

    async def __aexit__(self, *_: object) -> None:
        await self._pool.close()

    if not TYPE_CHECKING:  # type checkers know that it has no other attribute

        def __getattr__(self, name: str) -> NoReturn:
            raise AttributeError(f"The pool is not open, so it has no {name!r}: write `pool = await aio.create_pool(…)`.")


@overload
def create_pool(
    database: URL | Engine | AsyncEngine, *, prefix: str, **options: Unpack[PoolArguments]
) -> OpeningPool[AsyncConnection]: ...


@overload
def create_pool(database: RocksDBStore, *, prefix: str, **options: Unpack[PoolArguments]) -> OpeningPool[TransactionBatch]: ...


@overload
def create_pool(database: ZooKeeperStore, *, prefix: str, **options: Unpack[PoolArguments]) -> OpeningPool[ZooKeeperBatch]: ...


@overload
def create_pool(
    database: str | TxnStateStore | None = None, *, prefix: str, **options: Unpack[PoolArguments]
) -> OpeningPool[Any]: ...


def create_pool(database: Database | None = None, *, prefix: str, **options: Any) -> OpeningPool[Any]:
    """Build a pool, as `dualwrite.create_pool` does, without blocking the event loop.

    `async with aio.create_pool(…) as pool` closes it, too; `pool = await aio.create_pool(…)` leaves that to `pool.close()`.

    Args:
        database: See `dualwrite.create_pool`; also your AsyncEngine. The pool's threads have connections of their own.
        prefix: See `dualwrite.create_pool`.
        **options: See `dualwrite.create_pool`.

    Returns:
        What gives a pool for the running event loop, by `async with` or `await`.

    Raises: as for `dualwrite.create_pool`.
    """
    return OpeningPool(lambda: create_writer_pool(database, prefix=prefix, **options))
