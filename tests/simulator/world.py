"""The world of one run: processes as greenlets, of which a seed chooses the next at each step; time; the network's faults.

A process runs until it sends something to a database or to Kafka. Between two such requests nobody can see what it does, so
every order of steps that matters is one of requests. It can be paused before any request, and die there: then the request, or
its repetition, was either sent before or never.
"""

from __future__ import annotations

import datetime as dt
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final, TypeVar

from greenlet import GreenletExit, getcurrent, greenlet

from dualwrite import deadline, state
from dualwrite.observability import outages
from dualwrite.recipe import idle, remembered
from dualwrite.recovery import clusters, plan, resolve
from dualwrite.stores import rows
from simulator.choices import Choices

T = TypeVar("T")

STEP: Final = 0.001
"""Seconds that a step takes."""

PAUSES: Final = (0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.5, 30.0)
"""Seconds: from a few steps to those in which everybody else comes to an end, or a transaction times out."""

MAX_STEPS: Final = 20_000
"""A run with more steps does not end, which is a failure."""

_DATED: Final = (clusters, plan, remembered, resolve, rows, state)
_EPOCH: Final = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)


class Fate(Enum):
    """What becomes of a request."""

    ANSWERED = "answered"
    LOST = "lost on its way"
    UNANSWERED = "executed, and the answer is lost"
    DELAYED = "delayed in the network"


FATES: Final = tuple(Fate)


@dataclass
class Faults:
    """How often what goes wrong; shares of the steps, or of the requests."""

    lost: float = 0.0
    unanswered: float = 0.0
    delayed: float = 0.0
    dies: float = 0.0
    pauses: float = 0.0
    switches: float = 0.3
    events: float = 0.0
    lingers: float = 0.0
    oversleeps: float = 0.0


@dataclass(eq=False)
class Process:
    """One process of the simulation.

    Attributes:
        name: For the trace.
        task: Its greenlet.
        wakes_at: When it goes on at the earliest.
        waits_for: It goes on only if this is true, or at `wakes_at`.
        wall_clock: By how many seconds its wall clock is wrong.
        held: What servers do once they notice that it is gone.
    """

    name: str
    task: greenlet
    is_dead: bool = False
    may_die: bool = True
    wakes_at: float = 0.0
    waits_for: Callable[[], bool] | None = None
    wall_clock: float = 0.0
    held: list[Callable[[], None]] = field(default_factory=list)


@dataclass(frozen=True)
class Late:
    """A request that is still in the network.

    Args:
        lost: What happens if it never arrives; None: nothing.
    """

    what: str
    effect: Callable[[], Any]
    lost: Callable[[], Any] | None = None


class SimulationError(AssertionError):
    """The promise is broken, or the run does not end."""


class World:
    """What happens in one run.

    Attributes:
        events: What else may happen at a step: each returns what it has done, or None if it has nothing to do now.
        broken: The first part of the promise that was broken while the processes ran.
        met: How many faults there were, by kind.
    """

    def __init__(self, choices: Choices, faults: Faults, *, trace: bool = False) -> None:
        self.choices = choices
        self.faults = faults
        self.now = 1000.0
        self.processes: list[Process] = []
        self.late: list[Late] = []
        self.events: list[Callable[[], str | None]] = []
        self.steps = 0
        self.turns = 0  # COMMITs, and aborts at Kafka: what changes what others have read
        self.met: Counter[str] = Counter()
        self.broken: str | None = None
        self.trace: list[str] | None = [] if trace else None
        self._main = getcurrent()
        self._last: Process | None = None
        self._held_for = 0.0  # how long the process that has just committed is paused next

    def note(self, who: str, what: str) -> None:
        """Add a line to the trace."""
        if self.trace is not None:
            self.trace.append(f"{self.now - 1000:9.3f}  {who:<12} {what}")

    def breaks(self, what: str) -> None:
        """Note that a part of the promise is broken: an error would reach the code that is tested."""
        self.note("judge", what)
        self.broken = self.broken or what

    # --- processes --------------------------------------------------------------------------------------------------------

    def start(self, name: str, program: Callable[[Process], None]) -> Process:
        """Add a process."""

        def run() -> None:
            with suppress(GreenletExit):
                program(process)

        process = Process(name, greenlet(run))
        self.processes.append(process)
        return process

    @property
    def is_dying(self) -> bool:
        """Whether the process that runs is dead, and only unwinds."""
        process = self.current
        return process is not None and process.is_dead

    @property
    def current(self) -> Process | None:
        """The process that runs; None: the environment."""
        return self._last if getcurrent() is not self._main else None

    def run(self) -> None:
        """Run until every process has ended."""
        choices, faults = self.choices, self.faults
        while self.processes:
            self.steps += 1
            if self.steps > MAX_STEPS:
                raise SimulationError(f"the run has not ended after {MAX_STEPS} steps")
            self.now += STEP
            if faults.events and choices.happens(faults.events):
                self._event()
            ready = [each for each in self.processes if self._is_ready(each)]
            if not ready:
                self._wait()
                continue
            process = self._next(ready)
            if faults.dies and process.may_die and choices.happens(faults.dies):
                self.kill(process)
                continue
            if faults.pauses and len(self.processes) > 1 and choices.happens(faults.pauses):
                self._paused(process)
                continue
            self._resume(process)

    def _paused(self, process: Process) -> None:
        chosen = self.choices.below(2 * len(PAUSES))
        seconds = PAUSES[chosen] if chosen < len(PAUSES) else PAUSES[-1]
        process.wakes_at = self.now + seconds
        self.met["a process paused"] += 1
        if chosen >= len(PAUSES):  # between a COMMIT and what follows there is most to go wrong
            before = self.turns
            process.waits_for = lambda: self.turns > before
        self.note(process.name, f"is paused for {seconds} s{', or until a transaction ends' if process.waits_for else ''}")

    def committed(self) -> None:
        """A database has executed a user's COMMIT."""
        self.turns += 1
        if self.faults.pauses and self.current is not None and self.choices.happens(0.3):
            self._held_for = PAUSES[self.choices.below(len(PAUSES))]
        if self.late and self.choices.happens(0.5):
            self._deliver(self.choices.below(len(self.late)))

    def _deliver(self, number: int) -> None:
        late = self.late.pop(number)
        self.note("network", f"delivers late: {late.what}")
        late.effect()

    def _is_ready(self, process: Process) -> bool:
        if process.waits_for is not None and process.waits_for():
            return True
        return process.wakes_at <= self.now

    def _next(self, ready: list[Process]) -> Process:
        if self._last in ready and not (len(ready) > 1 and self.choices.happens(self.faults.switches)):
            return self._last
        return ready[self.choices.below(len(ready)) if len(ready) > 1 else 0]

    def _resume(self, process: Process) -> None:
        self._last = process
        process.waits_for, process.wakes_at = None, 0.0
        process.task.switch()
        if process.task.dead:
            self._end(process)

    def _wait(self) -> None:
        """Everybody waits: an event may end that, or else time passes."""
        if self.late or self.events:
            self._event()
        self.now = max(self.now, min(each.wakes_at for each in self.processes))

    def kill(self, process: Process) -> None:
        """End a process as SIGKILL does: nothing that its code does while it is unwound reaches anybody."""
        self.note(process.name, "dies")
        process.is_dead = True
        self.met["a process killed"] += 1
        self._last = process
        self.late += [Late(f"that {process.name} is gone", each, each) for each in process.held]
        while process.task and not process.task.dead:
            process.task.throw(GreenletExit)
        self._end(process)

    def _end(self, process: Process) -> None:
        process.is_dead = True
        self.processes.remove(process)

    def lose_late(self) -> None:
        """So much time passes that nothing is in the network any more."""
        late, self.late = self.late, []
        for each in late:
            if each.lost is not None:
                each.lost()

    def _event(self) -> None:
        if self.late:
            chosen = self.choices.below(len(self.late) + len(self.events))
            if chosen < len(self.late):
                self._deliver(chosen)
                return
            chosen -= len(self.late)
        elif self.events:
            chosen = self.choices.below(len(self.events))
        else:
            return
        done = self.events[chosen]()
        if done is not None:
            self.met["an event of the surroundings"] += 1
            self.note("environment", done)

    # --- what a process does ----------------------------------------------------------------------------------------------

    def pause(self, seconds: float = 0.0, *, until: Callable[[], bool] | None = None) -> None:
        """Let others run, for so long at least or until something is true."""
        process = self.current
        if process is None:
            self.now += seconds
            return
        self._check_alive(process)
        process.wakes_at = self.now + max(seconds, self._held_for)
        process.waits_for = until
        self._held_for = 0.0
        self._main.switch()
        self._check_alive(process)

    def linger(self) -> None:
        """A process that asks a coordinator may be paused before until a transaction ends, as it acts on what it has read."""
        before = self.turns
        if self.faults.lingers and len(self.processes) > 1 and self.choices.happens(self.faults.lingers):
            self.met["a process paused"] += 1
            self.pause(0.5, until=lambda: self.turns > before)

    def _check_alive(self, process: Process) -> None:
        if process.is_dead:
            raise GreenletExit

    def step(self, what: str) -> Fate:
        """A process is about to send a request: what will become of it."""
        process = self.current
        if process is None:
            return Fate.ANSWERED
        self.pause()
        faults = self.faults
        if not faults.lost and not faults.delayed and not faults.unanswered:
            fate = Fate.ANSWERED
        else:
            fate = FATES[self.choices.weighted((faults.lost, faults.unanswered, faults.delayed))]
            if fate is not Fate.ANSWERED:
                self.met[f"a request {fate.value}"] += 1
        if self.trace is not None:
            self.note(process.name, what if fate is Fate.ANSWERED else f"{what}: {fate.value}")
        return fate

    def request(
        self,
        what: str,
        effect: Callable[[], T],
        failed: Callable[[], BaseException],
        *,
        attempts: int = 3,
        changes: bool = True,
    ) -> T:
        """Send a request, and repeat it if it has no answer; raise `failed()` if no attempt has one."""
        for _ in range(attempts):
            fate = self.step(what)
            if fate is Fate.ANSWERED:
                return effect()
            if not changes:
                continue
            if fate is Fate.UNANSWERED:
                effect()
            elif fate is Fate.DELAYED:
                self.late.append(Late(what, effect))
        raise failed()

    # --- the clocks -------------------------------------------------------------------------------------------------------

    def wall_clock(self) -> dt.datetime:
        """What the process that runs takes for the time of day."""
        process = self.current
        return _EPOCH + dt.timedelta(seconds=self.now + (0.0 if process is None else process.wall_clock))

    @contextmanager
    def clocks(self) -> Iterator[None]:
        """In the block, the code sees this world's time, no thread of dualwrite's runs, and nothing is logged."""
        world, logger = self, logging.getLogger("dualwrite")

        class Datetime(dt.datetime):
            @classmethod
            def now(cls, tz: Any = None) -> Any:  # noqa: ARG003  (the code asks for UTC)
                return world.wall_clock()

        level = logger.level
        logger.setLevel(logging.CRITICAL + 1)
        kept = time.monotonic, time.sleep, deadline.CHANCE, outages._watch.is_asleep, idle.IDLE
        time.monotonic, time.sleep, deadline.CHANCE = (lambda: world.now), self.pause, _Evenly
        outages._watch.is_asleep, idle.IDLE = False, _NoThread
        for module in _DATED:
            module.datetime = Datetime
        try:
            yield
        finally:
            logger.setLevel(level)
            time.monotonic, time.sleep, deadline.CHANCE, outages._watch.is_asleep, idle.IDLE = kept
            for module in _DATED:
                module.datetime = dt.datetime


class _Evenly:
    """In place of the numbers that spread pauses."""

    @staticmethod
    def uniform(low: float, high: float) -> float:
        return (low + high) / 2


class _NoThread:
    """In place of the thread for idle writers: a process of the simulation calls what it would call."""

    @staticmethod
    def watch(writer: Any, clear: Any) -> None: ...

    @staticmethod
    def unwatch(writer: Any) -> None: ...

    @staticmethod
    def call_within(writer: Any, seconds: float) -> None: ...
