"""Claiming all lanes of an id in one transaction, by several processes at once, on each kind of SQL database."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import sqlalchemy as sa

from dualwrite.errors import ClaimTimeoutError
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
