"""A call that waits for a database or for Kafka must not be made in the thread of a running event loop: it would block it."""

from __future__ import annotations

import asyncio
import sys

from dualwrite.errors import UsageError


def check_may_block(what: str, instead: str) -> None:
    """Check that no event loop runs in this thread, or that nobody else waits for it, as in an interactive session.

    The cells of a notebook run inside the kernel's event loop, and so does what is typed into `python -m asyncio`: there the
    user waits for the call in any case. `sys.ps1`, the prompt, exists only in interactive sessions; IPython's kernels have it.

    Args:
        what: The call.
        instead: The same with `dualwrite.aio`.

    Raises:
        UsageError: A loop runs, and the session is not interactive.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    if hasattr(sys, "ps1"):
        return
    raise UsageError(
        f"{what} would block the event loop that runs in this thread.",
        cause="it was called in a coroutine, or in a callback of the loop; every other task would wait for the commit",
        next_step=f"use dualwrite.aio: {instead}; or call a plain function that does it: await asyncio.to_thread(function)",
    )
