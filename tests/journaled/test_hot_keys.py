"""A long run on few keys: three processes write numbers, each having seen its key's last one, and are killed now and then.

So the numbers of a key must be in the topic in the order in which they were seen.
"""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest
import sqlalchemy as sa
from history_recorder import Recorder

from crash.databases import Databases
from crash.scene import Scene, Worker
from dualwrite.devcluster import DevCluster
from dualwrite.stores.sql import SqlStateStore
from fixtures.broker import make_topic
from fixtures.histories import recording
from journaled.hot_key_worker import begin
from journaled.journaled_scene import publish_all

PROCESSES = 3
THREADS = 4
PARTITIONS = 3
KILLS_EVERY = (3.0, 9.0)
"""Seconds between two kills."""

PER_PROCESS = 1_000_000

TOTAL = "SELECT sum(number) FROM hot_keys WHERE topic = :topic"


def worker(scene: Scene, history: Path, number: int) -> Worker:
    first = str(1 + number * PER_PROCESS)
    where = [scene.url, scene.bootstrap, scene.transactional_id, scene.topic, str(THREADS), first, str(history)]
    return Worker(where, module="journaled.hot_key_worker", LEASE="2")


def total(scene: Scene) -> int:
    with scene.engine.begin() as connection:
        return int(connection.scalar(sa.text(TOTAL), {"topic": scene.topic}) or 0)


def write(scene: Scene, units: int, history: Path, recorder: Recorder) -> int:
    """Have so many units written by processes, of which one is killed and replaced now and then; how many were killed."""
    chance, kills, workers = random.Random(units), 0, [worker(scene, history, number) for number in range(PROCESSES)]
    try:
        for each in workers:
            each.wait_for("open")
        kill_at = time.monotonic() + chance.uniform(*KILLS_EVERY)
        while total(scene) < units:
            time.sleep(0.2)
            if time.monotonic() > kill_at:
                killed = workers.pop(chance.randrange(PROCESSES))
                recorder.fault("a process killed", str(killed.process.pid))
                killed.kill()
                workers.append(worker(scene, history, PROCESSES + kills))
                kills += 1
                workers[-1].wait_for("open")
                kill_at = time.monotonic() + chance.uniform(*KILLS_EVERY)
        for each in workers:
            each.tell("stop")
        for each in workers:
            assert each.end() == 0, each.errors[-3000:]
            assert not [line for line in each.lines if line.startswith("error")], each.lines[:5]
    finally:
        for each in workers:
            each.process.kill()
    return kills


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("database", "units"), [("postgresql", 100_000), ("mariadb", 20_000)])
def test_each_number_of_each_key_is_published_once_and_in_order(
    databases: Databases, broker: DevCluster, history: Path, database: str, units: int
) -> None:
    scene = databases.scene(database, broker)
    make_topic(broker, scene.topic, PARTITIONS)
    begin(scene)
    with recording(history, scene, broker) as recorder:
        began = time.monotonic()
        kills = write(scene, units, history, recorder)
        wrote, journal = time.monotonic(), SqlStateStore(scene.engine).journal
        (left,) = journal.gates(scene.transactional_id, counts=True)
        publish_all(scene)
    done = total(scene)
    assert done >= units
    print(  # noqa: T201  (the figures of a soak run)
        f"{database}: {done} units by {PROCESSES} processes in {wrote - began:.0f} s, {done / (wrote - began):.0f} a second; "
        f"{kills} processes killed; {left.entries} messages left at the end"
    )
