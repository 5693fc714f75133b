"""A call inside an open database transaction waits no longer than its limit, however many waits it consists of.

The clock is a fake: a wait takes as long as it may, and what counts is the sum.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException

from dualwrite import deadline as deadlines
from dualwrite.errors import BrokerError, DeliveryError
from dualwrite.kafka.client.config import KafkaConfig
from dualwrite.kafka.librdkafka.librdkafka_producer import LibrdkafkaProducer
from dualwrite.kafka.native import retry_policy
from dualwrite.kafka.native.retry_policy import Patience

DELIVERY = 60.0
CONFIG = KafkaConfig.of({"bootstrap.servers": "127.0.0.1:1", "transaction.timeout.ms": 900_000})


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
    monkeypatch.setattr(retry_policy, "time", made)
    return made


def test_the_limit_of_a_call_starts_again_when_brokers_have_stored_something(clock: Clock) -> None:
    stored = [0]
    limit = Patience(DELIVERY, lambda: stored[0])
    clock.sleep(DELIVERY - 1)
    assert (limit.left, limit.expired, limit.within(5).left) == (1.0, False, 1.0)
    stored[0] = 3
    assert (limit.left, limit.expired, limit.within(100).left) == (DELIVERY, False, DELIVERY)
    clock.sleep(DELIVERY)
    assert (limit.left, limit.expired, limit.within(5).left) == (0.0, True, 0.0)
    assert limit.seconds == DELIVERY, "errors name the limit, not what is left of it"


def test_the_time_in_which_messages_are_made_does_not_count(clock: Clock) -> None:
    def slow() -> Iterator[int]:
        for number in range(3_000):
            clock.sleep(1.0)
            yield number

    limit = Patience(DELIVERY, lambda: 0)
    chunks = list(limit.chunks(slow()))
    assert ([number for chunk in chunks for number in chunk], len(chunks)) == (list(range(3_000)), 3)
    assert limit.left == DELIVERY


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
