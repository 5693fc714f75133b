"""Functions that run in a transaction: a decorator, further attempts after retriable errors, and a check that they have run."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator
from contextlib import AbstractContextManager
from typing import Any, Concatenate, Final, ParamSpec, TypeVar

from dualwrite.deadline import CHANCE, Pauses
from dualwrite.errors import JournalSwitchedError, UsageError
from dualwrite.transaction import H, Transaction

P = ParamSpec("P")
T = TypeVar("T")

_PAUSES: Final = 0.05, 2.0
"""Seconds before the second attempt, and the limit up to which they are doubled."""

MAX_SWITCHES: Final = 5
"""How often a function, or a unit of a pool, runs again because Kafka went down or came back; more means that it flaps."""


def transactional(
    transaction: Callable[[], AbstractContextManager[Transaction[H]]],
    *,
    attempts: int,
    is_retriable: Callable[[BaseException], bool],
) -> Callable[[Callable[Concatenate[Transaction[H], P], T]], Callable[P, T]]:
    """A decorator that runs a function inside `transaction()`, up to so many times with backoff in between.

    The function gets the Transaction as its first argument. It runs again after an error that `is_retriable`: both sides were
    rolled back, and another attempt may succeed.
    """

    def decorate(function: Callable[Concatenate[Transaction[H], P], T]) -> Callable[P, T]:
        @functools.wraps(function)
        def once(*args: P.args, **kwargs: P.kwargs) -> T:
            with transaction() as begun:
                result = function(begun, *args, **kwargs)
                check_has_run(result, name_of(function))
                return result

        return repeated(once, attempts=attempts, is_retriable=is_retriable)

    return decorate


def repeated(once: Callable[P, T], *, attempts: int, is_retriable: Callable[[BaseException], bool]) -> Callable[P, T]:
    """Wrap a function so that a call runs it up to `attempts` times, with backoff, while it raises a retriable error.

    Raises:
        UsageError: `attempts` is below 1.
    """
    _check(attempts)

    @functools.wraps(once)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        repeating = _Repeating(attempts, is_retriable)
        while True:
            try:
                return once(*args, **kwargs)
            except Exception as error:
                pause = repeating.pause_after(error)
                if pause is None:
                    raise
            time.sleep(pause)

    return run


def repeated_coroutine(
    once: Callable[P, Coroutine[Any, Any, T]], *, attempts: int, is_retriable: Callable[[BaseException], bool]
) -> Callable[P, Coroutine[Any, Any, T]]:
    """As `repeated`, for an `async def` function."""
    _check(attempts)

    @functools.wraps(once)
    async def run(*args: P.args, **kwargs: P.kwargs) -> T:
        repeating = _Repeating(attempts, is_retriable)
        while True:
            try:
                return await once(*args, **kwargs)
            except Exception as error:
                pause = repeating.pause_after(error)
                if pause is None:
                    raise
            await asyncio.sleep(pause)

    return run


class _Repeating:
    """The attempts of one call."""

    def __init__(self, attempts: int, is_retriable: Callable[[BaseException], bool]) -> None:
        self._attempts = attempts
        self._is_retriable = is_retriable
        self._pauses = Pauses(*_PAUSES, spread=0.0)
        self._switches = 0

    def pause_after(self, error: Exception) -> float | None:
        """Seconds until the next attempt; None if there is none."""
        if isinstance(error, JournalSwitchedError):  # the next attempt goes another way: it is no repetition
            self._switches += 1
            return None if self._switches > MAX_SWITCHES else 0.0
        if self._pauses.taken + 1 >= self._attempts or not self._is_retriable(error):
            return None
        return next(self._pauses) + CHANCE.uniform(0, _PAUSES[0])


def _check(attempts: int) -> None:
    if attempts < 1:
        raise UsageError(f"attempts must be at least 1, not {attempts}.")


def made_for_each_attempt(make: Callable[[], T]) -> Callable[[], T]:
    """What each attempt may change: the first is made now, before a transaction holds locks, the others when needed."""
    ready = [make()]
    return lambda: ready.pop() if ready else make()


def check_has_run(result: object, name: str) -> None:
    """Check that a function has run, since one that returned a coroutine or a generator has not done its work yet.

    Raises:
        UsageError: The result is a coroutine or a generator.
    """
    if result is None:  # as of a processor's handler, for each message
        return
    if isinstance(result, Coroutine):
        result.close()
        raise UsageError(
            f"{name} returned a coroutine, which has not run.",
            next_step="make it a plain function; or use dualwrite.aio and pass the `async def` function itself (`await "
            "pool.run(function)`, AsyncDualProcessor); in an `async def` function, await what it returns",
        )
    if isinstance(result, Generator | AsyncGenerator):
        kind = "a generator" if isinstance(result, Generator) else "an async generator"
        raise UsageError(
            f"{name} returned {kind}, which runs only after the transaction.",
            next_step="run its loop inside the function, and return a list",
        )


async def awaited(result: Awaitable[T], name: str) -> T:
    """Await what an `async` function returned, and check that all of it has run.

    Raises:
        UsageError: It can't be awaited, or its own result is a coroutine or a generator, which has not run.
        BaseException: As raised by the function.
    """
    if not isinstance(result, Awaitable):
        raise UsageError(
            f"{name} returned {type(result).__qualname__}, which can't be awaited.",
            next_step="make it an `async def` function without `yield`",
        )
    value = await result
    check_has_run(value, name)
    return value


def name_of(function: Callable[..., Any]) -> str:
    """A function's name, for messages."""
    return getattr(function, "__qualname__", None) or repr(function)
