"""Claiming all lanes of an id in one transaction, by several processes at once, on each kind of SQL database."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import sqlalchemy as sa

from dualwrite.errors import ClaimTimeoutError, ClusterMismatchError
from dualwrite.state import ProducerKind
from dualwrite.stores.base import Acquiring
from dualwrite.stores.sql import SqlStateStore
from dualwrite.stores.sql.tables import state_table
from fixtures.pace import LIMIT

NewName = Callable[[str], str]


def lanes_of(name: str, count: int) -> list[str]:
    return [name, *(f"{name}~{number}" for number in range(1, count))]


def test_a_claimant_with_fewer_lanes_claims_them_all(store: SqlStateStore, rival: SqlStateStore, new_name: NewName) -> None:
    lanes = lanes_of(new_name("id"), 3)
    store.claim_lanes(lanes, "ours", timeout=LIMIT, cluster_id="c")
    claimed = rival.claim_lanes(lanes[:1], "theirs", timeout=LIMIT, cluster_id="c").rows
    assert {row.transactional_id: row.fence for row in claimed} == dict.fromkeys(lanes, 2)


@pytest.mark.slow
def test_the_last_of_several_claimants_has_every_lane(store: SqlStateStore, rival: SqlStateStore, new_name: NewName) -> None:
    """Whatever their numbers of lanes are, the owner of lane 0 owns every row, also those that another one has just created."""
    for _ in range(10):
        name = new_name("id")
        with ThreadPoolExecutor(4) as threads:
            claiming = [
                threads.submit(each.claim_lanes, lanes_of(name, count), f"{count}", timeout=LIMIT, cluster_id="c")
                for each, count in ((store, 1), (rival, 4), (store, 2), (rival, 3))
            ]
            made = [each.result().rows for each in claiming]
        last = max(made, key=lambda rows: rows[0].fence)
        rows = store.look_at([name])
        assert last[0].fence == 4
        assert {row.transactional_id: row.fence for row in rows} == {row.transactional_id: row.fence for row in last}


@pytest.mark.slow
def test_the_first_ids_of_a_name_get_one_cluster(store: SqlStateStore, rival: SqlStateStore, new_name: NewName) -> None:
    """Two processes with the addresses of two clusters make their ids at the same time: one of them is refused (rule CL)."""
    for round_ in range(10):
        name, together = new_name("id"), threading.Barrier(2)

        def claim(each: SqlStateStore, number: int, name: str = name, together: threading.Barrier = together) -> str:
            lanes = lanes_of(f"{name}.{number}", 2)
            acquiring = Acquiring(ProducerKind.NATIVE, frozenset(lanes), frozenset(), f"cluster {number}")
            each.look_at(lanes)
            together.wait(LIMIT)
            try:
                each.claim_lanes(lanes, "ours", timeout=LIMIT, cluster_id=acquiring.cluster_id, acquiring=acquiring)
            except ClusterMismatchError as refused:
                assert each.list(lanes[0]) == [], "a refused claim makes no row"
                return refused.stored_cluster_id
            return acquiring.cluster_id

        with ThreadPoolExecutor(2) as threads:
            claiming = [threads.submit(claim, each, number) for each, number in ((store, 1), (rival, 2))]
            on = {each.result() for each in claiming}
        assert len(on) == 1, f"round {round_}: {on}"
        (cluster,) = on
        rows = list(map(store.read, store.list(name)))
        assert [row.cluster_id for row in rows if row is not None] == [cluster, cluster]


def test_a_claim_waits_for_no_row_of_another_id(store: SqlStateStore, rival: SqlStateStore, new_name: NewName) -> None:
    """On MariaDB, a search with locks would wait for every row that it looks at."""
    if store.engine.dialect.name == "sqlite":
        pytest.skip("SQLite locks the whole file")
    name, other = new_name("id"), new_name("id")
    store.claim_lanes(lanes_of(other, 2), "theirs", timeout=LIMIT, cluster_id="c")
    with rival.engine.begin() as connection:
        row = sa.select(state_table).where(state_table.c.transactional_id == other)
        connection.execute(row.with_for_update()).all()
        for fence, lanes in ((1, 1), (2, 3)):
            claimed = store.claim_lanes(lanes_of(name, lanes), "ours", timeout=LIMIT, cluster_id="c").rows
            assert claimed[0].fence == fence


def test_a_locked_lane_is_named_and_no_other_is_claimed(store: SqlStateStore, rival: SqlStateStore, new_name: NewName) -> None:
    if store.engine.dialect.name == "sqlite":
        pytest.skip("SQLite locks the whole file")
    lanes = lanes_of(new_name("id"), 3)
    before = store.claim_lanes(lanes, "ours", timeout=LIMIT, cluster_id="c").rows
    with rival.engine.begin() as connection:
        name = lanes[1]
        connection.execute(sa.select(state_table).where(state_table.c.transactional_id == name).with_for_update()).all()
        with pytest.raises(ClaimTimeoutError) as caught:
            store.claim_lanes(lanes, "ours", timeout=0.5, cluster_id="c")
    shows_holders = store.engine.dialect.name == "postgresql"
    assert caught.value.transactional_id == (name if shows_holders else lanes[0])
    assert store.read_claimed_rows([row.claim for row in before]) == before
