"""Reads that fail, or take long: the last result stays, with the reason, and nobody waits for long."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import anyio

from dualwrite.console.shared_read import LastRead, SharedRead
from dualwrite.errors import StoreUnavailableError
from fixtures.pace import LIMIT, until


def answer(shared: SharedRead[Any], wait: float | None = None) -> LastRead[Any]:
    return anyio.run(shared.answer, wait)


def reading(*results: Any) -> Callable[[], Any]:
    left = list(results)

    def read() -> Any:
        found = left.pop(0)
        if isinstance(found, Exception):
            raise found
        return found

    return read


def test_a_result_is_read_once_and_shared_until_it_is_too_old() -> None:
    shared = SharedRead("a test", reading(1, 2), limit=LIMIT, every=LIMIT)
    assert [answer(shared).value for _ in range(3)] == [1, 1, 1]
    shared.again()
    assert answer(shared).value == 2


def test_after_an_error_the_last_result_stays_with_the_reason() -> None:
    results = reading(1, StoreUnavailableError("It is away."), ValueError("secret"), 4)
    shared = SharedRead("a test", results, limit=LIMIT, every=0)
    first = answer(shared)
    found = []
    for _ in range(3):
        shared.again()
        found.append(answer(shared))
    assert [(each.value, each.problem) for each in found] == [
        (1, "It is away."),
        (1, "ValueError (see the log)"),
        (4, None),
    ]
    assert found[0].at == found[1].at == first.at


def test_a_read_that_hangs_is_not_waited_for_and_not_repeated() -> None:
    going, begun = threading.Event(), []

    def read() -> int:
        begun.append(1)
        if len(begun) > 1:
            assert going.wait(LIMIT)
        return len(begun)

    shared = SharedRead("a test", read, limit=0.2, every=0)
    until(lambda: answer(shared).value == 1, "the first result")
    shared.again()
    seen = [answer(shared) for _ in range(3)]
    assert seen[-1].value == 1
    assert "There has been no answer for" in (seen[-1].problem or "")
    assert len(begun) == 2, "one at a time"
    going.set()
    until(lambda: shared.known.value == 2, "the second result")
