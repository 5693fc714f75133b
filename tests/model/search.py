"""Breadth-first search over every interleaving of a model, for the shortest trace that breaks its promise."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

S = TypeVar("S")


@dataclass(frozen=True)
class Found:
    """The result of a search.

    Args:
        violation: The broken promise; empty if none was found.
        trace: The shortest way to it, step by step.
        states: How many states were seen.
        is_complete: Whether every state was explored.
        seconds: How long the search took.
    """

    violation: str
    trace: tuple[str, ...]
    states: int
    is_complete: bool
    seconds: float


def explore(
    first: S,
    successors: Callable[[S], Iterable[tuple[str, S]]],
    violated: Callable[[S], str],
    *,
    seconds: float = 600.0,
    wanted: str = "",
) -> Found:
    """Explore all states, for any violation or for the one wanted.

    Args:
        first: The first state.
        successors: Every next state, with the step that leads to it.
        violated: What is broken in a state; empty if nothing is.
        seconds: Time limit.
        wanted: The violation to look for; the search goes on past every other one.
    """
    began = time.monotonic()
    before: dict[S, tuple[S, str] | None] = {first: None}
    queue = deque([first])
    while queue:
        s = queue.popleft()
        violation = violated(s)
        if violation and wanted in ("", violation):
            return Found(violation, _trace(before, s), len(before), False, time.monotonic() - began)
        for what, t in successors(s):
            seen = len(before)
            before.setdefault(t, (s, what))  # looked up once: computing the hash of a state takes long
            if len(before) > seen:
                queue.append(t)
        if len(before) % 1024 == 0 and time.monotonic() - began > seconds:
            return Found("", (), len(before), False, time.monotonic() - began)
    return Found("", (), len(before), True, time.monotonic() - began)


def _trace(before: dict[S, tuple[S, str] | None], s: S) -> tuple[str, ...]:
    def back() -> Iterator[str]:
        at = s
        while (step := before[at]) is not None:
            at, what = step
            yield what

    return tuple(back())[::-1]
