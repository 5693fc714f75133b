"""A broker that is not Apache's (kfake): a writer and recovery die at each step, and both sides are compared record by record.

kfake answers an InitProducerId that names an unknown producer id with INVALID_PRODUCER_ID_MAPPING, shows an ended transaction
as Empty, and offers no two-phase commit. Below 4.1 librdkafka is used, else the native producer.

CI has three cases, if Go is there; `pytest -m soak` runs the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest

import dualwrite
from crash.cases import WRITER_POINTS, recovery_dies, recovery_steps, writer_dies
from crash.databases import Databases
from crash.scene import Scene
from dualwrite.errors import UnsupportedBrokerError
from fixtures.kfake_broker import NEWEST, VERSIONS, Kfake
from fixtures.pace import LIMIT
from fixtures.tiers import thinned

pytestmark = pytest.mark.slow

NewKfake = Callable[[str], Kfake]


@pytest.fixture
def scene(databases: Databases, kfake: NewKfake, version: str) -> Scene:
    return databases.scene("sqlite", kfake(version))  # type: ignore[arg-type]  # it has bootstrap servers, which is enough


@pytest.mark.parametrize(
    ("version", "point"),
    thinned(
        product(VERSIONS, WRITER_POINTS),
        kept=[(NEWEST, "after_db_commit"), (NEWEST, "after_kafka_commit"), ("3.9", "after_db_commit")],
    ),
)
def test_a_writer_that_dies_leaves_both_sides_alike(scene: Scene, point: str) -> None:
    writer_dies(scene, point)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("version", "left", "point"),
    [(version, *step) for version in VERSIONS for step in recovery_steps(aborts_by_registering=version in ("3.0", "3.9"))],
)
def test_recovery_that_dies_leaves_both_sides_alike(scene: Scene, left: str, point: str) -> None:
    recovery_dies(scene, left, point)


@pytest.mark.parametrize("version", thinned(VERSIONS, kept=[NEWEST]))
def test_a_pool(scene: Scene) -> None:
    """Units that share transactions, one that fails, and one that is rolled back."""

    def unit(number: int) -> Callable[[dualwrite.Transaction], None]:
        def run(tx: dualwrite.Transaction) -> None:
            scene.events.write(tx.db, scene.transactional_id, number)
            tx.send(scene.topic, str(number))
            if number == 7:
                raise KeyError(number)

        return run

    with dualwrite.create_pool(scene.events.database, kafka=scene.bootstrap, prefix=scene.transactional_id) as pool:
        calls = [pool.submit(unit(number)) for number in range(1, 31)]
        failed = [number for number, call in enumerate(calls, 1) if call.exception(LIMIT) is not None]
    assert failed == [7]
    assert scene.agree() == [number for number in range(1, 31) if number != 7]


@pytest.mark.parametrize("version", ["2.8", "1.0"])
def test_a_release_that_is_too_old_is_said_at_once(scene: Scene) -> None:
    with pytest.raises(UnsupportedBrokerError, match=r"older than Apache Kafka 3\.0"):
        scene.connect()


@pytest.mark.parametrize("version", [NEWEST])
def test_each_id_is_registered_once(scene: Scene) -> None:
    """A writer that opens again continues its generations: only an id that Kafka does not know gets a new one."""
    for number in (1, 2, 3):
        scene.write_here(number)
        assert scene.row().generation == 1
    assert scene.agree() == [1, 2, 3]
