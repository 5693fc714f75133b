"""Two separate writes without dualwrite, each as safe as a single write can be: the demo's baseline.

The database commits durably; the producer is idempotent, waits for all replicas, and is flushed after every transaction. But
nothing makes the two writes atomic.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

from confluent_kafka import Producer
from sqlalchemy import Connection, Engine

from dualwrite.errors import DeliveryError

_DELIVERY_TIMEOUT: Final = 60.0


class NaiveTransaction:
    """The object that the block gets, as with dualwrite: a connection, and a method to send."""

    def __init__(self, db: Connection) -> None:
        self.db = db
        self.messages: list[tuple[str, bytes, str]] = []

    def send(self, topic: str, value: bytes, *, key: str) -> None:
        """Send a message when the block ends."""
        self.messages.append((topic, value, key))


class NaiveWriter:
    """Alternates both orders: commits and then produces, the next time produces and then commits.

    Args:
        engine: The database.
        kafka: The Kafka settings, named as in librdkafka.
    """

    def __init__(self, engine: Engine, kafka: Mapping[str, Any]) -> None:
        self._engine = engine
        self._producer = Producer({**kafka, "enable.idempotence": True, "acks": "all"})
        self._kafka_first = False

    @contextmanager
    def transaction(self) -> Iterator[NaiveTransaction]:
        """One business transaction in two steps, with a possible crash between them.

        With the commit first, such a crash loses the message; with Kafka first, the message remains and is sent again.

        Raises:
            DeliveryError: A message was not delivered.
        """
        kafka_first, self._kafka_first = self._kafka_first, not self._kafka_first
        with self._engine.begin() as connection:
            transaction = NaiveTransaction(connection)
            yield transaction
            if kafka_first:
                self._produce(transaction)
        if not kafka_first:
            self._produce(transaction)

    def _produce(self, transaction: NaiveTransaction) -> None:
        failures: list[Any] = []
        for topic, value, key in transaction.messages:
            self._producer.produce(topic, value, key, on_delivery=lambda error, _: failures.append(error) if error else None)
        if self._producer.flush(_DELIVERY_TIMEOUT) or failures:
            raise DeliveryError("A message was not delivered.", cause=str(failures[0]) if failures else None)
