"""WriterPool: one object per process, shared by all of its threads, like a SQLAlchemy Engine."""

from __future__ import annotations

import atexit
import contextlib
import copy
import functools
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager
from functools import partial
from types import TracebackType
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeVar, overload

from dualwrite import process
from dualwrite.deadline import Deadline, Limit, check_may_block
from dualwrite.errors import DualWriteError, FencedError, NestedTransactionError, PoolTimeoutError, UsageError
from dualwrite.observability.health import CHECK_LIMIT, Asking, Part, PoolHealth, goes_on
from dualwrite.observability.logs import SubjectLogger
from dualwrite.observability.outages import database_at
from dualwrite.observability.readings import Reading, add_source, remove_source
from dualwrite.pool.calls import AloneUnits, UnitCall, WaitingCalls, in_callback
from dualwrite.pool.declared import NONE, Declared, Local, local_on_connection
from dualwrite.pool.group import SavepointPolicy, Shared
from dualwrite.pool.joining import Joining, Savepoints, UsersUnit, claimed_first
from dualwrite.pool.pool_ids import Adoption, FixedIds, Ids, LeasedIds
from dualwrite.pool.scaling import LEAST, OneEach, PoolOptions, Scaler, Sizing
from dualwrite.pool.upkeep import Upkeep
from dualwrite.pool.workers import Workers
from dualwrite.pool.writers import UnclaimedWriters, Writers, closed, pool_timeout
from dualwrite.recipe.journaling import Keeper
from dualwrite.recovery.recoverer import Recoverer
from dualwrite.settings import Settings, check_seconds
from dualwrite.stores.base import TxnStateStore
from dualwrite.stores.store_transaction import UsersTransaction
from dualwrite.transaction import H, Transaction, no_later, opened
from dualwrite.transactional import name_of, repeated
from dualwrite.writer import DualWriter

P = ParamSpec("P")
T = TypeVar("T")


log = SubjectLogger(__name__)


class BoundPool(Generic[H]):
    """A pool with other options, made by `WriterPool.with_options`; `check` raises if the pool can't be used here and now.

    Attributes:
        is_retriable: Whether both sides were rolled back after an error, and another attempt may succeed.
        timeout: Seconds that `run` waits for its unit to start.
        alone: Whether units run in transactions of their own.
        key: The ordering key, or None.
        local: The settings that calls declare, besides those of the pool's function.
    """

    def __init__(
        self,
        waiting: WaitingCalls,
        workers: Workers,
        writers: Writers,
        check: Callable[..., None],
        prefix: str,
        *,
        is_retriable: Callable[[BaseException], bool],
        timeout: float,
        alone: bool,
        declared: Declared,
        key: Hashable = None,
        runs_here: bool = False,
    ) -> None:
        self._runs_here = runs_here
        self._declared = declared
        self._waiting = waiting
        self._workers = workers
        self._writers = writers
        self._check = check
        self._prefix = prefix
        self.is_retriable = is_retriable
        self.timeout = timeout
        self.alone = alone
        self.key = key
        self.local: Local = NONE

    def run(self, unit: Callable[Concatenate[Transaction[H], P], T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        call = self._call(unit, args, kwargs)
        check_may_block(f"run({call.name})", "await pool.run(…)")
        future: Future[T] = call.future
        if self._runs_here and self.key is None:
            self._check("a unit")
            self._workers.run_here(call)
            return self.outcome(future)
        try:
            self._submit(call, waits=True)
            return future.result(self.timeout)
        except TimeoutError:
            if future.cancel():
                raise self.timed_out(unit) from None
            return future.result()  # it has begun, or raised a TimeoutError of its own
        except CancelledError:
            return self.outcome(future)
        except BaseException:
            future.cancel()  # KeyboardInterrupt: if it has not begun, it need not run
            raise

    def submit(self, unit: Callable[Concatenate[Transaction[H], P], T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        call = self._call(unit, args, kwargs)
        self._submit(call, waits=False)
        return call.future

    def _call(self, unit: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> UnitCall:
        local = self._declared.of_call(self.local)
        return UnitCall(unit, args, kwargs, self.key, prefix=self._prefix, alone=self.alone, local=local)

    def _submit(self, call: UnitCall, *, waits: bool) -> None:
        """Put a call into the queue; `waits`: the caller will wait for it, which a thread of the pool can't."""
        try:
            self._check("a unit", waits=waits)
            if self._waiting.put(call):
                self._workers.called()
                return
        except BaseException:
            call.future.cancel()  # KeyboardInterrupt: it may be in the queue already, but nobody would get its future
            raise
        raise closed(self._prefix)

    def outcome(self, future: Future[T]) -> T:
        """The result of a unit that has ended, or its error; WriterClosedError if the pool was closed before the unit began.

        Only `close` can have cancelled the call, if nobody else has the future.
        """
        if future.cancelled():
            raise closed(self._prefix)
        return future.result()

    def timed_out(self, unit: Callable[..., Any]) -> PoolTimeoutError:
        """The error for a unit that did not start within the limit."""
        return pool_timeout(f"{name_of(unit)} did not start", self.timeout, self._writers.doing())


class WriterPool(Generic[H]):
    """Writes from many threads to one database and to Kafka, atomically; made by `dualwrite.create_pool`. Thread-safe.

    `run` and `submit` share commits: the units of work that arrive while one group commits form the next group, which is one
    transaction on both sides. There is no timer: a unit that arrives alone is committed alone, immediately.

    A unit is a function that receives a Transaction as its first argument. It may run more than once: if a group fails, its
    units run again, each in its own transaction. So everything that it changes must go through the Transaction. A unit that
    raises an exception does not affect the other units: its changes are undone, its messages are never sent, and its caller
    gets the exception.

    Isolation: the units of a group run one after another and see each other's changes, as if each had committed before the
    next began. Nothing else of a unit reaches another: a unit that changes a setting of the session runs alone. Under
    REPEATABLE READ and SERIALIZABLE, the isolation level applies to the group as a whole: one snapshot is taken for all of
    its units.

    Args:
        open_writer: Opens a writer on a transactional id; each serves one group or one transaction at a time.
        open_recoverer: Opens a recoverer on the store.
        size: The number of writers; None: as many as the load asks for.
        store: The writers' store; closed with the pool if `owns_store`.
        settings: The settings of the writers, with the prefix as transactional id.
        prefix: The prefix of their transactional ids.
        options: How the pool groups units, and when its calls return.
        owns_store: Whether `close` closes the store.
        keeper: Looks after the journal of the prefix, if the writers have one; not started yet.
        ask_kafka: Asks the coordinators about ids, as Kafka sees them, within some seconds; raises if they don't answer.

    Raises:
        ConfigurationError: `size` is out of range, or there is an option `local` without PostgreSQL.
        DualWriteError: As for `DualWriter.open`; or no ids could be leased.
    """

    def __init__(
        self,
        open_writer: Callable[[str], DualWriter[H]],
        open_recoverer: Callable[[], Recoverer],
        *,
        size: int | None,
        store: TxnStateStore,
        settings: Settings,
        prefix: str,
        options: PoolOptions | None = None,
        owns_store: bool = False,
        keeper: Keeper | None = None,
        ask_kafka: Callable[[list[str], float], object] | None = None,
    ) -> None:
        self._options = options or PoolOptions()
        self._keeper = keeper
        self._ask_kafka = ask_kafka
        self._asking = Asking()
        if size is not None:
            self._options.check_size(size)
        self._declared = Declared(store, self._options.local)
        self._prefix = prefix
        self._store = store
        self._settings = settings
        self._owns_store = owns_store
        self._open_writer = open_writer
        leases = store.leases
        self._ids: Ids = (
            FixedIds(prefix)
            if leases is None
            else LeasedIds(
                leases, prefix, seconds=self._options.lease, database=database_at(store.description, is_local=store.is_local)
            )
        )
        is_journaled = self._options.is_journaled
        most = max(1, min(self._options.max_size if size is None else size, store.most_side_by_side))
        self._writers: Writers
        self._scaler: Sizing
        if is_journaled:
            make, timeout = partial(open_writer, prefix), self._options.timeout
            self._writers = UnclaimedWriters(prefix, self._ids, make, most=most, timeout=timeout)
            self._scaler = OneEach(most)
        else:
            self._writers = Writers(prefix, self._ids)
            self._scaler = Scaler(
                size,
                most=self._options.max_size if leases is not None else LEAST,
                side_by_side=store.most_side_by_side,
                writers=self._writers,
                prefix=prefix,
            )
        alone = AloneUnits(prefix)
        self._waiting = WaitingCalls(alone)
        shared = Shared(
            waiting=self._waiting,
            writers=self._writers,
            scaler=self._scaler,
            alone=alone,
            savepoint_policy=SavepointPolicy() if store.units_need_savepoints else None,
            most_units=int(self._options.group_units) if store.undoes_units and not is_journaled else 1,
            most_bytes=int(self._options.group_bytes),
        )
        self._workers = Workers(prefix, shared, timeout=self._options.timeout)
        self._upkeep = Upkeep(
            prefix,
            self._ids,
            self._writers,
            self._scaler,
            self._workers,
            open_writer,
            kafka_is_lost=lambda: keeper is not None and keeper.journal.is_lost,
        )
        self._bound: BoundPool[H] = BoundPool(
            self._waiting,
            self._workers,
            self._writers,
            self._check,
            prefix,
            is_retriable=self._is_retriable,
            timeout=self._options.timeout,
            alone=self._options.alone or is_journaled,
            declared=self._declared,
            runs_here=is_journaled,
        )
        self._joining = Joining(prefix, store, self._writer_for_users, can_wait=is_journaled)
        self._pid = process.pid
        self._closing = threading.RLock()  # also for `resize`
        self._is_in_progress = False  # one of the two, in the thread that has the lock
        self._is_closed = self._has_ended = False  # no new calls; nothing is left to do
        if isinstance(self._ids, LeasedIds):
            self._ids.on_lost = self._writers.remove
        try:
            self._upkeep.resize(self._scaler.size, Deadline.after(self._options.timeout))
        except BaseException as error:
            self._end_writers(self._limit(None), error)
            raise
        if leases is not None and isinstance(self._ids, LeasedIds):
            self._upkeep.start(Adoption(store, leases, self._ids, prefix, open_recoverer), self._ids.interval)
        self._workers.match_size()
        if self._keeper is not None:
            self._keeper.start()
        add_source(self)
        atexit.register(self._close_at_exit)  # queued calls are finished even if the pool is never closed

    # --- using it ---------------------------------------------------------------------------------------------------------

    @property
    def size(self) -> int:
        """The number of writers that can be used now."""
        return len(self._writers)

    @property
    def store(self) -> TxnStateStore:
        """The database."""
        return self._store

    @property
    def settings(self) -> Settings:
        """The settings of the writers, with the prefix as transactional id; they may contain passwords."""
        return self._settings

    def __repr__(self) -> str:
        state = "closed" if self._is_closed else f"{len(self.transactional_ids)} writers, {self.waiting} calls waiting"
        return f"<{type(self).__name__} {self._prefix!r}: {state}>"

    @property
    def transactional_ids(self) -> tuple[str, ...]:
        """The transactional ids of the writers that can be used now."""
        return self._writers.transactional_ids

    @property
    def waiting(self) -> int:
        """The number of calls that are waiting to be taken by a group."""
        return len(self._waiting)

    def readings(self) -> Iterator[Reading]:
        """Its size and its queue, for `dualwrite.observability.current_readings`."""
        labels = {"prefix": self._prefix}
        yield Reading("pool_writers", self.size, labels)
        yield Reading("pool_busy_writers", len(self._writers.doing()), labels)
        yield Reading("pool_waiting_calls", self.waiting, labels)
        if isinstance(self._ids, LeasedIds):
            yield Reading("pool_leases", len(self._ids.held), labels)
        if self._keeper is not None:
            yield from self._keeper.readings()

    def check(self, timeout: float = CHECK_LIMIT) -> PoolHealth:
        """Whether the pool can write now, for probes: asks the database and Kafka's coordinators at the same time.

        It writes nothing and waits for no unit. If a side does not answer, that is a part of the result, not an error.

        Args:
            timeout: Seconds within which it returns.

        Raises:
            ConfigurationError: The time limit is not a number of seconds from 0 to 1000000.
        """
        limit = Deadline.after(self._seconds(timeout))
        ask_kafka, ids = self._ask_kafka, self._writers.kafka_ids()
        asks: dict[str, Callable[[], object]] = {"database": self._store.check_now}
        if ask_kafka is not None:
            asks["kafka"] = lambda: ask_kafka(ids, limit.seconds)
        answers = self._asking.answers(asks, limit)
        names, busy = self.transactional_ids, self._writers.busy_for()
        usable = f"{len(names)} writers ({', '.join(sorted(names))}), {len(busy)} busy" if names else "none can be used"
        if self._options.is_journaled:
            usable = f"{self.size} places for units, {len(busy)} busy"
        is_usable = self.size > 0 and not self._is_closed
        shortest = min(busy, default=0.0) if self.waiting and len(busy) >= self.size else 0.0
        return PoolHealth(
            answers["database"],
            answers.get("kafka", Part(is_ok=True, text="not asked")),
            Part(is_ok=is_usable, text="the pool is closed" if self._is_closed else usable),
            goes_on(shortest, self._options.timeout),
            needs_kafka=self._keeper is None,
        )

    @property
    def options(self) -> PoolOptions:
        """How the pool groups units, and when its calls return."""
        return self._options

    @property
    def is_closed(self) -> bool:
        """Whether the pool is closed, or is being closed."""
        return self._is_closed

    def run(self, unit: Callable[Concatenate[Transaction[H], P], T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a unit of work, sharing a commit with units of other threads, and wait for its result.

        Args:
            unit: Called with a Transaction and the arguments in one of the pool's threads, in a copy of the caller's context
                (`contextvars`). It may run more than once, so everything that it changes must go through the Transaction.
            *args: Positional arguments of the unit after the Transaction.
            **kwargs: Keyword arguments of the unit.

        Returns:
            What the unit returned; both sides are committed.

        Raises:
            BaseException: What the unit raised; none of its changes are committed.
            PoolTimeoutError: The unit did not start within `timeout`; it has not run.
            DualWriteError: As for `DualWriter.transaction`. InDoubtTransactionError: its outcome is unknown.
            NestedTransactionError: Called from a unit of this pool, or in a done-callback of one of its futures.
            UsageError: An event loop runs in the thread, which the call would block: use `dualwrite.aio`.
            WriterClosedError: The pool is closed.
        """
        return self._bound.run(unit, *args, **kwargs)

    def submit(self, unit: Callable[Concatenate[Transaction[H], P], T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Like `run`, but return a future for the result immediately; it can be cancelled until the unit begins.

        A thread of the pool runs the future's done-callbacks. They may call `submit`, but nothing that waits for the pool. If
        `close` cancels the call, its own thread runs them.
        """
        return self._bound.submit(unit, *args, **kwargs)

    def with_options(
        self,
        *,
        key: Hashable = None,
        timeout: float | None = None,
        alone: bool | None = None,
        local: Mapping[str, str] | None = None,
    ) -> BoundPool[H]:
        """This pool with an ordering key, or other options: `pool.with_options(key=customer).run(unit)`.

        Args:
            key: Units with the same key are committed in the order of their calls, and their messages sent in that order.
            timeout: Seconds that `run` waits for its unit to start; `submit` has no limit.
            alone: Whether units run in transactions of their own, instead of the pool's option; see PoolOptions.
            local: Settings of PostgreSQL that the statements of the units see, with a dot in their names, such as
                `{"app.tenant": "acme"}`; over those of the pool's function (PoolOptions). Each has its value from the unit's
                first statement on. For other units it has the one that they declare, or the one of the session.

        Raises:
            UsageError: The key has no hash; a setting has another name, or a value that is not a str; or the database is not
                PostgreSQL.
            ConfigurationError: The time limit is not a number of seconds from 0 to 1000000.
        """
        try:
            hash(key)
        except TypeError as error:
            raise UsageError(
                f"An ordering key must be hashable: {error}.", next_step="use a str, an int, or a tuple of them"
            ) from error
        bound = copy.copy(self._bound)
        bound.key, bound.timeout, bound.local = key, self._seconds(timeout), self._declared.checked(local)
        if alone is not None:
            bound.alone = alone
        return bound

    @overload
    def transactional(self, function: Callable[Concatenate[Transaction[H], P], T], /) -> Callable[P, T]: ...

    @overload
    def transactional(
        self, /, *, attempts: int = ..., alone: bool | None = ...
    ) -> Callable[[Callable[Concatenate[Transaction[H], P], T]], Callable[P, T]]: ...

    def transactional(
        self,
        function: Callable[Concatenate[Transaction[H], P], T] | None = None,
        /,
        *,
        attempts: int = 1,
        alone: bool | None = None,
    ) -> Callable[P, T] | Callable[[Callable[Concatenate[Transaction[H], P], T]], Callable[P, T]]:
        """Run every call of a function as a unit; the function receives the Transaction as its first argument.

        Use it as `@pool.transactional` or `@pool.transactional(attempts=3)`. The latter runs the unit again, with backoff,
        after a retriable error (such as a serialization failure), which has rolled back both sides. It also retries after
        FencedError if the pool can use another id. `alone` is that of `with_options`.
        """
        if function is None:
            return functools.partial(self._decorated, attempts=attempts, alone=alone)
        return self._decorated(function, attempts=attempts, alone=alone)

    def _decorated(
        self, function: Callable[Concatenate[Transaction[H], P], T], *, attempts: int, alone: bool | None
    ) -> Callable[P, T]:
        bound = self.with_options(alone=alone)

        @functools.wraps(function)
        def once(*args: P.args, **kwargs: P.kwargs) -> T:
            return bound.run(function, *args, **kwargs)

        return repeated(once, attempts=attempts, is_retriable=self._is_retriable)

    def _is_retriable(self, error: BaseException) -> bool:
        """Whether both sides were rolled back and a retry may succeed; after FencedError it can do so only under another id."""
        if isinstance(error, FencedError):
            return self._ids.are_leased
        return error.retriable if isinstance(error, DualWriteError) else self._store.passes(error)

    @contextmanager
    def transaction(
        self, *, connection: Any = None, timeout: Limit | None = None, local: Mapping[str, str] | None = None
    ) -> Iterator[Transaction[H]]:
        """Begin a separate transaction on a free writer; otherwise like `DualWriter.transaction`.

        Args:
            connection: A connection of yours on the pool's database, without a transaction: the transaction is begun, and
                committed, on it. Of psycopg, psycopg2, PyMySQL, mysqlclient or sqlite3; `tx.db` is the connection itself. As
                for `join`, the messages are sent at the end of the block, and no writer is needed before; but nobody sees your
                savepoints: what was sent in one is sent even if it is rolled back. Leave the transaction's end to the block.
            timeout: Seconds to wait for a writer, or a deadline, instead of the pool's `timeout`.
            local: As for `with_options`; not with `connection`, on which you set them yourself.

        Raises:
            PoolTimeoutError: No writer was free within the limit.
            UsageError: As for `run` and `with_options`; or `local` is given with `connection`.
            ConfigurationError: As for `with_options`.
            DualWriteError: As for `DualWriter.transaction`.
        """
        check_may_block("transaction()", "async with pool.transaction() as tx")
        self._check("transaction()")
        own = self._declared.checked(local)
        if connection is not None:
            if own:
                raise local_on_connection()
            with self._joining.on_connection(connection, timeout) as joined:
                yield joined
            return
        settings = self._declared.of_call(own)
        limit, fenced_until = self._limit(timeout), self._limit(None)
        has_begun = False
        while not has_begun:
            with self._scaler.own_transaction(), self._writers.checked_out("a transaction of its own", limit) as writer:
                if self._is_closed:
                    raise closed(self._prefix)
                try:
                    with writer.checked_transaction() as begun:
                        has_begun = True
                        opened(begun).store_transaction.watch(shares=False)
                        opened(begun).store_transaction.set_local(settings)
                        yield begun
                except FencedError as error:
                    if has_begun or not self._writers.can_continue(fenced_until):
                        raise
                    text = "fenced before the block began; taking a writer again: %s"
                    log.info(text, error, transactional_id=writer.transactional_id)

    def join(self, session: Any) -> Transaction[Any]:
        """Send messages with a transaction that you begin and end yourself: on your own SQLAlchemy session or connection.

        The messages are kept until you commit, by `session.commit()`, `with session.begin():` or a framework. Then they are
        sent, and both sides commit as one. A rollback, a session that is closed without a commit, or one that is forgotten
        leaves nothing behind; what was sent inside a savepoint that is rolled back is not sent. Until your transaction ends,
        the pool is not involved.

        An error of the commit is raised by your `session.commit()`: as for `transaction`. Both sides have been rolled back
        then, unless it is InDoubtTransactionError.

        Such a commit shares nothing with others: `run` is faster with many callers (docs/guides/own-sessions.md).

        Args:
            session: A Session, AsyncSession, Connection, AsyncConnection or scoped session of SQLAlchemy, or a session of
                SQLModel. On the pool's database, with any driver.

        Returns:
            What `send`, `send_many` and `send_offsets` are called on; the same one until your transaction ends.

        Raises:
            UsageError: It can't be joined: AUTOCOMMIT, `twophase=True`, several connections in one transaction, or something
                else than a session or a connection.
            WriterClosedError: The pool is closed.
        """
        self._check("join()")
        return self._joining.joined(session)

    def cancel(self, cancel_id: str) -> bool:
        """Cancel a message that waits for its time, in a transaction of its own; see `Transaction.cancel`.

        Raises:
            UsageError: Not with `acknowledge="journaled"`.
            StoreError: The database's own errors, translated.
        """
        check_may_block("cancel()", "await pool.cancel(…)")
        self._check("cancel()")
        if not self._options.is_journaled or self._store.journal is None:
            raise no_later(self._prefix)
        return self._store.journal.cancel(self._prefix, cancel_id)

    def unit_on(
        self, connection: Any, *, savepoints: Callable[[], Savepoints] = frozenset, handle: Callable[[], Any] | None = None
    ) -> UsersUnit:
        """For integrations of frameworks that begin and end transactions themselves: a unit of the one on this connection.

        Call `commit` of the unit where the framework would send its COMMIT, and `end` wherever the transaction ends.

        Args:
            connection: As for `transaction`, but a transaction has begun on it.
            savepoints: Those that the transaction is in now, as `UsersUnit.forget_since` gets them.
            handle: Returns `tx.db`; None: the connection.

        Raises:
            UsageError: It is not a connection of a blocking driver that dualwrite knows.
            WriterClosedError: The pool is closed.
        """
        self._check("unit_on()")
        return self._joining.unit_on(connection, savepoints, handle)

    @contextmanager
    def _writer_for_users(self, users: UsersTransaction, timeout: Limit | None) -> Iterator[DualWriter[H]]:
        """A writer for the commit of a transaction that the user has begun."""
        check_may_block("commit()", "an asynchronous session or connection: `await session.commit()`")
        self._check("commit()")
        is_rolled_back = False

        def roll_back() -> None:
            nonlocal is_rolled_back
            users.roll_back()
            is_rolled_back = True

        doing, limit = "a transaction on the user's connection", self._limit(timeout)
        before_claiming = roll_back if self._store.is_local else None  # SQLite has one lock, which the transaction may have
        with (
            self._scaler.own_transaction(),
            self._writers.checked_out(doing, limit, before_claiming=before_claiming) as writer,
        ):
            if self._is_closed:
                raise closed(self._prefix)
            if is_rolled_back:
                with contextlib.suppress(DualWriteError), writer.checked_transaction():
                    pass  # it recovers what it has to
                raise claimed_first(writer.transactional_id)
            yield writer

    # --- its size -----------------------------------------------------------------------------------------------------------

    def resize(self, size: int | None) -> None:
        """Change the number of writers while the pool is in use. Returns once the pool has the new size.

        Growing leases additional ids. Shrinking closes writers as soon as their transactions have ended, and releases their
        ids.

        Args:
            size: The number of writers, from 1 to the option `max_size`; None: from now on as many as the load asks for.

        Raises:
            ConfigurationError: The number is out of range.
            PoolTimeoutError: The writers to be closed were busy for `timeout` seconds; the pool keeps the size it has reached.
            DualWriteError: A writer could not be opened, as for `DualWriter.open`; the pool keeps the size it has reached.
            NestedTransactionError: Called from a unit of this pool.
            WriterClosedError: The pool is closed.
        """
        if size is not None:
            self._options.check_size(size)
        self._check("resize()")
        with self._closing:
            if self.is_closed:
                raise closed(self._prefix)
            try:
                self._is_in_progress = True
                if size is not None:
                    self._scaler.resize(size)  # first: the load must not ask for another number meanwhile
                if size is not None or not self._ids.are_leased:
                    self._upkeep.resize(LEAST if size is None else size, Deadline.after(self._options.timeout))
            finally:
                try:
                    self._scaler.resize(None if size is None else self._scaler.wanted)
                    self._workers.match_size()
                finally:
                    self._is_in_progress = False
                if self.is_closed:  # by a signal handler, which could not wait for this call
                    self.close()

    # --- closing ------------------------------------------------------------------------------------------------------------

    def close(self, *, timeout: float | None = None) -> None:
        """Finish the waiting calls, resolve what is in doubt, close the writers, and release the ids.

        May be called more than once. If it was interrupted, for example by the SystemExit of a signal handler, the next
        call continues; what the writer that was being closed at that moment has left in doubt is resolved by recovery. A call
        by a signal handler or a done-callback that has interrupted `close` or `resize` returns at once: the interrupted call
        closes the pool when it goes on. `close` is called automatically when the program ends.

        Args:
            timeout: Seconds within which units and transactions must end. By default `close` waits as long as the pool makes
                progress, and gives up when no unit has begun and no group has ended for the pool's `timeout`, or when a group
                has failed because Kafka or the database does not answer. Calls that have not begun by then are cancelled.

        Raises:
            ConcurrentUseError: A unit or transaction did not end in time; the error names it and says how far it got. Its
                writer is closed as soon as it ends.
            ConfigurationError: As for `with_options`.
            DualWriteError: As for `DualWriter.close`; errors of several writers are added as notes.
        """
        if process.pid != self._pid:
            return  # a forked child: the connections belong to its parent
        self._check("close()", also_closed=True)
        self._seconds(timeout)  # raises if it is not valid: the pool is still open
        with self._closing:
            if self._has_ended:
                return
            self._is_closed = True
            if self._is_in_progress:
                return
            try:
                self._is_in_progress = True
                self._finish(timeout)
            finally:
                self._is_in_progress = False

    def _finish(self, timeout: float | None) -> None:
        self._waiting.close()
        limit = self._workers.drain(self._limit(timeout), is_total=timeout is not None)
        try:
            self._end_writers(limit)
        except Exception:
            self._end()
            raise
        self._end()

    def _end(self) -> None:
        if self._owns_store:
            self._store.close()
        self._has_ended = True
        remove_source(self)
        atexit.unregister(self._close_at_exit)

    def _close_at_exit(self) -> None:
        """Close the pool; a handler of SIGTERM that calls `sys.exit()`, which has begun already, does not interrupt that."""
        while process.pid == self._pid and not self._has_ended:
            with contextlib.suppress(SystemExit):
                self.close()

    def _limit(self, timeout: Limit | None) -> Deadline:
        return timeout if isinstance(timeout, Deadline) else Deadline.after(self._seconds(timeout))

    def _seconds(self, timeout: float | None) -> float:
        """The pool's time limit, or the one that a caller gave; 0 means not to wait."""
        if timeout is None:
            return self._options.timeout
        check_seconds("timeout", timeout, may_be_zero=True)
        return timeout

    def _end_writers(self, limit: Deadline, error: BaseException | None = None) -> None:
        """Close the writers and release their ids; if `error` is given, failures become notes on it instead."""
        if self._keeper is not None:
            self._keeper.stop()
        self._upkeep.stop()
        try:
            self._writers.close(limit)
        except Exception as closing:
            self._ids.close()
            if error is None or not isinstance(closing, DualWriteError):
                raise
            error.add_note(f"dualwrite, closing the pool: {closing}")
        else:  # after e.g. KeyboardInterrupt the ids are still in use
            self._ids.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _check(self, what: str, *, waits: bool = True, also_closed: bool = False) -> None:
        process.check_not_forked(what, self._pid, self._prefix)
        if self._workers.include_this_thread:
            if not in_callback():
                raise NestedTransactionError(
                    f"{what} inside a unit of the same pool.",
                    next_step="a unit acts only through its transaction: call functions with `tx`, and use savepoints",
                )
            if waits:
                raise NestedTransactionError(
                    f"{what} in a done-callback of a future of the same pool.",
                    cause="a thread of the pool runs the callback, and would wait for itself",
                    next_step="call submit(), which does not wait, or do it in a thread of your own",
                )
        if self._is_closed and not also_closed:
            raise closed(self._prefix)


def joining(pool: WriterPool[Any]) -> Joining:
    """A pool's transactions that its users begin."""
    return pool._joining  # noqa: SLF001  (not a property: users would see it)
