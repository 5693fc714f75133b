"""What the tests of journaled pools do: a pool, what the topic has, and waiting for it."""

from __future__ import annotations

from typing import Any

import dualwrite
from crash.scene import Scene
from crash.worker import timeouts
from dualwrite import PoolOptions, WriterPool
from dualwrite.stores.sql import SqlStateStore
from fixtures.broker import read_values
from fixtures.pace import LIMIT, until, until_recorded


def journaled_pool(scene: Scene, database: Any = None, **changes: Any) -> WriterPool[Any]:
    options = PoolOptions(**{"timeout": LIMIT, "acknowledge": "journaled", **changes.pop("pool_options", {})})
    database = scene.events.database if database is None else database
    given = {"kafka": scene.settings, "prefix": scene.transactional_id, "timeouts": timeouts(), **changes}
    return dualwrite.create_pool(database, options=options, **given)


def published(scene: Scene) -> list[int]:
    return [int(value or b"") for value in read_values(scene.bootstrap, scene.topic)]


def until_published(scene: Scene, *numbers: int) -> None:
    """Wait until the topic has these events, in any order, each once."""
    until_recorded(lambda: published(scene), numbers)


def publish_all(scene: Scene) -> None:
    """Open a pool, and wait until the journal is empty."""
    journal = SqlStateStore(scene.engine).journal
    with journaled_pool(scene, scene.engine):
        until(lambda: not journal.gates(scene.transactional_id, counts=True)[0].entries, "all is published", seconds=10 * LIMIT)
