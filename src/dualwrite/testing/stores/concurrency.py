"""Conformance of concurrent use: threads, processes, calls during an open transaction, and waiting for locks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final, TypeVar

import pytest

from dualwrite.errors import ClaimTimeoutError, FencedError, StoreCommitFailedError, StoreUnavailableError
from dualwrite.state import PreparedTxnState, ProducerKind
from dualwrite.stores.base import TxnStateStore
from dualwrite.stores.rows import Claim, LostKind, LostTransaction, Resolution, StateRow
from dualwrite.testing import TIMEOUT
from dualwrite.testing.stores.resolutions import LOST, UNVERIFIED
from dualwrite.testing.stores.scene import STATE, ClaimsWait, StoreScene
from dualwrite.testing.stores.steps import (
    PROCESSES,
    THREADS,
    at,
    at_once,
    expect_error,
    expect_row,
    finish,
    in_processes,
    outcome_of,
    running,
)

T = TypeVar("T")

_TIMES: Final = 4

_Change = tuple[Callable[[TxnStateStore, Claim], Any], Callable[[StateRow], bool]]

_CHANGES: Final[dict[str, _Change]] = {
    "acknowledge": (lambda store, claim: store.acknowledge(claim.transactional_id), lambda row: row.lost == ()),
    "resolve a generation": (
        lambda store, claim: store.record_resolution(claim, Resolution(resolved_generation=9)),
        lambda row: row.resolved_generation == 9,  # noqa: PLR2004  (what the line above has set)
    ),
    "add a lost entry": (
        lambda store, claim: store.record_resolution(claim, Resolution(lost=UNVERIFIED)),
        lambda row: UNVERIFIED in row.lost,
    ),
    "acquire a generation": (
        lambda store, claim: store.acquire_generation(claim, ProducerKind.NATIVE),
        lambda row: (row.generation, row.generation_kind) == (1, ProducerKind.NATIVE),
    ),
}
"""What is called during a transaction, and how the row shows that it took effect."""

_WAITING: Final[dict[str, Callable[[TxnStateStore, Claim], Any]]] = {
    **{name: call for name, (call, _) in _CHANGES.items()},
    "forget": lambda store, claim: store.forget(claim.transactional_id),
    "begin": lambda store, claim: store.begin(claim).rollback(),
}
"""What may have to wait for another's transaction; `begin` only where a transaction holds a lock from the beginning."""


class ThreadConformance:
    """TxnStateStore is safe to use from several threads, each with its own claims and transactions."""

    def test_concurrent_claims_get_different_fences(self, scene: StoreScene) -> None:
        """`claim` raises the fence by one, even if several claims create the row at the same time."""
        store, name = scene.new_store(), scene.new_id()
        claims = at_once(lambda number: [scene.claim(store, name, f"thread {number}") for _ in range(_TIMES)])
        fences = sorted(claim.fence for made in claims for claim in made)
        assert fences == list(range(1, THREADS * _TIMES + 1)), f"{THREADS * _TIMES} concurrent claims got the fences {fences}"

    def test_one_of_several_conditional_claims_succeeds(self, scene: StoreScene) -> None:
        """`expected_fence` is a compare-and-set."""
        stores, name = [scene.new_store() for _ in range(3)], scene.new_id()
        for fence in range(1, 1 + _TIMES):
            claim = scene.claim(stores[0], name) if fence == 1 else Claim(name, fence, "")
            made = at_once(partial(_expecting, stores, claim))
            assert sorted(made, key=str) == [fence + 1, *[None] * (THREADS - 1)], f"claims that expect the fence {fence}"

    def test_concurrent_calls_acquire_different_generations(self, scene: StoreScene) -> None:
        """No generation is returned twice."""
        store, name, claim = scene.claimed()
        made = at_once(lambda _: [store.acquire_generation(claim, ProducerKind.LIBRDKAFKA) for _ in range(_TIMES)])
        acquired = sorted(generation for some in made for generation in some)
        assert len(set(acquired)) == THREADS * _TIMES, f"generations acquired by concurrent calls: {acquired}"
        expect_row(store, name, "after it", generation=acquired[-1])

    def test_no_resolution_is_lost(self, scene: StoreScene) -> None:
        """Each of several concurrent resolutions adds its entry; each entry is acknowledged once, and then removed."""
        store, name, claim = scene.claimed()
        entries = [
            LostTransaction(LostKind.LOST, PreparedTxnState(number, 0), 0, datetime(2026, 11, 21, tzinfo=UTC))
            for number in range(THREADS * _TIMES)
        ]

        def resolve_and_acknowledge(number: int) -> list[LostTransaction]:
            for entry in entries[number::THREADS]:
                store.record_resolution(claim, Resolution(lost=entry))
            return list(store.acknowledge(name)) if number % 2 else []

        acknowledged = [entry for some in at_once(resolve_and_acknowledge) for entry in some]
        left = store.read_claimed(claim).lost
        missing = [entry.state for entry in entries if entry not in {*acknowledged, *left}]
        assert not missing, f"the entries {missing} were added, but are neither in the row nor acknowledged"
        twice = [entry.state for entry, times in Counter([*acknowledged, *left]).items() if times > 1]
        assert not twice, f"the entries {twice} were acknowledged twice, or are still in the row"

    def test_concurrent_writers_of_different_ids_do_not_interfere(self, scene: StoreScene) -> None:
        """Every transaction is committed, and each row has its own last one."""
        store = scene.new_store()
        claims = [scene.claim(store, scene.new_id()) for _ in range(THREADS)]

        def write(thread: int) -> list[int]:
            return [_until_committed(scene, store, claims[thread], number) for number in range(1, _TIMES + 1)]

        numbers = [number for written in at_once(write) for number in written]
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

        confirmed = sorted(number for some in at_once(fight) for number in some)
        found = scene.committed()
        assert set(confirmed) <= set(found), f"confirmed, but not in the database: {set(confirmed) - set(found)}"
        assert set(found) - set(confirmed) == set(), f"in the database, but not confirmed: {set(found) - set(confirmed)}"
        expect_row(stores[0], name, "after it", fence=THREADS * _TIMES)


class ProcessConformance:
    """The same for several processes, if the database supports more than one."""

    def test_concurrent_claims_of_processes_get_different_fences(self, scene: StoreScene) -> None:
        """`claim` raises the fence by one, even if several processes create the row at the same time."""
        name = scene.new_id()
        made = in_processes(scene.opener(), partial(_claims_of, name))
        assert sorted(fence for fences in made for fence in fences) == list(range(1, PROCESSES * _TIMES + 1))
        expect_row(scene.new_store(), name, "after the processes have ended", fence=PROCESSES * _TIMES)


def _claims_of(name: str, store: TxnStateStore, _: int) -> list[int]:
    return [store.claim(name, "process", timeout=TIMEOUT).fence for _ in range(_TIMES)]


def _expecting(stores: list[TxnStateStore], claim: Claim, number: int) -> int | None:
    store = stores[number % len(stores)]
    try:
        return store.claim(claim.transactional_id, f"thread {number}", timeout=TIMEOUT, expected_fence=claim.fence).fence
    except FencedError:
        return None


def _until_committed(scene: StoreScene, store: TxnStateStore, claim: Claim, number: int) -> int:
    """A transaction, repeated if the database aborted it because of a conflict."""
    while True:
        with suppress(StoreCommitFailedError):
            state = PreparedTxnState(claim.fence, number)
            return scene.transact(store, claim, state=state, transaction_number=number)


class InFlightConformance:
    """Calls during an open transaction."""

    @pytest.mark.parametrize("change", _CHANGES)
    @pytest.mark.parametrize("moment", ["begun", "recorded"])
    def test_neither_a_transaction_nor_a_change_during_it_is_lost(self, scene: StoreScene, moment: str, change: str) -> None:
        """A call may wait for the transaction (`acknowledge` even needs no claim), or make it fail with a conflict.

        But it does not fence the writer, since there is no newer claim; and a transaction that read the row before does not
        revert what the call has changed.
        """
        store, other, name = scene.new_store(), scene.new_store(), scene.new_id()
        claim = scene.claim(store, name)
        store.record_resolution(claim, Resolution(lost=LOST))
        call, is_kept = _CHANGES[change]
        transaction, number = at(scene, store, claim, moment)
        with running(lambda: call(other, claim)) as changing:
            failed = outcome_of(lambda: finish(scene, transaction, number, moment))
            transaction.rollback()
            changing.result(TIMEOUT)
        row = store.read_claimed(claim)
        assert is_kept(row), f"{change}: the call returned, but the row does not show the change: {row}"
        if failed is None:
            assert scene.committed() == [number], f"{change}: commit() returned, but the user's data is not in the database"
            expect_row(store, name, f"{change}: commit() returned", prepared_state=STATE, transaction_number=1)
        else:
            assert not isinstance(failed, FencedError), (
                f"{change}: there is no newer claim, but the writer was fenced: {failed}"
            )
            assert isinstance(failed, StoreCommitFailedError), (
                f"{change}: the contract requires StoreCommitFailedError, not {failed!r}"
            )
            assert scene.committed() == [], f"{change}: the transaction failed, but has written the user's data"
            expect_row(store, name, f"{change}: the transaction failed", prepared_state=None, transaction_number=0)

    @pytest.mark.parametrize("moment", ["begun", "recorded"])
    def test_reads_see_only_committed_data_and_do_not_block(self, scene: StoreScene, moment: str) -> None:
        """`read`, `read_claimed`, `list` and `check` during a transaction: `dualwrite status` must work then as well."""
        store, other, name = scene.new_store(), scene.new_store(), scene.new_id()
        claim = scene.claim(store, name)
        transaction, _ = at(scene, store, claim, moment)
        try:
            other.check()
            expect_row(other, name, "during a transaction", prepared_state=None, fence=claim.fence)
            assert other.read_claimed(claim).transaction_number == 0
            assert other.list(name) == [name]
        finally:
            transaction.rollback()


class TimeLimitConformance:
    """No method waits for a lock indefinitely."""

    def test_a_claim_times_out(self, scene: StoreScene) -> None:
        """ClaimTimeoutError: the row stayed locked. Nothing was changed, and the same claim works once the lock is released."""
        if scene.capabilities.claims_wait is ClaimsWait.NEVER:
            pytest.skip("claims do not wait for transactions in this store")
        store, rival, name = scene.new_store(), scene.new_store(), scene.new_id()
        ours = scene.claim(store, name)
        transaction, number = scene.recorded(store, ours)
        try:
            for timeout in (0.01, 0.3):
                with expect_error(ClaimTimeoutError, f"claim(timeout={timeout}) while the row is locked") as caught:
                    rival.claim(name, "theirs", timeout=timeout)
                found = (caught.value.transactional_id, caught.value.facts.get("timeout"), caught.value.retriable)
                assert found == (name, timeout, True), "ClaimTimeoutError's transactional_id, timeout and retriable"
            expect_row(rival, name, "after claims that timed out", fence=ours.fence, owner="ours")
            transaction.commit()
        finally:
            transaction.rollback()
        assert scene.committed() == [number], "a claim that timed out has harmed the transaction that it waited for"
        assert scene.claim(rival, name, "theirs").fence == ours.fence + 1

    @pytest.mark.parametrize("call", _WAITING)
    def test_other_calls_time_out_after_the_limit_of_the_store(self, scene: StoreScene, call: str) -> None:
        """The others wait up to a limit of the store, then raise ClaimTimeoutError (`begin`: or StoreUnavailableError)."""
        if call == "begin" and scene.capabilities.claims_wait is not ClaimsWait.FROM_BEGIN:
            pytest.skip("`begin` does not wait for transactions in this store")
        store, name = scene.new_store(), scene.new_id()
        other = scene.adopt(scene.open_with_short_timeout())
        claim = scene.claim(store, name)
        before = store.read_claimed(claim)
        transaction, _ = scene.recorded(store, claim)
        try:
            errors = (ClaimTimeoutError, StoreUnavailableError) if call == "begin" else ClaimTimeoutError
            with expect_error(errors, f"{call}, while the row is locked") as caught:
                _WAITING[call](other, claim)
            assert caught.value.transactional_id == name
        finally:
            transaction.rollback()
        assert store.read_claimed(claim) == before, f"{call} timed out, but has changed the row"
