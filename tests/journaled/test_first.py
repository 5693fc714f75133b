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


@pytest.mark.parametrize("database", ["postgresql", "mariadb", "sqlite"])
def test_joined(scene: Scene, broker) -> None:
    from sqlalchemy.orm import Session
    import sqlalchemy as sa
    from joined.own_sessions import INSERT
    make_topic(broker, scene.topic)
    with dualwrite.create_pool(scene.url, kafka=scene.settings, prefix=scene.transactional_id, options=dualwrite.PoolOptions(acknowledge="journaled", timeout=LIMIT)) as pool:
        engine = sa.create_engine(scene.url, echo=True)
        for n in range(3):
            with Session(engine) as session:
                session.execute(INSERT, {"writer": scene.transactional_id, "number": n})
                pool.join(session).send(scene.topic, str(n), key=scene.transactional_id)
                session.commit()
        until(lambda: len(read_values(scene.bootstrap, scene.topic)) >= 3, "published")
        engine.dispose()
    assert scene.agree() == list(range(3))
