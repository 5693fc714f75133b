"""Asking again until an answer says something, or the time is over: the one way for all of Kafka's side."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Final, TypeVar

from dualwrite.deadline import Deadline

T = TypeVar("T")

_MOST: Final = 1.0


def repeated(once: Callable[[], T], passing: tuple[type[Exception], ...], deadline: Deadline, *, pause: float) -> T:
    """Call until it raises none of `passing`; the last of them goes through when the deadline has come.

    Args:
        once: The call; it keeps to the deadline by itself.
        passing: Errors that pass by themselves.
        deadline: No call begins after it, but for the first.
        pause: Seconds to wait at first; doubled each time, up to 1 s.
    """
    while True:
        try:
            return once()
        except passing:
            deadline.sleep(pause * random.uniform(1.0, 2.0))  # noqa: S311  (spreads retries; no secret)
            if deadline.expired:
                raise
            pause = min(2 * pause, _MOST)
