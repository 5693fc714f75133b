"""Pools and writers start while the only broker is down: they write at once, and recover before they send anything to it."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from crash.cases import crash_writer
from crash.scene import Scene
from dualwrite import DualWriter, Phase, Transaction
from dualwrite.devcluster import DevCluster
from dualwrite.stores.journal import GateStatus
from fixtures.broker import read_values
from fixtures.pace import LIMIT, until
from fixtures.tiers import thinned
from journal.journal_scene import journal_pool, until_closed
from pool.pool_scene import both

pytestmark = pytest.mark.slow

DATABASES = ["postgresql", "mariadb", "sqlite"]


def assert_in_order(scene: Scene, numbers: range) -> None:
    """Both sides have the events, the topic in their order."""
    assert scene.agree() == list(numbers)
    assert [int(value or 0) for value in read_values(scene.bootstrap, scene.topic)] == list(numbers)


def journal_writer(scene: Scene, **changes: Any) -> DualWriter[Any]:
    return scene.connect(when_kafka_is_down="journal", **changes)


def write(writer: DualWriter[Any], scene: Scene, *numbers: int) -> list[str | None]:
    """Write events, each in a transaction of its own; return the outcomes."""

    @writer.transactional
    def event(tx: Transaction[Any], number: int) -> Transaction[Any]:
        both(tx, scene, number)
        return tx

    return [event(number).outcome for number in numbers]


def gate(writer: DualWriter[Any], scene: Scene) -> GateStatus:
    assert writer.store.journal is not None
    (status,) = writer.store.journal.gates(scene.transactional_id, counts=True)
    return status


def until_writer_closed(writer: DualWriter[Any], scene: Scene) -> None:
    until(lambda: not gate(writer, scene).is_open, "the journal's gate closed")


@pytest.mark.parametrize(
    ("database", "producer", "two_phase"),
    thinned(
        [*product(DATABASES, ["native"], [None, False]), ("postgresql", "librdkafka", None)],
        kept=[*product(DATABASES, ["native"], [None]), ("postgresql", "native", False), ("postgresql", "librdkafka", None)],
    ),
    indirect=["producer"],
)
def test_a_pool_starts_while_the_broker_is_down(scene: Scene, own_broker: DevCluster, two_phase: bool | None) -> None:
    own_broker.kill(1)
    with journal_pool(scene, two_phase=two_phase) as pool:
        for number in range(10):
            pool.run(both, scene, number)
        own_broker.start(1, timeout=LIMIT)
        until_closed(pool, scene)
        for number in range(10, 15):
            pool.run(both, scene, number)
    assert_in_order(scene, range(15))


@pytest.mark.parametrize(
    ("database", "producer"),
    thinned([*product(DATABASES, ["native"]), ("postgresql", "librdkafka")], kept=list(product(DATABASES, ["native"]))),
    indirect=["producer"],
)
def test_a_writer_starts_while_the_broker_is_down_and_finds_what_the_one_before_has_left(
    scene: Scene, own_broker: DevCluster
) -> None:
    """The transaction that the killed writer had committed in the database only comes first."""
    crash_writer(scene, "after_db_commit")
    own_broker.kill(1)
    with journal_writer(scene) as writer:
        assert writer.phase is Phase.NEEDS_RECOVERY
        assert write(writer, scene, 3, 4) == ["journaled", "journaled"]
        own_broker.start(1, timeout=LIMIT)
        until_writer_closed(writer, scene)
        assert write(writer, scene, 5) == ["published"]
    assert_in_order(scene, range(1, 6))
    assert scene.unfinished() == []
