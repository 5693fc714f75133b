"""Conformance of concurrent use, by several threads and processes: every change takes effect exactly once."""

from __future__ import annotations

import multiprocessing
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from functools import partial
from typing import Final, TypeVar

from dualwrite.errors import FencedError, StoreCommitFailedError
from dualwrite.producer_kind import ProducerKind
from dualwrite.state import PreparedTxnState
from dualwrite.stores.base import TxnStateStore
from dualwrite.stores.state_row import Claim, LostKind, LostTransaction, Resolution
from dualwrite.testing.limits import TIMEOUT
from dualwrite.testing.stores.expectations import expect_row
from dualwrite.testing.stores.scene import StoreScene

T = TypeVar("T")

_THREADS: Final = 6
_TIMES: Final = 4
_PROCESSES: Final = 3


class ThreadConformance:
    """TxnStateStore is safe to use from several threads, each with its own claims and transactions."""

    def test_concurrent_claims_get_different_fences(self, scene: StoreScene) -> None:
        """`claim` raises the fence by one, even if several claims create the row at the same time."""
        store, name = scene.new_store(), scene.new_id()
        claims = _at_once(lambda number: [scene.claim(store, name, f"thread {number}") for _ in range(_TIMES)])
        fences = sorted(claim.fence for made in claims for claim in made)
        assert fences == list(range(1, _THREADS * _TIMES + 1)), f"{_THREADS * _TIMES} concurrent claims got the fences {fences}"

    def test_one_of_several_conditional_claims_succeeds(self, scene: StoreScene) -> None:
        """`expected_fence` is a compare-and-set."""
        stores, name = [scene.new_store() for _ in range(3)], scene.new_id()
        for fence in range(1, 1 + _TIMES):
            claim = scene.claim(stores[0], name) if fence == 1 else Claim(name, fence, "")
            made = _at_once(partial(_expecting, stores, claim))
            assert sorted(made, key=str) == [fence + 1, *[None] * (_THREADS - 1)], f"claims that expect the fence {fence}"

    def test_concurrent_calls_acquire_different_generations(self, scene: StoreScene) -> None:
        """No generation is returned twice."""
        store, name = scene.new_store(), scene.new_id()
        claim = scene.claim(store, name)
        made = _at_once(lambda _: [store.acquire_generation(claim, ProducerKind.LIBRDKAFKA) for _ in range(_TIMES)])
        acquired = sorted(generation for some in made for generation in some)
        assert len(set(acquired)) == _THREADS * _TIMES, f"generations acquired by concurrent calls: {acquired}"
        expect_row(store, name, "after it", generation=acquired[-1])

    def test_no_resolution_is_lost(self, scene: StoreScene) -> None:
        """Each of several concurrent resolutions adds its entry; each entry is acknowledged once, and then removed."""
        store, name = scene.new_store(), scene.new_id()
        claim = scene.claim(store, name)
        entries = [
            LostTransaction(LostKind.LOST, PreparedTxnState(number, 0), 0, datetime(2026, 11, 21, tzinfo=UTC))
            for number in range(_THREADS * _TIMES)
        ]

        def resolve_and_acknowledge(number: int) -> list[LostTransaction]:
            for entry in entries[number::_THREADS]:
                store.record_resolution(claim, Resolution(lost=entry))
            return list(store.acknowledge(name)) if number % 2 else []

        acknowledged = [entry for some in _at_once(resolve_and_acknowledge) for entry in some]
        left = store.read_claimed(claim).lost
        missing = [entry.state for entry in entries if entry not in {*acknowledged, *left}]
        assert not missing, f"the entries {missing} were added, but are neither in the row nor acknowledged"
        twice = [entry.state for entry, times in Counter([*acknowledged, *left]).items() if times > 1]
        assert not twice, f"the entries {twice} were acknowledged twice, or are still in the row"

    def test_concurrent_writers_of_different_ids_do_not_interfere(self, scene: StoreScene) -> None:
        """Every transaction is committed, and each row has its own last one."""
        store = scene.new_store()
        claims = [scene.claim(store, scene.new_id()) for _ in range(_THREADS)]

        def write(thread: int) -> list[int]:
            return [_until_committed(scene, store, claims[thread], number) for number in range(1, _TIMES + 1)]

        numbers = [number for written in _at_once(write) for number in written]
        assert scene.committed() == sorted(numbers)
        for thread, claim in enumerate(claims):
            expect_row(
                store,
                claim.transactional_id,
                f"the row of thread {thread}",
                prepared_state=PreparedTxnState(claim.fence, _TIMES),
                transaction_number=_TIMES,
            )

    def test_writers_that_fence_each_other_confirm_only_what_is_committed(self, scene: StoreScene) -> None:
        """The database has what `commit` has confirmed, and nothing else, whichever writer owned the id at any time."""
        stores, name = [scene.new_store() for _ in range(3)], scene.new_id()

        def fight(thread: int) -> list[int]:
            store = stores[thread % len(stores)]
            confirmed: list[int] = []
            for _ in range(_TIMES):
                claim = scene.claim(store, name, f"thread {thread}")
                try:
                    confirmed.append(_until_committed(scene, store, claim, 1))
                    confirmed.append(_until_committed(scene, store, claim, 2))
                except FencedError:
                    continue
            return confirmed

        confirmed = sorted(number for some in _at_once(fight) for number in some)
        found = scene.committed()
        assert set(confirmed) <= set(found), f"confirmed, but not in the database: {set(confirmed) - set(found)}"
        assert set(found) - set(confirmed) == set(), f"in the database, but not confirmed: {set(found) - set(confirmed)}"
        expect_row(stores[0], name, "after it", fence=_THREADS * _TIMES)


class ProcessConformance:
    """The same for several processes, if the database supports more than one."""

    def test_concurrent_claims_of_processes_get_different_fences(self, scene: StoreScene) -> None:
        """`claim` raises the fence by one, even if several processes create the row at the same time."""
        opener, name = scene.opener(), scene.new_id()
        context = multiprocessing.get_context("spawn")
        results: multiprocessing.Queue[int | str] = context.Queue()
        processes = [context.Process(target=_claim_in_a_process, args=(opener, name, results)) for _ in range(_PROCESSES)]
        for process in processes:
            process.start()
        try:
            fences = [results.get(timeout=2 * TIMEOUT) for _ in range(_PROCESSES * _TIMES)]
        finally:
            for process in processes:
                process.join(TIMEOUT)
                process.close()
            results.close()
        assert sorted(fences, key=str) == sorted(range(1, _PROCESSES * _TIMES + 1), key=str)
        expect_row(scene.new_store(), name, "after the processes have ended", fence=_PROCESSES * _TIMES)


def _at_once(work: Callable[[int], T]) -> list[T]:
    """Run `work` in several threads that start at the same time; each gets its number."""
    barrier = threading.Barrier(_THREADS)

    def one(number: int) -> T:
        barrier.wait(TIMEOUT)
        return work(number)

    with ThreadPoolExecutor(_THREADS) as threads:
        return list(threads.map(one, range(_THREADS)))


def _expecting(stores: list[TxnStateStore], claim: Claim, number: int) -> int | None:
    store = stores[number % len(stores)]
    try:
        return store.claim(claim.transactional_id, f"thread {number}", timeout=TIMEOUT, expected_fence=claim.fence).fence
    except FencedError:
        return None


def _until_committed(scene: StoreScene, store: TxnStateStore, claim: Claim, number: int) -> int:
    """A transaction, repeated if the database aborted it because of a conflict."""
    while True:
        transaction = None
        try:
            transaction, written = scene.recorded(
                store, claim, state=PreparedTxnState(claim.fence, number), transaction_number=number
            )
            transaction.commit()
        except StoreCommitFailedError:
            continue
        else:
            return written
        finally:
            if transaction is not None:
                transaction.rollback()


def _claim_in_a_process(opener: Callable[[], TxnStateStore], name: str, results: multiprocessing.Queue[int | str]) -> None:
    try:
        with opener() as store:
            for _ in range(_TIMES):
                results.put(store.claim(name, "process", timeout=TIMEOUT).fence)
    except Exception as error:  # noqa: BLE001  (reported by the test)
        for _ in range(_TIMES):
            results.put(f"{type(error).__name__}: {error}")
