"""Conformance of durability: what was committed, what the errors say, and commits whose connection breaks."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest

from dualwrite.errors import (
    ClaimTimeoutError,
    DualWriteError,
    FencedError,
    NotResolvedError,
    StoreCommitUnknownError,
    StoredStateError,
)
from dualwrite.state import ProducerKind
from dualwrite.stores.rows import Resolution
from dualwrite.testing import TIMEOUT
from dualwrite.testing.stores.resolutions import LOST
from dualwrite.testing.stores.scene import SHORT_TIME, STATE, ClaimsWait, StoreScene
from dualwrite.testing.stores.steps import at, expect_error, expect_row, finish, outcome_of


class DurabilityConformance:
    """Stores that are closed and opened again."""

    def test_a_new_store_sees_what_was_committed(self, scene: StoreScene) -> None:
        """The row is in the database, not in the store."""
        store, name, claim = scene.claimed()
        generation = store.acquire_generation(claim, ProducerKind.NATIVE)
        store.record_resolution(claim, Resolution(lost=LOST, resolved_generation=0))
        number = scene.transact(store, claim, generation=generation, transaction_number=7)
        row = store.read_claimed(claim)
        scene.close_stores()
        store = scene.new_store()
        assert store.read(name) == row, "the row in a new store"
        assert scene.committed() == [number]
        assert store.read_claimed(claim) == row, "a claim outlives the store object that made it"
        again = store.claim(name, "ours", timeout=TIMEOUT, expected_fence=claim.fence)
        expect_row(store, name, "after a conditional claim by a new store", transaction_number=7, fence=again.fence)

    def test_a_store_can_be_closed_twice(self, scene: StoreScene) -> None:
        """`close` releases what the store opened itself; as a context manager it does so at the end."""
        store = scene.new_store()
        store.check()
        with store as entered:
            assert entered is store
        store.close()

    def test_a_store_describes_its_address_and_its_durability(self, scene: StoreScene) -> None:
        """`description`: the address for people. `durability`: settings by their names; names and values are strings."""
        store = scene.new_store()
        assert store.description, "description is empty"
        found = store.durability()
        assert all(isinstance(text, str) for pair in found.items() for text in pair), f"durability() returned {found!r}"


class ErrorConformance:
    """Unreadable rows, and errors that are sent to another process."""

    def test_an_unreadable_row_is_reported(self, scene: StoreScene) -> None:
        """StoredStateError if a row can't be read: nothing is guessed, and the row is not overwritten."""
        store, name, claim = scene.claimed()
        store.record_resolution(claim, Resolution(resolved_generation=0))
        scene.corrupt(name)
        calls: dict[str, Callable[[], Any]] = {
            "read()": lambda: store.read(name),
            "read_claimed()": lambda: store.read_claimed(claim),
            "record_resolution()": lambda: store.record_resolution(claim, Resolution(clear_state=True)),
            "acquire_generation()": lambda: store.acquire_generation(claim, ProducerKind.NATIVE),
            "acknowledge()": lambda: store.acknowledge(name),
            "forget()": lambda: store.forget(name),
            "read(), once more": lambda: store.read(name),
        }
        for what, call in calls.items():
            with expect_error(StoredStateError, f"{what} of a row that is unreadable") as caught:
                call()
            assert caught.value.transactional_id == name, f"StoredStateError's transactional_id, from {what}"

    def test_errors_survive_pickling(self, scene: StoreScene) -> None:
        """Errors are sent between processes (Spark, multiprocessing), with their text, id and facts."""
        store, rival, name = scene.new_store(), scene.new_store(), scene.new_id()
        ours = scene.claim(store, name)
        theirs = scene.claim(rival, name, "theirs")
        found: list[DualWriteError] = []
        with expect_error(FencedError, "begin() under a claim that was replaced") as fenced:
            store.begin(ours)
        found.append(fenced.value)
        rival.acquire_generation(theirs, ProducerKind.NATIVE)
        with expect_error(NotResolvedError, "forget() with an unresolved generation") as open_:
            store.forget(name)
        found.append(open_.value)
        if scene.capabilities.claims_wait is not ClaimsWait.NEVER:
            with ExitStack() as ending:
                transaction, _ = scene.recorded(rival, theirs)
                ending.callback(transaction.rollback)
                with expect_error(ClaimTimeoutError, "claim() while the row is locked") as late:
                    store.claim(name, "ours", timeout=SHORT_TIME)
                found.append(late.value)
        for error in found:
            again = pickle.loads(pickle.dumps(error))  # noqa: S301  (our own)
            assert type(again) is type(error)
            assert str(again) == str(error)
            assert (again.transactional_id, again.facts) == (name, error.facts)


class ConnectionLossConformance:
    """Connections that break during a commit: the outcome is unknown, and the next claim shows it."""

    @pytest.mark.parametrize("arrives", [False, True], ids=["cut before it arrives", "cut before its answer"])
    def test_a_commit_without_an_answer_is_unknown_until_the_row_is_read(self, scene: StoreScene, arrives: bool) -> None:
        """StoreCommitUnknownError; then the writer claims the id if the fence is still its own, and reads its number (F8)."""
        store, name, claim = scene.claimed()
        transaction, number = scene.recorded(store, claim, transaction_number=5)
        try:
            with (
                scene.without_an_answer(arrives=arrives),
                expect_error(StoreCommitUnknownError, "commit() whose connection broke") as caught,
            ):
                transaction.commit()
        finally:
            transaction.rollback()
        assert not caught.value.retriable, "an unknown outcome must not be retried blindly"
        again = store.claim(name, "ours", timeout=TIMEOUT, expected_fence=claim.fence)
        row = store.read_claimed(again)
        assert (row.transaction_number, row.prepared_state) == ((5, STATE) if arrives else (0, None)), "the row after it"
        assert scene.committed() == ([number] if arrives else []), "the user's data after it"

    @pytest.mark.parametrize("moment", ["written", "recorded"])
    def test_a_transaction_does_not_continue_on_another_connection(self, scene: StoreScene, moment: str) -> None:
        """What was written over a connection that broke is rolled back: then `record` or `commit` fails, too.

        A store that sends nothing before `commit` may commit all of it instead.
        """
        store, name, claim = scene.claimed()
        before = store.read_claimed(claim)
        transaction, number = at(scene, store, claim, moment)
        try:
            scene.cut_connections()
            failed = outcome_of(lambda: finish(scene, transaction, number, moment))
        finally:
            transaction.rollback()
        if failed is None:
            assert scene.committed() == [number], "commit() returned after a broken connection, without the user's data"
            expect_row(store, name, "commit() returned", prepared_state=STATE, transaction_number=1)
        else:
            assert scene.committed() == [], f"a broken connection made the transaction fail, but its data is there: {failed}"
            assert store.read_claimed(claim) == before, f"a broken connection made the transaction fail, but not all: {failed}"
        kept = scene.transact(store, claim)
        assert kept in scene.committed(), "the transaction after a broken connection"

    @pytest.mark.parametrize("arrives", [False, True], ids=["cut before it arrives", "cut before its answer"])
    def test_a_claim_without_an_answer_is_retried(self, scene: StoreScene, arrives: bool) -> None:
        """A broken connection is replaced; a claim that the same call has made does not count as another's."""
        store, name = scene.new_store(), scene.new_id()
        first = scene.claim(store, name)
        with scene.without_an_answer(arrives=arrives):
            second = scene.claim(store, name)
        assert second.fence > first.fence, "the fence of a claim that had to be sent twice"
        expect_row(store, name, "the row after it", fence=second.fence)
        with scene.without_an_answer(arrives=arrives):
            third = store.claim(name, "ours", timeout=TIMEOUT, expected_fence=second.fence)
        assert third.fence == second.fence + 1, "a conditional claim is made once, and recognized"
        expect_row(store, name, "the row after it", fence=third.fence)
        store.begin(third).rollback()

    @pytest.mark.parametrize("arrives", [False, True], ids=["cut before it arrives", "cut before its answer"])
    def test_changes_without_an_answer_are_retried(self, scene: StoreScene, arrives: bool) -> None:
        """`record_resolution` is idempotent; a generation may be skipped; `acknowledge` still returns what it removed."""
        store, name, claim = scene.claimed()
        with scene.without_an_answer(arrives=arrives):
            store.record_resolution(claim, Resolution(lost=LOST, resolved_generation=0))
        expect_row(store, name, "after record_resolution()", lost=(LOST,), resolved_generation=0)
        with scene.without_an_answer(arrives=arrives):
            generation = store.acquire_generation(claim, ProducerKind.LIBRDKAFKA)
        expect_row(store, name, "after acquire_generation()", generation=generation)
        with scene.without_an_answer(arrives=arrives):
            assert store.acknowledge(name) == (LOST,), "acknowledge()"
        expect_row(store, name, "after acknowledge()", lost=())
