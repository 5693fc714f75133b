"""What several tests of the suite do, and how they say what they expect: an error, a row, what is committed."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import fields
from typing import Any, Final, Generic, TypeVar

import pytest

from dualwrite.errors import DualWriteError, FencedError
from dualwrite.state import ProducerKind
from dualwrite.stores.base import TxnStateStore
from dualwrite.stores.rows import Claim, Resolution, StateRow
from dualwrite.stores.store_transaction import StoreTransaction
from dualwrite.testing import TIMEOUT
from dualwrite.testing.stores.scene import SHORT_TIME, STATE, StoreScene

E = TypeVar("E", bound=BaseException)
T = TypeVar("T")

_TEXT_LIMIT: Final = 300

MOMENTS: Final = ("begun", "written", "recorded")
"""How far a transaction has come; see `at`."""

THREADS: Final = 6
"""How many `at_once` starts."""
PROCESSES: Final = 3
"""How many `in_processes` starts."""


def at(scene: StoreScene, store: TxnStateStore, claim: Claim, moment: str) -> tuple[StoreTransaction, int]:
    """A transaction that has reached one of MOMENTS, and its number; `finish` does the rest."""
    if moment == "recorded":
        return scene.recorded(store, claim)
    transaction, number = store.begin(claim), scene.new_number()
    if moment == "written":
        scene.put(transaction.handle, number)
    return transaction, number


def finish(scene: StoreScene, transaction: StoreTransaction, number: int, moment: str) -> None:
    """The rest of a transaction that `at` has brought to a moment."""
    if moment == "begun":
        scene.put(transaction.handle, number)
    if moment == "recorded":
        transaction.commit()
    else:
        record_and_commit(transaction)


def record_and_commit(transaction: StoreTransaction) -> None:
    """Commit with STATE."""
    transaction.record(STATE, generation=0, transaction_number=1)
    transaction.commit()


def uses_of_a_claim(store: TxnStateStore) -> Mapping[str, Callable[[Claim], Any]]:
    """Every call that needs a claim, by its name."""

    def claim_again(claim: Claim) -> Claim:
        return store.claim(claim.transactional_id, "ours", timeout=TIMEOUT, expected_fence=claim.fence)

    return {
        "read_claimed()": store.read_claimed,
        "begin()": store.begin,
        "acquire_generation()": lambda claim: store.acquire_generation(claim, ProducerKind.NATIVE),
        "acquire_generation(reuse=True)": lambda claim: store.acquire_generation(claim, ProducerKind.NATIVE, reuse=True),
        "record_resolution()": lambda claim: store.record_resolution(
            claim, Resolution(clear_state=True, resolved_generation=0)
        ),
        "claim(expected_fence=…)": claim_again,
    }


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

    It must name the claim that replaced it, or say that there is no row at all, if that is given.
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


def at_once(work: Callable[[int], T]) -> list[T]:
    """The results of `work` in several threads that start at the same time; each gets its number."""
    barrier = threading.Barrier(THREADS)

    def one(number: int) -> T:
        barrier.wait(TIMEOUT)
        return work(number)

    with ThreadPoolExecutor(THREADS) as threads:
        return list(threads.map(one, range(THREADS)))


def in_processes(opener: Callable[[], TxnStateStore], work: Callable[[TxnStateStore, int], T]) -> list[T]:
    """The results of `work` in several processes; each gets a store and its number.

    They close their stores when all have done their work: a lease may end with its process.
    """
    context = multiprocessing.get_context("spawn")
    results: multiprocessing.Queue[tuple[T | None, str]] = context.Queue()
    all_done = context.Event()
    arguments = (opener, work, results, all_done)
    processes = [context.Process(target=_work_in_a_process, args=(*arguments, number)) for number in range(PROCESSES)]
    for process in processes:
        process.start()
    try:
        found = [results.get(timeout=2 * TIMEOUT) for _ in processes]
    finally:
        all_done.set()
        for process in processes:
            process.join(TIMEOUT)
            process.close()
        results.close()
    assert not any(error for _, error in found), f"errors in other processes: {found}"
    return [result for result, _ in found if result is not None]


def _work_in_a_process(
    opener: Callable[[], TxnStateStore],
    work: Callable[[TxnStateStore, int], T],
    results: multiprocessing.Queue[tuple[T | None, str]],
    all_done: threading.Event,
    number: int,
) -> None:
    try:
        with opener() as store:
            results.put((work(store, number), ""))
            all_done.wait(2 * TIMEOUT)
    except Exception as error:  # noqa: BLE001  (reported by the test)
        results.put((None, f"{type(error).__name__}: {error}"))


def outcome_of(call: Callable[[], T]) -> T | DualWriteError:
    """The result of a call, or the DualWriteError that it raises."""
    try:
        return call()
    except DualWriteError as error:
        return error


def _shortened(error: BaseException) -> str:
    text = f"{type(error).__name__}: {error}"
    return text if len(text) <= _TEXT_LIMIT else f"{text[:_TEXT_LIMIT]}…"
