"""Relays are killed, paused and taken over, at every step of the recipe: each row is published once, in order."""

from __future__ import annotations

import logging
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import islice, product
from pathlib import Path

import pytest
from history_recorder import Recorder
from relay_scene import RelayScene, key_of, running

from crash.cases import WRITER_POINTS
from dualwrite.devcluster import DevCluster
from dualwrite.observability.outages import kafka_at
from dualwrite.testing.proxy import TcpProxy
from fixtures.broker_door import BrokerBehindDoor
from fixtures.fork_server import ForkedProcess
from fixtures.histories import judge
from fixtures.pace import LIMIT, ended, until
from fixtures.tiers import thinned

pytestmark = pytest.mark.slow

DATABASES = ["postgresql", "mariadb", "sqlite"]
LEASE = 1.0
BATCH = 4
Make = Callable[[str], "Crashing"]


class Crashing(RelayScene):
    """A scene with the processes on it."""

    def __init__(self, url: str, broker: DevCluster | BrokerBehindDoor, new_name: Callable[[str], str]) -> None:
        super().__init__(url, broker, new_name)
        self.processes: list[ForkedProcess] = []

    def start(self, failpoints: str = "", *, url: str | None = None, shards: int = 1, lease: float = LEASE) -> ForkedProcess:
        arguments = [url or self.url, self.servers, self.name, str(BATCH), str(lease), str(shards)]
        process = ForkedProcess("relay.relay_worker", arguments, failpoints=failpoints)
        self.processes.append(process)
        return process

    def wait_until_empty(self, seconds: float = LIMIT) -> None:
        until(lambda: self.waiting() == 0, "the outbox is empty", seconds=seconds, pause=0.1)

    def stop(self, *processes: ForkedProcess) -> None:
        """Stop processes in the way that a service is stopped: each finishes its batch."""
        for process in processes:
            process.send_signal(signal.SIGTERM)
        assert [ended(process) for process in processes] == [0] * len(processes)

    def close(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.kill()
                ended(process)
        self.engine.dispose()


@pytest.fixture
def crashing(request: pytest.FixtureRequest, broker: DevCluster, new_name: Callable[[str], str]) -> Iterator[Make]:
    fixtures = {"sqlite": "sqlite_url", "postgresql": "postgres_url", "mariadb": "mariadb_url"}
    with ExitStack() as opened:

        def make(database: str) -> Crashing:
            found = Crashing(request.getfixturevalue(fixtures[database]), broker, new_name)
            opened.callback(found.close)
            return found

        yield make


@pytest.mark.parametrize(
    ("database", "point"),
    thinned(
        product(DATABASES, WRITER_POINTS),
        kept=[
            *product(["postgresql"], WRITER_POINTS),
            *product(["mariadb", "sqlite"], ["after_prepare", "before_db_commit", "after_db_commit"]),
        ],
    ),
)
def test_a_relay_that_is_killed_is_relieved_by_another(crashing: Make, database: str, point: str) -> None:
    scene = crashing(database)
    scene.insert(30)
    killed = scene.start(f"{point}#3=kill")
    until(lambda: scene.waiting() < 30 or killed.poll() is not None, "it has the lease")
    other = scene.start()
    assert ended(killed) == -signal.SIGKILL
    scene.insert(10)
    scene.wait_until_empty()
    scene.stop(other)
    scene.check(range(40))


@pytest.mark.parametrize("point", ["after_send", "after_record", "after_db_commit"])
def test_a_relay_that_is_paused_beyond_its_lease_cannot_continue(crashing: Make, point: str) -> None:
    scene = crashing("postgresql")
    scene.insert(30)
    paused = scene.start(f"{point}#3=stop")
    until(lambda: _is_stopped(paused), "it stops")
    other = scene.start()
    time.sleep(2 * LEASE)  # the other one takes over, and waits for the rows that the first one has locked
    paused.send_signal(signal.SIGCONT)
    scene.insert(30)
    scene.wait_until_empty()
    scene.stop(paused, other)
    scene.check(range(60))


def _is_stopped(process: ForkedProcess) -> bool:
    return Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


@pytest.mark.parametrize("database", ["postgresql", "mariadb"])
def test_two_relays_share_shards_and_take_over_those_of_a_dead_one(crashing: Make, database: str) -> None:
    scene = crashing(database)
    scene.insert(50)
    first, second = scene.start(shards=4), scene.start("after_record#12=kill", shards=4)
    for _ in range(20):
        scene.insert(20)
        time.sleep(0.02)
    scene.wait_until_empty()
    scene.insert(200)
    scene.wait_until_empty()
    first.kill()
    ended(first)
    scene.insert(50)
    third = scene.start(shards=3)  # another number of shards
    scene.wait_until_empty()
    scene.stop(third, *([second] if second.poll() is None else []))
    scene.check(range(700))


@pytest.mark.parametrize("database", ["postgresql", "mariadb"])
def test_the_connection_to_the_database_is_cut_again_and_again(crashing: Make, database: str) -> None:
    scene = crashing(database)
    with TcpProxy(str(scene.engine.url.host), int(scene.engine.url.port or 0)) as proxy:
        url = scene.engine.url.set(host="127.0.0.1", port=proxy.port).render_as_string(hide_password=False)
        scene.insert(200)
        relay = scene.start(url=url, lease=5)
        for _ in range(8):
            time.sleep(0.3)
            proxy.cut()
            scene.insert(10)
        scene.wait_until_empty()
        scene.stop(relay)
    scene.check(range(280))


def test_the_broker_is_down_and_back_again(
    sqlite_url: str, broker_behind_door: BrokerBehindDoor, new_name: Callable[[str], str]
) -> None:
    scene = Crashing(sqlite_url, broker_behind_door, new_name)
    with ExitStack() as opened:
        opened.callback(scene.close)
        scene.insert(100)
        relay = scene.start()
        until(lambda: scene.waiting() < 80)
        broker_behind_door.kill()
        scene.insert(50)
        time.sleep(2)
        broker_behind_door.start()
        scene.insert(50)
        scene.wait_until_empty(3 * LIMIT)
        scene.stop(relay)
        scene.check(range(200))


@pytest.mark.soak
def test_an_outage_of_kafka_is_one_warning(
    sqlite_url: str, broker_behind_door: BrokerBehindDoor, new_name: Callable[[str], str], caplog: pytest.LogCaptureFixture
) -> None:
    """The relay itself says nothing louder, however often it tries; see `dualwrite.observability.outages`."""
    scene = Crashing(sqlite_url, broker_behind_door, new_name)
    kafka = kafka_at(scene.servers)
    with running(scene, longest_pause=0.2):
        scene.insert(5)
        scene.wait_until_empty()
        broker_behind_door.kill()
        scene.insert(5)
        until(lambda: kafka.is_out, "the outage is noticed")
        time.sleep(3)
        broker_behind_door.start()
        scene.wait_until_empty(3 * LIMIT)
        until(lambda: not kafka.is_out, "its end is noticed", seconds=3 * LIMIT)
    scene.check(range(10))
    scene.close()
    loud = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert {record.name for record in loud} == {"dualwrite.outages"}, caplog.text
    assert ["does not answer" in record.getMessage() for record in loud] == [True, False], caplog.text


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("database", DATABASES)
@pytest.mark.parametrize("shards", [1, 3])
def test_random_kills_and_pauses_of_relays(
    crashing: Make, broker: DevCluster, history: Path, database: str, shards: int
) -> None:
    """Three relays, killed and paused at random for a minute, while rows are inserted by four threads."""
    if database == "sqlite" and shards > 1:
        pytest.skip("one transaction at a time")
    scene, chance, over = crashing(database), random.Random(7), threading.Event()

    recorder = Recorder(history, "test", versions={"kafka": broker.status().kafka_version})

    def insert(client: int) -> None:
        while not over.wait(0.05):
            with inserting:  # so that the numbers of a key commit in their order
                numbers = list(islice(scene.numbers, 10))
                sent = {scene.topic: [(key_of(number), str(number)) for number in numbers]}
                with recorder.operation(client, (), sent, fails=lambda _: False), scene.engine.begin() as connection:
                    scene.insert_on(connection, numbers)

    inserting = threading.Lock()
    threads = [threading.Thread(target=insert, args=(client,)) for client in range(4)]
    for thread in threads:
        thread.start()
    relays = [scene.start(shards=shards) for _ in range(3)]
    end = time.monotonic() + 60
    while time.monotonic() < end:
        time.sleep(chance.uniform(0.1, 1.5))
        index = chance.randrange(3)
        if chance.random() < 0.3:
            recorder.fault("a relay paused")
            relays[index].send_signal(signal.SIGSTOP)
            time.sleep(chance.uniform(0, 2.5 * LEASE))
            relays[index].send_signal(signal.SIGCONT)
        else:
            recorder.fault("a relay killed")
            relays[index].kill()
            ended(relays[index])
            relays[index] = scene.start(shards=shards)
    over.set()
    for thread in threads:
        thread.join()
    scene.wait_until_empty(3 * LIMIT)
    scene.stop(*relays)
    judge(recorder, history, scene.servers, scene.topic)
