"""Random steps of several writers, crashes and recoveries on each store, against a model of the promise.

More runs: DUALWRITE_STATE_MACHINE_EXAMPLES=1000.
"""

from __future__ import annotations

import gc
import logging

import pytest

from dualwrite.testing.stores import StoreScene
from dualwrite.testing.stores.machine import run_random_steps
from fixtures.tiers import thinned

SCENES = ("sqlite_scene", "postgresql_scene", "mariadb_scene", "rocksdb_scene", "zookeeper_scene")


@pytest.mark.timeout(900)  # a failure is made smaller before it is shown
@pytest.mark.parametrize("scene", thinned(SCENES, quick=["rocksdb_scene"]))
def test_random_steps_keep_the_promise(request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture, scene: str) -> None:
    caplog.set_level(logging.CRITICAL, "sqlalchemy.pool")  # SQLAlchemy reports each connection that a crash has closed
    found: StoreScene = request.getfixturevalue(scene)
    run_random_steps(found)
    gc.collect()
