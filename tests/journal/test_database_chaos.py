"""The database dies too, while Kafka is down and while it comes back: nothing is lost, doubled or out of order.

Three processes add links to chains (`chain_worker`). Their database is killed with SIGKILL and started again, and their
connections are cut in the middle of whatever they do: a statement, a COMMIT, opening the gate, emptying the journal. The broker
is behind a door (`test_chaos.py` kills it), except in the long runs.
"""

from __future__ import annotations

import random
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import sqlalchemy as sa

from crash.events import Events, SqlEvents
from crash.scene import Scene, Worker
from dualwrite.devcluster import DevCluster
from dualwrite.stores.sql import SqlStateStore
from dualwrite.testing.postgres import PostgresServer
from dualwrite.testing.proxy import TcpProxy
from fixtures.broker import make_topic
from fixtures.broker_door import BrokerBehindDoor
from fixtures.mariadb_server import MariaDBServer
from fixtures.pace import LIMIT, done, until
from journal.conftest import BEHIND_DOOR, KILLED
from journal.test_chaos import assert_chains, begin_chains, chain_worker, until_drained

pytestmark = pytest.mark.slow

WORKERS = 3
SERVERS = {"postgresql": PostgresServer, "mariadb": MariaDBServer}


class Database(ABC):
    """A database that breaks.

    Attributes:
        direct: How the test reaches it.
        of_workers: How the workers do.
    """

    direct: Events
    of_workers: Events

    @abstractmethod
    def strike(self, chance: random.Random, workers: Workers) -> None:
        """Break it in one of its ways; it works again when this returns."""


class Server(Database):
    """A server, which the workers reach through a proxy."""

    def __init__(self, server: PostgresServer | MariaDBServer, proxy: TcpProxy) -> None:
        self._server = server
        self._proxy = proxy
        url = server.create_database("chaos")
        self.direct = SqlEvents(url)
        self.of_workers = SqlEvents(sa.make_url(url).set(port=proxy.port).render_as_string(hide_password=False))

    def strike(self, chance: random.Random, workers: Workers) -> None:
        del workers
        ways = [self._proxy.cut, self._proxy.cut_with_reset, self._cut_off, self._kill]
        chance.choices(ways, [1, 1, 1, 3])[0]()

    def _cut_off(self) -> None:
        self._proxy.refuse()
        self._proxy.cut()
        time.sleep(1)
        self._proxy.refuse(refusing=False)

    def _kill(self) -> None:
        self._server.kill()
        time.sleep(0.5)
        self._server.start()


class File(Database):
    """A SQLite file: only those who use it can die."""

    def __init__(self, folder: Path) -> None:
        self.direct = self.of_workers = SqlEvents(f"sqlite:///{folder}/chaos.db")

    def strike(self, chance: random.Random, workers: Workers) -> None:
        del chance
        workers.kill_all()


@pytest.fixture
def broken(database: str, tmp_path: Path) -> Iterator[Database]:
    with ExitStack() as opened:
        if database == "sqlite":
            yield File(tmp_path)
            return
        server = opened.enter_context(SERVERS[database]())
        proxy = opened.enter_context(TcpProxy("127.0.0.1", server.port))
        yield Server(server, proxy)


@pytest.fixture
def scene(broken: Database, own_broker: BrokerBehindDoor | DevCluster, producer: str) -> Iterator[Scene]:
    """As the tests see it: without the proxy."""
    del producer
    broken.direct.create()
    made = Scene(broken.direct, own_broker.bootstrap_servers)
    make_topic(own_broker, made.topic)
    yield made
    own_broker.start(1, timeout=LIMIT)


class Workers:
    """Three worker processes; each that is killed is followed by another one."""

    def __init__(self, scene: Scene, environment: dict[str, str]) -> None:
        self._scene = scene
        self._environment = environment
        self._running = [self._started() for _ in range(WORKERS)]

    def _started(self) -> Worker:
        return chain_worker(self._scene, **self._environment)

    def wait_until_open(self) -> None:
        for worker in self._running:
            worker.wait_for("open")

    def kill_one(self) -> None:
        self._running[0].kill()
        self._running = [*self._running[1:], self._started()]

    def kill_all(self) -> None:
        for worker in self._running:
            worker.process.kill()
        for worker in self._running:
            worker.end()
        self._running = [self._started() for _ in range(WORKERS)]

    def finish(self) -> None:
        """Tell all to stop."""
        for worker in self._running:
            worker.tell("stop")
        for worker in self._running:
            assert worker.end() == 0, worker.errors[-3000:]

    def end(self) -> None:
        for worker in self._running:
            if worker.process.poll() is None:
                worker.kill()


@contextmanager
def adding_links(scene: Scene, database: Database, environment: dict[str, str]) -> Iterator[Workers]:
    workers = Workers(replace(scene, events=database.of_workers), environment)
    try:
        workers.wait_until_open()
        yield workers
    finally:
        workers.end()


def break_everything(
    scene: Scene, workers: Workers, database: Database, broker: BrokerBehindDoor | DevCluster, *, rounds: int, seed: int
) -> None:
    """Kill and start the broker; the database breaks before, meanwhile, while the broker comes back, and after that."""
    chance = random.Random(seed)
    journal = SqlStateStore(scene.engine).journal

    def strike(probability: float) -> None:
        if chance.random() < probability:
            database.strike(chance, workers)
            time.sleep(chance.uniform(0, 1))

    with ThreadPoolExecutor() as threads:
        for number in range(rounds):
            time.sleep(chance.uniform(0.2, 1.5))
            strike(0.3)
            broker.kill(1)
            if number == 0:
                until(lambda: journal.gates(scene.transactional_id, counts=False)[0].is_open, "the gate open")
            time.sleep(chance.uniform(0, 2.5))  # later perhaps before the gate is open
            strike(0.9)
            time.sleep(chance.uniform(0.5, 2))
            if chance.random() < 0.3:
                workers.kill_one()
            starting = threads.submit(broker.start, 1, timeout=LIMIT)
            time.sleep(chance.uniform(0, 0.5))
            strike(0.5)
            done(starting)
            time.sleep(chance.uniform(0, 1))
            strike(0.7)  # perhaps the journal is being emptied
            time.sleep(chance.uniform(0, 1.5))


CASES = [
    ("postgresql", {}),
    ("mariadb", {}),
    ("sqlite", {}),
    ("postgresql", {"ISOLATION": "SERIALIZABLE"}),
    ("mariadb", {"ISOLATION": "READ COMMITTED"}),
    ("postgresql", {"TWO_PHASE": "no"}),
]


@pytest.mark.soak
@pytest.mark.parametrize(("database", "environment"), CASES)
def test_chains_are_kept_while_the_database_dies_too(
    scene: Scene, broken: Database, own_broker: BrokerBehindDoor, environment: dict[str, str]
) -> None:
    begin_chains(scene)
    with adding_links(scene, broken, environment) as workers:
        break_everything(scene, workers, broken, own_broker, rounds=3, seed=1)
        workers.finish()
    until_drained(scene)
    assert assert_chains(scene) > 0


@pytest.mark.soak
@pytest.mark.parametrize("database", ["postgresql", "mariadb", "sqlite"])
@pytest.mark.parametrize("seed", range(2, 5))
@pytest.mark.parametrize("own_broker", [BEHIND_DOOR, KILLED], indirect=True)
def test_chains_are_kept_for_long(scene: Scene, broken: Database, own_broker: BrokerBehindDoor | DevCluster, seed: int) -> None:
    begin_chains(scene)
    with adding_links(scene, broken, {}) as workers:
        break_everything(scene, workers, broken, own_broker, rounds=8, seed=seed)
        workers.finish()
    until_drained(scene)
    assert assert_chains(scene) > 0
