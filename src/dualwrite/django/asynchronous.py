"""Async views: Django's transactions belong to threads, so a block runs in one, and an event loop never waits for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, ParamSpec, TypeVar, cast

from asgiref.sync import sync_to_async

P = ParamSpec("P")
T = TypeVar("T")

NEXT_STEP: Final = "put the block into a plain function, and call it: await dualwrite.django.arun(function, …)"


async def arun(function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Run a plain function, with blocks in it, in the thread of Django's connections, and wait for it.

    It is `sync_to_async(function, thread_sensitive=True)`: the thread, and so the connection, is that of Django's own
    asynchronous calls, such as `await Order.objects.aget()`.

    Raises:
        BaseException: What the function raises.
    """
    wrapped: Any = sync_to_async(function, thread_sensitive=True)
    return cast("T", await wrapped(*args, **kwargs))
