"""The plan of the kills. Pure, and the same for the same seed."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Final

MAX_DELAY: Final = 0.02
"""Seconds. A transaction takes milliseconds, so a kill hits each step with a probability proportional to its duration."""

MAX_POOL_DELAY: Final = 0.1
"""The same for a pool: a full group takes tens of milliseconds, and its flights are all reported at its end."""

MAX_OPENING_DELAY: Final = 0.1
OPENING_SHARE: Final = 0.25


@dataclass(frozen=True, slots=True)
class Kill:
    """One kill.

    Args:
        after: Wait until all workers together have done this many transactions.
        delay: Then wait this many more seconds.
        choice: Selects one of the workers that can be killed, as a fraction of their number, from 0 to below 1.
        while_opening: Instead, kill the last killed worker again, `delay` seconds after it begins to reopen its writer.
    """

    after: int
    delay: float
    choice: float
    while_opening: bool


def plan_kills(kills: int, transactions: int, seed: int, *, max_delay: float = MAX_DELAY) -> tuple[Kill, ...]:
    """Divide the run's progress into one part per kill, with the kill at a random place in its part.

    A quarter of the kills, at least one but never the first, hit a worker that is recovering from the last kill.

    Args:
        kills: Number of kills.
        transactions: How many transactions the workers complete while kills are pending: each worker delays its last one.
        seed: Seed for the random numbers.
        max_delay: The longest delay of a kill in seconds, unless it hits a worker that is opening.
    """
    rng = random.Random(seed)  # noqa: S311  (not a secret)
    later = range(1, kills)
    again = set(rng.sample(later, min(len(later), max(1, int(kills * OPENING_SHARE)))))
    plan = []
    for number in range(kills):
        after = int((number + rng.random()) / kills * transactions)
        while_opening = number in again
        delay = rng.uniform(0, MAX_OPENING_DELAY if while_opening else max_delay)
        plan.append(Kill(after, delay, rng.random(), while_opening))
    return tuple(plan)
