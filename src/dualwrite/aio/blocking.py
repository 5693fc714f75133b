"""What blocks, in a thread, awaited until it has ended, whatever is cancelled."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")


async def finished(function: Callable[[], T], *, undo: Callable[[T], object] = lambda _: None) -> T:
    """Run a blocking function in a thread and return its result; if the caller is cancelled, undo its effect, in a thread too.

    A cancellation is raised only when that has ended, however often the caller is cancelled. No task is involved, because a
    loop that ends cancels all tasks.
    """
    loop = asyncio.get_running_loop()
    running = loop.run_in_executor(None, contextvars.copy_context().run, function)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError as cancelled:
        await _ended(running)
        error = running.exception()
        if error is None:
            undoing = loop.run_in_executor(None, undo, running.result())
            await _ended(undoing)
            error = undoing.exception()
        raise cancelled from error


async def _ended(future: asyncio.Future[Any]) -> None:
    while not future.done():
        with suppress(asyncio.CancelledError):
            await asyncio.wait([future])
