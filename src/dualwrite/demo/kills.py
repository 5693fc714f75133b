"""The plan of the kills: when, and how long after that moment. Pure, and the same for the same seed."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Final

MAX_DELAY: Final = 0.02
"""Seconds. A transaction takes a few milliseconds, so a kill hits every part of it with its share of the time."""

MAX_OPENING_DELAY: Final = 0.1
OPENING_SHARE: Final = 0.25


@dataclass(frozen=True, slots=True)
class Kill:
    """One kill.

    Args:
        after: Wait until so many transactions are done by all workers together.
        delay: Then so many seconds more.
        choice: Which of the workers that can be killed: a number from 0 to below 1, of the length of their list.
        while_opening: Instead, kill the worker that was killed last once more, `delay` after it has begun to open again.
    """

    after: int
    delay: float
    choice: float
    while_opening: bool


def plan_kills(kills: int, transactions: int, seed: int) -> tuple[Kill, ...]:
    """Spread the kills over the run by its progress, each at a random place of its own part.

    A quarter of them, and at least one, but never the first, hit a worker that is recovering from the last kill.

    Args:
        kills: How many.
        transactions: How many transactions are sure to be reached while every kill is still to come.
        seed: For the random numbers.
    """
    chance = random.Random(seed)  # noqa: S311  (no secret)
    later = range(1, kills)
    again = set(chance.sample(later, min(len(later), max(1, int(kills * OPENING_SHARE)))))
    plan = []
    for number in range(kills):
        after = int((number + chance.random()) / kills * transactions)
        while_opening = number in again
        delay = chance.uniform(0, MAX_OPENING_DELAY if while_opening else MAX_DELAY)
        plan.append(Kill(after, delay, chance.random(), while_opening))
    return tuple(plan)
