"""A call inside an open database transaction waits no longer than its limit, however many waits it consists of.

The clock is a fake: a wait takes as long as it may, and what counts is the sum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from confluent_kafka import KafkaError, KafkaException

from dualwrite import deadline as deadlines
from dualwrite.deadline import Deadline
from dualwrite.errors import BrokerError, DeliveryError
from dualwrite.kafka.base import Message
from dualwrite.kafka.client.config import KafkaConfig
from dualwrite.kafka.librdkafka.librdkafka_producer import LibrdkafkaProducer
from dualwrite.kafka.messages import checked_messages
from dualwrite.kafka.native import accumulator as accumulators
from dualwrite.kafka.native.bulk import BulkSender
from dualwrite.kafka.native.native_producer import NativeProducer

DELIVERY = 60.0
CONFIG = KafkaConfig.of({"bootstrap.servers": "127.0.0.1:1", "transaction.timeout.ms": 900_000})
VALUES = [b"x" * 100] * 20_000


class Clock:
    """Stands for the module `time` where deadlines are made."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(deadlines, "time", made)
    return made


class Brokers:
    """The sender of a native producer, at brokers that let each call wait, and store what `stores` says."""

    def __init__(self, clock: Clock, *, wait: float, stores: int) -> None:
        self._clock, self._wait, self._stores = clock, wait, stores
        self.topics = SimpleNamespace(layout=self._layout, forget=lambda _: None)
        self.buffered = self.stored = 0
        self.has_sent, self.failure = False, None
        self.limits: set[float] = set()
        self.least_left = DELIVERY

    def _layout(self, _topic: str, deadline: Deadline) -> Any:
        self._pass(deadline)
        return SimpleNamespace(leaders=(None,) * 3)

    def _pass(self, deadline: Deadline) -> None:
        self.limits.add(deadline.seconds)
        self.least_left = min(self.least_left, deadline.left)
        self._clock.sleep(min(self._wait, deadline.left))
        self.stored += self._stores

    def add(self, partition: Any, _records: Any = None) -> None:
        if partition.builder.records:
            partition.close_batch()
            partition.drain()

    def push(self, deadline: Deadline) -> None:
        self.has_sent = True
        self._pass(deadline)

    def make_room(self, _limit: int, deadline: Deadline) -> None:
        self._pass(deadline)

    def raise_failure(self) -> None:
        pass

    def begin(self) -> None:
        pass

    close = interrupted = raise_failure


def on_brokers(brokers: Any) -> NativeProducer:
    producer = NativeProducer(CONFIG, "orders", delivery_timeout=DELIVERY)
    settings = replace(producer._accumulator._settings, batch_bytes=5_000, buffer_bytes=100_000)
    producer._sender = brokers
    producer._accumulator = accumulators.RecordAccumulator(brokers, settings, "orders")
    producer._bulk = BulkSender(brokers, producer._accumulator, producer._markers, producer._budget, DELIVERY)
    producer.adopt(1, 0, timeout_ms=900_000)
    producer.begin_transaction()
    return producer


def checked(values: list[bytes]) -> list[Message]:
    return list(checked_messages("t", values, keys=None, partition=None, timestamp=None))


CALLS: dict[str, Callable[[NativeProducer], None]] = {
    "values": lambda producer: producer.send_many("t", VALUES),
    "keys and values": lambda producer: producer.send_many("t", VALUES, keys=[b"%d" % n for n in range(len(VALUES))]),
    "messages": lambda producer: producer.send_messages(checked(VALUES)),
    "columns": lambda producer: producer.send_columns("t", pa.array(VALUES), keys=pa.array(VALUES)),
    "few columns": lambda producer: producer.send_columns("t", pa.array(VALUES[:500])),
}


@pytest.fixture(params=CALLS)
def call(request: pytest.FixtureRequest) -> Callable[[NativeProducer], None]:
    return CALLS[request.param]


def test_all_waits_of_a_call_share_its_limit(clock: Clock, call: Callable[[NativeProducer], None]) -> None:
    """Where the brokers store nothing, each of them would take the whole limit."""
    producer = on_brokers(brokers := Brokers(clock, wait=50.0, stores=0))
    began = clock.now
    call(producer)
    assert clock.now - began == pytest.approx(DELIVERY)
    assert brokers.limits == {DELIVERY}, "errors name the limit, not what is left of it"
    producer.close()


def test_a_call_that_makes_progress_may_take_longer_than_its_limit(
    clock: Clock, call: Callable[[NativeProducer], None]
) -> None:
    producer = on_brokers(Brokers(clock, wait=50.0, stores=1))
    began = clock.now
    call(producer)
    assert clock.now - began > 2 * DELIVERY
    producer.close()


def test_the_time_in_which_messages_are_made_does_not_count(clock: Clock) -> None:
    producer = on_brokers(brokers := Brokers(clock, wait=0.0, stores=0))

    def slow() -> Iterator[bytes]:
        for value in VALUES[:3_000]:
            clock.sleep(1.0)
            yield value

    producer.send_many("t", slow())
    assert brokers.least_left == DELIVERY
    producer.close()


class Librdkafka:
    """librdkafka, whose queue is full for a while, and which then refuses messages because an earlier one has failed."""

    def __init__(self, clock: Clock, full: float) -> None:
        self._clock, self._full_until = clock, clock.now + full

    def produce(self, *_: Any, **__: Any) -> None:
        if self._clock.now < self._full_until:
            raise BufferError("queue full")
        raise KafkaException(KafkaError(KafkaError._STATE, "an earlier message has failed"))

    def poll(self, timeout: float) -> None:
        self._clock.sleep(timeout)

    def purge(self, **_: Any) -> None:
        pass

    def __len__(self) -> int:
        return 0


@pytest.mark.parametrize("full", [0.0, 1.5, 10.0])
def test_the_reason_of_librdkafka_is_not_waited_for_beyond_the_limit(clock: Clock, full: float) -> None:
    """The report of the message that has failed never arrives."""
    made: Any = None
    producer = LibrdkafkaProducer(CONFIG, "orders", made, delivery_timeout=2.0)
    rdkafka: Any = Librdkafka(clock, full)
    producer._producer = rdkafka
    producer._reports.add_topic("t")
    began = clock.now
    with pytest.raises(DeliveryError if full > 2.0 else BrokerError):
        producer.send("t", b"v")
    assert clock.now - began <= 2.0 + 1e-6
    producer.close()
