"""Processes add links to chains while they, the drainer and the broker are killed: nothing is lost, doubled or out of order.

With PostgreSQL the broker's process is killed. On the other databases, and where what dies is a process of ours, the broker is
behind a door; `pytest -m soak` kills it everywhere.
"""

from __future__ import annotations

import random
import time
from itertools import product

import pytest

from crash.cases import JOURNAL_POINTS
from crash.scene import Scene
from dualwrite.devcluster import DevCluster
from fixtures.broker_door import BrokerBehindDoor
from fixtures.pace import LIMIT
from fixtures.tiers import thinned
from journal.chains import assert_chains, begin_chains, chain_worker, until_drained
from journal.conftest import BEHIND_DOOR, KILLED

pytestmark = pytest.mark.slow


def flap(
    scene: Scene, broker: BrokerBehindDoor | DevCluster, *, rounds: int, seed: int, pauses: float = 1, **environment: str
) -> None:
    """Kill and start the broker, and processes, at random. `pauses` is the factor for those in between."""
    chance = random.Random(seed)
    broker.kill(1)
    workers = [chain_worker(scene, **environment) for _ in range(3)]
    try:
        for worker in workers:  # they start while the broker is down
            worker.wait_for("open")
        broker.start(1, timeout=LIMIT)
        for _ in range(rounds):
            time.sleep(pauses * chance.uniform(0.2, 1.5))
            broker.kill(1)
            time.sleep(pauses * chance.uniform(0.5, 5))
            if chance.random() < 0.5:
                workers[0].kill()
                workers = [*workers[1:], chain_worker(scene, **environment)]
                if chance.random() < 0.5:
                    workers[-1].wait_for("open")
            broker.start(1, timeout=LIMIT)
            time.sleep(pauses * chance.uniform(0, 2.5))
            if chance.random() < 0.5:  # perhaps it drains
                workers[0].kill()
                workers = [*workers[1:], chain_worker(scene, **environment)]
        for worker in workers:
            worker.tell("stop")
        for worker in workers:
            assert worker.end() == 0, worker.errors[-3000:]
    finally:
        for worker in workers:
            if worker.process.poll() is None:
                worker.kill()


@pytest.mark.parametrize(
    ("database", "environment", "own_broker"),
    thinned(
        [
            ("postgresql", {}, KILLED),
            ("mariadb", {}, KILLED),
            ("sqlite", {}, KILLED),
            ("postgresql", {"ISOLATION": "REPEATABLE READ"}, KILLED),
            ("postgresql", {"ISOLATION": "SERIALIZABLE"}, KILLED),
            ("mariadb", {"ISOLATION": "READ COMMITTED"}, KILLED),
            ("postgresql", {"TWO_PHASE": "no"}, KILLED),
            ("mariadb", {}, BEHIND_DOOR),
            ("sqlite", {}, BEHIND_DOOR),
        ],
        kept=[("postgresql", {}, KILLED), ("mariadb", {}, BEHIND_DOOR), ("sqlite", {}, BEHIND_DOOR)],
    ),
    indirect=["own_broker"],
)
def test_chains_are_kept_while_everything_is_killed(
    scene: Scene, own_broker: BrokerBehindDoor | DevCluster, environment: dict[str, str]
) -> None:
    begin_chains(scene)
    if isinstance(own_broker, BrokerBehindDoor):
        flap(scene, own_broker, rounds=4, seed=1, pauses=0.5, **environment)
    else:
        flap(scene, own_broker, rounds=3, seed=1, **environment)
    until_drained(scene)
    assert assert_chains(scene) > 0


KILLED_AT = [*JOURNAL_POINTS[1:], "after_record", "before_db_commit", "after_db_commit"]
"""The first is passed by whoever opens the gate: see test_journal_starts.py."""


@pytest.mark.parametrize(
    ("database", "point"),
    thinned(product(["postgresql", "mariadb", "sqlite"], KILLED_AT), kept=list(product(["postgresql"], KILLED_AT))),
)
def test_a_process_dies_while_it_writes_or_empties_the_journal(scene: Scene, own_broker: BrokerBehindDoor, point: str) -> None:
    begin_chains(scene)
    filling = chain_worker(scene)
    try:
        filling.wait_for("open")
        dying = chain_worker(scene, JOURNAL_FAILPOINT=point)
        dying.wait_for("open")
        own_broker.kill(1)
        dying.tell("arm")
        dying.wait_for("armed")
        if point == "journal_before_close":
            filling.kill()  # or it might close the gate
            own_broker.start(1, timeout=LIMIT)
        dying.killed()
    finally:
        filling.process.kill()
        filling.end()
    if point != "journal_before_close":
        own_broker.start(1, timeout=LIMIT)
    until_drained(scene)
    assert assert_chains(scene) > 0
