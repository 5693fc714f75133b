"""The pool's threads: each runs one group after another.

While one thread commits its group, the next thread runs the units of the next group. If the pool waits for the network most of
the time, the threads run their groups side by side (`scaling.py`).
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from dataclasses import replace
from typing import Any, Final, Protocol

from dualwrite.deadline import Deadline, check_may_block
from dualwrite.errors import FencedError, PoolTimeoutError, StoreError, StoreUnavailableError, WriterClosedError
from dualwrite.logs import SubjectLogger
from dualwrite.outages import is_no_answer
from dualwrite.pool.calls import Call, WaitingCalls
from dualwrite.pool.group import Group, Rules, SavepointPolicy
from dualwrite.pool.scaling import SERIAL, PoolOptions, Scaler
from dualwrite.pool.writers import Writers, closed, pool_timeout
from dualwrite.stores.base import TxnStateStore


class Check(Protocol):
    """Whether the pool can be used for a call here and now."""

    def __call__(self, what: str, *, waits: bool) -> None:
        """Raise an error if it can't be.

        Args:
            what: A description of the call.
            waits: Whether the call waits for something that a thread of the pool must do.
        """


class Submitter:
    """Submits calls to a pool's queue.

    Args:
        prefix: The prefix of the pool's ids, for errors.
        waiting: The queue.
        writers: The pool's writers: an error names what they are doing.
        check: Called before each call; raises an error if the pool can't be used for it here and now.
    """

    def __init__(self, prefix: str, waiting: WaitingCalls, writers: Writers, check: Check) -> None:
        self._prefix = prefix
        self._waiting = waiting
        self._writers = writers
        self._check = check

    def submit(self, call: Call, *, waits: bool = False) -> Future[Any]:
        """Put a call into the queue.

        Args:
            call: The call.
            waits: Whether the caller will wait for it, which a thread of the pool can't.

        Raises:
            NestedTransactionError: Called from a unit of this pool, or to wait in a done-callback.
            WriterClosedError: The pool is closed.
        """
        try:
            self._check("a unit", waits=waits)
            if self._waiting.put(call):
                return call.future
        except BaseException:
            call.future.cancel()  # KeyboardInterrupt: it may be in the queue already, but nobody would get its future
            raise
        raise closed(self._prefix)

    def run(self, call: Call, timeout: float) -> Any:
        """Submit a call and wait for its result.

        Args:
            call: The call.
            timeout: Seconds to wait for the unit to start.

        Raises:
            BaseException: As for `WriterPool.run`.
        """
        check_may_block(f"run({call.name})", "await pool.run(…)")
        try:
            return self.submit(call, waits=True).result(timeout)
        except TimeoutError:
            if call.future.cancel():
                raise self.timed_out(call.name, timeout) from None
            return call.future.result()  # it has begun, or raised a TimeoutError of its own
        except CancelledError:
            self.check_not_cancelled(call.future)
            raise
        except BaseException:
            call.future.cancel()  # KeyboardInterrupt: if it has not begun, it need not run
            raise

    def check_not_cancelled(self, future: Future[Any]) -> None:
        """Raise WriterClosedError if the call was cancelled: only `close` can have done that, as nobody else has the future."""
        if future.cancelled():
            raise closed(self._prefix)

    def timed_out(self, name: str, timeout: float) -> PoolTimeoutError:
        """The error for a unit that did not start within `timeout` seconds."""
        return pool_timeout(f"{name} did not start", timeout, self._writers.doing())


log = SubjectLogger(__name__)

_MOST: Final = 1_000
"""More functions are not remembered: they run twice, first with others and then alone."""


class AloneUnits:
    """The functions of a pool that run alone from now on. Any thread may use it.

    Args:
        prefix: The pool's prefix, for messages.
    """

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._functions: set[object] = set()

    def goes_alone(self, call: Call) -> bool:
        """Whether a call gets a transaction of its own."""
        return call.alone or (bool(self._functions) and _identity(call.unit) in self._functions)

    def add(self, call: Call, what: str) -> None:
        """From now on the call's function runs alone.

        Args:
            call: A call whose unit was refused.
            what: What it was about to do.
        """
        function = _identity(call.unit)
        if function not in self._functions and len(self._functions) < _MOST:
            self._functions.add(function)
            log.info(
                "%s runs in transactions of its own from now on: others would see %s", call.name, what, prefix=self._prefix
            )


def _identity(unit: Callable[..., Any]) -> object:
    """What the units of one function have in common: the code of the innermost function that it wraps."""
    found: Any = unit
    while True:
        if isinstance(found, functools.partial):
            found = found.func
        elif hasattr(found, "__wrapped__"):
            found = found.__wrapped__
        elif hasattr(found, "__func__"):
            found = found.__func__
        else:
            break
    if not hasattr(found, "__code__"):
        found = type(found).__call__
    return getattr(found, "__code__", found)


_MOST_RUNS: Final = 5
"""How often a unit runs, if the database rolls it back each time because of another transaction."""


class Workers:
    """Threads that run the calls of a queue in groups.

    Args:
        prefix: The prefix of the ids, for messages and the threads' names.
        options: The pool's options.
        store: The writers' store.
        scaler: Knows how many threads there should be, and whether their groups run side by side.
        writers: The writers that the groups use.
        waiting: The queue.
        alone: Which calls run alone.

    Attributes:
        threads: The threads, including surplus ones until their next turn.
    """

    def __init__(
        self,
        prefix: str,
        options: PoolOptions,
        store: TxnStateStore,
        scaler: Scaler,
        writers: Writers,
        waiting: WaitingCalls,
        alone: AloneUnits,
    ) -> None:
        self.threads: list[threading.Thread] = []
        self._prefix = prefix
        self._options = options
        self._store = store
        self._scaler = scaler
        self._writers = writers
        self._waiting = waiting
        self._alone = alone
        self._savepoint_policy = SavepointPolicy() if store.units_need_savepoints else None
        self._turn = threading.Lock()  # one thread at a time collects calls; and runs their SQL, unless groups run side by side
        self._here = threading.local()
        self._threads_lock = threading.Lock()
        self._numbers = itertools.count()
        self._groups: dict[int, list[Call]] = {}  # by thread: the calls of its group

    @property
    def include_this_thread(self) -> bool:
        """Whether the calling thread is one of these threads: the call comes from inside a unit, or from a done-callback."""
        return getattr(self._here, "is_ours", False)

    def match_size(self) -> None:
        """Start the threads that are missing. Surplus threads end at their next turn."""
        with self._threads_lock:
            while len(self.threads) < self._scaler.threads and not self._waiting.is_closed:
                name = f"dualwrite pool {self._prefix} {next(self._numbers)}"
                self.threads.append(threading.Thread(target=self._work, name=name, daemon=True))
                self.threads[-1].start()

    def drain(self, limit: Deadline, *, is_total: bool) -> Deadline:
        """Wait until the threads have run what is in the closed queue; cancel the calls that have not begun by the limit.

        Args:
            limit: The limit.
            is_total: Whether the limit is for the whole wait; otherwise it starts again whenever the pool makes progress.

        Returns:
            The limit for the steps that follow.
        """
        seen = -1
        while threads := [thread for thread in list(self.threads) if thread.is_alive()]:
            if limit.expired and (is_total or self._writers.steps == seen):
                self._cancel_calls()
                return limit
            if not is_total:
                seen, limit = self._writers.steps, Deadline.after(self._options.timeout)
            for thread in threads:
                thread.join(limit.left)
        self._cancel_calls()  # nobody would run them; there are none unless the threads have ended early
        return limit if is_total else Deadline.after(self._options.timeout)

    def _cancel_calls(self) -> None:
        """Cancel the calls that have not begun: they must not run later, when whatever blocks them has ended."""
        self._waiting.cancel()
        for calls in list(self._groups.values()):
            for call in list(calls):
                call.cancel()

    # --- in the threads -----------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        """Take turns: collect calls, and run them as a group."""
        self._here.is_ours = True
        most = int(self._options.group_units) if self._store.undoes_units else 1
        rules = Rules(
            most_units=most,
            most_bytes=int(self._options.group_bytes),
            when_decided=self._options.acknowledge == "decided",
            savepoint_policy=self._savepoint_policy,
            goes_alone=self._alone.goes_alone,
            runs_alone=self._alone.add,
            runs_again=self._runs_again,
        )
        while True:
            self._turn.acquire()  # released at once if groups run side by side; otherwise as soon as the group's SQL is done
            turn = _Once(self._turn.release)
            try:
                side_by_side = self._scaler.side_by_side
                calls, was_waiting = ([], False) if self._is_surplus() else self._waiting.take(most, side_by_side)
                if not calls:
                    return
                if side_by_side > SERIAL:
                    turn()
                self._run_group(calls, replace(rules, has_written=turn))
                self._scaler.group_ended(calls, was_waiting=was_waiting)
            except Exception:  # whatever it was, such as an ordering key's __eq__: this thread must go on
                log.exception("an unexpected error in a thread of the pool", prefix=self._prefix)
            finally:
                turn()

    def _runs_again(self, call: Call) -> bool:
        """Whether a call that another transaction got in the way of runs once more: it may have been another group."""
        self._scaler.conflicted()
        call.conflicts += 1
        return call.conflicts < _MOST_RUNS

    def _is_surplus(self) -> bool:
        """Whether this thread should end; if so, it is removed from `threads`."""
        with self._threads_lock:
            if len(self.threads) <= self._scaler.threads or self._waiting.is_closed:
                return False
            self.threads.remove(threading.current_thread())
            return True

    def _run_group(self, calls: list[Call], rules: Rules) -> None:
        self._groups[threading.get_ident()] = calls

        def more(most: int) -> list[Call]:
            came = self._waiting.take_more(most, calls, self._scaler.side_by_side)
            calls.extend(came)
            return came

        def put_back(rest: list[Call]) -> None:
            calls[:] = [call for call in calls if call not in rest]
            self._waiting.put_back(rest, calls)

        try:
            limit = Deadline.after(self._options.timeout)
            while self._is_fenced_before_it_begins(calls, replace(rules, more=more, put_back=put_back), limit):
                pass
        except BaseException as error:
            self._note_outage(error)
            if not isinstance(error, FencedError | WriterClosedError):
                log.exception("a group ended with an unexpected error", prefix=self._prefix)
            for call in calls:
                call.deliver_error(error)
        finally:
            del self._groups[threading.get_ident()]
            self._waiting.release(calls)

    def _is_fenced_before_it_begins(self, calls: list[Call], rules: Rules, limit: Deadline) -> bool:
        """Run the calls as a group; True if its writer was fenced before any unit ran: they can run on a writer taken again.

        Raises:
            FencedError: The units have run, and were rolled back; or there is no other writer for them.
        """
        with self._writers.checked_out("a group") as writer:  # without a limit: each caller has its own
            group = Group(writer, list(calls), replace(rules, doing=functools.partial(self._writers.note, writer)))
            try:
                group.run()
                if group.conflicted:
                    rules.put_back(group.conflicted)
            except FencedError as error:
                if group.has_begun or not self._writers.can_continue(limit):
                    raise
                text = "fenced before a unit ran; taking a writer again: %s"
                log.info(text, error, transactional_id=writer.transactional_id)
                return True
        self._note_outage(group.error)
        if isinstance(group.error, StoreError) and group.error.retriable and not isinstance(group.error, StoreUnavailableError):
            self._scaler.conflicted()
        return False

    def _note_outage(self, error: BaseException | None) -> None:
        """While the pool is being closed, cancel the calls that wait if a side does not answer: they would fail, one by one."""
        if self._waiting.is_closed and is_no_answer(error):
            self._waiting.cancel()


class _Once:
    """Calls a function on the first call only."""

    __slots__ = ("_function",)

    def __init__(self, function: Callable[[], None]) -> None:
        self._function: Callable[[], None] | None = function

    def __call__(self) -> None:
        function, self._function = self._function, None
        if function is not None:
            function()
