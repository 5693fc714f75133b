"""The suite's assertions: a failure says what the contract requires, and what the store did instead."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import fields
from typing import Any, Final, Generic, TypeVar

import pytest

from dualwrite.errors import DualWriteError, FencedError
from dualwrite.stores.base import TxnStateStore
from dualwrite.stores.state_row import Claim, StateRow
from dualwrite.testing.stores.scene import SHORT_TIME

E = TypeVar("E", bound=BaseException)
T = TypeVar("T")

_TEXT_LIMIT: Final = 300


class Caught(Generic[E]):
    """The error that a block raised, once it has ended."""

    value: E


@contextmanager
def expect_error(kind: type[E] | tuple[type[E], ...], what: str) -> Iterator[Caught[E]]:
    """The block must raise this error; `what` names the call and its situation, for the failure's text."""
    __tracebackhide__ = True
    caught: Caught[E] = Caught()
    wanted = " or ".join(one.__name__ for one in (kind if isinstance(kind, tuple) else (kind,)))
    try:
        yield caught
    except kind as error:
        caught.value = error
        return
    except Exception as error:  # noqa: BLE001  (reported as an error that the contract does not allow)
        pytest.fail(f"{what}: the contract requires {wanted}; the store raised {_shortened(error)}")
    pytest.fail(f"{what}: the contract requires {wanted}; the store raised nothing")


def expect_fenced(
    call: Callable[[Claim], Any], claim: Claim, what: str, *, by: Claim | None = None, missing: bool = False
) -> None:
    """`call` must raise FencedError under a claim that was replaced, and the error must have the right attributes.

    Args:
        call: The call, which gets the claim.
        claim: The claim that was replaced.
        what: Names the call and its situation.
        by: The claim that replaced it, which the error must name.
        missing: Whether there is no row at all.
    """
    __tracebackhide__ = True
    with expect_error(FencedError, what) as caught:
        call(claim)
    error = caught.value
    found = {"transactional_id": error.transactional_id, "fence": error.facts.get("fence")}
    wanted: dict[str, Any] = {"transactional_id": claim.transactional_id, "fence": claim.fence}
    if by is not None or missing:
        found |= {name: error.facts.get(name) for name in ("current_fence", "current_owner")}
        wanted |= {"current_fence": by.fence if by else None, "current_owner": by.owner if by else None}
    assert found == wanted, f"{what}: FencedError's attributes are {found}, the contract requires {wanted}"


def expect_row(store: TxnStateStore, name: str, why: str, /, **wanted: Any) -> None:
    """The row must exist and have these fields; the others are not checked."""
    __tracebackhide__ = True
    row = store.read(name)
    if row is None:
        pytest.fail(f"{why}: read() returned None, there is no row")
    wrong = {name: getattr(row, name) for name, value in wanted.items() if getattr(row, name) != value}
    text = "; ".join(f"{name} is {value!r}, the contract requires {wanted[name]!r}" for name, value in wrong.items())
    assert not wrong, f"{why}: {text}"


def expect_changed(store: TxnStateStore, before: StateRow, why: str, /, **changes: Any) -> None:
    """The row must be `before` with these changes and no others; what has no meaning, and `updated_at`, is not compared."""
    __tracebackhide__ = True
    kept = {field.name: getattr(before, field.name) for field in fields(before) if field.name != "updated_at"}
    wanted = {**kept, **changes}
    if wanted["prepared_state"] is None:
        del wanted["prepared_generation"]
    expect_row(store, before.transactional_id, why, **wanted)


@contextmanager
def running(call: Callable[[], T]) -> Iterator[Future[T]]:
    """Run `call` in a thread; the block begins when the call has ended, or has had enough time to begin to wait for a lock."""
    with ThreadPoolExecutor(1) as thread:
        future = thread.submit(call)
        wait([future], timeout=SHORT_TIME)
        yield future


def outcome_of(call: Callable[[], T]) -> T | DualWriteError:
    """The result of a call, or the DualWriteError that it raises."""
    try:
        return call()
    except DualWriteError as error:
        return error


def _shortened(error: BaseException) -> str:
    text = f"{type(error).__name__}: {error}"
    return text if len(text) <= _TEXT_LIMIT else f"{text[:_TEXT_LIMIT]}…"
