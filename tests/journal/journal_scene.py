"""What the journal's tests do: pools with a journal, and waiting until it is empty."""

from __future__ import annotations

from typing import Any

from crash.scene import Scene
from dualwrite import PoolOptions, WriterPool
from dualwrite.stores.journal import GateStatus
from fixtures.pace import LIMIT, until
from pool.pool_scene import open_pool


def journal_pool(scene: Scene, **changes: Any) -> WriterPool[Any]:
    """A pool whose messages go into the journal while Kafka is down."""
    options = PoolOptions(timeout=LIMIT, when_kafka_is_down="journal", **changes.pop("pool_options", {}))
    return open_pool(scene, options=options, **changes)


def gate_of(pool: WriterPool[Any], scene: Scene) -> GateStatus:
    """The gate of the scene's prefix, with the number of entries."""
    journal = pool.store.journal
    assert journal is not None
    (status,) = journal.gates(scene.transactional_id, counts=True)
    return status


def until_closed(pool: WriterPool[Any], scene: Scene) -> None:
    """Wait until the journal is empty and its gate is closed."""
    until(lambda: not gate_of(pool, scene).is_open, "the journal's gate closed")
