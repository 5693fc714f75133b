"""A function as one transaction: what `@writer.transactional` makes of it, with another attempt where that may help."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Concatenate, Final, ParamSpec, TypeVar

from tenacity import Retrying, retry_if_exception, stop_after_attempt, wait_exponential, wait_random

from dualwrite.errors import UsageError
from dualwrite.transaction import H, Transaction

P = ParamSpec("P")
T = TypeVar("T")

_WAIT: Final = wait_exponential(multiplier=0.05, max=2.0) + wait_random(0, 0.05)


def transactional(
    transaction: Callable[[], AbstractContextManager[Transaction[H]]],
    *,
    attempts: int,
    may_be_repeated: Callable[[BaseException], bool],
) -> Callable[[Callable[Concatenate[Transaction[H], P], T]], Callable[P, T]]:
    """A decorator that runs a function inside `transaction()`, and hands it the Transaction as its first argument.

    Args:
        transaction: Begins a transaction, as a context manager.
        attempts: How often the whole function runs at most, with back-off.
        may_be_repeated: Whether an error left nothing behind, and the same again may succeed.

    Raises:
        UsageError: `attempts` is below 1.
    """
    if attempts < 1:
        raise UsageError(f"attempts is {attempts}; 1 is the least.")

    def decorate(function: Callable[Concatenate[Transaction[H], P], T]) -> Callable[P, T]:
        @functools.wraps(function)
        def once(*args: P.args, **kwargs: P.kwargs) -> T:
            with transaction() as begun:
                return function(begun, *args, **kwargs)

        @functools.wraps(function)
        def repeated(*args: P.args, **kwargs: P.kwargs) -> T:
            retrying = Retrying(
                retry=retry_if_exception(may_be_repeated), stop=stop_after_attempt(attempts), wait=_WAIT, reraise=True
            )
            return retrying(once, *args, **kwargs)

        return once if attempts == 1 else repeated

    return decorate
