"""BoundPool: a pool with an ordering key, or with another limit for waiting."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from dualwrite.errors import PoolTimeoutError
from dualwrite.pool.call import Call, name_of
from dualwrite.pool.submitter import Submitter
from dualwrite.transaction import H, Transaction

P = ParamSpec("P")
T = TypeVar("T")


class BoundPool(Generic[H]):
    """A pool with other options, made by `WriterPool.with_options`.

    Attributes:
        timeout: Seconds that a call waits for its turn.
    """

    def __init__(self, submitter: Submitter, key: Hashable, timeout: float) -> None:
        self._submitter = submitter
        self._key = key
        self.timeout = timeout

    def run(self, unit: Callable[Concatenate[Transaction[H], P], T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """See WriterPool."""
        result: T = self._submitter.run(Call(unit, args, kwargs, self._key), self.timeout)
        return result

    def submit(self, unit: Callable[Concatenate[Transaction[H], P], T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """See WriterPool."""
        return self._submitter.submit(Call(unit, args, kwargs, self._key))

    def outcome(self, future: Future[T]) -> T:
        """The outcome of a unit that has ended. If the pool was closed before the unit began, WriterClosedError."""
        self._submitter.check_not_cancelled(future)
        return future.result()

    def timed_out(self, unit: Callable[..., Any]) -> PoolTimeoutError:
        """The error for a unit whose turn did not come within the limit."""
        return self._submitter.timed_out(name_of(unit), self.timeout)
