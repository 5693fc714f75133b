"""A moment by which something must be done: made once where a time limit is given, and handed down through every layer."""

from __future__ import annotations

import time
from typing import Self


class Deadline:
    """A time limit that has begun to run.

    Whoever is given one waits by `left`, and hands the same object on: no layer begins a limit of its own.

    Args:
        seconds: The limit, for messages.
        at: When it ends, by `time.monotonic`; by default that many seconds from now.
    """

    __slots__ = ("_at", "seconds")

    def __init__(self, seconds: float, at: float | None = None) -> None:
        self.seconds = seconds
        self._at = time.monotonic() + seconds if at is None else at

    @classmethod
    def after(cls, seconds: float) -> Self:
        """A deadline that many seconds from now."""
        return cls(seconds)

    @classmethod
    def of(cls, limit: float | Deadline) -> Deadline:
        """The deadline itself, or one that many seconds from now."""
        return limit if isinstance(limit, Deadline) else cls(limit)

    @property
    def left(self) -> float:
        """Seconds that are left, never below 0."""
        return max(self._at - time.monotonic(), 0.0)

    @property
    def expired(self) -> bool:
        """Whether the time is over."""
        return time.monotonic() >= self._at

    def within(self, seconds: float) -> Deadline:
        """The earlier one: this, or that many seconds from now. Its `seconds` are what it leaves from now on."""
        left = min(seconds, self.left)
        return Deadline(left)

    def sleep(self, seconds: float) -> None:
        """Sleep that long, or as long as is left."""
        time.sleep(min(seconds, self.left))

    def __repr__(self) -> str:
        return f"<Deadline: {self.left:.3f} of {self.seconds:g} s left>"


Limit = float | Deadline
"""Seconds from the call on, or a deadline that runs already."""
