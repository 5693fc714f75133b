"""Conformance of leases on numbered ids; skipped for a store without leases."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final

import pytest

from dualwrite.stores.base import TxnStateStore
from dualwrite.stores.leases import LeaseStore, numbered
from dualwrite.stores.rows import MAX_OWNER_LENGTH
from dualwrite.testing import TIMEOUT
from dualwrite.testing.stores.scene import SHORT_TIME, LeasesEnd, StoreScene
from dualwrite.testing.stores.steps import PROCESSES, THREADS, at_once, expect_row, in_processes

_LONG: Final = 600.0
_TIMES: Final = 3
_OWNERS: Final = ("host:4711 'program' \"x\" %s \\", "größe 😀", "o" * (MAX_OWNER_LENGTH + 50))


class LeaseConformance:
    """`TxnStateStore.leases`."""

    def test_an_id_is_leased_by_one_owner(self, scene: StoreScene) -> None:
        """`acquire`: those of the ids that are free, and those that this owner has leased already."""
        ours, theirs = _two(scene)
        prefix = scene.new_id()
        first, second, third = _names(prefix, 3)
        assert ours.acquire([first, second], "ours", seconds=_LONG) == {first, second}
        assert theirs.acquire([second, third], "theirs", seconds=_LONG) == {third}, "an id that is leased was leased again"
        assert ours.acquire([first, second, third], "ours", seconds=_LONG) == {first, second}, "acquire() a second time"
        assert ours.acquire([], "ours", seconds=_LONG) == frozenset()
        assert _owners(theirs, prefix) == {first: "ours", second: "ours", third: "theirs"}

    def test_released_ids_are_free(self, scene: StoreScene) -> None:
        """`release`: ends leases; those of other owners are not changed."""
        ours, theirs = _two(scene)
        prefix = scene.new_id()
        first, second = numbered(prefix, 1), numbered(prefix, 2)
        ours.acquire([first], "ours", seconds=_LONG)
        theirs.acquire([second], "theirs", seconds=_LONG)
        for _ in range(2):
            ours.release([first, second, numbered(prefix, 3)], "ours")
            assert _owners(ours, prefix) == {second: "theirs"}
        assert theirs.acquire([first], "theirs", seconds=_LONG) == {first}
        ours.release([first], "ours")
        assert _owners(ours, prefix) == {first: "theirs", second: "theirs"}, "release() of an id that another owner has now"

    def test_only_an_owner_renews_its_leases(self, scene: StoreScene) -> None:
        """`renew`: returns the ids that this owner has leased; it leases nothing."""
        ours, theirs = _two(scene)
        prefix = scene.new_id()
        first, second, third = _names(prefix, 3)
        ours.acquire([first, second], "ours", seconds=_LONG)
        theirs.acquire([third], "theirs", seconds=_LONG)
        assert ours.renew([first, second, third, numbered(prefix, 4)], "ours", seconds=_LONG) == {first, second}
        ours.release([second], "ours")
        assert ours.renew([first, second], "ours", seconds=_LONG) == {first}, "renew() of an id that was released"
        assert ours.renew([], "ours", seconds=_LONG) == frozenset()
        assert _owners(ours, prefix) == {first: "ours", third: "theirs"}

    def test_a_lease_ends(self, scene: StoreScene) -> None:
        """A lease that has ended is listed, if the store keeps it; any other owner may then lease the id."""
        store = scene.new_store()
        ours, theirs = _leases(store), _leases(scene.new_store())
        name = numbered(prefix := scene.new_id(), 1)
        ours.acquire([name], "ours", seconds=SHORT_TIME)
        if scene.capabilities.leases_end is LeasesEnd.WITH_TIME:
            _until(lambda: all(each.has_ended for each in theirs.entries(prefix)), "the lease has ended")
            assert _owners(theirs, prefix) == {name: "ours"}
        else:
            store.close()
            _until(lambda: not theirs.entries(prefix), "the lease has ended with its owner's session")
        assert theirs.acquire([name], "theirs", seconds=_LONG) == {name}
        if scene.capabilities.leases_end is LeasesEnd.WITH_TIME:
            assert ours.renew([name], "ours", seconds=_LONG) == frozenset(), "renew() of an id that another owner has leased"
            assert ours.acquire([name], "ours", seconds=_LONG) == frozenset()
        (lease,) = theirs.entries(prefix)
        assert (lease.owner, lease.has_ended) == ("theirs", False)

    def test_a_lease_that_has_ended_is_renewed_unless_another_owner_has_it(self, scene: StoreScene) -> None:
        """`renew`: also those that have ended and were leased by nobody since."""
        ours, theirs = _two(scene)
        name = numbered(prefix := scene.new_id(), 1)
        ours.acquire([name], "ours", seconds=SHORT_TIME)
        if scene.capabilities.leases_end is LeasesEnd.WITH_TIME:
            _until(lambda: all(each.has_ended for each in theirs.entries(prefix)), "the lease has ended")
        assert ours.renew([name], "ours", seconds=_LONG) == {name}
        assert theirs.acquire([name], "theirs", seconds=_LONG) == frozenset()
        (lease,) = theirs.entries(prefix)
        assert not lease.has_ended
        assert lease.seconds_left is None or SHORT_TIME < lease.seconds_left <= _LONG

    def test_a_lost_lease_is_not_renewed(self, scene: StoreScene) -> None:
        """`renew`: an id that another owner has leased meanwhile is lost, even if that owner has released it."""
        if scene.capabilities.leases_end is not LeasesEnd.WITH_TIME:
            pytest.skip("leases end with their owner's session")
        ours, theirs = _two(scene)
        name = numbered(prefix := scene.new_id(), 1)
        ours.acquire([name], "ours", seconds=SHORT_TIME)
        _until(lambda: bool(theirs.acquire([name], "theirs", seconds=_LONG)), "the lease has ended")
        theirs.release([name], "theirs")
        assert ours.renew([name], "ours", seconds=_LONG) == frozenset()
        assert ours.entries(prefix) == []

    def test_no_lease_has_more_left_than_its_length_once_others_want_it(self, scene: StoreScene) -> None:
        """`acquire`: after the database's clock has gone back, a lease lasts for its length at most, and its owner keeps it."""
        ours, theirs = _two(scene)
        prefix = scene.new_id()
        dead, alive = _names(prefix, 2)
        ours.acquire([dead], "ours", seconds=SHORT_TIME)
        ours.acquire([alive], "ours", seconds=_LONG)
        scene.turn_clock_back(2 * _LONG)
        assert all(each.is_impossible and each.has_ended for each in theirs.entries(prefix))
        assert theirs.acquire([dead, alive], "theirs", seconds=_LONG) == frozenset(), "a living owner can't renew in time"
        assert not any(each.is_impossible for each in theirs.entries(prefix))
        assert ours.renew([alive], "ours", seconds=_LONG) == {alive}
        _until(lambda: theirs.acquire([dead, alive], "theirs", seconds=_LONG) == {dead}, "the shortened lease has ended")
        assert _owners(ours, prefix) == {dead: "theirs", alive: "ours"}

    def test_the_lowest_free_numbers_are_leased(self, scene: StoreScene) -> None:
        """`lease`: the free ids of a prefix with the lowest numbers, without those to be left out."""
        ours, theirs = _two(scene)
        prefix = scene.new_id()
        one, two, three, four, five = _names(prefix, 5)
        assert ours.lease(prefix, "ours", 2, seconds=_LONG) == [one, two]
        assert theirs.lease(prefix, "theirs", 2, seconds=_LONG) == [three, four]
        ours.release([two], "ours")
        assert theirs.lease(prefix, "theirs", 2, seconds=_LONG) == [two, five]
        theirs.release([three, two], "theirs")
        assert ours.lease(prefix, "ours", 1, seconds=_LONG, without=[two]) == [three]
        assert _owners(ours, prefix) == {one: "ours", three: "ours", four: "theirs", five: "theirs"}

    def test_prefixes_are_independent(self, scene: StoreScene) -> None:
        """Also if one begins with another; every character counts, including case and trailing spaces."""
        leases = _leases(scene.new_store())
        base = scene.new_id()
        prefixes = [base, f"{base}.1", f"{base}.", base.upper(), f"{base} ", f"{base}/%_'😀", f"{base}é"]
        for prefix in prefixes:
            assert leases.lease(prefix, f"owner of {prefix}", 2, seconds=_LONG) == [f"{prefix}.1", f"{prefix}.2"]
        found = _owners(leases, base)
        assert set(found) == {f"{prefix}.{number}" for prefix in prefixes if prefix != base.upper() for number in (1, 2)}
        assert list(found) == sorted(found), "entries() are sorted by id"
        assert all(owner == f"owner of {name[:-2]}" for name, owner in found.items())

    def test_owners_are_stored_and_long_ones_truncated(self, scene: StoreScene) -> None:
        """`MAX_OWNER_LENGTH`: a longer owner is truncated; it can still renew and release."""
        leases = _leases(scene.new_store())
        for owner in _OWNERS:
            name = numbered(prefix := scene.new_id(), 1)
            leases.acquire([name], owner, seconds=_LONG)
            assert _owners(leases, prefix) == {name: owner[:MAX_OWNER_LENGTH]}
            assert leases.renew([name], owner, seconds=_LONG) == {name}
            leases.release([name], owner)
            assert leases.entries(prefix) == []

    def test_leases_and_rows_are_independent(self, scene: StoreScene) -> None:
        """A lease needs no row of the id, and changes none; a claim needs no lease."""
        store = scene.new_store()
        leases, name = _leases(store), numbered(prefix := scene.new_id(), 1)
        leases.acquire([name], "ours", seconds=_LONG)
        assert store.read(name) is None
        assert store.list(prefix) == []
        claim = scene.claim(store, name, "another")
        leases.release([name], "ours")
        leases.acquire([name], "theirs", seconds=_LONG)
        expect_row(store, name, "the row after its lease changed", fence=claim.fence, owner="another")
        scene.transact(store, claim)
        assert _owners(leases, prefix) == {name: "theirs"}

    def test_a_change_of_leases_without_an_answer_is_retried(self, scene: StoreScene) -> None:
        """All methods may be repeated after an error: a second call has the same effect as one."""
        ours, theirs = _two(scene)
        ours.acquire([numbered(scene.new_id(), 1)], "ours", seconds=_LONG)  # a store may have to create something first
        for arrives in (True, False):
            name = numbered(prefix := scene.new_id(), 1)
            with scene.without_an_answer(arrives=arrives):
                assert ours.acquire([name], "ours", seconds=_LONG) == {name}, f"acquire(), its commit {arrives=}"
            scene.cut_next_commit(arrives=arrives)  # a store may have nothing to commit here
            assert ours.renew([name], "ours", seconds=_LONG) == {name}, f"renew(), its commit {arrives=}"
            assert _owners(theirs, prefix) == {name: "ours"}
            with scene.without_an_answer(arrives=arrives):
                ours.release([name], "ours")
            assert theirs.entries(prefix) == []

    def test_one_of_several_threads_leases_an_id(self, scene: StoreScene) -> None:
        """`acquire`: if several owners try at once, each id is leased by one of them."""
        stores = [scene.new_store() for _ in range(3)]
        prefix = scene.new_id()
        names = _names(prefix, 4)
        barrier = threading.Barrier(THREADS)

        def race(number: int) -> list[frozenset[str]]:
            leases, got = _leases(stores[number % len(stores)]), []
            for _ in range(_TIMES):
                barrier.wait(TIMEOUT)
                got.append(leases.acquire(names, f"thread {number}", seconds=_LONG))
                barrier.wait(TIMEOUT)
                leases.release(names, f"thread {number}")
            return got

        with ThreadPoolExecutor(THREADS) as threads:
            rounds = list(zip(*threads.map(race, range(THREADS)), strict=True))
        for got in rounds:
            assert sorted(name for some in got for name in some) == names, f"leased in one round: {got}"

    def test_pools_started_at_the_same_time_lease_different_ids(self, scene: StoreScene) -> None:
        """`lease`: each gets as many ids as it wants, no id is leased twice, and the ids have the lowest numbers."""
        stores, prefix = [scene.new_store() for _ in range(3)], scene.new_id()
        got = at_once(lambda number: _lowest(prefix, stores[number % len(stores)], number))
        assert sorted(name for some in got for name in some) == sorted(_names(prefix, 2 * THREADS))

    def test_processes_started_at_the_same_time_lease_different_ids(self, scene: StoreScene) -> None:
        """The same for several processes, if the database supports more than one."""
        _leases(scene.new_store())
        prefix = scene.new_id()
        got = in_processes(scene.opener(), partial(_lowest, prefix))
        assert sorted(name for some in got for name in some) == _names(prefix, 2 * PROCESSES)


def _lowest(prefix: str, store: TxnStateStore, number: int) -> list[str]:
    return _leases(store).lease(prefix, f"owner {number}", 2, seconds=_LONG)


def _names(prefix: str, count: int) -> list[str]:
    return [numbered(prefix, number) for number in range(1, count + 1)]


def _leases(store: TxnStateStore) -> LeaseStore:
    if store.leases is None:
        pytest.skip("this store has no leases")
    return store.leases


def _two(scene: StoreScene) -> tuple[LeaseStore, LeaseStore]:
    return _leases(scene.new_store()), _leases(scene.new_store())


def _owners(leases: LeaseStore, prefix: str) -> dict[str, str]:
    return {each.transactional_id: each.owner for each in leases.entries(prefix)}


def _until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + TIMEOUT
    while not condition():
        assert time.monotonic() < deadline, f"not within {TIMEOUT:.0f} s: {what}"
        time.sleep(0.05)
