"""Processors are killed while their pools write into the journal, and while it is emptied: each message takes effect once.

In CI the broker is behind a door; `pytest -m soak` kills it.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import product

import pytest

from crash.databases import Databases
from crash.scene import Worker
from dualwrite.devcluster import DevCluster
from fixtures.broker_door import BrokerBehindDoor
from fixtures.pace import LIMIT, until_recorded
from fixtures.tiers import thinned
from processor.journal_processing import JournalScene

pytestmark = pytest.mark.slow

COUNT = 600
EMPTIES = "journal_before_close"
KILLED_AT = ["journal_after_entries", EMPTIES, "after_record", "before_db_commit", "after_db_commit"]


class Members:
    """Processes of one consumer group; those that are left are killed at the end."""

    def __init__(self, scene: JournalScene, opened: ExitStack) -> None:
        self._scene = scene
        self._opened = opened

    def start(self, member: str | None = None, **environment: str) -> Worker:
        scene = self._scene
        where = [scene.events.url, scene.broker.bootstrap_servers, scene.prefix, scene.group, scene.source, scene.target]
        if member is not None:
            where.append(member)
        worker = Worker(where, module="processor.journal_worker", **environment)
        self._opened.callback(lambda: worker.process.poll() is None and worker.kill())
        return worker


@pytest.fixture
def broker(request: pytest.FixtureRequest) -> BrokerBehindDoor | DevCluster:
    """A broker that goes down: behind a door, or `brisk` itself if the test has that as an indirect parameter."""
    found: BrokerBehindDoor | DevCluster = request.getfixturevalue(getattr(request, "param", "brisk_behind_door"))
    return found


@pytest.fixture
def scene(
    databases: Databases, broker: BrokerBehindDoor | DevCluster, new_name: Callable[[str], str], database: str
) -> Iterator[JournalScene]:
    """A scene without messages; the broker, which the test may kill, is running again after it."""
    yield JournalScene(databases.scene(database, broker).events, broker, new_name)
    broker.start(timeout=LIMIT)


@pytest.fixture
def members(scene: JournalScene) -> Iterator[Members]:
    with ExitStack() as opened:
        yield Members(scene, opened)


def finished(scene: JournalScene, workers: list[Worker], count: int) -> None:
    """Wait until everything is processed, and stop the processes."""
    until_recorded(lambda: scene.events.numbers(scene.group), range(count), seconds=3 * LIMIT, pause=0.3)
    for worker in workers:
        worker.tell("stop")
    for worker in workers:
        assert worker.end() == 0, worker.errors[-3000:]


@pytest.mark.parametrize(
    ("database", "point"),
    thinned(
        product(["postgresql", "mariadb", "sqlite"], KILLED_AT),
        kept=[("postgresql", "journal_after_entries"), ("postgresql", "after_db_commit"), ("postgresql", EMPTIES)],
    ),
)
def test_a_processor_dies_while_the_gate_is_open_and_others_take_over(
    scene: JournalScene, members: Members, broker: BrokerBehindDoor, point: str
) -> None:
    """It has fetched all messages when the broker dies. One of the others has its membership, and so its partitions at once."""
    scene.produce(range(COUNT))
    dying = members.start("1", JOURNAL_FAILPOINT=point)
    dying.wait_for("processing")
    broker.kill()
    dying.tell("arm")
    dying.wait_for("armed")
    if point == EMPTIES:
        broker.start(timeout=LIMIT)
    dying.killed()
    others = [members.start("1"), members.start("2")]
    if point != EMPTIES:
        broker.start(timeout=LIMIT)
    finished(scene, others, COUNT)
    scene.assert_once_after_all(COUNT)


@pytest.mark.parametrize("database", thinned(["postgresql", "mariadb", "sqlite"], kept=["postgresql"]))
@pytest.mark.parametrize("broker", thinned(["brisk_behind_door", "brisk"], kept=["brisk_behind_door"]), indirect=True)
@pytest.mark.soak
def test_random_kills_of_processors_and_of_the_broker(
    scene: JournalScene, members: Members, broker: BrokerBehindDoor | DevCluster
) -> None:
    pauses = 0.5 if isinstance(broker, BrokerBehindDoor) else 1
    chance = random.Random(5)
    workers = [members.start() for _ in range(3)]
    count = 0
    for _ in range(4):
        scene.produce(range(count, count + 200))
        count += 200
        time.sleep(pauses * chance.uniform(0.5, 2))
        broker.kill()
        time.sleep(pauses * chance.uniform(0.5, 4))
        if chance.random() < 0.5:
            workers.pop(0).kill()
            workers.append(members.start())
        broker.start(timeout=LIMIT)
        time.sleep(pauses * chance.uniform(0, 2.5))
        if chance.random() < 0.5:  # perhaps it empties the journal
            workers.pop(0).kill()
            workers.append(members.start())
    finished(scene, workers, count)
    scene.assert_once_after_all(count)
