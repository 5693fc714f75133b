from __future__ import annotations
import time
from typing import Any
import pytest
import dualwrite
from crash.scene import Scene
from fixtures.broker import make_topic, read_values
from fixtures.pace import LIMIT, until
from pool.pool_scene import both


@pytest.mark.parametrize("database", ["postgresql", "mariadb", "sqlite"])
def test_first(scene: Scene, broker) -> None:
    make_topic(broker, scene.topic)
    with dualwrite.create_pool(scene.url, kafka=scene.settings, prefix=scene.transactional_id, options=dualwrite.PoolOptions(acknowledge="journaled", timeout=LIMIT)) as pool:
        for n in range(10):
            assert pool.run(both, scene, n) == n
        t = time.monotonic()
        until(lambda: len(read_values(scene.bootstrap, scene.topic)) >= 10, "published")
        print("published", time.monotonic() - t)
        with pool.transaction() as tx:
            both(tx, scene, 10)
        assert pool.submit(both, scene, 11).result() == 11
        until(lambda: len(read_values(scene.bootstrap, scene.topic)) >= 12, "published")
    assert scene.agree() == list(range(12))
