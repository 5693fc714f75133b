"""Callers in one process, threads or asyncio tasks: each places one order, waits for the result, and places the next."""

from __future__ import annotations

import asyncio
import gc
import importlib
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, Protocol, TypeVar

import pool_tasks
import pool_threads
from alternatives import Target
from orders import Order
from phases import Phases, Recorder
from pool_cases import THREADS, UVLOOP, PoolCase
from writing import Samples

T = TypeVar("T")

_MIN_WARM_UP: Final = 100
"""Units of all callers together: enough for every connection to prepare its statements."""


class Callers:
    """All callers of a case, and the alternative that they use; serves one case after another."""

    def __init__(self) -> None:
        self._crew: Crew | None = None
        self._recorder: Recorder | None = None
        self._pool_size: int | None = None
        self._done = 0

    def open(self, case: PoolCase, target: Target, warm_up: int) -> None:
        """Connect, and place some orders that are not measured.

        Args:
            case: The case.
            target: Where to write to.
            warm_up: The minimum number of these orders for each caller.
        """
        self._recorder = Recorder() if case.has_clocks else None
        self._done = max(warm_up, _MIN_WARM_UP // case.point.callers)
        make = ThreadCrew if case.point.kind == THREADS else TaskCrew
        self._crew = make(case, target, self._recorder)
        self._crew.warm_up(self._done)

    def run(self, begin_at: float, seconds: float) -> list[Samples]:
        """Place orders, beginning at a time of `time.monotonic()`."""
        assert self._crew is not None
        if self._recorder is not None:
            self._recorder.clear()
        gc.collect()
        samples = self._crew.run(self._done, begin_at, seconds)
        self._pool_size = self._crew.pool_size
        return samples

    def close(self) -> None:
        """Disconnect."""
        crew, self._crew = self._crew, None
        if crew is not None:
            crew.close()
        if self._recorder is not None:
            self._recorder.close()

    def pool_size(self) -> int | None:
        """How many writers the last case's pool had at its end; None if it was no pool."""
        return self._pool_size

    def phases(self) -> Phases:
        """The phases that the last case's recorder has recorded."""
        assert self._recorder is not None
        assert self._pool_size is not None
        return self._recorder.phases(writers=self._pool_size)


class Crew(Protocol):
    """The callers of one case."""

    @property
    def pool_size(self) -> int | None:
        """How many writers the pool has now; None if the alternative is no pool."""
        ...

    def warm_up(self, units: int) -> None:
        """Every caller places this many orders."""
        ...

    def run(self, first: int, begin_at: float, seconds: float) -> list[Samples]:
        """Every caller places orders from `begin_at` on, numbered from `first`."""
        ...

    def close(self) -> None:
        """Disconnect."""
        ...


class ThreadCrew:
    """Callers that are threads."""

    def __init__(self, case: PoolCase, target: Target, recorder: Recorder | None) -> None:
        self._callers = case.point.callers
        self._alternative = pool_threads.make(case, target, recorder)

    @property
    def pool_size(self) -> int | None:
        """See Crew."""
        return self._alternative.pool.size if isinstance(self._alternative, pool_threads.Pool) else None

    def warm_up(self, units: int) -> None:
        """See Crew."""

        def call(caller: int) -> None:
            for number in range(units):
                self._alternative.write(caller, Order(caller, number))

        self._all(call)

    def run(self, first: int, begin_at: float, seconds: float) -> list[Samples]:
        """See Crew."""

        def call(caller: int) -> Samples:
            samples = Samples(caller, first, [], [])
            write, began, ended, clock = self._alternative.write, samples.began, samples.ended, time.monotonic
            time.sleep(max(0.0, begin_at - clock()))
            until, number = max(begin_at, clock()) + seconds, first
            while (now := clock()) < until:
                write(caller, Order(caller, number))
                ended.append(clock())
                began.append(now)
                number += 1
            return samples

        return self._all(call)

    def close(self) -> None:
        """See Crew."""
        self._alternative.close()

    def _all(self, call: Callable[[int], T]) -> list[T]:
        with ThreadPoolExecutor(self._callers) as threads:
            return list(threads.map(call, range(self._callers)))


class TaskCrew:
    """Callers that are tasks of one event loop, which runs only while one of these methods does."""

    def __init__(self, case: PoolCase, target: Target, recorder: Recorder | None) -> None:
        self._callers = case.point.callers
        self._runner = asyncio.Runner(loop_factory=_uvloop if case.point.kind == UVLOOP else None)
        try:
            self._alternative = self._runner.run(pool_tasks.make(case, target, recorder))
        except BaseException:
            self._runner.close()
            raise

    @property
    def pool_size(self) -> int | None:
        """See Crew."""
        return self._alternative.pool.size if isinstance(self._alternative, pool_tasks.AsyncPool) else None

    def warm_up(self, units: int) -> None:
        """See Crew."""

        async def call(caller: int) -> None:
            for number in range(units):
                await self._alternative.write(Order(caller, number))

        self._runner.run(self._all(call))

    def run(self, first: int, begin_at: float, seconds: float) -> list[Samples]:
        """See Crew."""

        async def call(caller: int) -> Samples:
            samples = Samples(caller, first, [], [])
            write, began, ended, clock = self._alternative.write, samples.began, samples.ended, time.monotonic
            await asyncio.sleep(max(0.0, begin_at - clock()))
            until, number = max(begin_at, clock()) + seconds, first
            while (now := clock()) < until:
                await write(Order(caller, number))
                ended.append(clock())
                began.append(now)
                number += 1
            return samples

        return self._runner.run(self._all(call))

    def close(self) -> None:
        """See Crew."""
        try:
            self._runner.run(self._alternative.close())
        finally:
            self._runner.close()

    async def _all(self, call: Callable[[int], Coroutine[Any, Any, T]]) -> list[T]:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(call(caller)) for caller in range(self._callers)]
        return [task.result() for task in tasks]


def _uvloop() -> asyncio.AbstractEventLoop:
    loop: asyncio.AbstractEventLoop = importlib.import_module("uvloop").new_event_loop()
    return loop
