"""One call of `run` or `submit`: a unit of work, and the future that gets its result."""

from __future__ import annotations

import contextvars
import copy
import itertools
import logging
import threading
import time
from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import Future
from typing import Any, Final

from dualwrite.transaction import Transaction, UnitTransaction
from dualwrite.transactional import check_has_run, name_of

log = logging.getLogger(__name__)

_NOT_RUN: Final = object()
_here: Final = threading.local()
_numbers: Final = itertools.count()


class Call:
    """A unit of work with its arguments. It may run more than once; its caller gets the outcome of the last run.

    Args:
        unit: Called with the transaction and the arguments, in a copy of the caller's context (`contextvars`).
        args: Positional arguments after the transaction.
        kwargs: Keyword arguments.
        key: Units with the same key run in the order of their calls; None: no ordering.
        alone: Run it in a transaction of its own.

    Attributes:
        future: What the caller waits for.
        name: The unit's name, for messages.
        number: Later calls have higher ones.
        created: When it was made, by `time.monotonic`.
        conflicts: How often its unit was rolled back because of another transaction.
    """

    __slots__ = (
        "_args",
        "_beginning",
        "_begun",
        "_context",
        "_error",
        "_kwargs",
        "_result",
        "alone",
        "conflicts",
        "created",
        "future",
        "key",
        "name",
        "number",
        "unit",
    )

    def __init__(
        self,
        unit: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        key: Hashable,
        *,
        alone: bool = False,
    ) -> None:
        self.unit = unit
        self.number = next(_numbers)
        self.created = time.monotonic()
        self.conflicts = 0
        self.alone = alone
        self._args = args
        self._kwargs = kwargs
        self._context = contextvars.copy_context()
        self._result: Any = _NOT_RUN
        self._error: BaseException | None = None
        self._beginning = threading.Lock()  # `close` cancels calls while a thread of the pool begins them
        self._begun: bool | None = None
        self.key = key
        self.name = name_of(unit)
        self.future: Future[Any] = Future()

    def begin(self) -> bool:
        """Called before each run of the unit; False if the caller has cancelled it, or no longer waits.

        The first call decides, atomically with respect to `Future.cancel`: after it, the unit either can't be cancelled any
        more or will never run.
        """
        with self._beginning:
            if self._begun is None:
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
        result = self._context.run(self.unit, Transaction(transaction), *self._args, **self._kwargs)
        check_has_run(result, f"The unit {self.name}")
        self._result = result

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
        if self._error is not None:
            self._set(self.future.set_exception, self._error)
        else:
            self._set(self.future.set_result, self._result)

    def deliver_error(self, error: BaseException) -> None:
        """Deliver a copy of an error that the unit did not raise itself; a unit that has not begun will never run."""
        if self.begin() and not self.future.done():
            self._set(self.future.set_exception, _copy_of(error))

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
