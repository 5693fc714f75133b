"""Conformance of rows: claims, ids that are listed, and ids that are forgotten."""

from __future__ import annotations

import unicodedata
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Final

from dualwrite.errors import FencedError, NotResolvedError
from dualwrite.state import ProducerKind
from dualwrite.stores.base import TxnStateStore
from dualwrite.stores.rows import MAX_OWNER_LENGTH, Claim, Resolution
from dualwrite.testing import TIMEOUT
from dualwrite.testing.stores.resolutions import LOST, full_row
from dualwrite.testing.stores.scene import STATE, StoreScene
from dualwrite.testing.stores.steps import (
    expect_changed,
    expect_error,
    expect_fenced,
    expect_row,
    outcome_of,
    running,
    uses_of_a_claim,
)
from dualwrite.transactional_id import MAX_TRANSACTIONAL_ID_LENGTH

_CLOCKS_DIFFER: Final = timedelta(minutes=5)
_OWNERS: Final = ("", "host:4711 'program' \"x\" %s \\", "größe 😀", "😀" * MAX_OWNER_LENGTH, "o" * (MAX_OWNER_LENGTH + 50))

ODD_ENDINGS: Final = (
    *("", "a", "A", "aa", "b", "B"),
    *("a%", "a%b", "a_b", "axb", "a*", "a?", "[a]", "^a$"),
    *("a/b", "a//b", "/", "a.b", ".", "..", "../a", "a\\b", "\\", "a:b", "a@b"),
    *("a ", " a", "  ", "a'b", "''", 'a"b', "a`b", "a;b", "--", "%s", "%(a)s", "{a}", "$a", ":a"),
    *("ä", "äö", "Ä", "ß", "ss", "\u0131", "i", "I", unicodedata.normalize("NFC", "é"), unicodedata.normalize("NFD", "é")),
    *("😀", "😀a", "名前", "\ufffd"),
    *("a~1", "a~2", "a~10", "%2F", "%61", "0", "00", "1e0", "NULL", "None", "true"),
)
"""Endings of valid ids: each id has its own row, and each is also used as a prefix."""

SPECIAL_IDS: Final = (".", "..", "/", "//", "\\", " ", "%", "_", "'", "0", "~1")


class RowConformance:
    """The row as `read` returns it."""

    def test_an_id_that_nobody_claimed_has_no_row(self, scene: StoreScene) -> None:
        """`read`: the row, or None. A Claim that no call of `claim` has returned is refused; there is nothing to forget."""
        store, name = scene.new_store(), scene.new_id()
        assert store.read(name) is None, "read() of an unknown id: the contract requires None"
        unknown = Claim(name, 1, "nobody")
        expect_fenced(store.read_claimed, unknown, "read_claimed() of an id without a row", missing=True)
        expect_fenced(store.begin, unknown, "begin() on an id without a row", missing=True)
        assert store.acknowledge(name) == (), "acknowledge() of an id without a row"
        store.forget(name)
        assert store.read(name) is None, "a call that needs no claim, or was refused, has created a row"

    def test_the_first_claim_creates_the_row(self, scene: StoreScene) -> None:
        """`claim` creates the row if it is missing: fence 1, no generation acquired, nothing prepared, nothing lost."""
        store, name = scene.new_store(), scene.new_id()
        claim = store.claim(name, "host:1", timeout=TIMEOUT)
        assert claim == Claim(name, 1, "host:1"), "claim() of an unknown id"
        expect_row(
            store,
            name,
            "the row of a first claim",
            transactional_id=name,
            fence=1,
            generation=0,
            generation_kind=ProducerKind.LIBRDKAFKA,
            prepared_state=None,
            resolved_generation=0,
            transaction_number=0,
            lost=(),
            owner="host:1",
            forgotten=False,
        )
        assert not store.read_claimed(claim).unresolved_generations, "no generation was acquired yet, but one is unresolved"

    def test_every_change_sets_updated_at(self, scene: StoreScene) -> None:
        """`updated_at`: when the row last changed (UTC, aware)."""
        store, _, claim = scene.claimed()
        before = store.read_claimed(claim).updated_at
        for change in (
            lambda: store.record_resolution(claim, Resolution(resolved_generation=0)),
            lambda: store.acquire_generation(claim, ProducerKind.NATIVE),
            lambda: scene.transact(store, claim),
        ):
            change()
            after = store.read_claimed(claim).updated_at
            assert after.utcoffset() == timedelta(0), f"updated_at is {after!r}, the contract requires an aware time in UTC"
            assert abs(after - datetime.now(UTC)) < _CLOCKS_DIFFER, f"updated_at is {after}, not the time of the change"
            assert after >= before, f"updated_at went back from {before} to {after}"
            before = after

    def test_an_owner_is_stored_and_a_long_one_truncated(self, scene: StoreScene) -> None:
        """`MAX_OWNER_LENGTH`: characters of an owner; a longer one is truncated, in the row and in the Claim."""
        store, name = scene.new_store(), scene.new_id()
        for owner in _OWNERS:
            claim = store.claim(name, owner, timeout=TIMEOUT)
            assert claim.owner == owner[:MAX_OWNER_LENGTH], "the Claim's owner"
            expect_row(store, name, "the row after a claim", owner=owner[:MAX_OWNER_LENGTH])


class ClaimConformance:
    """Claims: the fence, and its owner."""

    def test_each_claim_fences_the_one_before(self, scene: StoreScene) -> None:
        """`claim` raises the fence by one; every use of the earlier claim then raises FencedError, which names the new one."""
        store, rival, name = scene.new_store(), scene.new_store(), scene.new_id()
        ours = scene.claim(store, name)
        theirs = rival.claim(name, "theirs", timeout=TIMEOUT)
        assert theirs.fence == ours.fence + 1, "the fence of a second claim"
        before = rival.read_claimed(theirs)
        for what, call in uses_of_a_claim(store).items():
            expect_fenced(call, ours, f"{what} under a claim that was replaced", by=theirs)
            assert rival.read_claimed(theirs) == before, f"{what} under a replaced claim has changed the row"

    def test_a_fence_that_no_claim_returned_is_refused(self, scene: StoreScene) -> None:
        """Every write requires that the row's fence equals the claim's: a claim with a higher fence is refused, too."""
        store, _, claim = scene.claimed()
        invented = Claim(claim.transactional_id, claim.fence + 1, "nobody")
        expect_fenced(store.read_claimed, invented, "read_claimed() with a fence above the row's", by=claim)
        expect_fenced(store.begin, invented, "begin() with a fence above the row's", by=claim)

    def test_a_claim_changes_only_fence_owner_and_transaction_number(self, scene: StoreScene) -> None:
        """`claim` changes the fence, the owner and `transaction_number`, which becomes 0. What is prepared or lost is kept."""
        store, name = scene.new_store(), scene.new_id()
        _, before = full_row(scene, store, name)
        theirs = scene.claim(scene.new_store(), name, "theirs")
        token = store.read_claimed(theirs).claim_token
        changes = {"fence": before.fence + 1, "owner": "theirs", "claim_token": token, "transaction_number": 0}
        expect_changed(store, before, "the row after one more claim", **changes)

    def test_a_conditional_claim_keeps_the_transaction_number(self, scene: StoreScene) -> None:
        """`claim` keeps `transaction_number` if `expected_fence` is given: it shows the outcome of an unknown COMMIT (F8)."""
        store, name = scene.new_store(), scene.new_id()
        claim, before = full_row(scene, store, name)
        again = store.claim(name, "ours again", timeout=TIMEOUT, expected_fence=claim.fence)
        assert again == Claim(name, claim.fence + 1, "ours again"), "claim() with the row's fence as expected_fence"
        token = store.read_claimed(again).claim_token
        expect_changed(store, before, "the row after it", fence=again.fence, owner="ours again", claim_token=token)
        expect_fenced(store.begin, claim, "begin() under the claim before it", by=again)

    def test_a_conditional_claim_with_another_fence_changes_nothing(self, scene: StoreScene) -> None:
        """`expected_fence`: claim only if the fence still is this number."""
        store, name = scene.new_store(), scene.new_id()
        ours = scene.claim(store, name)
        theirs = scene.claim(scene.new_store(), name, "theirs")
        before = store.read_claimed(theirs)
        for expected in (ours.fence, ours.fence - 1, theirs.fence + 1):
            wrong = Claim(name, expected, "ours")
            expect_fenced(
                lambda claim: store.claim(name, "ours", timeout=TIMEOUT, expected_fence=claim.fence),
                wrong,
                f"claim(expected_fence={expected}) where the fence is {theirs.fence}",
                by=theirs,
            )
        assert store.read_claimed(theirs) == before, "a claim whose expected fence was wrong has changed the row"

    def test_a_conditional_claim_creates_no_row(self, scene: StoreScene) -> None:
        """FencedError: `expected_fence` was given and there is no row."""
        store, name = scene.new_store(), scene.new_id()
        for expected in (0, 1):
            with expect_error(FencedError, f"claim(expected_fence={expected}) of an id without a row"):
                store.claim(name, "ours", timeout=TIMEOUT, expected_fence=expected)
        assert store.read(name) is None, "a claim with an expected fence has created a row"

    def test_each_claim_has_its_own_token(self, scene: StoreScene) -> None:
        """`claim_token` is unique to a call: by it a store recognizes its own claim whose commit was not answered."""
        store, name = scene.new_store(), scene.new_id()
        claim, tokens = scene.claim(store, name), set()
        for _ in range(2):
            tokens.add(store.read_claimed(claim).claim_token)
            claim = scene.claim(store, name)
            tokens.add(store.read_claimed(claim).claim_token)
            claim = store.claim(name, "ours", timeout=TIMEOUT, expected_fence=claim.fence)
        tokens.add(store.read_claimed(claim).claim_token)
        assert len(tokens) == 1 + 2 * 2, f"five claims have set {len(tokens)} different tokens"
        assert "" not in tokens, "a claim has set no token"

    def test_a_repeated_claim_is_recognized_by_its_token(self, scene: StoreScene) -> None:
        """`token`: the newest claim is the caller's own if it has this token; a claim in between is another's."""
        store, name = scene.new_store(), scene.new_id()
        first = scene.claim(store, name)
        claim = partial(store.claim, name, "ours", timeout=TIMEOUT, expected_fence=first.fence, token="ours")  # noqa: S106
        made = claim()
        assert made.fence == first.fence + 1, "the fence of a claim with a token"
        expect_row(store, name, "the row after it", fence=made.fence, claim_token="ours")  # noqa: S106  (not a secret)
        before = store.read_claimed(made)
        assert claim() == made, "the same claim, repeated because its response was lost"
        assert store.read_claimed(made) == before, "a repeated claim has changed the row"
        theirs = scene.claim(scene.new_store(), name, "theirs")
        expect_fenced(lambda _: claim(), first, "claim(token=…) after a claim of another process", by=theirs)
        taken = store.claim(name, "ours", timeout=TIMEOUT, token="again")  # noqa: S106
        again = store.claim(name, "ours", timeout=TIMEOUT, expected_fence=first.fence, token="again")  # noqa: S106
        assert again == taken, "a repeated claim, after one without expected_fence that took the id from another process"


class ListingConformance:
    """`list`, and ids that a database could misinterpret."""

    def test_every_id_has_its_own_row(self, scene: StoreScene) -> None:
        """An id is any printable text of 1 to 255 characters, compared exactly: case, spaces and Unicode forms matter."""
        store, start = scene.new_store(), scene.new_id("odd")
        ids = [start + ending for ending in ODD_ENDINGS]
        for name in ids:
            claim = scene.claim(store, name, owner=name)
            assert claim.fence == 1, f"{name!r} was mistaken for another id: its first claim has the fence {claim.fence}"
        for name in ids:
            expect_row(store, name, f"the row of {name!r}", transactional_id=name, fence=1, owner=name)

    def test_ids_are_listed_by_prefix_and_sorted(self, scene: StoreScene) -> None:
        """`list`: the logical ids that begin with `prefix`, sorted (by code point, as Python does, whatever the collation)."""
        store, start = scene.new_store(), scene.new_id("odd")
        ids = sorted(start + ending for ending in ODD_ENDINGS)
        for name in reversed(ids):
            scene.claim(store, name)
        for prefix in (*ids, start[:-1], start + "nothing"):
            wanted = [name for name in ids if name.startswith(prefix)]
            assert store.list(prefix) == wanted, f"list({prefix!r})"
        everything = store.list()
        assert everything == sorted(everything), "list() is not sorted"
        assert set(ids) <= set(everything), "list() omits ids"
        assert len(everything) == len(set(everything)), "list() returns an id twice"

    def test_names_with_a_special_meaning_are_valid_ids(self, scene: StoreScene) -> None:
        """Names with a meaning in a path or a URL are ids like any other."""
        store = scene.new_store()
        claims = [scene.claim(store, name) for name in SPECIAL_IDS]
        for claim in claims:
            expect_row(store, claim.transactional_id, f"the row of {claim.transactional_id!r}", fence=claim.fence)
            assert claim.transactional_id in store.list(claim.transactional_id)
            number = scene.transact(store, claim)
            assert number in scene.committed(), f"a transaction of {claim.transactional_id!r}"

    def test_an_id_may_be_255_characters_long(self, scene: StoreScene) -> None:
        """Characters, not bytes; ids that differ only in the last character are different."""
        store, start = scene.new_store(), scene.new_id()
        for character in ("x", "/", "ä", "😀"):
            long = start + character * (MAX_TRANSACTIONAL_ID_LENGTH - 1 - len(start))
            for last in ("1", "2"):
                claim = scene.claim(store, long + last)
                assert claim.fence == 1, f"the last of 255 characters like {character!r} was truncated"
                scene.transact(store, claim)
                expect_row(store, long + last, "the row of a long id", transactional_id=long + last, prepared_state=STATE)
            assert store.list(long) == [long + "1", long + "2"]

    def test_every_method_accepts_an_unusual_id(self, scene: StoreScene) -> None:
        """Every method accepts every id."""
        store, start = scene.new_store(), scene.new_id("odd")
        for ending in ("/a.b %_'\"\\~1", "😀é ", "%2F.."):
            claim = scene.claim(store, start + ending)
            store.acquire_generation(claim, ProducerKind.NATIVE)
            scene.transact(store, claim)
            store.record_resolution(claim, Resolution(clear_state=True, lost=LOST, resolved_generation=1))
            assert store.acknowledge(claim.transactional_id) == (LOST,)
            again = store.claim(claim.transactional_id, "ours", timeout=TIMEOUT, expected_fence=claim.fence)
            expect_fenced(store.begin, claim, f"begin() on {claim.transactional_id!r}", by=again)
            store.forget(claim.transactional_id)
            assert store.list(claim.transactional_id) == []


def _resolved(scene: StoreScene, store: TxnStateStore, name: str) -> Claim:
    """A claim of an id that has nothing to recover."""
    claim = scene.claim(store, name)
    store.record_resolution(claim, Resolution(resolved_generation=store.acquire_generation(claim, ProducerKind.LIBRDKAFKA)))
    return claim


class ForgettingConformance:
    """`forget`: the row is dropped, but its fence is kept."""

    def test_a_forgotten_id_is_a_tombstone_with_a_raised_fence(self, scene: StoreScene) -> None:
        """Its fence is raised and kept, so that no zombie can come back; it is not listed; forget() twice is the same."""
        store, name = scene.new_store(), scene.new_id()
        claim = _resolved(scene, store, name)
        for _ in range(2):
            store.forget(name)
            expect_row(store, name, "after forget()", forgotten=True, fence=claim.fence + 1)
        assert store.list(name) == [], "list() returns a tombstone"
        for what, call in uses_of_a_claim(store).items():
            expect_fenced(call, claim, f"{what} of a holder whose id was forgotten")
        expect_row(store, name, "after a zombie's attempts", forgotten=True, fence=claim.fence + 1)

    def test_a_claim_revives_a_forgotten_id(self, scene: StoreScene) -> None:
        """`claim` revives a forgotten row: with a fence above the tombstone's, and continuing its generations."""
        store, name = scene.new_store(), scene.new_id()
        old = _resolved(scene, store, name)
        before = store.read_claimed(old)
        generation = before.generation
        store.forget(name)
        new = scene.claim(store, name)
        assert new.fence == old.fence + 2, "the fence of a claim after forget()"
        expect_changed(store, before, "after the claim", fence=new.fence, claim_token=store.read_claimed(new).claim_token)
        assert store.list(name) == [name]
        assert store.acquire_generation(new, ProducerKind.NATIVE) == generation + 1, "a generation was used a second time"
        expect_fenced(store.begin, old, "begin() of the holder before forget()", by=new)

    def test_a_forgotten_id_can_be_opened_on_another_cluster(self, scene: StoreScene) -> None:
        """`cluster_id` (CL): a forgotten id belongs to no cluster, because nothing of it is open."""
        store, name, claim = scene.claimed()
        generation = store.acquire_generation(claim, ProducerKind.NATIVE, cluster_id="cluster-A")
        store.record_resolution(claim, Resolution(resolved_generation=generation))
        store.forget(name)
        expect_row(store, name, "after forget()", forgotten=True, cluster_id="")
        claim = scene.claim(store, name)
        store.acquire_generation(claim, ProducerKind.NATIVE, cluster_id="cluster-B")
        expect_row(store, name, "after opening it again", forgotten=False, cluster_id="cluster-B")

    def test_an_unresolved_id_is_not_forgotten(self, scene: StoreScene) -> None:
        """NotResolvedError: the id still has something to recover or acknowledge; nothing was changed."""
        store, name, claim = scene.claimed()
        acquired = store.acquire_generation(claim, ProducerKind.NATIVE)
        scene.transact(store, claim)
        store.record_resolution(claim, Resolution(lost=LOST))
        for why, resolution in {
            "with a prepared state": Resolution(clear_state=True),
            "with an unresolved generation": Resolution(resolved_generation=acquired),
            "with a lost transaction": None,
        }.items():
            before = store.read_claimed(claim)
            with expect_error(NotResolvedError, f"forget() {why}") as caught:
                store.forget(name)
            assert caught.value.transactional_id == name
            assert store.read_claimed(claim) == before, f"forget() {why} was refused, but has changed the row"
            if resolution is not None:
                store.record_resolution(claim, resolution)
        store.acknowledge(name)
        store.forget(name)
        expect_row(store, name, "after forget()", forgotten=True)

    def test_forgetting_an_id_during_a_transaction(self, scene: StoreScene) -> None:
        """Whichever comes first: forget() finds the transaction's state, or the transaction finds the raised fence."""
        store, other, name = scene.new_store(), scene.new_store(), scene.new_id()
        transaction, number = scene.recorded(store, _resolved(scene, store, name))
        with running(lambda: outcome_of(lambda: other.forget(name))) as forgetting:
            committing = outcome_of(transaction.commit)
            forgot = forgetting.result(TIMEOUT)
        transaction.rollback()
        if committing is None:
            assert isinstance(forgot, NotResolvedError), f"the transaction committed, but forget() returned {forgot!r}"
            assert scene.committed() == [number]
            expect_row(store, name, "after the transaction", prepared_state=STATE, forgotten=False)
        else:
            assert isinstance(committing, FencedError), f"the id was forgotten, but commit() raised {committing!r}"
            assert scene.committed() == [], "a transaction of a forgotten id was committed"
            expect_row(store, name, "after forget()", prepared_state=None, forgotten=True)
