"""Conformance of ids: listing and forgetting them, and unusual ids."""

from __future__ import annotations

import unicodedata
from typing import Final

from dualwrite.errors import FencedError, NotResolvedError
from dualwrite.producer_kind import ProducerKind
from dualwrite.stores.base import TxnStateStore
from dualwrite.stores.state_row import Claim, Resolution
from dualwrite.testing.limits import TIMEOUT
from dualwrite.testing.stores.expectations import expect_changed, expect_error, expect_fenced, expect_row, outcome_of, running
from dualwrite.testing.stores.resolutions import LOST
from dualwrite.testing.stores.scene import STATE, StoreScene
from dualwrite.transactional_id import MAX_TRANSACTIONAL_ID_LENGTH

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
        for what, call in {
            "begin()": store.begin,
            "begin_group()": store.begin_group,
            "read_claimed()": store.read_claimed,
            "record_resolution()": lambda held: store.record_resolution(held, Resolution(clear_state=True)),
            "acquire_generation()": lambda held: store.acquire_generation(held, ProducerKind.NATIVE),
            "claim(expected_fence=…)": lambda held: store.claim(name, "ours", timeout=TIMEOUT, expected_fence=held.fence),
        }.items():
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
        store, name = scene.new_store(), scene.new_id()
        claim = scene.claim(store, name)
        generation = store.acquire_generation(claim, ProducerKind.NATIVE, cluster_id="cluster-A")
        store.record_resolution(claim, Resolution(resolved_generation=generation))
        store.forget(name)
        expect_row(store, name, "after forget()", forgotten=True, cluster_id="")
        claim = scene.claim(store, name)
        store.acquire_generation(claim, ProducerKind.NATIVE, cluster_id="cluster-B")
        expect_row(store, name, "after opening it again", forgotten=False, cluster_id="cluster-B")

    def test_forgetting_an_unknown_id_creates_no_row(self, scene: StoreScene) -> None:
        """There is nothing to forget."""
        store, name = scene.new_store(), scene.new_id()
        store.forget(name)
        assert store.read(name) is None, "forget() has created a row"

    def test_an_unresolved_id_is_not_forgotten(self, scene: StoreScene) -> None:
        """NotResolvedError: the id still has something to recover or acknowledge; nothing was changed."""
        store, name = scene.new_store(), scene.new_id()
        claim = scene.claim(store, name)
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
