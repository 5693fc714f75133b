"""Processes that write into the journal always are killed, and replaced by others, and back: order by cause, each link once."""

from __future__ import annotations

import random
import time
from itertools import product

import pytest

from crash.scene import Scene
from fixtures.broker_door import BrokerBehindDoor
from fixtures.pace import LIMIT
from fixtures.tiers import thinned
from journal.chains import assert_chains, begin_chains, chain_worker, until_drained

pytestmark = pytest.mark.slow

DATABASES = ["postgresql", "mariadb", "sqlite"]
POINTS = [
    *("after_begin", "group_after_unit", "journal_after_entries", "before_db_commit", "after_db_commit"),
    *("after_prepare", "after_record", "before_kafka_commit", "after_kafka_commit"),  # of the thread that publishes
]


@pytest.mark.parametrize(
    ("database", "point"),
    thinned(product(DATABASES, POINTS), kept=[*product(["postgresql"], POINTS), ("mariadb", "before_db_commit")]),
)
def test_a_process_dies_while_it_writes_or_publishes(scene: Scene, point: str) -> None:
    begin_chains(scene)
    dying = chain_worker(scene, JOURNAL_FAILPOINT=point, ACKNOWLEDGE="journaled")
    dying.wait_for("open")
    other = chain_worker(scene, ACKNOWLEDGE="journaled")
    try:
        other.wait_for("open")
        dying.tell("arm")
        dying.killed()
        time.sleep(0.3)
        other.tell("stop")
        assert other.end() == 0, other.errors[-3000:]
    finally:
        other.process.kill()
    until_drained(scene)
    assert assert_chains(scene) > 0


@pytest.mark.parametrize("database", thinned(DATABASES, kept=["postgresql", "sqlite"]))
@pytest.mark.parametrize("seed", thinned(range(5), kept=[0]))
def test_a_rolling_change_of_the_way_and_back(outage: Scene, broker_behind_door: BrokerBehindDoor, seed: int) -> None:
    """Each process is replaced by one that goes the other way, by its end or its death; Kafka goes down and comes back."""
    chance = random.Random(seed)
    begin_chains(outage)
    ways = ["visible", "visible", "journaled"]
    workers = [chain_worker(outage, ACKNOWLEDGE=way) for way in ways]
    try:
        for worker in workers:
            worker.wait_for("open")
        for way in [*["journaled"] * 3, *["visible"] * 3]:
            time.sleep(chance.uniform(0.1, 0.8))
            is_down = chance.random() < 0.3
            if is_down:
                broker_behind_door.kill(1)
                time.sleep(chance.uniform(0, 1.5))
            oldest, *rest = workers
            if chance.random() < 0.5:
                oldest.kill()
            else:
                oldest.tell("stop")
                assert oldest.end() == 0, oldest.errors[-3000:]
            workers = [*rest, chain_worker(outage, ACKNOWLEDGE=way)]
            workers[-1].wait_for("open")
            if is_down:
                broker_behind_door.start(1, timeout=LIMIT)
        for worker in workers:
            worker.tell("stop")
        for worker in workers:
            assert worker.end() == 0, worker.errors[-3000:]
    finally:
        for worker in workers:
            worker.process.kill()
    until_drained(outage)
    assert assert_chains(outage) > 0
