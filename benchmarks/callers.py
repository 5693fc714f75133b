"""Callers in one process, threads or tasks: each places one order, waits for the result, and places the next."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass
from typing import Any, Final

from alternatives import THREADS, Case, Target, for_tasks, for_threads
from orders import Order

_MIN_WARM_UP: Final = 20
_MIN_WARM_UP_OF_ALL: Final = 100
"""Orders of all callers together: enough for every connection to prepare its statements."""


@dataclass(frozen=True)
class Samples:
    """When each of a caller's calls began and ended, by `time.monotonic()`, which all processes of a machine share.

    The first call has the number `first`, after those of the warm-up.
    """

    caller: int
    first: int
    began: list[float]
    ended: list[float]


@dataclass(frozen=True)
class Ran:
    """What the callers of a process measured; its CPU seconds, and how many writers its pool had in the end."""

    samples: list[Samples]
    cpu: float
    writers: int | None


class Callers:
    """The callers with these numbers, for one case. They place some orders that are not measured."""

    def __init__(self, case: Case, target: Target, numbers: range) -> None:
        self._numbers = numbers
        self._warm_up = max(_MIN_WARM_UP, _MIN_WARM_UP_OF_ALL // case.callers)
        self._loop: asyncio.Runner | None = None
        with ExitStack() as closing:
            if case.kind == THREADS:
                self._opened = closing.enter_context(for_threads(case, target, numbers))
            else:
                loop, tasks = closing.enter_context(asyncio.Runner()), AsyncExitStack()
                self._opened = loop.run(tasks.enter_async_context(for_tasks(case, target)))
                closing.callback(lambda: loop.run(tasks.aclose()))
                self._loop = loop
            self.close = closing.pop_all().close
        self._place(0, self._warm_up, 0.0, 0.0)

    def run(self, begin_at: float, seconds: float) -> Ran:
        """Measure for some seconds, beginning at a time of `time.monotonic()`."""
        gc.collect()
        cpu = time.process_time()
        samples = self._place(self._warm_up, self._warm_up + 1, begin_at, seconds)
        cpu = time.process_time() - cpu
        pool = self._opened.pool
        return Ran(samples, cpu, None if pool is None else pool.size)

    def _place(self, first: int, least: int, begin_at: float, seconds: float) -> list[Samples]:
        """Every caller places orders, from a number up to another one and for some seconds, which begin late if it is late."""
        place, clock = self._opened.place, time.monotonic

        def call(caller: int) -> Samples:
            samples, number = Samples(caller, first, [], []), first
            time.sleep(max(0.0, begin_at - clock()))
            until = clock() + seconds
            while (now := clock()) < until or number < least:
                place(caller, Order(caller, number))
                samples.ended.append(clock())
                samples.began.append(now)
                number += 1
            return samples

        async def task(caller: int) -> Samples:
            samples, number = Samples(caller, first, [], []), first
            await asyncio.sleep(max(0.0, begin_at - clock()))
            until = clock() + seconds
            while (now := clock()) < until or number < least:
                await place(caller, Order(caller, number))
                samples.ended.append(clock())
                samples.began.append(now)
                number += 1
            return samples

        if self._loop is not None:
            return self._loop.run(_together(task, self._numbers))
        with ThreadPoolExecutor(len(self._numbers)) as threads:
            return list(threads.map(call, self._numbers))


async def _together(task: Callable[[int], Coroutine[Any, Any, Samples]], callers: range) -> list[Samples]:
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(task(caller)) for caller in callers]
    return [each.result() for each in tasks]


# --- in a worker process ------------------------------------------------------------------------------------------------------

_here: Final[list[Callers]] = []


def open_callers(case: Case, target: Target, numbers: range) -> None:
    _here.append(Callers(case, target, numbers))


def run_callers(begin_at: float, seconds: float) -> Ran:
    return _here[0].run(begin_at, seconds)


def close_callers() -> None:
    _here.pop().close()
