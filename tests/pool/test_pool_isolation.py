"""Isolation of a pool's units: one after another, or, under the higher levels, all on the snapshot of their group."""

from __future__ import annotations

from functools import partial

import pytest
import sqlalchemy as sa

from crash.scene import Scene
from dualwrite import Transaction
from pool.pool_scene import both, grouped, open_pool


@pytest.mark.parametrize("level", ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"])
def test_the_group_is_the_transaction(scene: Scene, level: str) -> None:
    """Units see each other's changes at every level. What others commit meanwhile they see only under READ COMMITTED."""
    query = sa.text("SELECT number FROM events WHERE writer = :w ORDER BY number")

    def reads(tx: Transaction, number: int) -> list[int]:
        found = list(tx.db.scalars(query, {"w": scene.transactional_id}))
        both(tx, scene, number)
        return found

    def lets_others_commit(tx: Transaction) -> list[int]:
        del tx
        with scene.engine.begin() as other:
            other.execute(sa.text("INSERT INTO events VALUES (:w, 100)"), {"w": scene.transactional_id})
        return []

    engine = sa.create_engine(scene.url, isolation_level=level)
    with open_pool(scene, engine, size=1) as pool:
        futures = grouped(
            pool, partial(reads, number=1), lets_others_commit, partial(reads, number=2), partial(reads, number=3)
        )
        seen = [future.result() for future in futures]
        later = pool.run(reads, 4)
    engine.dispose()
    others = [100] if level == "READ COMMITTED" else []
    assert seen == [[], [], [1, *others], [1, 2, *others]]
    assert later == [1, 2, 3, 100], "the next group has a snapshot of its own"
    assert scene.messages() == [1, 2, 3, 4]
