"""Processors are killed, paused and taken over, at every step: each number is booked once, and answered once."""

from __future__ import annotations

import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, nullcontext
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from history_recorder import Recorder
from processor_scene import PARTITIONS, ProcessorScene

import dualwrite
from crash.cases import WRITER_POINTS
from dualwrite.devcluster import DevCluster
from dualwrite.testing.postgres import PostgresServer
from fixtures.broker import BRISK, make_topic, read_topic, started, wait_for_markers
from fixtures.fork_server import ForkedProcess
from fixtures.histories import judge
from fixtures.kfake_broker import VERSIONS, Kfake
from fixtures.mariadb_server import MariaDBServer
from fixtures.pace import LIMIT, ended, until, until_received, until_recorded
from fixtures.producing import producing
from fixtures.tiers import thinned
from fixtures.zookeeper_server import ZooKeeperServer
from processor.ledger import ledger
from processor.processor_worker import PROCESS

pytestmark = pytest.mark.slow

NewName = Callable[[str], str]
DATABASES = ["postgresql", "mariadb", "sqlite", "rocksdb", "zookeeper"]
PROTOCOLS = {"classic": (), "consumer": ("group.protocol=consumer", "session.timeout.ms=", "heartbeat.interval.ms=")}
AT_KAFKA = "offsets=kafka"
RECIPES: list[tuple[str, ...]] = [(), (AT_KAFKA,)]
STOPPED = {0, -signal.SIGTERM}
"""A process that has only just been started has no handler yet."""
BATCH = 5


class Crashing(ProcessorScene):
    """A scene with the processes on it.

    Args:
        url: The database.
        broker: The cluster.
        new_name: Makes names.
        history: Where a history is recorded.
    """

    def __init__(self, url: str, broker: DevCluster, new_name: NewName, history: Path | None = None) -> None:
        super().__init__(ledger(url), broker, new_name)
        self.url, self.servers = url, broker.bootstrap_servers
        self.produced = self._started = 0
        self._history = history
        self.recorder = (
            None if history is None else Recorder(history, "test", versions={"kafka": broker.status().kafka_version})
        )
        self._processes = ExitStack()

    def produce_more(self, count: int) -> None:
        new = range(self.produced, self.produced + count)
        sent = {self.source: [(None, str(number)) for number in new]}
        with self.recorder.operation("source", (), sent, fails=lambda _: False) if self.recorder else nullcontext():
            self.produce(new)
        self.produced += count

    def numbers(self) -> list[int]:
        """The numbers that are booked, whichever process has booked them."""
        return sorted(number % PROCESS for number in self.events.numbers(self.group))

    def answers(self) -> list[int]:
        return sorted(number % PROCESS for number in super().answers())

    def judge(self, positions: Mapping[int, int]) -> None:
        """Read both sides, and have the history judged."""
        assert self.recorder is not None
        assert self._history is not None
        self.recorder.final_rows(self.events.numbers(self.group))
        for partition in range(PARTITIONS):
            self.recorder.final_position(self.group, self.source, partition, positions.get(partition, 0))
        judge(self.recorder, self._history, self.servers, self.source, self.target)

    def start(self, name: str = "1", failpoints: str = "", batch: int = BATCH, *more: str) -> ForkedProcess:
        arguments = [self.url, self.servers, self.group, self.source, self.target, f"{self.prefix}.{name}", str(batch), *more]
        if name == "*":
            arguments[5] = f"{self.prefix}*"
        if self._history is not None:
            arguments += [f"history={self._history}", f"process={self._started}"]
        self._started += 1
        process = ForkedProcess("processor.processor_worker", arguments, failpoints=failpoints)
        self._processes.callback(_kill, process)
        return process

    def wait_for_all(self, seconds: float = LIMIT) -> None:
        until_recorded(self.numbers, range(self.produced), seconds=seconds, pause=0.3)

    def wait_for_answers(self) -> None:
        """Until as many are visible as there should be; so nothing is left that waits for recovery."""
        until_received(self.answers, "answers", at_least=self.produced, seconds=3 * LIMIT, pause=1)

    def check(self) -> None:
        """Both sides have each number once."""
        wait_for_markers(self.servers)
        self.check_one(self.events.numbers(self.group))
        self.check_one(self.answers())

    def check_one(self, found: list[int]) -> None:
        expected = list(range(self.produced))
        assert found == expected, Counter(found) - Counter(expected) or Counter(expected) - Counter(found)

    def close(self) -> None:
        self._processes.close()


def _kill(process: ForkedProcess) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGCONT)
        process.kill()
        ended(process)


@pytest.fixture(scope="module")
def urls(tmp_path_factory: pytest.TempPathFactory, server_of: Callable[[type[Any]], Any]) -> Callable[[str], str]:
    """A new SQLite file or RocksDB folder each time, one database on each server."""
    made: dict[str, str] = {}

    def url_of(database: str) -> str:
        if database in ("sqlite", "rocksdb"):
            name = tmp_path_factory.mktemp("processor") / "data"
            url = f"{database}:///{name}"
        elif database in made:
            return made[database]
        elif database == "zookeeper":
            url = str(server_of(ZooKeeperServer).url)
        else:
            url = server_of(PostgresServer if database == "postgresql" else MariaDBServer).create_database("processor")
        ledger(url).create()
        made[database] = url
        return url

    return url_of


@pytest.fixture
def crashing(urls: Callable[[str], str], brisk: DevCluster, new_name: NewName) -> Iterator[Callable[[str], Crashing]]:
    with ExitStack() as opened:

        def make(database: str) -> Crashing:
            found = Crashing(urls(database), brisk, new_name)
            opened.callback(found.close)
            return found

        yield make


@pytest.mark.parametrize(
    ("database", "point", "more"),
    thinned(
        product(DATABASES, WRITER_POINTS, RECIPES),
        kept=[
            *product(["postgresql"], ["after_prepare", "after_db_commit", "after_kafka_commit"], [()]),
            ("zookeeper", "after_db_commit", ()),  # each database: tests/crash
            ("sqlite", "after_prepare", (AT_KAFKA,)),
        ],
    ),
)
def test_a_processor_that_is_killed(
    crashing: Callable[[str], Crashing], database: str, point: str, more: tuple[str, ...]
) -> None:
    scene = crashing(database)
    scene.produce_more(30)
    killed = scene.start("1", f"{point}#3=kill", 2, *more)
    assert ended(killed) == -signal.SIGKILL
    running = scene.start("1", "", BATCH, *more)
    if database == "rocksdb":  # only one process can open it
        time.sleep(1)
        until_recorded(scene.answers, range(scene.produced), pause=0.3)
    else:
        scene.wait_for_all()
    running.send_signal(signal.SIGTERM)
    assert ended(running) == 0
    scene.check()


@pytest.mark.soak
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("point", ["after_prepare", "after_db_commit", "after_kafka_commit"])
@pytest.mark.parametrize("more", RECIPES)
def test_a_processor_that_is_killed_at_a_broker_that_is_not_apaches(
    urls: Callable[[str], str],
    kfake: Callable[[str], Kfake],
    new_name: NewName,
    version: str,
    point: str,
    more: tuple[str, ...],
) -> None:
    with closing(Crashing(urls("sqlite"), kfake(version), new_name)) as scene:  # type: ignore[arg-type]  # its servers are enough
        scene.produce_more(30)
        assert ended(scene.start("1", f"{point}#3=kill", 2, *more)) == -signal.SIGKILL
        running = scene.start("1", "", BATCH, *more)
        scene.wait_for_all()
        running.send_signal(signal.SIGTERM)
        assert ended(running) == 0
        scene.check()


@pytest.mark.parametrize(
    ("database", "point"),
    thinned(
        product(DATABASES, ["after_begin", "before_db_commit", "after_db_commit"]),
        kept=[("postgresql", "before_db_commit")],
    ),
)
def test_a_kill_of_a_processor_that_writes_only_to_the_database(
    crashing: Callable[[str], Crashing], database: str, point: str
) -> None:
    """Kafka has no part in its transactions."""
    scene = crashing(database)
    scene.produce_more(30)
    assert ended(scene.start("1", f"{point}#3=kill", 2, "answers=no")) == -signal.SIGKILL
    running = scene.start("1", "", BATCH, "answers=no")
    if database == "rocksdb":  # only one process can open it; it shows what it has done by the group's offsets
        until_recorded(lambda: {"offsets": sum(scene.shown().values())}, {"offsets": scene.produced}, pause=0.3)
    else:
        scene.wait_for_all()
    running.send_signal(signal.SIGTERM)
    assert ended(running) == 0
    scene.check_one(scene.events.numbers(scene.group))
    assert scene.answers() == []


@pytest.mark.parametrize(
    "more", thinned([(each,) for each in RECIPES], kept=[(RECIPES[0],)]), ids=["in the database", "at Kafka"]
)
def test_a_kill_between_two_attempts(
    crashing: Callable[[str], Crashing], new_name: NewName, brisk: DevCluster, more: tuple[str, ...]
) -> None:
    """The next process begins to count again, and gives the message up once."""
    scene, dead = crashing("postgresql"), new_name("dead")
    make_topic(brisk, dead)
    scene.produce_more(6)
    with producing(scene.servers) as produce:
        produce(scene.source, b"bad", partition=0)
    scene.produce_more(6)
    more = (*more, f"dead_letter_topic={dead}")
    with_pauses = scene.start("1", "", BATCH, *more, "attempts=1000000")
    until_received(
        lambda: [one for one in scene.events.numbers(scene.group) if one == 0], "those before it are booked", pause=0.2
    )
    time.sleep(1)
    with_pauses.kill()
    assert ended(with_pauses) == -signal.SIGKILL
    assert read_topic(scene.servers, dead) == []
    running = scene.start("1", "", BATCH, *more, "attempts=3")
    scene.wait_for_all()
    (letter,) = until_received(lambda: read_topic(scene.servers, dead), "the dead letter", pause=0.2)
    running.send_signal(signal.SIGTERM)
    assert ended(running) == 0
    assert (letter.value(), dict(letter.headers() or ())["dualwrite.attempts"]) == (b"bad", b"3")
    scene.check()
    assert len(read_topic(scene.servers, dead)) == 1


@pytest.mark.parametrize(
    ("protocol", "more"),
    thinned(product(PROTOCOLS, RECIPES), kept=[("classic", ()), ("consumer", (AT_KAFKA,))]),
)
def test_a_processor_paused_beyond_its_session_timeout(
    crashing: Callable[[str], Crashing], protocol: str, more: tuple[str, ...]
) -> None:
    """SIGSTOP in the middle of a transaction, takeover by another member, SIGCONT: it can't commit what it had begun."""
    scene = crashing("postgresql")
    more = (*more, *PROTOCOLS[protocol])
    scene.produce_more(60)
    paused = scene.start("1", "after_send#7=stop", 4, *more)
    until(lambda: _is_stopped(paused), "it stops")
    other = scene.start("2", "", BATCH, *more)
    scene.wait_for_all(2 * LIMIT)
    paused.send_signal(signal.SIGCONT)
    scene.produce_more(60)
    scene.wait_for_all()
    for process in (paused, other):
        process.send_signal(signal.SIGTERM)
    assert [ended(process) for process in (paused, other)] == [0, 0]
    scene.check()


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("more", RECIPES, ids=["in the database", "at Kafka"])
@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("database", DATABASES)
def test_random_kills_and_pauses_of_processors_and_broker(
    urls: Callable[[str], str], new_name: NewName, history: Path, database: str, protocol: str, more: tuple[str, ...]
) -> None:
    """Three processors of one group, random kills, pauses past the session, and kills of the broker, for a minute.

    Only one process can open a RocksDB database: there, the three are threads of one process, which share its pool.
    """
    chance = random.Random(7)
    more = (*more, *PROTOCOLS[protocol])
    count = 1 if database == "rocksdb" else 3
    arguments = (*more, "processors=3") if database == "rocksdb" else more
    with started(config=BRISK) as cluster, ExitStack() as opened:
        scene = Crashing(urls(database), cluster, new_name, history)
        opened.callback(scene.close)
        processes = [scene.start("*", "", BATCH, *arguments) for _ in range(count)]
        done = Counter[str]()

        def check_that_nobody_has_ended() -> None:
            assert [process.poll() for process in processes] == [None] * count, f"one has ended by itself, after {dict(done)}"

        until_then = time.monotonic() + 60
        while time.monotonic() < until_then:
            scene.produce_more(200)
            time.sleep(chance.uniform(0.5, 3))
            place = chance.randrange(count)
            what = chance.choice(["kill", "kill", "pause", "stop", "broker"])
            check_that_nobody_has_ended()
            done[what] += 1
            assert scene.recorder is not None
            scene.recorder.fault(what, str(place))
            if what == "kill":
                processes[place].kill()
                assert ended(processes[place]) == -signal.SIGKILL
                processes[place] = scene.start("*", "", BATCH, *arguments)
            elif what == "stop":
                processes[place].send_signal(signal.SIGTERM)
                assert ended(processes[place]) in STOPPED
                processes[place] = scene.start("*", "", BATCH, *arguments)
            elif what == "pause":
                processes[place].send_signal(signal.SIGSTOP)
                time.sleep(chance.uniform(1, 9))
                processes[place].send_signal(signal.SIGCONT)
            else:
                cluster.kill()
                cluster.start()
        if database != "rocksdb":  # which can't be read while it is open
            scene.wait_for_all(3 * LIMIT)
        scene.wait_for_answers()  # those that live have recovered what the killed ones had prepared
        check_that_nobody_has_ended()
        for process in processes:
            process.send_signal(signal.SIGTERM)
        assert {ended(process) for process in processes} <= STOPPED
        dualwrite.recover(scene.url, kafka=scene.servers, prefix=scene.prefix)
        scene.judge(scene.shown() if AT_KAFKA in more else stored_positions(scene))


def stored_positions(scene: Crashing) -> dict[int, int]:
    """The group's positions in the database."""
    with dualwrite.store_from_url(scene.url) as store:
        assert store.positions is not None
        found = store.positions.read(scene.group)
    return {partition: position.offset for (_, partition), position in found.items()}


def _is_stopped(process: ForkedProcess) -> bool:
    with open(f"/proc/{process.pid}/stat") as file:  # noqa: PTH123
        return file.read().rpartition(")")[2].split()[0] == "T"
