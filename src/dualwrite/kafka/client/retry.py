"""Retry until a conclusive response or the deadline: the one retry loop of the Kafka side."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Final, TypeVar

from dualwrite.deadline import Deadline
from dualwrite.kafka.client.sockets import ConnectionLostError

T = TypeVar("T")

_MOST: Final = 1.0


def repeated(once: Callable[[], T], passing: tuple[type[Exception], ...], deadline: Deadline, *, pause: float) -> T:
    """Call until it raises none of `passing`; after the deadline, the last of these errors is raised.

    If the deadline cuts off a request, the error of the attempt before it is raised, since it says what was wrong.

    Args:
        once: The call; it must observe the deadline itself.
        passing: Transient errors, after which the call is repeated.
        deadline: No call starts after it, except the first.
        pause: Seconds before the first retry; doubled each time, up to 1 s.
    """
    before: Exception | None = None
    while True:
        try:
            return once()
        except passing as error:
            if before is not None and isinstance(error, ConnectionLostError) and deadline.expired:
                raise before from error
            before = error
            deadline.sleep(pause * random.uniform(1.0, 2.0))  # noqa: S311  (spreads retries; no secret)
            if deadline.expired:
                raise
            pause = min(2 * pause, _MOST)


def rounds(deadline: Deadline, *, pause: float) -> Iterator[None]:
    """Rounds of attempts, for work whose parts succeed one by one; the caller leaves the loop when nothing is left.

    Args:
        deadline: No round starts after it, except the first.
        pause: Seconds before the second round; doubled each time, up to 1 s.
    """
    while True:
        yield
        if deadline.expired:
            return
        deadline.sleep(pause * random.uniform(1.0, 2.0))  # noqa: S311  (spreads retries; no secret)
        pause = min(2 * pause, _MOST)
