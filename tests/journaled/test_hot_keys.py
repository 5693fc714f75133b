"""A long run on few keys: three processes count the same rows up and send each number, and are killed now and then.

Afterwards the topic has 1, 2, 3, … of each key, in this order, each once, and up to what its row says.
"""

from __future__ import annotations

import random
import time
from collections import defaultdict

import pytest
import sqlalchemy as sa

import dualwrite
from crash.databases import Databases
from crash.scene import Scene, Worker
from dualwrite.devcluster import DevCluster
from dualwrite.stores.sql import SqlStateStore
from fixtures.broker import make_topic, read_topic
from fixtures.pace import LIMIT, until
from journaled.hot_key_worker import KEYS
from journaled.journaled_scene import journaled_pool

PROCESSES = 3
THREADS = 4
PARTITIONS = 3
KILLS_EVERY = (3.0, 9.0)
"""Seconds between two kills."""

CREATE = """
CREATE TABLE IF NOT EXISTS hot_keys (topic varchar(100), hot_key integer, number integer, PRIMARY KEY (topic, hot_key))
"""
TOTAL = "SELECT sum(number) FROM hot_keys WHERE topic = :topic"


def worker(scene: Scene) -> Worker:
    where = [scene.url, scene.bootstrap, scene.transactional_id, scene.topic, str(THREADS)]
    return Worker(where, module="journaled.hot_key_worker", LEASE="2")


def begin(scene: Scene) -> None:
    with scene.engine.begin() as connection:
        connection.execute(sa.text(CREATE))
        insert = sa.text("INSERT INTO hot_keys VALUES (:topic, :key, 0)")
        connection.execute(insert, [{"topic": scene.topic, "key": key} for key in range(KEYS)])


def total(scene: Scene) -> int:
    with scene.engine.begin() as connection:
        return int(connection.scalar(sa.text(TOTAL), {"topic": scene.topic}) or 0)


def write(scene: Scene, units: int) -> int:
    """Have so many units written by processes, of which one is killed and replaced now and then; how many were killed."""
    chance, kills, workers = random.Random(units), 0, [worker(scene) for _ in range(PROCESSES)]
    try:
        for each in workers:
            each.wait_for("open")
        kill_at = time.monotonic() + chance.uniform(*KILLS_EVERY)
        while total(scene) < units:
            time.sleep(0.2)
            if time.monotonic() > kill_at:
                workers.pop(chance.randrange(PROCESSES)).kill()
                kills += 1
                workers.append(worker(scene))
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
    databases: Databases, broker: DevCluster, database: str, units: int
) -> None:
    scene = databases.scene(database, broker)
    make_topic(broker, scene.topic, PARTITIONS)
    begin(scene)
    began = time.monotonic()
    kills = write(scene, units)
    wrote, journal = time.monotonic(), SqlStateStore(scene.engine).journal
    (left,) = journal.gates(scene.transactional_id, counts=True)
    with journaled_pool(scene, scene.engine):
        until(lambda: not journal.gates(scene.transactional_id, counts=True)[0].entries, "all is published", seconds=10 * LIMIT)
    published = time.monotonic()
    dualwrite.recover(scene.engine, kafka=scene.settings, prefix=scene.transactional_id).raise_for_problems()
    found = defaultdict(list)
    for message in read_topic(scene.bootstrap, scene.topic):
        found[int(message.key() or b"")].append(int(message.value() or b""))
    with scene.engine.begin() as connection:
        rows = connection.execute(sa.text("SELECT hot_key, number FROM hot_keys WHERE topic = :topic"), {"topic": scene.topic})
        numbers = {row.hot_key: row.number for row in rows}
    for key, number in numbers.items():
        assert found[key] == list(range(1, number + 1)), f"key {key}"
    done = sum(map(len, found.values()))
    assert done >= units
    print(  # noqa: T201  (the figures of a soak run)
        f"{database}: {done} units by {PROCESSES} processes in {wrote - began:.0f} s, {done / (wrote - began):.0f} a second; "
        f"{kills} processes killed; {left.entries} messages left at the end, published in {published - wrote:.1f} s"
    )
