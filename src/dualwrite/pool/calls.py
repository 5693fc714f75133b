"""Calls that wait for a group: first come, first served; those with one key keep their order, and some go alone."""

from __future__ import annotations

import contextvars
import copy
import functools
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Hashable, Mapping
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import Any, Final

from dualwrite.observability import observers, tracing
from dualwrite.observability.events import UnitEnded
from dualwrite.observability.logs import SubjectLogger
from dualwrite.observability.tracing import UndoneError, UnitTrace
from dualwrite.pool.declared import NONE, Local
from dualwrite.transaction import Transaction, UnitTransaction
from dualwrite.transactional import check_has_run, name_of

log = SubjectLogger(__name__)

_MAX_ALONE_FUNCTIONS: Final = 1_000
"""More functions are not remembered as running alone: they run twice, first with others and then alone."""

_NOT_RUN: Final = object()
_here: Final = threading.local()
_numbers: Final = itertools.count()


class UnitCall:
    """A unit of work with its arguments, which runs in a copy of the caller's context (`contextvars`).

    It may run more than once; its caller gets the outcome of the last run.

    Attributes:
        key: Units with the same key run in the order of their calls; None: no ordering.
        alone: Whether it must have a transaction of its own.
        local: The settings that it declares.
        future: What the caller waits for.
        name: The unit's name, for messages.
        number: Later calls have higher ones.
        created: When it was made, by `time.monotonic`.
        conflicts: How often its unit was rolled back because of another transaction.
    """

    __slots__ = (
        *("_args", "_beginning", "_begun", "_began_at", "_context", "_error", "_kwargs", "_prefix", "_result", "_trace"),
        *("alone", "conflicts", "created", "future", "key", "local", "name", "number", "unit"),
    )

    def __init__(
        self,
        unit: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        key: Hashable,
        *,
        prefix: str = "",
        alone: bool = False,
        local: Local = NONE,
    ) -> None:
        self._prefix = prefix
        self._trace: UnitTrace | None = None
        self._began_at: float | None = None
        self.unit = unit
        self.key = key
        self.alone = alone
        self.local = local
        self.name = name_of(unit)
        self.number = next(_numbers)
        self.created = time.monotonic()
        self.conflicts = 0
        self.future: Future[Any] = Future()
        self._args = args
        self._kwargs = kwargs
        self._context = contextvars.copy_context()
        self._result: Any = _NOT_RUN
        self._error: BaseException | None = None
        self._beginning = threading.Lock()  # `close` cancels calls while a thread of the pool begins them
        self._begun: bool | None = None

    def begin(self) -> bool:
        """Called before each run of the unit; False if the caller has cancelled it, or no longer waits.

        The first call decides, atomically with respect to `Future.cancel`: after it, the unit either can't be cancelled any
        more or will never run.
        """
        with self._beginning:
            if self._begun is None:
                self._began_at = time.monotonic()
                self._begun = self.future.set_running_or_notify_cancel()
            return self._begun

    def cancel(self) -> bool:
        """Cancel the call unless it has begun, in any thread; return whether it is cancelled.

        `Future.cancel` alone does not end `concurrent.futures.wait` and `as_completed`.
        """
        return self.future.cancel() and not self.begin()

    @property
    def has_begun(self) -> bool:
        """Whether the unit has run, or is about to."""
        return self._begun is True

    @property
    def is_cancelled(self) -> bool:
        """Whether the caller has cancelled it before it began."""
        return self.future.cancelled() and not self.begin()  # begin() notifies the threads that wait for the future

    def run(self, transaction: UnitTransaction) -> None:
        """Run the unit, and keep its result.

        Raises:
            UsageError: The unit is an `async` function or a generator, or returned a coroutine or a generator.
            BaseException: What the unit raises.
        """
        self._error, self._result = None, _NOT_RUN
        if tracing.tracer is None:
            result = self._context.run(self.unit, Transaction(transaction), *self._args, **self._kwargs)
        else:
            result = self._context.run(self._run_traced, transaction)
        check_has_run(result, f"The unit {self.name}")
        self._result = result

    def _run_traced(self, transaction: UnitTransaction) -> Any:
        """Run the unit in a trace of its own, which belongs to the caller's."""
        self.undone()
        waited = (self._began_at or time.monotonic()) - self.created
        self._trace = tracing.unit_trace(self.name, transaction.transactional_id, transaction.number, waited)
        transaction.trace = self._trace
        with self._trace.current():
            return self.unit(Transaction(transaction), *self._args, **self._kwargs)

    def undone(self, error: BaseException | None = None) -> None:
        """What the unit has done is undone, because of its error or because of others: end the trace of this run."""
        if self._trace is not None:
            self._trace.end(error or UndoneError())

    def failed(self, error: BaseException) -> None:
        """Record the error that the unit raised; the unit was undone."""
        self._error = error

    @property
    def has_failed(self) -> bool:
        """Whether the last run of the unit was undone."""
        return self._error is not None

    def deliver(self) -> None:
        """Deliver the outcome of the last run to the caller: its result, or its own error."""
        if self.future.done():
            return
        self._report(self._error)
        if self._error is not None:
            self._set(self.future.set_exception, self._error)
        else:
            self._set(self.future.set_result, self._result)

    def deliver_error(self, error: BaseException) -> None:
        """Deliver a copy of an error that the unit did not raise itself; a unit that has not begun will never run."""
        if self.begin() and not self.future.done():
            self._report(error)
            self._set(self.future.set_exception, _copy_of(error))

    def _report(self, error: BaseException | None) -> None:
        """Before the caller goes on: end the trace, and tell the observers."""
        if self._trace is not None:
            self._trace.end(error)
        if observers.installed:
            now = time.monotonic()
            waited = (self._began_at or now) - self.created
            observers.notify(UnitEnded(self._prefix, self.name, waited, now - self.created, error))

    def _set(self, setter: Callable[[Any], None], outcome: Any) -> None:
        """Set the future's outcome: an error of one of its done-callbacks concerns no call, least of all the other ones."""
        before, _here.in_callback = in_callback(), True
        try:
            setter(outcome)
        except BaseException:
            log.exception("a done-callback of %s has failed", self.name)
        finally:
            _here.in_callback = before


def in_callback() -> bool:
    """Whether the calling thread delivers an outcome, so that it is in a done-callback of the call's future."""
    return getattr(_here, "in_callback", False)


def _copy_of(error: BaseException) -> BaseException:
    """A copy for one caller: if several threads raised the same exception object, it would collect all their tracebacks."""
    try:
        copied = copy.copy(error)
    except Exception:  # noqa: BLE001  (an exception of the user's that can't be copied is shared)
        return error
    copied.__cause__ = error
    return copied


class AloneUnits:
    """The functions of a pool that run alone from now on. Any thread may use it."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._functions: set[object] = set()

    def goes_alone(self, call: UnitCall) -> bool:
        """Whether a call gets a transaction of its own."""
        return call.alone or (bool(self._functions) and _function_of(call.unit) in self._functions)

    def add(self, call: UnitCall, what: str) -> None:
        """From now on the function of a call runs alone, since its unit was about to do `what`, which others would see."""
        function = _function_of(call.unit)
        if function not in self._functions and len(self._functions) < _MAX_ALONE_FUNCTIONS:
            self._functions.add(function)
            log.info(
                "%s runs in transactions of its own from now on: others would see %s", call.name, what, prefix=self._prefix
            )


def _function_of(unit: Callable[..., Any]) -> object:
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


class WaitingCalls:
    """A queue. Any thread may `put` calls, even in a signal handler; one thread at a time may wait in `take`.

    A call is held back while another call with the same key is in a group that has not committed yet.
    """

    def __init__(self, alone: AloneUnits) -> None:
        self._alone = alone
        self._inbox: SimpleQueue[UnitCall | None] = SimpleQueue()  # None wakes the thread that takes calls
        self._calls: deque[UnitCall] = deque()  # received from the inbox, and not taken by a group yet
        self._in_groups = 0
        self._busy: set[Hashable] = set()
        self._lock = threading.Lock()  # for these three
        self._is_closed = False
        self._is_drained = False

    def put(self, call: UnitCall) -> bool:
        """Add a call; False if the queue is closed."""
        if self._is_closed:
            return False
        self._inbox.put(call)
        return not (self._is_drained and call.cancel())  # closed in between: nobody takes calls any more

    def take(self, most: int, groups: int = 1) -> list[UnitCall]:
        """Wait for calls, and take some of them for a group.

        Of all calls that wait or are in groups, none of `groups` groups takes more than its part. There are no calls once the
        queue is closed and empty.
        """
        while True:
            with self._lock:
                self._receive()
                taken = self._takable(most, set(), may_be_alone=True, groups=groups)
                if taken:
                    return taken
                if self._is_closed and not self._calls:
                    self._is_drained = True
                    if not self._receive():
                        return []
                    continue
            call = self._inbox.get()
            if call is not None:
                with self._lock:
                    self._calls.append(call)

    def take_more(self, most: int, group: Collection[UnitCall], groups: int = 1) -> list[UnitCall]:
        """Take further calls for a group that has not committed yet; does not wait. Any thread may call this."""
        with self._lock:
            if not self._inbox.empty():
                self._receive()
                self._inbox.put(None)  # for the thread that waits in `take`, which what was received may have been meant for
            own = {call.key for call in group if call.key is not None}
            return self._takable(most, own, may_be_alone=False, groups=groups, has=len(group))

    def put_back(self, calls: list[UnitCall], group: Collection[UnitCall]) -> None:
        """Put calls that were taken back at the front, in their order. Any thread may call this.

        The keys of those that stay in the group, `group`, stay busy.
        """
        keys = {call.key for call in calls} - {call.key for call in group}
        with self._lock:
            self._calls.extendleft(reversed(calls))
            self._in_groups -= len(calls)
            self._busy -= keys
        self._inbox.put(None)  # another group may take them

    def count(self) -> bool:
        """Count a call that is run without having been in the queue, until it is released; False if the queue is closed."""
        with self._lock:
            self._in_groups += not self._is_closed
        return not self._is_closed

    def release(self, group: Collection[UnitCall]) -> None:
        """Note that a group has ended, so that calls with its keys can be taken. Any thread may call this."""
        keys = {call.key for call in group if call.key is not None}
        with self._lock:
            self._in_groups -= len(group)
            self._busy -= keys
        if keys:
            self._inbox.put(None)

    @property
    def is_closed(self) -> bool:
        """Whether the queue accepts no more calls."""
        return self._is_closed

    def close(self) -> None:
        """Accept no more calls; those that are waiting are still taken."""
        self._is_closed = True
        self._inbox.put(None)

    def cancel(self) -> None:
        """After `close`, in any thread: cancel the waiting calls, because the threads that should take them are blocked."""
        self._is_drained = True
        while True:
            try:
                call = self._inbox.get_nowait()
            except Empty:
                break
            if call is not None:
                call.cancel()
        for call in list(self._calls):
            call.cancel()
        self._inbox.put(None)

    def __len__(self) -> int:
        return len(self._calls) + self._inbox.qsize()

    @property
    def unfinished(self) -> int:
        """How many calls wait or are in groups."""
        return len(self) + self._in_groups

    def _receive(self) -> bool:
        """Empty the inbox; return whether there was a call in it."""
        before = len(self._calls)
        try:
            while True:
                call = self._inbox.get_nowait()
                if call is not None:
                    self._calls.append(call)
        except Empty:
            return len(self._calls) > before

    def _takable(self, most: int, own: set[Hashable], *, may_be_alone: bool, groups: int, has: int = 0) -> list[UnitCall]:
        if groups > 1:
            most = min(most, -(-(len(self._calls) + self._in_groups) // groups) - has)
        taken: list[UnitCall] = []
        passed_over: list[UnitCall] = []
        blocked: set[Hashable] = set()
        while self._calls and len(taken) < most:
            call = self._calls.popleft()
            if call.is_cancelled:
                continue
            alone = self._alone.goes_alone(call)
            try:
                is_held_back = self._is_held_back(call.key, own, blocked, joins=not alone or (may_be_alone and not taken))
            except Exception as error:  # noqa: BLE001  (a method of the key, such as __eq__)
                call.deliver_error(error)
                continue
            if is_held_back:
                passed_over.append(call)
            else:
                taken.append(call)
                if alone:
                    break
        self._calls.extendleft(reversed(passed_over))
        self._in_groups += len(taken)
        return taken

    def _is_held_back(self, key: Hashable, own: set[Hashable], blocked: set[Hashable], *, joins: bool) -> bool:
        """Whether a call with this key must wait for an earlier one, or can't join; if not, the key is busy from now on."""
        if key is None:
            return not joins
        if not joins or key in blocked or (key not in own and key in self._busy):
            blocked.add(key)
            return True
        own.add(key)
        self._busy.add(key)
        return False
