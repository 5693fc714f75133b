"""Reads that fail, or take long: the last result stays, with the reason, and nobody waits for long."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import anyio

from dualwrite.console.watched import Answer, Watched
from dualwrite.errors import StoreUnavailableError
from fixtures.pace import LIMIT, until


def answer(watched: Watched[Any], wait: float | None = None) -> Answer[Any]:
    return anyio.run(watched.answer, wait)


def reading(*results: Any) -> Callable[[], Any]:
    left = list(results)

    def read() -> Any:
        found = left.pop(0)
        if isinstance(found, Exception):
            raise found
        return found

    return read


def test_a_result_is_read_once_and_shared_until_it_is_too_old() -> None:
    watched = Watched("a test", reading(1, 2), limit=LIMIT, every=LIMIT)
    assert [answer(watched).value for _ in range(3)] == [1, 1, 1]
    watched.again()
    assert answer(watched).value == 2


def test_after_an_error_the_last_result_stays_with_the_reason() -> None:
    watched = Watched("a test", reading(1, StoreUnavailableError("It is away."), ValueError("secret"), 4), limit=LIMIT, every=0)
    first = answer(watched)
    found = []
    for _ in range(3):
        watched.again()
        found.append(answer(watched))
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

    watched = Watched("a test", read, limit=0.2, every=0)
    until(lambda: answer(watched).value == 1, "the first result")
    watched.again()
    seen = [answer(watched) for _ in range(3)]
    assert seen[-1].value == 1
    assert "There has been no answer for" in (seen[-1].problem or "")
    assert len(begun) == 2, "one at a time"
    going.set()
    until(lambda: watched.known.value == 2, "the second result")
