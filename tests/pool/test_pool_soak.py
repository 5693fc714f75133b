"""Many callers of a pool, while its process and the brokers are killed at random: nothing lost, doubled or invented."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import pytest

from crash.databases import Databases
from crash.scene import Worker
from dualwrite.devcluster import DevCluster
from dualwrite.testing.topics import read_committed
from fixtures.broker import make_topic
from fixtures.histories import recording
from fixtures.pace import LIMIT, limit
from pool.soak_scene import Run
from pool.soak_worker import PER_CALLER

pytestmark = [pytest.mark.soak, pytest.mark.usefixtures("producer")]

CALLERS = 64
UNITS = int(os.environ.get("DUALWRITE_TEST_UNITS", "1_000_000"))
AT_MOST = 10_000
"""Units between two faults."""


# the number is also the seed: with the small one, a broker is killed, and then the process
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("units", [1_220, UNITS])
def test_processes_and_brokers_are_killed_at_random(
    databases: Databases, three_brokers: DevCluster, units: int, history: Path
) -> None:
    scene = databases.scene("postgresql", three_brokers)
    make_topic(three_brokers, scene.topic, partitions=3)
    chance = random.Random(units)
    runs: list[Run] = []
    brokers_killed = 0
    with recording(history, scene, three_brokers) as recorder:
        while sum(len(run.told) for run in runs) < units:
            first = len(runs) * CALLERS * PER_CALLER
            where = [scene.url, scene.bootstrap, scene.transactional_id, scene.topic]
            process = Worker([*where, str(first), str(CALLERS), str(history)], module="pool.soak_worker")
            runs.append(run := Run(process))
            for _ in range(chance.randint(1, 3)):
                run.wait_for_more(chance.randint(1, min(units // 6, AT_MOST)))
                if chance.random() < 0.5:
                    node = chance.choice((1, 2, 3))
                    recorder.fault("a broker killed", str(node))
                    three_brokers.kill(node)
                    time.sleep(chance.random() * limit(1.0))
                    three_brokers.start(node)
                    brokers_killed += 1
            recorder.fault("a process killed", str(process.process.pid))
            run.kill()
    assert brokers_killed
    latest: dict[bytes | str | None, int] = {}
    for message in read_committed(scene.settings, scene.topic, timeout=LIMIT):  # a caller's units at once keep their order, too
        number = int(message.value or b"-1")
        assert number > latest.get(message.key, -1), f"the order of key {message.key!r} was not kept"
        latest[message.key] = number
