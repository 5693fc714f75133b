"""Conformance of changes to the row during a transaction: neither may revert the other, and no call waits without limit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import pytest

from dualwrite.errors import ClaimTimeoutError, FencedError, StoreCommitFailedError, StoreUnavailableError
from dualwrite.producer_kind import ProducerKind
from dualwrite.stores.base import TxnStateStore
from dualwrite.stores.state_row import Claim, Resolution, StateRow
from dualwrite.testing.limits import TIMEOUT
from dualwrite.testing.stores.expectations import expect_error, expect_row, outcome_of, running
from dualwrite.testing.stores.resolutions import LOST, UNVERIFIED
from dualwrite.testing.stores.scene import STATE, ClaimsWait, StoreScene

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
        if moment == "recorded":
            transaction, number = scene.recorded(store, claim)
        else:
            transaction, number = store.begin(claim), scene.new_number()

        def finish() -> None:
            if moment == "begun":
                scene.put(transaction.handle, number)
                transaction.record(STATE, generation=0, transaction_number=1)
            transaction.commit()

        with running(lambda: call(other, claim)) as changing:
            failed = outcome_of(finish)
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
        transaction = scene.recorded(store, claim)[0] if moment == "recorded" else store.begin(claim)
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
