"""Calls that block are refused in the thread of a running event loop, and allowed in an interactive session."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from dualwrite import DualWriter
from dualwrite.deadline import check_may_block
from dualwrite.errors import UsageError
from dualwrite.processor import DualProcessor


def without_a_database(_: Any) -> None:
    pass


def processor() -> DualProcessor:
    return DualProcessor(writer(), {"group.id": "group"}, ["orders"], handle=lambda *_: None)


def writer() -> DualWriter[Any]:
    anything = cast("Any", SimpleNamespace(kind=None, description="nothing", is_local=True, positions=object()))
    return DualWriter(anything, transactional_id="shop", producers=anything, coordinator=anything)


CALLS: list[Callable[[], Any]] = [
    lambda: writer().transaction(),
    writer().transactional(without_a_database),
    lambda: processor().run(),
]


@pytest.mark.parametrize("call", CALLS)
def test_a_call_that_would_block_the_loop_is_refused_before_it_does_anything(call: Callable[[], Any]) -> None:
    async def main() -> None:
        with pytest.raises(UsageError, match="would block the event loop") as caught:
            call()
        assert "await asyncio.to_thread(function)" in str(caught.value)

    asyncio.run(main())


def test_so_is_one_in_a_callback_of_the_loop() -> None:
    """No task runs there, and yet all of them would wait."""
    raised: list[BaseException] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: raised.append(context["exception"]))
        loop.call_soon(check_may_block, "run()", "await run()")
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    asyncio.run(main())
    assert [type(error) for error in raised] == [UsageError]


def test_threads_and_interactive_sessions_may_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cells of a notebook run in a task of the kernel's event loop, and IPython sets `sys.ps1` there."""

    async def main() -> None:
        await asyncio.to_thread(check_may_block, "run()", "await run()")
        monkeypatch.setattr(sys, "ps1", "In : ", raising=False)
        check_may_block("run()", "await run()")

    check_may_block("run()", "await run()")
    asyncio.run(main())
