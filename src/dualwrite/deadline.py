"""A deadline, made once and passed down through every layer; pauses between attempts; and that no event loop has to wait."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Iterator, Sequence
from random import SystemRandom
from typing import Final, Self, TypeVar

from dualwrite.errors import UsageError

T = TypeVar("T")

CHANCE: Final = SystemRandom()
"""Spreads pauses and choices. The numbers of `random` itself are the application's to seed, and equal in forked processes."""


class Pauses:
    """The pauses of a loop between its attempts, in seconds: `next` returns them, each twice as long as the one before.

    Attributes:
        taken: How many there were since the last success.
        upcoming: How long the next one is at least.

    Args:
        first: The first one.
        longest: The length up to which they are doubled.
        spread: The part by which each is longer at most, at random: those that have failed together don't return together.
    """

    __slots__ = ("_first", "_longest", "_spread", "taken", "upcoming")

    def __init__(self, first: float, longest: float = 1.0, *, spread: float = 1.0) -> None:
        self._first = first
        self._longest = longest
        self._spread = spread
        self.reset()

    def reset(self) -> None:
        """Begin with the first one again, after a success."""
        self.taken, self.upcoming = 0, self._first

    def __next__(self) -> float:
        seconds, self.upcoming = self.upcoming, min(2 * self.upcoming, self._longest)
        self.taken += 1
        return seconds * CHANCE.uniform(1.0, 1.0 + self._spread)


class Deadline:
    """A time limit that has started.

    Code that receives one waits for at most `left` seconds and passes the same object on: no layer starts its own time limit.

    Args:
        seconds: The limit; also for error messages.
        at: When it ends, on the clock of `time.monotonic`; by default `seconds` from now.
    """

    __slots__ = ("_at", "seconds")

    def __init__(self, seconds: float, at: float | None = None) -> None:
        self.seconds = seconds
        self._at = time.monotonic() + seconds if at is None else at

    @classmethod
    def after(cls, seconds: float) -> Self:
        """A deadline `seconds` from now."""
        return cls(seconds)

    @classmethod
    def of(cls, limit: float | Deadline) -> Deadline:
        """The deadline itself, or a new one that many seconds from now."""
        return limit if isinstance(limit, Deadline) else cls(limit)

    @property
    def left(self) -> float:
        """The remaining seconds, never below 0."""
        return max(self._at - time.monotonic(), 0.0)

    @property
    def expired(self) -> bool:
        """Whether the deadline has passed."""
        return time.monotonic() >= self._at

    def within(self, seconds: float) -> Deadline:
        """A deadline at this one's end or `seconds` from now, whichever is earlier; its `seconds` are counted from now."""
        now = time.monotonic()
        at = now + seconds
        return Deadline(seconds, at) if at < self._at else Deadline(max(self._at - now, 0.0), self._at)

    def shared(self, items: Sequence[T], *, least: float = 0.0) -> Iterator[tuple[Deadline, T]]:
        """Each item with its deadline, an equal share of what is left then: what one does not use is left to the others.

        An item gets at least `least` seconds, while that much is left.
        """
        for left, item in zip(range(len(items), 0, -1), items, strict=True):
            yield self.within(max(self.left / left, least)), item

    def sleep(self, seconds: float) -> None:
        """Sleep for `seconds`, or for the remaining time if that is shorter."""
        time.sleep(min(seconds, self.left))

    def pause(self, pauses: Pauses) -> bool:
        """Sleep until the next attempt; False if the deadline has passed, and there should be none."""
        self.sleep(next(pauses))
        return not self.expired

    def attempts(self, pauses: Pauses) -> Iterator[None]:
        """Attempts with pauses between them, until the caller leaves the loop; none but the first begins after the deadline."""
        yield
        while self.pause(pauses):
            yield

    def __repr__(self) -> str:
        return f"<Deadline: {self.left:.3f} of {self.seconds:g} s left>"


Limit = float | Deadline
"""Seconds from the call on, or a deadline that has already started."""


def check_may_block(what: str, instead: str, *, next_step: str | None = None) -> None:
    """Check that no event loop runs in this thread, or that nobody else waits for it, as in an interactive session.

    The cells of a notebook run inside the kernel's event loop, and so does what is typed into `python -m asyncio`: there the
    user waits for the call in any case. `sys.ps1`, the prompt, exists only in interactive sessions; IPython's kernels have it.

    Args:
        what: The call, for the message.
        instead: The same call with `dualwrite.aio`.
        next_step: What to do, if that is something else.

    Raises:
        UsageError: A loop runs, and the session is not interactive.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    if hasattr(sys, "ps1"):
        return
    raise UsageError(
        f"{what} would block the event loop that runs in this thread.",
        cause="it was called in a coroutine, or in a callback of the loop; every other task would wait for the commit",
        next_step=next_step
        or f"use dualwrite.aio: {instead}; or call a plain function that does it: await asyncio.to_thread(function)",
    )
