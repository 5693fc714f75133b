"""Many callers of a pool, while its process and the brokers are killed at random: nothing lost, doubled or invented."""

from __future__ import annotations

import random
import time
from collections import Counter, defaultdict

import pytest

import dualwrite
from crash import worker
from crash.databases import Databases
from crash.scene import Scene, Worker
from dualwrite.devcluster import DevCluster
from dualwrite.testing.topics import read_committed
from fixtures.broker import make_topic
from fixtures.pace import LIMIT, limit
from pool.soak_scene import Run
from pool.soak_worker import PER_CALLER

pytestmark = [pytest.mark.soak, pytest.mark.usefixtures("producer")]

CALLERS = 64


# the number is also the seed: with the small one, a broker is killed, and then the process
@pytest.mark.parametrize("units", [1_220, 1_000_000])
def test_processes_and_brokers_are_killed_at_random(databases: Databases, three_brokers: DevCluster, units: int) -> None:
    scene = databases.scene("postgresql", three_brokers)
    make_topic(three_brokers, scene.topic, partitions=3)
    chance = random.Random(units)
    runs: list[Run] = []
    kills = Counter[str]()
    while sum(len(run.told) for run in runs) < units:
        first = len(runs) * CALLERS * PER_CALLER
        where = [scene.url, scene.bootstrap, scene.transactional_id, scene.topic]
        runs.append(run := Run(Worker([*where, str(first), str(CALLERS)], module="pool.soak_worker")))
        for _ in range(chance.randint(1, 3)):
            run.wait_for_more(chance.randint(1, min(units // 6, 50_000)))
            if chance.random() < 0.5:
                node = chance.choice((1, 2, 3))
                three_brokers.kill(node)
                time.sleep(chance.random() * limit(1.0))
                three_brokers.start(node)
                kills["broker"] += 1
        run.kill()
        kills["process"] += 1
    assert kills["broker"]
    report = dualwrite.recover(scene.url, kafka=scene.settings, prefix=scene.transactional_id, timeouts=worker.timeouts())
    assert not report.failed
    assert not report.unacknowledged
    found = both_sides(scene)
    told = {number for run in runs for number in run.told}
    assert told <= found, f"told as committed, but not there: {sorted(told - found)[:20]}"
    there = {number for run in runs for number in run.reported_failed} & found
    assert not there, f"told as not committed, but there: {sorted(there)[:20]}"
    errors = sum((run.errors for run in runs), Counter[str]())
    print(f"{len(found)} units, told of {len(told)}; kills: {dict(kills)}; errors: {dict(errors)}")  # noqa: T201  (pytest -s)


def both_sides(scene: Scene) -> set[int]:
    """The numbers on both sides, each once, in the order of each key in the topic."""
    messages = read_committed(scene.settings, scene.topic, timeout=LIMIT)
    of_key: dict[bytes | None, list[int]] = defaultdict(list)
    for message in messages:
        of_key[message.key].append(int(message.value or b"-1"))
    for key, numbers in of_key.items():
        assert numbers == sorted(numbers), f"the order of key {key!r} was not kept"
    sent = Counter(number for numbers in of_key.values() for number in numbers)
    rows = Counter(scene.rows())
    assert rows == sent, f"only in the database {list(rows - sent)[:20]}, only in the topic {list(sent - rows)[:20]}"
    assert set(rows.values()) <= {1}, "something is there twice"
    return set(rows)
