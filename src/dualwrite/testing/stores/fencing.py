"""Conformance of fencing: a writer that was replaced at any moment can change nothing any more, and gets FencedError."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from itertools import count
from typing import Any, Final

import pytest

from dualwrite.errors import ClaimTimeoutError, FencedError, StoreCommitFailedError
from dualwrite.state import PreparedTxnState, ProducerKind
from dualwrite.stores.base import TxnStateStore
from dualwrite.stores.rows import Claim, Resolution
from dualwrite.stores.store_transaction import StoreTransaction
from dualwrite.testing import TIMEOUT
from dualwrite.testing.stores.scene import SHORT_TIME, STATE, StoreScene
from dualwrite.testing.stores.steps import (
    MOMENTS,
    at,
    expect_error,
    expect_fenced,
    expect_row,
    finish,
    running,
    uses_of_a_claim,
)

_RACES: Final = 12
_THEIRS: Final = PreparedTxnState(4712, 0)
_CHANGES: Final[dict[str, Callable[[TxnStateStore, Claim, int], Any]]] = {
    "record_resolution": lambda store, claim, number: store.record_resolution(
        claim, Resolution(clear_state=True, resolved_generation=number)
    ),
    "acquire_generation": lambda store, claim, _: store.acquire_generation(claim, ProducerKind.LIBRDKAFKA),
}


class FencingConformance:
    """Claims at every step of another writer's transaction."""

    def test_the_check_of_the_fence_may_come_later_but_before_the_first_message(self, scene: StoreScene) -> None:
        """`begin_soon` may leave the check to the first statement; `check_fence` makes it at once (F2)."""
        store, name = scene.new_store(), scene.new_id()
        ours = scene.claim(store, name)
        scene.transact(store, ours)  # a store may know from it that the connection works
        theirs = scene.claim(scene.new_store(), name, "theirs")
        for _ in range(2):
            expect_fenced(partial(_checked, store), ours, "begin_soon() and check_fence()", by=theirs)
        again = scene.claim(store, name)
        transaction = store.begin_soon(again)
        transaction.check_fence()
        assert transaction.is_fence_checked
        assert transaction.begin_error is None
        transaction.rollback()

    @pytest.mark.parametrize("expected", [False, True], ids=["claim", "conditional claim"])
    @pytest.mark.parametrize("moment", MOMENTS)
    def test_a_claim_during_a_transaction(self, scene: StoreScene, moment: str, expected: bool) -> None:
        """A claim waits for the transaction, or makes it fail: what is read under the claim does not change any more.

        From `record` on, a claim waits if the database locks rows; otherwise the fence is compared at `commit`.
        """
        store, rival, name = scene.new_store(), scene.new_store(), scene.new_id()
        ours = scene.claim(store, name)
        expected_fence = ours.fence if expected else None
        transaction, number = at(scene, store, ours, moment)
        try:
            if scene.capabilities.waits(moment):
                with expect_error(ClaimTimeoutError, f"claim() while a transaction is {moment} and holds its lock"):
                    rival.claim(name, "theirs", timeout=SHORT_TIME, expected_fence=expected_fence)
                expect_row(rival, name, "after a claim that timed out", fence=ours.fence, owner="ours")
                finish(scene, transaction, number, moment)
                assert scene.committed() == [number], "the transaction that a claim waited for"
                theirs = rival.claim(name, "theirs", timeout=TIMEOUT, expected_fence=expected_fence)
                expect_row(rival, name, "under the claim after the transaction", fence=theirs.fence, prepared_state=STATE)
                return
            theirs = rival.claim(name, "theirs", timeout=TIMEOUT, expected_fence=expected_fence)
            with expect_error(
                FencedError, f"record() and commit() of a transaction that was {moment} when its id was claimed"
            ) as e:
                finish(scene, transaction, number, moment)
            assert (e.value.transactional_id, e.value.facts.get("fence")) == (name, ours.fence), "FencedError's attributes"
        finally:
            transaction.rollback()
        assert scene.committed() == [], "a fenced transaction has left the user's data"
        expect_row(rival, name, "after a fenced transaction", prepared_state=None, transaction_number=0, fence=theirs.fence)
        expect_fenced(store.begin, ours, "begin() after it", by=theirs)

    def test_a_commit_that_records_is_fenced(self, scene: StoreScene) -> None:
        """`record_at_commit` and `commit` check the fence as `record` does, and say that nothing was committed."""
        if scene.capabilities.waits("written"):
            pytest.skip("a claim waits for a transaction that has written something")
        store, rival, name = scene.new_store(), scene.new_store(), scene.new_id()
        ours = scene.claim(store, name)
        transaction, _ = at(scene, store, ours, "written")
        theirs = scene.claim(rival, name, "theirs")
        try:
            with expect_error(FencedError, "record_at_commit() and commit() of a transaction whose id was claimed") as e:
                transaction.record_at_commit(STATE, generation=0, transaction_number=1)
                transaction.commit()
            assert (e.value.transactional_id, e.value.facts.get("fence")) == (name, ours.fence), "FencedError's attributes"
        finally:
            transaction.rollback()
        assert scene.committed() == [], "a fenced transaction has left the user's data"
        expect_row(rival, name, "after a fenced transaction", prepared_state=None, transaction_number=0, fence=theirs.fence)

    @pytest.mark.parametrize("moment", MOMENTS)
    def test_a_waiting_claim_reads_what_was_committed(self, scene: StoreScene, moment: str) -> None:
        """`claim` waits for a transaction that is about to commit: after reading too early, recovery would abort messages."""
        store, rival, name = scene.new_store(), scene.new_store(), scene.new_id()
        ours = scene.claim(store, name)
        transaction, number = at(scene, store, ours, moment)
        with running(lambda: scene.claim(rival, name, "theirs")) as claiming:
            try:
                if not scene.capabilities.waits(moment):
                    claiming.result(TIMEOUT)  # the rival may still be connecting
                finish(scene, transaction, number, moment)
                committed = True
            except FencedError:
                committed = False
            finally:
                transaction.rollback()
            theirs = claiming.result(TIMEOUT)
        assert committed == scene.capabilities.waits(moment), (
            f"claim() waits: {committed}, the scene says {scene.capabilities.claims_wait}"
        )
        row = rival.read_claimed(theirs)
        assert row.prepared_state == (STATE if committed else None), "what is read under the claim"
        assert row.transaction_number == 0, "claim() sets transaction_number to 0"
        assert scene.committed() == ([number] if committed else [])

    def test_a_zombie_cannot_harm_its_successor(self, scene: StoreScene) -> None:
        """A process that was paused and replaced changes neither the row nor the data of its successor, whatever it tries."""
        store, rival, name = scene.new_store(), scene.new_store(), scene.new_id()
        ours = scene.claim(store, name)
        transaction, number = None, 0
        if not scene.capabilities.waits("written"):
            transaction, number = at(scene, store, ours, "written")
        theirs = scene.claim(rival, name, "theirs")
        kept = scene.transact(rival, theirs, state=_THEIRS, transaction_number=1)
        before = rival.read_claimed(theirs)
        if transaction is not None:
            with expect_error(FencedError, "record() and commit() of a zombie after its successor's commit"):
                finish(scene, transaction, number, "written")
            transaction.rollback()
        for what, call in uses_of_a_claim(store).items():
            expect_fenced(call, ours, f"{what} of a zombie", by=theirs)
        assert rival.read_claimed(theirs) == before, "a zombie has changed its successor's row"
        assert scene.committed() == [kept], "a zombie has changed its successor's data"
        scene.transact(store, scene.claim(store, name))  # nothing of it is left open

    def test_an_old_claim_does_not_become_valid_again(self, scene: StoreScene) -> None:
        """The fence only grows: if an id changes hands back and forth, each claim has another fence."""
        stores, name = [scene.new_store(), scene.new_store()], scene.new_id()
        claims: list[Claim] = []
        for turn in range(10):
            claims.append(scene.claim(stores[turn % 2], name, f"store {turn % 2}"))
            for old in claims[:-1]:
                expect_fenced(stores[0].read_claimed, old, "read_claimed() under an old claim of the same store")
        assert [claim.fence for claim in claims] == list(range(1, 11))

    def test_nothing_is_committed_under_an_old_claim_after_a_new_one(self, scene: StoreScene) -> None:
        """Once claim() has returned, the old claim can commit nothing more; tested at many moments."""
        store, rival, name = scene.new_store(), scene.new_store(), scene.new_id()
        for race in range(_RACES):
            ours, confirmed = scene.claim(store, name), list[int]()

            def write(_: int, ours: Claim = ours, confirmed: list[int] = confirmed) -> None:
                number = len(confirmed) + 1
                with suppress(StoreCommitFailedError):
                    state = PreparedTxnState(4711, number)
                    confirmed.append(scene.transact(store, ours, state=state, transaction_number=number))

            with _until_fenced(write, after=0.002 * race) as writing:
                theirs = scene.claim(rival, name, "theirs")
                then, state = scene.committed(), rival.read_claimed(theirs).prepared_state
                writing.result(TIMEOUT)
            assert scene.committed() == then, "a transaction of an old claim was committed after the new claim"
            assert set(confirmed) <= set(then), "commit() returned, but the user's data is not in the database"
            assert rival.read_claimed(theirs).prepared_state == state, "an old claim's transaction has changed the row"
            assert state == PreparedTxnState(4711, len(confirmed)), (
                f"the row says {state}, {len(confirmed)} transactions were committed"
            )

    @pytest.mark.parametrize("change", _CHANGES)
    def test_nothing_is_changed_under_an_old_claim_after_a_new_one(self, scene: StoreScene, change: str) -> None:
        """`record_resolution`, `acquire_generation`: the fence is compared in the write, not before; tested at many moments."""
        store, rival, name = scene.new_store(), scene.new_store(), scene.new_id()
        for race in range(_RACES):
            ours = scene.claim(store, name)
            with _until_fenced(partial(_CHANGES[change], store, ours), after=0.002 * race) as changing:
                theirs = scene.claim(rival, name, "theirs")
                then = rival.read_claimed(theirs)
                scene.transact(rival, theirs, state=_THEIRS)
                changing.result(TIMEOUT)
            expect_row(
                rival,
                name,
                f"{change}() under an old claim, during the new one's transaction",
                prepared_state=_THEIRS,
                generation=then.generation,
                resolved_generation=then.resolved_generation,
            )


@contextmanager
def _until_fenced(step: Callable[[int], Any], *, after: float) -> Iterator[Future[None]]:
    """A thread calls `step` with 1, 2, 3 and so on until it is fenced; the block begins `after` seconds after the first call.

    The thread ends with the block at the latest: with a store that compares no fence, it would never end.
    """
    under_way, over = threading.Event(), threading.Event()

    def run() -> None:
        for number in count(1):
            if over.is_set():
                return
            try:
                step(number)
            except FencedError:
                return
            under_way.set()
            time.sleep(0.001)  # a database with one write lock may give it to the same holder forever

    with ThreadPoolExecutor(1) as thread:
        future = thread.submit(run)
        try:
            under_way.wait(TIMEOUT)
            time.sleep(after)
            yield future
        finally:
            over.set()


def _checked(store: TxnStateStore, claim: Claim) -> StoreTransaction:
    transaction = store.begin_soon(claim)
    try:
        transaction.check_fence()
    except BaseException:
        transaction.rollback()
        raise
    return transaction
