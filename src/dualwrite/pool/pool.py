"""WriterPool: one object a process, for all its threads, as a SQLAlchemy Engine is."""

from __future__ import annotations

import atexit
import functools
import logging
import os
import threading
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager
from dataclasses import replace
from types import TracebackType
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeVar, overload

from dualwrite.deadline import Deadline
from dualwrite.errors import (
    ConfigurationError,
    DualWriteError,
    FencedError,
    NestedTransactionError,
    PoolTimeoutError,
    WriterClosedError,
)
from dualwrite.pool.adoption import Adoption
from dualwrite.pool.call import Call, name_of
from dualwrite.pool.group import Group, Rules
from dualwrite.pool.ids import FixedIds, Ids
from dualwrite.pool.leases import LeasedIds
from dualwrite.pool.options import PoolOptions
from dualwrite.pool.savepoint_policy import SavepointPolicy
from dualwrite.pool.upkeep import Upkeep
from dualwrite.pool.waiting import WaitingCalls
from dualwrite.pool.writers import Writers, closed, pool_timeout
from dualwrite.recovery.recoverer import Recoverer
from dualwrite.stores.base import TxnStateStore
from dualwrite.transaction import H, Transaction, forked
from dualwrite.writer import DualWriter, repeated

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")


class WriterPool(Generic[H]):
    """Writes of many threads to one database and to Kafka, atomically; made by `dualwrite.create_pool`. Thread-safe.

    `run` and `submit` share commits: the units of work that wait while one group commits are the next group, in one
    transaction on both sides. Nothing waits for a timer: a unit that comes alone is committed alone, at once.

    What a unit is: a function that gets a Transaction as its first argument and acts only through it. It may run more than
    once: if a group fails, its units run again, each in a transaction of its own. A unit that raises takes nothing of the
    others with it, and its messages are never sent; its caller gets the exception.

    Isolation: the units of a group run one after another and see each other's changes, as if each had committed before the
    next began. Under REPEATABLE READ and SERIALIZABLE the group is the transaction: its snapshot is taken once for all of
    its units.

    Args:
        open_writer: Opens a writer on a transactional id; each serves one group or one transaction at a time.
        open_recoverer: Opens a recoverer on the store.
        size: The number of writers.
        store: The writers' store; closed with the pool if `owns_store`.
        prefix: What their transactional ids begin with.
        options: How it groups, and when it answers.
        owns_store: Whether `close` closes the store.

    Raises:
        ConfigurationError: `acknowledge="decided"` without two-phase commit, or `size` is out of range.
        DualWriteError: As for `DualWriter.open`; or no ids could be leased.
    """

    def __init__(
        self,
        open_writer: Callable[[str], DualWriter[H]],
        open_recoverer: Callable[[], Recoverer],
        *,
        size: int,
        store: TxnStateStore,
        prefix: str,
        options: PoolOptions | None = None,
        owns_store: bool = False,
    ) -> None:
        self._options = options or PoolOptions()
        self._options.check_size(size)
        self._prefix = prefix
        self._store = store
        self._owns_store = owns_store
        self._open_writer = open_writer
        leases = store.leases
        self._ids: Ids = FixedIds(prefix) if leases is None else LeasedIds(leases, prefix, seconds=self._options.lease)
        self._writers = Writers(prefix, self._ids)
        self._upkeep = Upkeep(prefix, self._ids, self._writers, self._opened)
        self._waiting = WaitingCalls()
        self._savepoint_policy = SavepointPolicy() if store.undoing_units_costs else None
        self._turn = threading.Lock()  # one thread at a time collects calls and runs their SQL
        self._here = threading.local()
        self._pid = os.getpid()
        self._closing = threading.Lock()  # also for `resize`
        self._is_closed = False
        self._threads: list[threading.Thread] = []
        self._threads_lock = threading.Lock()
        self._taken: dict[int, list[Call]] = {}  # by thread: the calls of its group
        if isinstance(self._ids, LeasedIds):
            self._ids.on_lost = self._writers.remove
        try:
            self._upkeep.resize(size, Deadline.after(self._options.timeout))
        except BaseException as error:
            self._end_writers(self._limit(None), error)
            raise
        if leases is not None and isinstance(self._ids, LeasedIds):
            self._upkeep.start(Adoption(store, leases, self._ids, prefix, open_recoverer), self._ids.interval)
        self._match_threads()
        atexit.register(self.close)  # what is queued is finished even if nobody closes the pool

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
    def transactional_ids(self) -> tuple[str, ...]:
        """The transactional ids of the writers that can be used now."""
        return self._writers.transactional_ids

    @property
    def waiting(self) -> int:
        """The number of calls that wait for their group."""
        return len(self._waiting)

    @property
    def options(self) -> PoolOptions:
        """How it groups, and when it answers."""
        return self._options

    @property
    def is_closed(self) -> bool:
        """Whether it is closed, or is being closed."""
        return self._is_closed

    def run(self, unit: Callable[Concatenate[Transaction[H], P], T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a unit of work, in one commit with those of other threads, and wait for it.

        Args:
            unit: Called with a Transaction and the arguments in one of the pool's threads, in a copy of the caller's context
                (`contextvars`). It acts only through the Transaction, and may run more than once.
            *args: Positional arguments of the unit after the Transaction.
            **kwargs: Keyword arguments of the unit.

        Returns:
            What the unit returned; both sides are committed.

        Raises:
            BaseException: What the unit raised; nothing of it is committed.
            PoolTimeoutError: Its turn did not come within `timeout`; it has not run.
            DualWriteError: As for `DualWriter.transaction`. InDoubtTransactionError: its outcome is unknown.
            NestedTransactionError: Called by a unit of this pool.
            WriterClosedError: The pool is closed.
        """
        result: T = self._run(Call(unit, args, kwargs, None), self._options.timeout)
        return result

    def submit(self, unit: Callable[Concatenate[Transaction[H], P], T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """As `run`, without waiting: the future has the result or the exception; until the unit begins it can be cancelled."""
        return self._submit(Call(unit, args, kwargs, None))

    def with_options(self, *, key: Hashable = None, timeout: float | None = None) -> BoundPool[H]:
        """The pool with an ordering key, or another limit for waiting: `pool.with_options(key=customer).run(unit)`.

        Args:
            key: Units with the same key are committed in the order of their calls, and their messages sent in that order.
            timeout: Seconds that a call waits for its turn; `submit` has no limit.
        """
        return BoundPool(self, key, self._options.timeout if timeout is None else timeout)

    @overload
    def transactional(self, function: Callable[Concatenate[Transaction[H], P], T], /) -> Callable[P, T]: ...

    @overload
    def transactional(self, /, *, attempts: int) -> Callable[[Callable[Concatenate[Transaction[H], P], T]], Callable[P, T]]: ...

    def transactional(
        self, function: Callable[Concatenate[Transaction[H], P], T] | None = None, /, *, attempts: int = 1
    ) -> Callable[P, T] | Callable[[Callable[Concatenate[Transaction[H], P], T]], Callable[P, T]]:
        """Make every call of a function a unit; the function gets the Transaction as its first argument.

        Use it as `@pool.transactional` or `@pool.transactional(attempts=3)`. The latter runs the unit again, with backoff,
        after a retriable error (such as a serialization failure), which has rolled back both sides; also after FencedError, if
        the pool can use another id.
        """
        if function is None:
            return functools.partial(self._decorated, attempts=attempts)
        return self._decorated(function, attempts=attempts)

    def _decorated(self, function: Callable[Concatenate[Transaction[H], P], T], *, attempts: int) -> Callable[P, T]:
        @functools.wraps(function)
        def once(*args: P.args, **kwargs: P.kwargs) -> T:
            return self.run(function, *args, **kwargs)

        return repeated(once, attempts=attempts, is_retriable=self._is_retriable)

    def _is_retriable(self, error: BaseException) -> bool:
        """Whether both sides were rolled back, and the unit may succeed now; one that was fenced may under another id."""
        if isinstance(error, FencedError):
            return self._ids.are_leased
        return error.retriable if isinstance(error, DualWriteError) else self._store.is_conflict(error)

    @contextmanager
    def transaction(self, *, timeout: float | None = None) -> Iterator[Transaction[H]]:
        """A transaction of its own, on a free writer, as `DualWriter.transaction`.

        Args:
            timeout: Seconds to wait for a writer, instead of the pool's.

        Raises:
            PoolTimeoutError: No writer was free within the limit.
            DualWriteError: As for `DualWriter.transaction`.
        """
        self._check("transaction()")
        limit = Deadline.after(self._options.timeout if timeout is None else timeout)
        with self._writers.checked_out("a transaction of its own", limit) as writer:
            if self._is_closed:
                raise closed(self._prefix)
            with writer.transaction() as begun:
                yield begun

    # --- its size -----------------------------------------------------------------------------------------------------------

    def resize(self, size: int) -> None:
        """Change the number of writers, while the pool is used. Returns when it has so many.

        A larger pool leases further ids. In a smaller one, writers are closed as soon as their transactions have ended, and
        their ids are given back.

        Args:
            size: The number of writers, from 1 to the option `max_size`.

        Raises:
            ConfigurationError: The number is out of range.
            PoolTimeoutError: The writers to be closed were busy for `timeout` seconds; the pool has the size it has reached.
            DualWriteError: A writer could not be opened, as for `DualWriter.open`; the same.
            NestedTransactionError: Called by a unit of this pool.
            WriterClosedError: The pool is closed.
        """
        self._options.check_size(size)
        self._check("resize()")
        with self._closing:
            if self._is_closed:
                raise closed(self._prefix)
            try:
                self._upkeep.resize(size, Deadline.after(self._options.timeout))
            finally:
                self._match_threads()

    def _opened(self, name: str) -> DualWriter[H]:
        writer = self._open_writer(name)
        if self._options.acknowledge == "decided" and not writer.is_two_phase:
            writer.close()
            raise ConfigurationError(
                'acknowledge="decided" requires two-phase commit.',
                cause="without it Kafka may abort a transaction that the database has committed, if it times out before its "
                "commit; callers can be answered only after Kafka's commit",
                next_step='use acknowledge="visible", or enable two-phase commit on the brokers',
            )
        return writer

    # --- closing ------------------------------------------------------------------------------------------------------------

    def close(self, *, timeout: float | None = None) -> None:
        """Finish the calls that wait, resolve what is in doubt, close the writers, and give the ids back.

        May be called more than once. At the end of the program it is called by itself.

        Args:
            timeout: Seconds that units and transactions have to end. By default it waits as long as the pool gets on, and gives
                up if for its `timeout` no unit has begun and no group has ended. Then calls that have not begun are cancelled.

        Raises:
            ConcurrentUseError: A unit or transaction has not ended in time: it is named, with what is left of it. Its writer is
                closed as soon as it ends.
            DualWriteError: As for `DualWriter.close`; errors of several writers are added as notes.
        """
        if os.getpid() != self._pid:
            return  # a forked child: the connections belong to its parent
        self._check("close()", also_closed=True)
        with self._closing:
            if self._is_closed:
                return
            self._is_closed = True
            atexit.unregister(self.close)
            self._waiting.close()
            limit = self._drain(self._limit(timeout), is_total=timeout is not None)
            try:
                self._end_writers(limit)
            finally:
                if self._owns_store:
                    self._store.close()

    def _drain(self, limit: Deadline, *, is_total: bool) -> Deadline:
        """Wait for the threads, which run what waits; returns the limit for what comes next. If they are blocked, it is over.

        Args:
            limit: The limit.
            is_total: If not, it begins anew with whatever the pool does.
        """
        threads, seen = list(self._threads), -1
        while any(thread.is_alive() for thread in threads):
            if limit.expired and (is_total or self._writers.steps == seen):
                self._cancel_calls()
                return limit
            if not is_total:
                seen, limit = self._writers.steps, self._limit(None)
            for thread in threads:
                thread.join(limit.left)
        return limit if is_total else self._limit(None)

    def _limit(self, timeout: float | None) -> Deadline:
        return Deadline.after(self._options.timeout if timeout is None else timeout)

    def _cancel_calls(self) -> None:
        """Those that have not begun will not any more, even if what blocks them ends."""
        self._waiting.cancel()
        for calls in list(self._taken.values()):
            for call in list(calls):
                call.future.cancel()

    def _end_writers(self, limit: Deadline, error: BaseException | None = None) -> None:
        """Close the writers and give their ids back; with an error, note on it what goes wrong meanwhile."""
        self._upkeep.stop()
        try:
            self._writers.close(limit)
        except DualWriteError as closing:
            if error is None:
                raise
            error.add_note(f"dualwrite, closing the pool: {closing}")
        finally:
            self._ids.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    # --- inside: the callers' side ------------------------------------------------------------------------------------------

    def _submit(self, call: Call) -> Future[Any]:
        try:
            self._check("a unit")
            if self._waiting.put(call):
                return call.future
        except BaseException:
            call.future.cancel()  # KeyboardInterrupt, when it may be in the queue already: nobody has its future
            raise
        raise closed(self._prefix)

    def _run(self, call: Call, timeout: float) -> Any:
        try:
            return self._submit(call).result(timeout)
        except TimeoutError:
            if call.future.cancel():
                raise self._timed_out(call.name, timeout) from None
            return call.future.result()  # it has begun, or raised a TimeoutError of its own
        except CancelledError:
            self._check_not_cancelled(call.future)
            raise
        except BaseException:
            call.future.cancel()  # KeyboardInterrupt: if it has not begun, it does not have to
            raise

    def _check_not_cancelled(self, future: Future[Any]) -> None:
        """Raise WriterClosedError if `close` has cancelled the call, whose future nobody else has."""
        if future.cancelled():
            raise closed(self._prefix)

    def _timed_out(self, name: str, timeout: float) -> PoolTimeoutError:
        return pool_timeout(f"The turn of {name} did not come", timeout, self._writers.doing())

    def _check(self, what: str, *, also_closed: bool = False) -> None:
        if os.getpid() != self._pid:
            raise forked(what, self._pid, self._prefix)
        if getattr(self._here, "is_ours", False):
            raise NestedTransactionError(
                f"{what} inside a unit of the same pool.",
                next_step="a unit acts only through its transaction: call functions with `tx`, and use savepoints",
            )
        if self._is_closed and not also_closed:
            raise closed(self._prefix)

    # --- inside: the pool's threads -----------------------------------------------------------------------------------------

    def _match_threads(self) -> None:
        """A thread for each writer. Those that are too many end when it is their turn."""
        with self._threads_lock:
            while len(self._threads) < self._upkeep.wanted:
                name = f"dualwrite pool {self._prefix} {len(self._threads)}"
                self._threads.append(threading.Thread(target=self._work, name=name, daemon=True))
                self._threads[-1].start()

    def _is_one_too_many(self) -> bool:
        """Whether this thread should end; it is not counted any more then."""
        with self._threads_lock:
            if len(self._threads) <= self._upkeep.wanted:
                return False
            self._threads.remove(threading.current_thread())
            return True

    def _work(self) -> None:
        """Take turns: while this thread's group is committed, the next thread collects calls and runs their SQL."""
        self._here.is_ours = True
        most = int(self._options.group_units) if self._store.undoes_units else 1
        rules = Rules(
            most_units=most,
            most_bytes=int(self._options.group_bytes),
            when_decided=self._options.acknowledge == "decided",
            savepoint_policy=self._savepoint_policy,
        )
        while True:
            self._turn.acquire()  # released as soon as the group's SQL is done
            turn = _Once(self._turn.release)
            try:
                calls = [] if self._is_one_too_many() else self._waiting.take(most)
                if not calls:
                    return
                self._run_group(calls, replace(rules, has_written=turn))
            finally:
                turn()

    def _run_group(self, calls: list[Call], rules: Rules) -> None:
        self._taken[threading.get_ident()] = calls

        def more(most: int) -> list[Call]:
            came = self._waiting.take_more(most, calls)
            calls.extend(came)
            return came

        def back(rest: list[Call]) -> None:
            calls[:] = [call for call in calls if call not in rest]
            self._waiting.put_back(rest, calls)

        try:
            with self._writers.checked_out("a group") as writer:  # without a limit: each caller has its own
                rules = replace(rules, more=more, back=back, doing=functools.partial(self._writers.note, writer))
                Group(writer, list(calls), rules).run()
        except BaseException as error:
            if not isinstance(error, FencedError | WriterClosedError):
                log.exception("%s: a group ended with an unexpected error", self._prefix)
            for call in calls:
                call.deliver_error(error)
        finally:
            del self._taken[threading.get_ident()]
            self._waiting.release(calls)


class BoundPool(Generic[H]):
    """A pool with other options, made by `WriterPool.with_options`.

    Attributes:
        timeout: Seconds that a call waits for its turn.
    """

    def __init__(self, pool: WriterPool[H], key: Hashable, timeout: float) -> None:
        self._pool = pool
        self._key = key
        self.timeout = timeout

    def run(self, unit: Callable[Concatenate[Transaction[H], P], T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """See WriterPool."""
        result: T = self._pool._run(Call(unit, args, kwargs, self._key), self.timeout)  # noqa: SLF001  (a part of the pool)
        return result

    def submit(self, unit: Callable[Concatenate[Transaction[H], P], T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """See WriterPool."""
        return self._pool._submit(Call(unit, args, kwargs, self._key))  # noqa: SLF001  (as above)

    def outcome(self, future: Future[T]) -> T:
        """The outcome of a unit that has ended. If the pool was closed before the unit began, WriterClosedError."""
        self._pool._check_not_cancelled(future)  # noqa: SLF001  (as above)
        return future.result()

    def timed_out(self, unit: Callable[..., Any]) -> PoolTimeoutError:
        """The error for a unit whose turn did not come within the limit."""
        return self._pool._timed_out(name_of(unit), self.timeout)  # noqa: SLF001  (as above)


class _Once:
    """Calls a function at the first call only."""

    __slots__ = ("_function",)

    def __init__(self, function: Callable[[], None]) -> None:
        self._function: Callable[[], None] | None = function

    def __call__(self) -> None:
        function, self._function = self._function, None
        if function is not None:
            function()
