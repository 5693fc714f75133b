"""A service is moved through what can change around it while it runs: refusals, a quota, a read-only database, clocks.

Three processes with a pool, a relay and a processor each. Nothing is lost, doubled, out of order or taken for a fault of a
message, no part ends with a driver's bare error, and the journal stays shut: Kafka was never down.
"""

from __future__ import annotations

import itertools
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import sqlalchemy as sa
from confluent_kafka.admin import (
    AdminClient,
    ScramCredentialInfo,
    ScramMechanism,
    UserScramCredentialUpsertion,
)
from kafka.protocol.admin import AlterClientQuotasRequest

from crash.events import SqlEvents
from crash.scene import Scene, Worker
from dualwrite.devcluster import DevCluster, Security
from dualwrite.kafka.client.brokers import Network
from dualwrite.kafka.client.config import KafkaConfig
from dualwrite.relay import create_table
from dualwrite.stores.sql import SqlStateStore
from dualwrite.testing.postgres import PostgresServer
from fixtures.broker import USERS, make_topic, read_values, started
from fixtures.foreign import foreign
from fixtures.pace import LIMIT, until, until_recorded
from journal.chains import assert_chains, begin_chains, until_drained
from moved.service_worker import outbox_topic

USER = "writer"
PROCESSES = 3
INSERT = sa.text("INSERT INTO outbox (topic, key, value) VALUES (:topic, :key, :value)")


@pytest.fixture
def broker() -> Iterator[DevCluster]:
    """A broker with logins, whose passwords and quotas change; each connection logs in again every few seconds (KIP-368)."""
    with started(security=Security(USERS), config={"connections.max.reauth.ms": "3000"}) as cluster:
        yield cluster


@dataclass
class Surroundings:
    """What is changed around the service."""

    scene: Scene
    broker: DevCluster
    database: str

    def __post_init__(self) -> None:
        self._admin = AdminClient({"bootstrap.servers": self.broker.bootstrap_servers})
        self._administration = self.scene.engine.execution_options(isolation_level="AUTOCOMMIT")

    def set_password(self, password: str) -> None:
        """Change the service's password, with which its connections log in again."""
        credential = ScramCredentialInfo(ScramMechanism.SCRAM_SHA_256, 4096)
        change = UserScramCredentialUpsertion(USER, credential, password.encode())
        for future in self._admin.alter_user_scram_credentials([change]).values():
            future.result(LIMIT)

    def set_quota(self, bytes_per_second: float | None) -> None:
        """Limit what the user may produce; None: no longer."""
        request = AlterClientQuotasRequest
        op = request.EntryData.OpData(key="producer_byte_rate", value=bytes_per_second or 0.0, remove=bytes_per_second is None)
        entity = request.EntryData.EntityData(entity_type="user", entity_name=USER)
        network = Network(KafkaConfig.of(self.broker.bootstrap_servers))
        answer = network.any_broker().call(
            foreign(request(entries=[request.EntryData(entity=[entity], ops=[op])], validate_only=False))
        )
        network.close()
        assert [entry.error_code for entry in answer.entries] == [0]

    def set_read_only(self, *, read_only: bool) -> None:
        """New sessions can't write, and the others are ended: as after a failover, or when an operator saves a full disk."""
        change = "SET default_transaction_read_only = on" if read_only else "RESET default_transaction_read_only"
        self.sql(f'ALTER DATABASE "{self.database}" {change}')
        if read_only:
            self.sql(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database()"
                " AND pid <> pg_backend_pid()"
            )

    def move_leases(self) -> None:
        """What a clock of the database that has gone back by an hour leaves: leases that have an hour more."""
        self.sql("UPDATE kafka_transaction_lease SET leased_until = leased_until + interval '1 hour'")

    def sql(self, statement: str) -> None:
        with self._administration.connect() as connection:
            connection.exec_driver_sql("SET default_transaction_read_only = off")
            connection.exec_driver_sql(statement)


class Service:
    """The processes, and the rows that are put into the outbox meanwhile."""

    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        self._where = [scene.url, scene.bootstrap, scene.transactional_id, scene.topic, json.dumps(dict(scene.kafka))]
        self._numbers = itertools.count(1)
        self.inserted: list[int] = []
        self.workers: list[Worker] = []
        self.ended: list[Worker] = []

    def start(self, **environment: str) -> Worker:
        worker = Worker(self._where, module="moved.service_worker", **environment)
        self.workers.append(worker)
        worker.wait_for("open")
        return worker

    def insert(self, count: int = 20) -> None:
        numbers = list(itertools.islice(self._numbers, count))
        rows = [
            {"topic": outbox_topic(self._scene.topic), "key": b"k%d" % (each % 3), "value": b"%d" % each} for each in numbers
        ]
        with self._scene.engine.begin() as connection:
            connection.execute(INSERT, rows)
        self.inserted += numbers

    def links(self) -> int:
        with self._scene.engine.connect() as connection:
            query = sa.text("SELECT sum(link) FROM chains WHERE topic = :topic")
            return int(connection.scalar(query, {"topic": self._scene.topic}) or 0)

    def until_more(self, count: int = 10) -> None:
        """Wait until the service has gone on: links, and what the relay and the processor had to do."""
        wanted = self.links() + count
        until(lambda: self.links() >= wanted, lambda: f"{count} more links; {self.last_lines()}")

    def last_lines(self) -> list[list[str]]:
        return [worker.lines[-3:] for worker in self.workers]

    def kill(self, worker: Worker) -> None:
        self.workers.remove(worker)
        self.ended.append(worker)
        worker.kill()

    def stop(self) -> None:
        for worker in self.workers:
            worker.tell("stop")
        for worker in self.workers:
            assert worker.end() == 0, worker.errors[-3000:]
        self.ended += self.workers
        self.workers = []

    def said(self, word: str) -> list[str]:
        return [line for worker in [*self.workers, *self.ended] for line in worker.lines if line.startswith(word)]


@pytest.fixture
def scene(own_postgres_server: PostgresServer, broker: DevCluster) -> Scene:
    events = SqlEvents(own_postgres_server.create_database("moved"))
    events.create()
    kafka = {
        "bootstrap.servers": broker.listeners["SASL_PLAINTEXT"],
        "security.protocol": "SASL_PLAINTEXT",
        "sasl.mechanism": "SCRAM-SHA-256",
        "sasl.username": USER,
        "sasl.password": USERS[USER],
    }
    return Scene(events, broker.bootstrap_servers, kafka=kafka)


@pytest.fixture
def service(scene: Scene, broker: DevCluster, producer: str) -> Iterator[Service]:
    del producer
    for topic in (scene.topic, outbox_topic(scene.topic)):
        make_topic(broker, topic)
    begin_chains(scene)
    create_table(scene.engine)
    with scene.engine.begin() as connection:
        connection.execute(sa.text("CREATE TABLE taken (topic varchar(100), value varchar(100))"))
    made = Service(scene)
    try:
        yield made
    finally:
        for worker in made.workers:
            if worker.process.poll() is None:
                worker.kill()


def through_refusals(service: Service, around: Surroundings) -> None:
    around.set_password("another")
    until(lambda: [line for line in service.said("error") if "refused" in line], "an error that names the refusal")
    service.insert()
    around.set_password(USERS[USER])


def through_a_quota(service: Service, around: Surroundings) -> None:
    around.set_quota(2000.0)
    service.insert()
    service.until_more(5)
    time.sleep(3)
    around.set_quota(None)


def through_a_read_only_database(service: Service, around: Surroundings) -> None:
    around.set_read_only(read_only=True)
    time.sleep(3)
    around.set_read_only(read_only=False)
    service.insert()


def through_clocks(service: Service, around: Surroundings) -> None:
    ahead = service.start(CLOCK_AHEAD="7200")
    service.insert()
    service.until_more()
    service.kill(ahead)
    around.move_leases()
    service.kill(service.workers[0])
    service.start()


WAYS: list[Callable[[Service, Surroundings], None]] = [
    through_refusals,
    through_a_quota,
    through_a_read_only_database,
    through_clocks,
]


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("producer", ["native", "librdkafka"], indirect=True)
def test_a_service_is_moved_through_its_surroundings(service: Service, scene: Scene, broker: DevCluster) -> None:
    around = Surroundings(scene, broker, "moved")
    for _ in range(PROCESSES):
        service.start()
    for way in [*WAYS, *reversed(WAYS)]:
        service.insert()
        service.until_more()
        way(service, around)
    service.until_more()
    compare(service, scene)


def compare(service: Service, scene: Scene) -> None:
    """Both sides have each record once, in order; nothing is a dead letter, and nothing went through the journal."""

    def taken() -> Counter[str]:
        with scene.engine.connect() as connection:
            return Counter(connection.scalars(sa.text("SELECT value FROM taken")))

    def outbox() -> int:
        with scene.engine.connect() as connection:
            return int(connection.scalar(sa.text("SELECT count(*) FROM outbox")) or 0)

    until(lambda: outbox() == 0, lambda: f"an empty outbox; {service.last_lines()}")
    journal = SqlStateStore(scene.engine).journal
    assert journal is not None
    (gate,) = journal.gates(scene.transactional_id, counts=False)
    assert service.said("bare") == []
    assert gate.epoch == 0, "the journal was opened, and Kafka was never down"
    service.stop()
    until_drained(scene)
    links = assert_chains(scene)
    sent = Counter(value.decode() for value in read_values(scene.bootstrap, scene.topic) if value is not None)
    assert sent.total() == links
    restarted = service.start(CALLERS="0")  # takes what the others have left
    until_recorded(taken, sent, "each link taken once")
    restarted.tell("stop")
    assert restarted.end() == 0, restarted.errors[-3000:]
    published = read_values(scene.bootstrap, outbox_topic(scene.topic))
    by_key: dict[int, list[int]] = {}
    for value in published:
        by_key.setdefault(int(value or b"0") % 3, []).append(int(value or b"0"))
    assert by_key == {key: [each for each in service.inserted if each % 3 == key] for key in range(3)}
