"""When which fault happens: chosen by a seed, several at a time, each ended by its own last step."""

from __future__ import annotations

import heapq
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import count

from endurance.clients import LEASE, Kind
from endurance.stage import Stage, Steps

Fault = tuple[str, str, Callable[[random.Random], Steps]]
"""Its kind; what it happens to, which has only one at a time; how it goes."""
QUIET = 15.0
"""Seconds before the first fault: processes start."""
FOR_SERVERS = 0.35
"""The share of the faults of servers and network: there are fewer of these than clients."""


class Schedule:
    """Faults, one after a random pause; those that last overlap.

    Args:
        stage: The servers.
        kinds: The clients.
        chance: Chooses.
        every: Seconds between two faults, on average.
    """

    def __init__(self, stage: Stage, kinds: Iterable[Kind], chance: random.Random, every: float) -> None:
        self._stage, self._kinds, self._chance, self._every = stage, [*kinds], chance, every
        self._servers: list[Fault] = [*stage.faults()]
        self._running: list[tuple[float, int, str, Steps]] = []
        self._numbers, self._next = count(), time.monotonic() + QUIET
        self.done: Counter[str] = Counter()

    def step(self) -> None:
        """Go on with those that are due, and begin another one if it is time."""
        while self._running and self._running[0][0] <= time.monotonic():
            self._go_on(*heapq.heappop(self._running)[2:])
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + self._chance.uniform(0, 2 * self._every)
            self._begin()

    def heal(self) -> None:
        """Let all faults end now."""
        while self._running:
            *_, what, steps = heapq.heappop(self._running)
            for seconds in steps:
                time.sleep(min(seconds, 0.5))
            del what

    @property
    def _affected(self) -> set[str]:
        return {what for _, _, what, _ in self._running}

    def _begin(self) -> None:
        of_servers = self._chance.random() < FOR_SERVERS
        possible = [fault for fault in (self._servers if of_servers else self._of_clients()) if fault[1] not in self._affected]
        if possible:
            kind, what, how = self._chance.choice(possible)
            self.done[kind] += 1
            for each in self._kinds:
                each.recorder.fault(kind, what)
            self._go_on(what, how(self._chance))

    def _go_on(self, what: str, steps: Steps) -> None:
        for seconds in steps:
            heapq.heappush(self._running, (time.monotonic() + seconds, next(self._numbers), what, steps))
            return

    # --- clients ----------------------------------------------------------------------------------------------------------

    def _of_clients(self) -> Iterable[Fault]:
        for kind in self._kinds:
            for place in set(range(kind.count)) - kind.busy:
                what = f"{kind.name} {place}"
                yield "a client killed", what, lambda chance, k=kind, p=place: _killed(k, p, chance)
                yield "a client paused", what, lambda chance, k=kind, p=place: _paused(k, p, chance)


def _killed(kind: Kind, place: int, chance: random.Random) -> Steps:
    kind.busy.add(place)
    kind.kill(kind.members[place])
    yield chance.choice([0, chance.uniform(0, 2 * LEASE)])
    kind.start(place)
    kind.busy.discard(place)


def _paused(kind: Kind, place: int, chance: random.Random) -> Steps:
    """After its lease another one takes over, and the one that was paused goes on for a while."""
    kind.busy.add(place)
    paused = kind.members[place]
    kind.signal(paused, signal.SIGSTOP)
    outlasts = kind.can_replace and chance.random() < 0.7
    yield chance.uniform(LEASE, 2 * LEASE) if outlasts else chance.uniform(0.1, LEASE)
    if outlasts:
        kind.start(place)
        yield chance.uniform(1, LEASE)
    kind.signal(paused, signal.SIGCONT)
    if outlasts:
        yield chance.uniform(0.5, 2 * LEASE)
        kind.kill(paused)
    kind.busy.discard(place)
