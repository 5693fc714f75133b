"""Conformance of what recovery and an opening write: resolutions, lost transactions, generations, and lanes."""

from __future__ import annotations

from dataclasses import fields, replace
from datetime import UTC, datetime, timedelta, timezone
from typing import Final

import pytest

from dualwrite.errors import ClusterMismatchError, FencedError, TransactionChangedError
from dualwrite.state import MAX_EPOCH, MAX_PRODUCER_ID, Delivery, Place, PreparedTxnState, ProducerKind
from dualwrite.stores.base import TxnStateStore
from dualwrite.stores.identity import StoreIdentity
from dualwrite.stores.rows import Acquiring, Claim, LostKind, LostTransaction, Republished, Resolution, StateRow
from dualwrite.testing import TIMEOUT
from dualwrite.testing.stores.scene import STATE, StoreScene
from dualwrite.testing.stores.steps import expect_changed, expect_error, expect_fenced, expect_row

_AT: Final = datetime(2026, 11, 21, 10, 0, 0, 123456, tzinfo=UTC)
_DELIVERY: Final = Delivery(3, (Place("orders", 0, 17, 2), Place("payments", 7, None, 1)), _AT.replace(microsecond=0))
LOST: Final = LostTransaction(LostKind.LOST, STATE, 0, _AT, _DELIVERY, ProducerKind.NATIVE_TWO_PHASE, cluster_id="cluster")
UNVERIFIED: Final = LostTransaction(
    LostKind.UNVERIFIED, PreparedTxnState(MAX_PRODUCER_ID, MAX_EPOCH, MAX_PRODUCER_ID), 70_000, _AT + timedelta(hours=1)
)
_NATIVE: Final = ProducerKind.NATIVE
_TWO_PHASE: Final = ProducerKind.NATIVE_TWO_PHASE
_LIBRDKAFKA: Final = ProducerKind.LIBRDKAFKA
_CLUSTER: Final = "cluster 1"


def full_row(scene: StoreScene, store: TxnStateStore, transactional_id: str) -> tuple[Claim, StateRow]:
    """A claim of an id, and its row, in which every field has a value that a store could lose."""
    claim = scene.claim(store, transactional_id)
    store.acquire_generation(claim, _NATIVE)
    generation = store.acquire_generation(claim, _TWO_PHASE, cluster_id="cluster")
    for entry in (LOST, UNVERIFIED):
        store.record_resolution(claim, Resolution(lost=entry, resolved_generation=1))
    scene.transact(store, claim, generation=generation, transaction_number=7, delivery=_DELIVERY)
    row = store.read_claimed(claim)
    lacking = [
        field.name for field in fields(row) if getattr(row, field.name) in ("", 0, None, ()) and field.name != "forgotten"
    ]
    assert not lacking, f"the row was written with values for every field, but {lacking} are empty: {row}"
    return claim, row


class ResolutionConformance:
    """`record_resolution` and `acknowledge`."""

    def test_a_resolution_changes_only_what_it_names(self, scene: StoreScene) -> None:
        """`Resolution`: fields left at their defaults change nothing."""
        store, name = scene.new_store(), scene.new_id()
        claim, row = full_row(scene, store, name)
        more = LostTransaction(LostKind.LOST, PreparedTxnState(1, 2), 2, _AT)
        for what, resolution, changes in (
            ("an empty resolution", Resolution(), {}),
            ("resolving a generation", Resolution(resolved_generation=2), {"resolved_generation": 2}),
            ("an entry for `lost`", Resolution(lost=more), {"lost": (LOST, UNVERIFIED, more)}),
            ("an entry that was resolved", Resolution(resolved_entry=UNVERIFIED), {"lost": (LOST, more)}),
            ("a move to another cluster", Resolution(cluster_id="another"), {"cluster_id": "another"}),
            ("clearing the state", Resolution(clear_state=True), {"prepared_state": None, "delivery": None}),
        ):
            store.record_resolution(claim, resolution)
            expect_changed(store, row, f"after {what}", **changes)
            row = store.read_claimed(claim)

    def test_clear_only_clears_no_other_state(self, scene: StoreScene) -> None:
        """`Resolution.clear_only`: a request that comes late does not clear the state of a later transaction."""
        store, name, claim = scene.claimed()
        scene.transact(store, claim, transaction_number=1)
        store.record_resolution(claim, Resolution(clear_only=PreparedTxnState(STATE.producer_id, STATE.epoch - 1)))
        expect_row(store, name, "after clearing another state", prepared_state=STATE, transaction_number=1)
        store.record_resolution(claim, Resolution(clear_only=STATE))
        expect_row(store, name, "after clearing this state", prepared_state=None, delivery=None, transaction_number=1)

    def test_a_resolution_recorded_twice_has_one_effect(self, scene: StoreScene) -> None:
        """`record_resolution` is idempotent, also for the entry in `lost`, even if that was found at another time."""
        store, name, claim = scene.claimed()
        scene.transact(store, claim)
        found_again = LostTransaction(LOST.kind, LOST.state, LOST.generation, _AT + timedelta(days=1))
        for entry in (LOST, LOST, found_again):
            store.record_resolution(claim, Resolution(clear_state=True, lost=entry))
        expect_row(store, name, "after resolving again", prepared_state=None, lost=(LOST,))
        store.acknowledge(name)
        store.record_resolution(claim, Resolution(clear_state=True, lost=LOST))
        expect_row(store, name, "after resolving what was acknowledged meanwhile (RS)", prepared_state=None, lost=())

    def test_a_resolved_entry_is_removed_from_the_list(self, scene: StoreScene) -> None:
        """`Resolution.resolved_entry` (UC): removes the entry of this kind, state and generation; a missing one is ignored."""
        store, name, claim = scene.claimed()
        scene.transact(store, claim)
        for entry in (LOST, UNVERIFIED):
            store.record_resolution(claim, Resolution(lost=entry))
        found = LostTransaction(UNVERIFIED.kind, UNVERIFIED.state, UNVERIFIED.generation, _AT + timedelta(days=1))
        for _ in range(2):
            store.record_resolution(claim, Resolution(resolved_entry=found))
            expect_row(store, name, "after it was resolved", lost=(LOST,), prepared_state=STATE)
        proven = LostTransaction(LostKind.LOST, UNVERIFIED.state, UNVERIFIED.generation, _AT)
        store.record_resolution(claim, Resolution(lost=UNVERIFIED))
        store.record_resolution(claim, Resolution(resolved_entry=UNVERIFIED, lost=proven))
        expect_row(store, name, "after it was found lost", lost=(LOST, proven))

    def test_a_lost_transaction_is_replaced_by_the_one_that_publishes_it_again(self, scene: StoreScene) -> None:
        """`Resolution.republished` (RA): S, its delivery and generation, and the entry, in one write; twice is as once."""
        store, name = scene.new_store(), scene.new_id()
        claim, row = full_row(scene, store, name)
        delivery = Delivery(1, (Place("orders", 1, 40, 1),), _AT.replace(microsecond=0))
        new = Republished(LOST, PreparedTxnState(5, 6), 2, delivery)
        for _ in range(2):
            store.record_resolution(claim, Resolution(republished=new))
            changes = {"prepared_state": new.state, "prepared_generation": 2, "delivery": new.delivery, "lost": (UNVERIFIED,)}
            expect_changed(store, row, "after it was published again", **changes)
        row = store.read_claimed(claim)
        other = replace(new, state=PreparedTxnState(5, 7))
        with expect_error(TransactionChangedError, "publishing an entry again that is not in the row (RE)"):
            store.record_resolution(claim, Resolution(republished=other))
        expect_changed(store, row, "after an entry was to be published again that is not in the row")

    def test_many_lost_transactions_are_kept_in_their_order(self, scene: StoreScene) -> None:
        """A row keeps all lost transactions until they are acknowledged, however many there are."""
        store, name, claim = scene.claimed()
        entries = tuple(LostTransaction(LostKind.LOST, PreparedTxnState(MAX_PRODUCER_ID, n), n, _AT) for n in range(60))
        for entry in entries:
            store.record_resolution(claim, Resolution(lost=entry))
        expect_row(store, name, "after 60 resolutions", lost=entries)
        assert store.acknowledge(name) == entries

    def test_times_are_stored_in_utc(self, scene: StoreScene) -> None:
        """`recorded_at`: UTC, aware, to the microsecond, whatever time zone it was given in."""
        store, _, claim = scene.claimed()
        east = LostTransaction(LostKind.LOST, STATE, 0, _AT.astimezone(timezone(timedelta(hours=9))))
        store.record_resolution(claim, Resolution(lost=east))
        (entry,) = store.read_claimed(claim).lost
        assert (entry.recorded_at, entry.recorded_at.utcoffset()) == (_AT, timedelta(0))

    def test_acknowledging_removes_and_returns_what_was_lost(self, scene: StoreScene) -> None:
        """`acknowledge`: remove the entries of `lost` and return them. It needs no claim and changes nothing else."""
        store, name = scene.new_store(), scene.new_id()
        claim, before = full_row(scene, store, name)
        assert scene.new_store().acknowledge(name) == (LOST, UNVERIFIED)
        expect_changed(store, before, "after acknowledge()", lost=())
        assert store.acknowledge(name) == (), "a second acknowledge() has returned something"
        store.read_claimed(claim)

    def test_acknowledging_some_entries_leaves_the_others(self, scene: StoreScene) -> None:
        """`only`: an entry that was recorded after the list was shown to somebody stays."""
        store, name, claim = scene.claimed()
        for entry in (LOST, UNVERIFIED):
            store.record_resolution(claim, Resolution(lost=entry))
        assert store.acknowledge(name, only=[LOST]) == (LOST,)
        expect_row(store, name, "after acknowledge(only=…)", lost=(UNVERIFIED,))
        assert store.acknowledge(name, only=[LOST]) == ()
        assert store.acknowledge(name, only=[]) == ()
        expect_row(store, name, "after acknowledging entries that are not there", lost=(UNVERIFIED,))


class GenerationConformance:
    """`acquire_generation`: the Kafka transactional ids of a logical one."""

    def test_each_generation_is_the_next(self, scene: StoreScene) -> None:
        """`generation` is raised by one; it is unresolved from then on."""
        store, name, claim = scene.claimed()
        assert [store.acquire_generation(claim, _NATIVE) for _ in range(3)] == [1, 2, 3]
        expect_row(store, name, "after three generations", generation=3, generation_kind=_NATIVE, resolved_generation=0)
        assert list(store.read_claimed(claim).unresolved_generations) == [1, 2, 3]

    def test_acquiring_changes_only_the_generation(self, scene: StoreScene) -> None:
        """`generation` and `generation_kind`; with `reuse`, only `resolved_generation`."""
        store, name = scene.new_store(), scene.new_id()
        claim, before = full_row(scene, store, name)
        store.record_resolution(claim, Resolution(resolved_generation=before.generation))
        store.acquire_generation(claim, before.generation_kind, reuse=True)
        expect_changed(store, before, "after using a generation again", resolved_generation=before.generation - 1)
        store.acquire_generation(claim, _LIBRDKAFKA)
        expect_changed(store, before, "after another generation", generation=before.generation + 1, generation_kind=_LIBRDKAFKA)

    def test_librdkafka_never_reuses_a_generation(self, scene: StoreScene) -> None:
        """Rule O2: `reuse` is for a kind that can take over an id; librdkafka gets a new generation each time."""
        store, _, claim = scene.claimed()
        assert [store.acquire_generation(claim, _LIBRDKAFKA, reuse=True) for _ in range(3)] == [1, 2, 3]

    def test_a_generation_is_reused_only_for_its_kind(self, scene: StoreScene) -> None:
        """`reuse`: continue with the newest generation if its kind is `kind` (F5); plain and two-phase are two kinds."""
        store, name, claim = scene.claimed()
        kinds = (_NATIVE, _NATIVE, _TWO_PHASE, _TWO_PHASE, _NATIVE, _LIBRDKAFKA, _NATIVE)
        acquired = [store.acquire_generation(claim, kind, reuse=True) for kind in kinds]
        assert acquired == [1, 1, 2, 2, 3, 4, 5], f"generations for {[kind.value for kind in kinds]}, each with reuse=True"
        acquired.append(store.acquire_generation(claim, _NATIVE))
        assert acquired[-1] == acquired[-2] + 1, "acquire_generation() without `reuse`"
        expect_row(store, name, "after it", generation=acquired[-1], generation_kind=_NATIVE)

    def test_a_reused_generation_is_unresolved_again(self, scene: StoreScene) -> None:
        """`reuse`: `resolved_generation` is lowered below it, since something may be open on it, unless it is already lower."""
        store, name, claim = scene.claimed()
        for _ in range(3):
            newest = store.acquire_generation(claim, _NATIVE)
        store.record_resolution(claim, Resolution(resolved_generation=newest))
        assert not store.read_claimed(claim).unresolved_generations
        assert store.acquire_generation(claim, _NATIVE, reuse=True) == newest
        assert list(store.read_claimed(claim).unresolved_generations) == [newest]
        store.record_resolution(claim, Resolution(resolved_generation=1))
        assert store.acquire_generation(claim, _NATIVE, reuse=True) == newest
        expect_row(store, name, "after using it again", generation=newest, resolved_generation=1)

    def test_a_generation_with_an_unverified_entry_is_not_reused(self, scene: StoreScene) -> None:
        """Rule UG: a new transaction on it could be mistaken for the unverified one."""
        store, _, claim = scene.claimed()
        acquired = store.acquire_generation(claim, _NATIVE)
        lost = LostTransaction(LostKind.LOST, STATE, acquired, _AT)
        store.record_resolution(claim, Resolution(lost=lost))
        assert store.acquire_generation(claim, _NATIVE, reuse=True) == acquired, "a LOST entry must not prevent the reuse"
        unverified = LostTransaction(LostKind.UNVERIFIED, STATE, acquired, _AT)
        store.record_resolution(claim, Resolution(lost=unverified))
        assert store.acquire_generation(claim, _NATIVE, reuse=True) == acquired + 1
        assert store.acquire_generation(claim, _NATIVE, reuse=True) == acquired + 1

    def test_a_generation_belongs_to_one_cluster(self, scene: StoreScene) -> None:
        """`cluster_id` (CL): the row keeps it; without one it is unchanged; another one is refused, and changes nothing."""
        store, name, claim = scene.claimed()
        expect_row(store, name, "the row of a first claim", cluster_id="")
        store.acquire_generation(claim, _NATIVE, cluster_id="cluster-A")
        store.acquire_generation(claim, _NATIVE)
        expect_row(store, name, "after two generations", cluster_id="cluster-A", generation=2)
        for reuse in (False, True):
            with pytest.raises(ClusterMismatchError) as caught:
                store.acquire_generation(claim, _LIBRDKAFKA, reuse=reuse, cluster_id="cluster-B")
            assert (caught.value.stored_cluster_id, caught.value.seen_cluster_id) == ("cluster-A", "cluster-B")
        expect_row(store, name, "after a refusal", cluster_id="cluster-A", generation=2, generation_kind=_NATIVE)
        scene.transact(store, claim)
        claim = scene.claim(store, name)
        expect_row(store, name, "after a transaction and a claim", cluster_id="cluster-A")

    def test_the_kafka_id_of_a_generation_contains_the_store_id(self, scene: StoreScene) -> None:
        """Rule ST: `identity`, which the first `acquire_generation` creates at the latest, is the same for every store."""
        store, name, claim = scene.claimed()
        expect_row(store, name, "the row of a first claim", store_id="")
        store.acquire_generation(claim, _NATIVE)
        identity = scene.new_store().identity()
        assert identity is not None, "identity() after acquire_generation()"
        assert identity == store.identity()
        expect_row(store, name, "after a generation", store_id=identity.store_id)
        assert store.read_claimed(claim).kafka_id(1) == f"{name}#{identity.store_id}.1"
        store.acquire_generation(claim, _LIBRDKAFKA)
        expect_row(store, name, "after another", store_id=identity.store_id, generation=2)
        assert name in store.list()
        assert store.list("#") == [], "the database's identity is listed as an id"
        scene.new_store().check_original()

    def test_a_new_store_id_starts_a_new_generation(self, scene: StoreScene) -> None:
        """`set_identity` is a compare-and-set. A generation whose Kafka id contains another store id is not reused."""
        store, name, claim = scene.claimed()
        acquired = store.acquire_generation(claim, _NATIVE)
        before = store.identity()
        assert before is not None
        after = StoreIdentity.new(before.marks)
        assert store.set_identity(after, expected=before)
        assert not store.set_identity(StoreIdentity.new(before.marks), expected=before), "the expected identity is ignored"
        assert not store.set_identity(StoreIdentity.new(before.marks), expected=None), "there is one already"
        assert scene.new_store().identity() == after
        assert store.acquire_generation(claim, _NATIVE, reuse=True) == acquired + 1, (
            "a generation with another store id was reused"
        )
        assert store.acquire_generation(claim, _NATIVE, reuse=True) == acquired + 1
        expect_row(store, name, "after it", store_id=after.store_id)

    def test_the_lost_entries_of_a_copy_are_cleared(self, scene: StoreScene) -> None:
        """`Resolution.clear_lost`."""
        store, name, claim = scene.claimed()
        for entry in (LOST, UNVERIFIED):
            store.record_resolution(claim, Resolution(lost=entry))
        store.record_resolution(claim, Resolution())
        expect_row(store, name, "after an empty resolution", lost=(LOST, UNVERIFIED))
        store.record_resolution(claim, Resolution(clear_lost=True))
        expect_row(store, name, "after it was cleared", lost=())

    def test_an_id_moves_to_another_cluster(self, scene: StoreScene) -> None:
        """`Resolution.cluster_id`."""
        store, name, claim = scene.claimed()
        store.acquire_generation(claim, _NATIVE, cluster_id="cluster-A")
        store.record_resolution(claim, Resolution(clear_state=True))
        expect_row(store, name, "after a resolution that names no cluster", cluster_id="cluster-A")
        store.record_resolution(claim, Resolution(cluster_id="cluster-B"))
        expect_row(store, name, "after the move", cluster_id="cluster-B", generation=1)
        assert store.acquire_generation(claim, _NATIVE, reuse=True, cluster_id="cluster-B") == 1

    def test_generations_continue_across_claims(self, scene: StoreScene) -> None:
        """A successor reads the newest generation and its kind; no generation is acquired twice."""
        name, acquired = scene.new_id(), []
        for _ in range(3):
            store = scene.new_store()
            claim = scene.claim(store, name)
            acquired.append(store.acquire_generation(claim, _TWO_PHASE, reuse=True))
            acquired.append(store.acquire_generation(claim, _LIBRDKAFKA))
        assert acquired == [1, 2, 3, 4, 5, 6]


def _lanes(scene: StoreScene, count: int) -> list[str]:
    name = scene.new_id()
    return [name, *(f"{name}~{number}" for number in range(1, count))]


def _acquiring(lanes: list[str], *reuse: str) -> Acquiring:
    return Acquiring(ProducerKind.NATIVE, frozenset(lanes), frozenset(reuse), _CLUSTER)


def _claimed(store: TxnStateStore, lanes: list[str], owner: str = "ours") -> list[Claim]:
    return [row.claim for row in store.claim_lanes(lanes, owner, timeout=TIMEOUT, cluster_id=_CLUSTER).rows]


class LaneConformance:
    """Lanes: rows that are claimed, read and changed together."""

    def test_an_opening_finds_the_rows_of_all_lanes(self, scene: StoreScene) -> None:
        """`look_at`: tombstones of the given lanes, but not of others; and no rows of other ids."""
        store, lanes = scene.new_store(), _lanes(scene, 4)
        assert store.look_at(lanes[:2]) == (), "look_at() of an unknown id"
        for lane in (*lanes, f"{lanes[0]}1~1", f"{lanes[0]}.1"):
            scene.claim(store, lane)
        for forgotten in (lanes[1], lanes[2]):
            store.forget(forgotten)
        assert store.look_at(lanes[:2]) == (store.read(lanes[0]), store.read(lanes[1]), store.read(lanes[3]))

    def test_all_lanes_are_claimed(self, scene: StoreScene) -> None:
        """`claim_lanes`: the given lanes in their order, then all others that have a row; every earlier claim is fenced."""
        store, rival, lanes = scene.new_store(), scene.new_store(), _lanes(scene, 4)
        earlier = _claimed(store, [lanes[0], lanes[3]])
        given = [lanes[0], lanes[2], lanes[1]]
        made = rival.claim_lanes(given, "theirs", timeout=TIMEOUT, cluster_id=_CLUSTER)
        assert [row.transactional_id for row in made.rows] == [*given, lanes[3]]
        assert [row.fence for row in made.rows] == [2, 1, 1, 2]
        assert [rival.read(row.transactional_id) for row in made.rows] == list(made.rows), "the rows as claimed"
        theirs = {row.transactional_id: row.claim for row in made.rows}
        for claim in earlier:
            expect_fenced(store.read_claimed, claim, "a claim before claim_lanes()", by=theirs[claim.transactional_id])

    def test_a_lane_on_another_cluster_is_not_claimed(self, scene: StoreScene) -> None:
        """`claim_lanes`: none is claimed if the row of one, or of another id of their name, names another cluster (rule CL)."""
        store, lanes = scene.new_store(), _lanes(scene, 2)
        claim = scene.claim(store, lanes[0])
        store.acquire_generation(claim, ProducerKind.NATIVE, cluster_id="cluster 0")
        before = store.read_claimed(claim)
        for other in (lanes, [f"{lanes[0]}.1"], [f"{lanes[0]}.journal"]):
            with expect_error(ClusterMismatchError, f"claim_lanes() of {other} on another cluster"):
                store.claim_lanes(other, "ours", timeout=TIMEOUT, cluster_id=_CLUSTER)
        assert store.list(lanes[0]) == [lanes[0]], "a row was made on another cluster"
        assert store.read(lanes[0]) == before, "claim_lanes() on another cluster has changed the row"
        late = [scene.claim(store, f"{lanes[0]}.1")]
        with expect_error(ClusterMismatchError, "acquire_generations() on another cluster than that of the id's name"):
            store.acquire_generations(late, _acquiring([f"{lanes[0]}.1"]))
        assert store.read_claimed(late[0]).cluster_id == "", "acquire_generations() on another cluster has changed the row"
        assert _claimed(store, [f"{lanes[0]}1.1"]), "an id with another name may be on another cluster"

    def test_lanes_are_claimed_while_the_cluster_is_not_known(self, scene: StoreScene) -> None:
        """`claim_lanes` without a cluster: the rows are not compared, and keep the cluster that they name."""
        store, lanes = scene.new_store(), _lanes(scene, 2)
        store.acquire_generation(scene.claim(store, lanes[0]), ProducerKind.NATIVE, cluster_id="cluster 0")
        made = store.claim_lanes(lanes, "ours", timeout=TIMEOUT, cluster_id=None)
        assert [(row.transactional_id, row.fence, row.cluster_id) for row in made.rows] == [
            (lanes[0], 2, "cluster 0"),
            (lanes[1], 1, ""),
        ]

    def test_lane_0_must_have_the_expected_fence(self, scene: StoreScene) -> None:
        """`claim_lanes` with `expected_fence`: no lane is claimed if lane 0 was claimed since (rule F8)."""
        store, rival, lanes = scene.new_store(), scene.new_store(), _lanes(scene, 2)
        ours = _claimed(store, lanes)
        claim = rival.claim(lanes[0], "theirs", timeout=TIMEOUT)
        with expect_error(FencedError, "claim_lanes() with an expected fence that is not the row's"):
            store.claim_lanes(lanes, "ours", timeout=TIMEOUT, cluster_id=_CLUSTER, expected_fence=ours[0].fence)
        assert store.read_claimed(ours[1])
        again = rival.claim_lanes(lanes, "theirs", timeout=TIMEOUT, cluster_id=_CLUSTER, expected_fence=claim.fence)
        assert [row.fence for row in again.rows] == [3, 2]

    def test_generations_may_be_acquired_with_the_claim(self, scene: StoreScene) -> None:
        """`claim_lanes` with `acquiring`: as by `acquire_generations` right after it, or no generation is acquired."""
        store, lanes = scene.new_store(), _lanes(scene, 2)
        made = store.claim_lanes(lanes, "ours", timeout=TIMEOUT, cluster_id=_CLUSTER, acquiring=_acquiring(lanes))
        rows = made.rows
        if not made.have_generations:
            assert [row.generation for row in rows] == [0, 0]
            rows = store.acquire_generations([row.claim for row in rows], _acquiring(lanes))
        assert [(row.generation, row.resolved_generation) for row in rows] == [(1, 0), (1, 0)]
        assert {(row.generation_kind, row.cluster_id) for row in rows} == {(ProducerKind.NATIVE, _CLUSTER)}
        again = store.claim_lanes(lanes, "ours", timeout=TIMEOUT, cluster_id=_CLUSTER, acquiring=_acquiring(lanes))
        assert not again.have_generations, "a generation was acquired although one is unresolved"
        assert [row.generation for row in again.rows] == [1, 1]

    def test_generations_are_acquired_for_the_lanes_that_are_named(self, scene: StoreScene) -> None:
        """`acquire_generations`: as `acquire_generation` with `reuse` for those of `Acquiring.reuse`."""
        store, lanes = scene.new_store(), _lanes(scene, 2)
        claims = _claimed(store, lanes)
        first = store.acquire_generations(claims, _acquiring(lanes))
        assert [(row.generation, row.resolved_generation) for row in first] == [(1, 0), (1, 0)]
        assert first == store.read_claimed_rows(claims)
        second = store.acquire_generations(claims, _acquiring(lanes, lanes[1]))
        assert [row.generation for row in second] == [2, 1]

    def test_several_rows_are_resolved(self, scene: StoreScene) -> None:
        """`record_resolutions`: each row as by `record_resolution`."""
        store, lanes = scene.new_store(), _lanes(scene, 2)
        claims = _claimed(store, lanes)
        store.acquire_generations(claims, _acquiring(lanes))
        scene.transact(store, claims[1])
        store.record_resolutions([(claims[0], Resolution(resolved_generation=1)), (claims[1], Resolution(clear_state=True))])
        rows = store.read_claimed_rows(claims)
        assert [(row.resolved_generation, row.prepared_state) for row in rows] == [(1, None), (0, None)]

    def test_each_row_needs_its_claim(self, scene: StoreScene) -> None:
        """`read_claimed_rows`, `record_resolutions` and `acquire_generations` raise FencedError if one claim was replaced."""
        store, rival, lanes = scene.new_store(), scene.new_store(), _lanes(scene, 2)
        claims = _claimed(store, lanes)
        theirs = rival.claim(lanes[1], "theirs", timeout=TIMEOUT)
        before = rival.read(lanes[1])
        for what, call in {
            "read_claimed_rows()": lambda claim: store.read_claimed_rows([claims[0], claim]),
            "record_resolutions()": lambda claim: store.record_resolutions(
                [(claims[0], Resolution(clear_state=True)), (claim, Resolution(resolved_generation=7))]
            ),
            "acquire_generations()": lambda claim: store.acquire_generations([claims[0], claim], _acquiring(lanes)),
        }.items():
            expect_fenced(call, claims[1], f"{what} under a claim that was replaced", by=theirs)
            assert rival.read(lanes[1]) == before, f"{what} under a replaced claim has changed the row"
