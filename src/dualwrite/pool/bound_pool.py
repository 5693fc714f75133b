"""BoundPool: a pool with an ordering key, or with a different time limit."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from dualwrite.errors import PoolTimeoutError
from dualwrite.pool.call import Call
from dualwrite.pool.submitter import Submitter
from dualwrite.transaction import H, Transaction
from dualwrite.transactional import name_of

P = ParamSpec("P")
T = TypeVar("T")


class BoundPool(Generic[H]):
    """A pool with other options, made by `WriterPool.with_options`.

    Attributes:
        key: The ordering key, or None.
        timeout: Seconds that `run` waits for its unit to start.
        is_retriable: Whether both sides were rolled back after an error, and another attempt may succeed.
        alone: Whether units run in transactions of their own.
    """

    def __init__(
        self,
        submitter: Submitter,
        key: Hashable,
        timeout: float,
        is_retriable: Callable[[BaseException], bool],
        *,
        alone: bool,
    ) -> None:
        self._submitter = submitter
        self.key = key
        self.timeout = timeout
        self.is_retriable = is_retriable
        self.alone = alone

    def run(self, unit: Callable[Concatenate[Transaction[H], P], T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """See WriterPool."""
        result: T = self._submitter.run(Call(unit, args, kwargs, self.key, alone=self.alone), self.timeout)
        return result

    def submit(self, unit: Callable[Concatenate[Transaction[H], P], T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """See WriterPool."""
        return self._submitter.submit(Call(unit, args, kwargs, self.key, alone=self.alone))

    def outcome(self, future: Future[T]) -> T:
        """The result of a unit that has ended, or its error; WriterClosedError if the pool was closed before the unit began."""
        self._submitter.check_not_cancelled(future)
        return future.result()

    def timed_out(self, unit: Callable[..., Any]) -> PoolTimeoutError:
        """The error for a unit that did not start within the limit."""
        return self._submitter.timed_out(name_of(unit), self.timeout)
