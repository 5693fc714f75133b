"""The alternatives that are compared: each performs a unit of work in its own way."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Literal, Protocol

from confluent_kafka import KafkaException, Producer
from sqlalchemy import Engine, insert

import dualwrite
from workload import Unit, engine, outbox

Name = Literal["database", "naive", "outbox", "recipe", "pool"]
NAMES: Final[tuple[Name, ...]] = ("database", "naive", "outbox", "recipe", "pool")
DELIVERY_TIMEOUT: Final = 60.0

GUARANTEES: Final[Mapping[str, str]] = {
    "database": "no message at all",
    "naive": "a crash after the commit loses the message",
    "outbox": "a crash of the relay publishes again: at least once",
    "recipe": "exactly once, atomic",
    "pool": "exactly once, atomic",
}


@dataclass(frozen=True)
class Target:
    """Where to write to.

    Args:
        url: The database.
        kafka: Kafka's settings, in librdkafka's names.
        topic: The topic of this measurement.
        producer: `producer` of `dualwrite.connect`.
        two_phase: `two_phase` of `dualwrite.connect`.
    """

    url: str
    kafka: Mapping[str, Any]
    topic: str
    producer: str = "auto"
    two_phase: bool | None = None

    @property
    def settings(self) -> dualwrite.Settings:
        """Settings for a writer or a pool."""
        return dualwrite.Settings(producer=self.producer, two_phase=self.two_phase)  # type: ignore[arg-type]  # checked there


class Alternative(Protocol):
    """One way to do a unit of work, for one writer."""

    def write(self, unit: Unit) -> None:
        """Perform one unit; returns when it is done, as far as this alternative can know."""
        ...

    def close(self) -> None:
        """Release everything."""
        ...


class DatabaseOnly:
    """The lower bound: only the database's part."""

    def __init__(self, target: Target) -> None:
        self._engine = engine(target.url)

    def write(self, unit: Unit) -> None:
        """Commit."""
        with self._engine.begin() as connection:
            unit.apply(connection)

    def close(self) -> None:
        """See Alternative."""
        self._engine.dispose()


class Naive(DatabaseOnly):
    """Commit, then produce and wait for the delivery."""

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        self._topic = target.topic
        self._delivery = Delivery(target.kafka)

    def write(self, unit: Unit) -> None:
        """Commit; produce; wait."""
        super().write(unit)
        self._delivery.send(self._topic, unit.message, unit.key)
        self._delivery.wait()


class Outbox(DatabaseOnly):
    """Write the message to a table in the same transaction; `relay.py` publishes it."""

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        self._topic = target.topic
        self._insert = insert(outbox).inline()

    def write(self, unit: Unit) -> None:
        """Commit with the row. The account is locked first, so that the rows of one account have ids in commit order."""
        with self._engine.begin() as connection:
            unit.apply(connection)
            connection.execute(self._insert, {"topic": self._topic, "key": unit.key, "value": unit.message})


class Recipe:
    """dualwrite, as applications use it."""

    def __init__(self, target: Target, writer: int) -> None:
        self._engine: Engine = engine(target.url)
        self._topic = target.topic
        self._writer = dualwrite.connect(
            self._engine,
            kafka=target.kafka,
            transactional_id=f"benchmark-{writer}",
            settings=target.settings,
        )

    def write(self, unit: Unit) -> None:
        """One dual write."""
        with self._writer.transaction() as tx:
            unit.apply(tx.db)
            tx.send(self._topic, unit.message, key=unit.key)

    def close(self) -> None:
        """See Alternative."""
        self._writer.close()
        self._engine.dispose()


class Pool:
    """dualwrite's pool, one for all writers of the process: they share their commits."""

    _open: ClassVar[dict[str, tuple[dualwrite.WriterPool[Any], Engine]]] = {}
    _users: ClassVar[Counter[str]] = Counter()
    _lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, target: Target) -> None:
        self._topic = target.topic
        with self._lock:
            if not self._users[target.topic]:
                database = engine(target.url)
                pool = dualwrite.create_pool(database, kafka=target.kafka, prefix="benchmark-pool", settings=target.settings)
                self._open[target.topic] = pool, database
            self._users[target.topic] += 1
            self._pool, self._engine = self._open[target.topic]

    def write(self, unit: Unit) -> None:
        """One dual write, in a group with those of other threads."""
        self._pool.run(self._unit, unit)

    def _unit(self, tx: dualwrite.Transaction, unit: Unit) -> None:
        unit.apply(tx.db)
        tx.send(self._topic, unit.message, key=unit.key)

    def close(self) -> None:
        """See Alternative; the last user closes the pool."""
        with self._lock:
            self._users[self._topic] -= 1
            if not self._users[self._topic]:
                del self._open[self._topic]
                self._pool.close()
                self._engine.dispose()


def make(name: str, target: Target, writer: int) -> Alternative:
    """A connected writer of an alternative."""
    match name:
        case "database":
            return DatabaseOnly(target)
        case "naive":
            return Naive(target)
        case "outbox":
            return Outbox(target)
        case "recipe":
            return Recipe(target, writer)
        case "pool":
            return Pool(target)
        case _:
            raise ValueError(name)


class Delivery:
    """An idempotent producer without transactions; a failed delivery is an error."""

    def __init__(self, kafka: Mapping[str, Any]) -> None:
        self._producer = Producer({**kafka, "enable.idempotence": True, "acks": "all"})
        self._failure: Any = None

    def send(self, topic: str, value: bytes | None, key: bytes | None) -> None:
        """Queue one message; wait while the queue is full."""
        while True:
            try:
                self._producer.produce(topic, value, key, on_delivery=self._delivered)
            except BufferError:
                self._producer.poll(0.1)
            else:
                return

    def wait(self) -> None:
        """Wait until everything is acknowledged. librdkafka ignores `linger.ms` while flushing."""
        left = self._producer.flush(DELIVERY_TIMEOUT)
        if self._failure is not None:
            raise KafkaException(self._failure)
        if left:
            raise TimeoutError(f"{left} messages were not acknowledged within {DELIVERY_TIMEOUT:g} s")

    def _delivered(self, error: Any, message: Any) -> None:
        del message
        if error is not None and self._failure is None:
            self._failure = error
