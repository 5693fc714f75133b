"""The clients of a soak run that are fed: processors, relays, services with sessions of their own, and a stream of Spark's."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext, suppress
from itertools import islice
from types import SimpleNamespace
from typing import Any, ClassVar
from uuid import uuid4

import psutil
import sqlalchemy as sa
from confluent_kafka import Consumer, Producer, TopicPartition
from relay_scene import RelayScene, key_of

import dualwrite
from dualwrite import migration
from endurance.clients import LEASE, PARTITIONS, Asyncio, Forked, Journal, Kind, MariaDB, Pool, Writers
from fixtures.broker import make_topic
from fixtures.histories import final_topics, rows_of, watched
from fixtures.pace import LIMIT, joined, until, until_received
from joined.service import Load, Service
from processor.processor_worker import PROCESS

WAITING = 3
"""Files that wait for Spark."""

ORDERS = sa.text("SELECT id FROM orders WHERE id IN :asked")


def id_of(value: bytes) -> Any:
    """The order of a message."""
    return json.loads(value)["id"]


def final_orders(kind: Kind) -> None:
    """Record the orders that the database has at the end."""
    with kind.engine.connect() as connection:
        kind.recorder.final_rows(connection.scalars(sa.text("SELECT id FROM orders")))


class Processors(Writers):
    """A group of processors that book numbers and answer them."""

    name = "processors"
    count = 3
    per_second: ClassVar[int] = 100

    def prepare(self) -> None:
        super().prepare()
        self.source, self.produced = f"source-{self.prefix}", 0
        make_topic(self.stage.cluster, self.source, PARTITIONS)
        self.at_kafka = self.chance.random() < 0.5
        more = ["offsets=kafka"] if self.at_kafka else []
        consumer = ["group.protocol=consumer", "session.timeout.ms=", "heartbeat.interval.ms="]
        self._more = more + (consumer if self.chance.random() < 0.5 else [])
        # without duplicates, and it gives no message up
        safe = {"enable.idempotence": True, "message.timeout.ms": 0}
        self._producer = Producer({**self.kafka, "log_level": 2, **safe})

    def arguments(self) -> list[str]:
        where = [self.url, self.stage.servers, self.prefix, self.source, self.scene.topic, f"{self.prefix}*", "10"]
        history = [f"history={self.folder}", f"process={self.started}"]
        return ["processor.processor_worker", *where, *self._more, *history]

    def feed(self) -> None:
        """Send more numbers."""
        new = range(self.produced, self.produced + self.per_second)
        self.produced += len(new)
        left, operation = [*new], self.recorder.invoke("source", (), {self.source: [(None, str(each)) for each in new]})

        def delivered(error: Any, _: Any) -> None:
            if error is None:
                left.pop()
            if not left:
                self.recorder.ok(operation)

        for number in new:
            self._producer.produce(self.source, str(number), partition=number % PARTITIONS, on_delivery=delivered)
        self._producer.poll(0)

    def settle(self) -> None:
        assert self._producer.flush(LIMIT) == 0
        until_received(self._booked, "numbers", at_least=self.produced, seconds=5 * LIMIT, pause=1)
        super().settle()

    def _booked(self) -> list[int]:
        self.supervise()
        return [*{number % PROCESS for number in self.scene.rows()}]

    def read_back(self) -> None:
        super().read_back()
        final_topics(self.recorder, self.kafka, self.source)
        for partition, offset in (self._at_kafka if self.at_kafka else self._in_the_database)().items():
            self.recorder.final_position(self.prefix, self.source, partition, offset)

    def _in_the_database(self) -> dict[int, int]:
        with dualwrite.store_from_url(self.direct) as store:
            assert store.positions is not None
            return {partition: position.offset for (_, partition), position in store.positions.read(self.prefix).items()}

    def _at_kafka(self) -> dict[int, int]:
        with closing(Consumer({**self.kafka, "group.id": self.prefix, "log_level": 2})) as consumer:
            found = consumer.committed([TopicPartition(self.source, number) for number in range(PARTITIONS)], LIMIT)
        return {one.partition: max(0, one.offset) for one in found}


class Relays(Forked):
    """Relays of an outbox, into which threads insert."""

    name = "relays"
    rows: ClassVar[int] = 10

    def prepare(self) -> None:
        migration.upgrade(self.engine)
        broker: Any = SimpleNamespace(bootstrap_servers=self.stage.direct)
        self.outbox = RelayScene(self.direct, broker, lambda kind: f"{kind}-{uuid4().hex[:8]}")
        self.prefix = self.outbox.name
        self.outbox.engine.dispose()
        self.outbox.engine = self.engine
        self._over, self._inserting = threading.Event(), threading.Lock()

    def arguments(self) -> list[str]:
        return ["relay.relay_worker", self.url, self.stage.servers, self.outbox.name, "20", str(LEASE), "3"]

    @contextmanager
    def running(self) -> Iterator[None]:
        """Meanwhile threads insert rows, and a consumer gets them."""
        threads = [threading.Thread(target=self._insert, args=(client,)) for client in range(4)]
        for thread in threads:
            thread.start()
        try:
            with watched(self.recorder, self.kafka, self.outbox.topic, None):
                yield
        finally:
            self._over.set()
            for thread in threads:
                joined(thread)

    def _insert(self, client: int) -> None:
        while not self._over.wait(0.1):
            with self._inserting, suppress(sa.exc.DBAPIError):  # so that the numbers of a key commit in their order
                numbers = [*islice(self.outbox.numbers, self.rows)]
                sent = {self.outbox.topic: [(key_of(number), str(number)) for number in numbers]}
                with (
                    self.recorder.operation(client, (), sent, fails=lambda _: False),
                    self.outbox.engine.begin() as connection,
                ):
                    self.outbox.insert_on(connection, numbers)

    def settle(self) -> None:
        def is_empty() -> bool:
            self.supervise()
            return self.outbox.waiting() == 0

        until(is_empty, "the outbox is empty", seconds=5 * LIMIT, pause=0.5)
        super().settle()

    def read_back(self) -> None:
        final_topics(self.recorder, self.kafka, self.outbox.topic)


class Joined(Kind):
    """Services whose sessions join a pool, under a steady load."""

    name = "joined sessions"
    prefix = "shop."
    can_replace = False
    per_second: ClassVar[int] = 30

    def prepare(self) -> None:
        migration.upgrade(self.engine)
        self.topic, self._over = f"orders-{uuid4().hex[:8]}", threading.Event()
        make_topic(self.stage.cluster, self.topic, PARTITIONS)
        self._log = (self.folder / "service.log").open("wb")
        self._services = [Service(self.url, self.stage.servers, self.topic, self._log) for _ in self.members]

    def start(self, place: int) -> Any:
        self.started += 1
        self._services[place].start()
        self.members[place] = self._services[place].process
        return self.members[place]

    @contextmanager
    def running(self) -> Iterator[None]:
        """Meanwhile clients send orders, and a consumer gets them."""
        loads = [
            Load(service, self.topic, self.recorder, first=place * 10_000_000) for place, service in enumerate(self._services)
        ]

        async def send() -> None:
            await asyncio.gather(*(load.run(self._over.is_set, self.per_second) for load in loads))

        with ThreadPoolExecutor(1) as thread:
            sending = thread.submit(asyncio.run, send())
            try:
                with watched(self.recorder, self.kafka, self.topic, rows_of(self.engine, ORDERS), value_of=id_of):
                    yield
            finally:
                self._over.set()
                sending.result(2 * LIMIT)

    def read_back(self) -> None:
        final_orders(self)
        final_topics(self.recorder, self.kafka, self.topic, value_of=id_of)


class Spark(Kind):
    """A stream from files: each is a micro-batch, written by several tasks."""

    name = "Spark stream"
    count = 1
    can_replace = False
    rows: ClassVar[int] = 50

    def prepare(self) -> None:
        from driven_scene import DrivenScene  # noqa: PLC0415  (where Spark is installed)

        from spark.session import environment  # noqa: PLC0415  (likewise)

        migration.upgrade(self.engine)
        place, name = self.folder / "spark", f"spark-{uuid4().hex[:8]}"
        self.stream = DrivenScene(self.direct, self.stage.direct, name, place, environment(place))
        self.stream.more |= {"url": self.url, "kafka.bootstrap.servers": self.stage.servers}
        make_topic(self.stage.cluster, name, PARTITIONS)
        self.files = 0

    def running(self) -> AbstractContextManager[None]:
        return watched(self.recorder, self.kafka, self.stream.name, rows_of(self.engine, ORDERS), value_of=id_of)

    def feed(self) -> None:
        """Add a file if there are few that wait."""
        if self.files - self.stream.micro_batches >= WAITING:
            return
        ids = range(self.files * self.rows, (self.files + 1) * self.rows)
        sent = {self.stream.name: [(str(each), str(each)) for each in ids]}
        with self.recorder.operation("files", [*ids], sent, fails=lambda _: False):
            self.stream.add_input(ids)
        self.files += 1

    def start(self, place: int) -> Any:
        """Start a driver, unless the one before outlives what was killed: only one may use the checkpoint."""
        before = self.members[place]
        if before is None or self.has_ended(before):
            with before or nullcontext():
                self.started += 1
            if before is not None:
                (self.folder / f"driver-{self.started - 1}.log").write_text(before.output)
            self.members[place] = self.stream.stream_driver(tries=10)
        return self.members[place]

    def has_ended(self, member: Any) -> bool:
        return member.process.poll() is not None

    def kill(self, member: Any) -> None:
        from spark.processes import Role  # noqa: PLC0415  (as above)

        if (part := self.chance.choice([Role.TASK, Role.JVM, Role.COMMIT, None])) is not None and member.kill(part):
            return
        member.kill_all()

    def signal(self, member: Any, number: int) -> None:
        for one in member.processes():
            with suppress(psutil.NoSuchProcess):
                one.process.send_signal(number)

    def settle(self) -> None:
        """The stream ends by itself, with the last file."""

        def is_done() -> bool:
            if self.stream.micro_batches < self.files:
                self.supervise()
                return False
            return self.has_ended(self.members[0])

        until(is_done, lambda: f"{self.files} micro-batches", seconds=10 * LIMIT, pause=0.5)

    def read_back(self) -> None:
        final_orders(self)
        final_topics(self.recorder, self.kafka, self.stream.name, value_of=lambda value: str(id_of(value)))
        self.stream.close()


KINDS: tuple[type[Kind], ...] = (Pool, Asyncio, MariaDB, Journal, Processors, Relays, Joined, Spark)


def missing(kind: type[Kind]) -> str:
    """Why a kind can't run here; empty if it can."""
    if kind is Spark and importlib.util.find_spec("pyspark") is None:
        return "pyspark is not installed"
    return ""
