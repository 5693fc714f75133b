"""Random steps of several writers, crashes and recoveries on each store, against a model of the promise.

CI does 3 runs on each store, a soak run does 25 or DUALWRITE_STATE_MACHINE_EXAMPLES.
"""

from __future__ import annotations

import gc
import logging
from itertools import product

import pytest

from dualwrite.testing.stores import StoreScene
from dualwrite.testing.stores.machine import run_random_steps
from fixtures.tiers import thinned

FEW = 3
SCENES = ("sqlite_scene", "postgresql_scene", "mariadb_scene", "rocksdb_scene", "zookeeper_scene")


@pytest.mark.timeout(900)  # a failure is made smaller before it is shown
@pytest.mark.parametrize(
    ("scene", "examples"),
    thinned(product(SCENES, [FEW, None]), kept=[(scene, FEW) for scene in SCENES], quick=[("rocksdb_scene", FEW)]),
)
def test_random_steps_keep_the_contract(
    request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture, scene: str, examples: int | None
) -> None:
    caplog.set_level(logging.CRITICAL, "sqlalchemy.pool")  # SQLAlchemy reports each connection that a crash has closed
    found: StoreScene = request.getfixturevalue(scene)
    run_random_steps(found, examples=examples)
    gc.collect()
