"""WriterPool: one object a process, for all its threads, as a SQLAlchemy Engine is."""

from __future__ import annotations

import atexit
import functools
import logging
import os
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Concatenate, Final, Generic, Literal, ParamSpec, Self, TypeVar, get_args, overload

from dualwrite.deadline import Deadline
from dualwrite.errors import ConfigurationError, DualWriteError, FencedError, NestedTransactionError, PoolTimeoutError
from dualwrite.pool.call import Call, name_of
from dualwrite.pool.group import Group, Rules
from dualwrite.pool.hopes import Hopes
from dualwrite.pool.waiting import WaitingCalls
from dualwrite.pool.writers import Writers, closed, pool_timeout
from dualwrite.stores.base import TxnStateStore
from dualwrite.transaction import H, Transaction, forked
from dualwrite.writer import DualWriter, repeated

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

Acknowledge = Literal["visible", "decided"]

MOST_UNITS: Final = 64
"""PostgreSQL caches 64 subtransactions of a transaction; a reader of its rows pays for each one beyond them."""


@dataclass(frozen=True, slots=True)
class PoolOptions:
    """How a pool groups and when it answers.

    Args:
        acknowledge: When a call returns: "visible" after Kafka's commit, when consumers can read the messages; "decided" after
            the database's commit, from which on neither side can be lost, only under two-phase commit.
        group_units: The most units of a group. Above 64, PostgreSQL's readers become slower; savepoints in a unit count too.
        group_bytes: The size of its messages in bytes at which a group takes no more units.
        timeout: Seconds that a call waits for its turn, or `transaction()` for a writer.

    Raises:
        ConfigurationError: A value is out of range.
    """

    acknowledge: Acknowledge = "visible"
    group_units: int = MOST_UNITS
    group_bytes: int = 1_000_000
    timeout: float = 30.0

    def __post_init__(self) -> None:
        if self.acknowledge not in get_args(Acknowledge):
            raise ConfigurationError(f"acknowledge is {self.acknowledge!r}.", next_step='use "visible" or "decided"')
        for name in ("group_units", "group_bytes"):
            number = getattr(self, name)
            if isinstance(number, bool) or not isinstance(number, int) or number < 1:
                raise ConfigurationError(f"{name} is {number!r}, not a whole number above 0.")
        if isinstance(self.timeout, bool) or not isinstance(self.timeout, int | float) or not self.timeout > 0:
            raise ConfigurationError(f"timeout is {self.timeout!r}, not a number of seconds above 0.")


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
        writers: Open writers, closed with the pool; each serves one group or one transaction at a time.
        store: Their store; closed with the pool if `owns_store`.
        prefix: What their transactional ids begin with, for errors.
        options: How it groups, and when it answers.
        owns_store: Whether `close` closes the store.

    Raises:
        ConfigurationError: `acknowledge="decided"` without two-phase commit.
    """

    def __init__(
        self,
        writers: Sequence[DualWriter[H]],
        *,
        store: TxnStateStore,
        prefix: str,
        options: PoolOptions | None = None,
        owns_store: bool = False,
    ) -> None:
        self._options = options or PoolOptions()
        if self._options.acknowledge == "decided" and not all(writer.is_two_phase for writer in writers):
            raise ConfigurationError(
                'acknowledge="decided" requires two-phase commit.',
                cause="without it Kafka may abort a transaction that the database has committed, if it times out before its "
                "commit; a caller must not be told before that is excluded",
                next_step='use acknowledge="visible", or enable two-phase commit on the brokers',
            )
        self._prefix = prefix
        self._store = store
        self._owns_store = owns_store
        self._writers = Writers(writers, prefix)
        self._waiting = WaitingCalls()
        self._hopes = Hopes() if store.undoing_units_costs else None
        self._turn = threading.Lock()  # one thread at a time collects calls and runs their SQL
        self._here = threading.local()
        self._pid = os.getpid()
        self._closing = threading.Lock()
        self._is_closed = False
        self._threads = [
            threading.Thread(target=self._work, name=f"dualwrite pool {prefix} {number}", daemon=True)
            for number in range(len(writers))
        ]
        for thread in self._threads:
            thread.start()
        atexit.register(self.close)  # what is queued is finished even if nobody closes the pool

    # --- using it ---------------------------------------------------------------------------------------------------------

    @property
    def size(self) -> int:
        """The number of writers that can be used."""
        return len(self._writers)

    @property
    def waiting(self) -> int:
        """The number of calls that wait for their group."""
        return len(self._waiting)

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
        result: T = self._run(unit, args, kwargs, None, self._options.timeout)
        return result

    def submit(self, unit: Callable[Concatenate[Transaction[H], P], T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """As `run`, without waiting: the future has the result or the exception; until the unit begins it can be cancelled."""
        return self._put(unit, args, kwargs, None).future

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
        after a retriable error (such as a serialization failure), which has rolled back both sides.
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
        with self._writers.lent("a transaction of its own", limit) as writer:
            if self._is_closed:
                raise closed(self._prefix)
            with writer.transaction() as begun:
                yield begun

    # --- closing ------------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Finish the calls that wait, resolve what is in doubt, and close the writers. May be called more than once.

        Raises:
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
            for thread in self._threads:
                thread.join()
            try:
                self._writers.close(Deadline.after(self._options.timeout))
            finally:
                if self._owns_store:
                    self._store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    # --- inside: the callers' side ------------------------------------------------------------------------------------------

    def _put(self, unit: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], key: Hashable) -> Call:
        self._check("a unit")
        call = Call(unit, args, kwargs, key)
        if not self._waiting.put(call):
            raise closed(self._prefix)
        return call

    def _run(self, unit: Any, args: tuple[Any, ...], kwargs: dict[str, Any], key: Hashable, timeout: float) -> Any:
        call = self._put(unit, args, kwargs, key)
        try:
            return call.future.result(timeout)
        except TimeoutError:
            if call.future.cancel():
                raise self._timed_out(call.name, timeout) from None
            return call.future.result()  # it has begun, or raised a TimeoutError of its own
        except BaseException:
            call.future.cancel()  # KeyboardInterrupt: if it has not begun, it does not have to
            raise

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

    def _work(self) -> None:
        """Take turns: while this thread's group is committed, the next thread collects calls and runs their SQL."""
        self._here.is_ours = True
        most = int(self._options.group_units) if self._store.undoes_units else 1
        rules = Rules(
            most_units=most,
            most_bytes=int(self._options.group_bytes),
            when_decided=self._options.acknowledge == "decided",
            hopes=self._hopes,
        )
        while True:
            self._turn.acquire()  # released as soon as the group's SQL is done
            turn = _Once(self._turn.release)
            try:
                calls = self._waiting.take(most)
                if not calls:
                    return
                self._run_group(calls, replace(rules, has_written=turn))
            finally:
                turn()

    def _run_group(self, calls: list[Call], rules: Rules) -> None:
        try:
            with self._writers.lent("a group") as writer:
                rules = replace(
                    rules,
                    more=lambda most: self._waiting.take_more(most, calls),
                    doing=functools.partial(self._writers.note, writer),
                )
                Group(writer, calls, rules).run()
        except BaseException as error:
            if not isinstance(error, FencedError):
                log.exception("%s: a group ended with an unexpected error", self._prefix)
            for call in calls:
                call.tell_error(error)
        finally:
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
        result: T = self._pool._run(unit, args, kwargs, self._key, self.timeout)  # noqa: SLF001  (a part of the pool)
        return result

    def submit(self, unit: Callable[Concatenate[Transaction[H], P], T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """See WriterPool."""
        return self._pool._put(unit, args, kwargs, self._key).future  # noqa: SLF001  (as above)

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
