"""Conformance of the methods that treat all lanes of an id at once."""

from __future__ import annotations

from typing import Final

from dualwrite.errors import ClusterMismatchError, FencedError
from dualwrite.producer_kind import ProducerKind
from dualwrite.stores.base import TxnStateStore
from dualwrite.stores.state_row import Acquiring, Claim, Resolution
from dualwrite.testing.limits import TIMEOUT
from dualwrite.testing.stores.expectations import expect_error, expect_fenced
from dualwrite.testing.stores.scene import StoreScene

_CLUSTER: Final = "cluster 1"


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
        """`claim_lanes`: a lane whose row names another cluster is not claimed (rule CL)."""
        store, lanes = scene.new_store(), _lanes(scene, 2)
        claim = scene.claim(store, lanes[0])
        store.acquire_generation(claim, ProducerKind.NATIVE, cluster_id="cluster 0")
        before = store.read_claimed(claim)
        with expect_error(ClusterMismatchError, "claim_lanes() on another cluster"):
            store.claim_lanes(lanes, "ours", timeout=TIMEOUT, cluster_id=_CLUSTER)
        assert store.read(lanes[0]) == before, "claim_lanes() on another cluster has changed the row"

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
