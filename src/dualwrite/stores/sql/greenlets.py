"""Blocking work for SQLAlchemy's asyncio: it runs in a thread, and its statements where the connection belongs.

A connection of an asynchronous driver can be used only in its event loop, in a greenlet of SQLAlchemy's. So the thread passes
each of its steps on the connection back to the greenlet, which waits for them instead of blocking the loop.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import Any, Final, TypeVar

from sqlalchemy.util import await_only

from dualwrite import process

T = TypeVar("T")
Step = tuple[Callable[[], Any], Future[Any]]

_MAX_THREADS: Final = 64
"""Each waits for a writer, or for Kafka."""


def in_thread(work: Callable[[Callable[[Callable[[], Any]], Any]], T]) -> T:
    """Run work in a thread, and wait for it in a greenlet; the event loop goes on.

    A cancellation of the task is raised when the work has ended: it can't be stopped halfway. One that comes during a step on
    the connection ends the step, for which the work gets an error: the outcome of a COMMIT is unknown then, and is read.

    Args:
        work: Gets a function that runs a step on the connection.
    """
    loop = asyncio.get_running_loop()
    steps: asyncio.Queue[Step | None] = asyncio.Queue()

    def run(step: Callable[[], Any]) -> Any:
        outcome: Future[Any] = Future()
        loop.call_soon_threadsafe(steps.put_nowait, (step, outcome))
        return outcome.result()

    job = _threads(process.pid).submit(contextvars.copy_context().run, work, run)
    job.add_done_callback(lambda _: loop.call_soon_threadsafe(steps.put_nowait, None))
    cancelled: asyncio.CancelledError | None = None
    while True:
        try:
            asked = await_only(steps.get())
        except asyncio.CancelledError as error:
            cancelled = error
            continue
        if asked is None:
            break
        step, outcome = asked
        try:
            outcome.set_result(step())
        except asyncio.CancelledError as error:
            cancelled = error
            outcome.set_exception(ConnectionAbortedError("the task was cancelled"))
        except BaseException as error:  # noqa: BLE001  (the thread has asked)
            outcome.set_exception(error)
    if cancelled is not None:
        raise cancelled from job.exception()
    return job.result()


@cache
def _threads(_pid: int) -> ThreadPoolExecutor:
    """Those of this process: a forked child has none of its parent's."""
    return ThreadPoolExecutor(_MAX_THREADS, thread_name_prefix="dualwrite joined")
