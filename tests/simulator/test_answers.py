"""The coordinator in memory gives the answers of a real one, and is then in the same state."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing
from random import Random

import pytest

from dualwrite.devcluster import DevCluster
from dualwrite.errors import BrokerError
from dualwrite.kafka.base import NewProducerId
from dualwrite.kafka.client.config import KafkaConfig
from dualwrite.kafka.client.coordinator import WireTransactionCoordinator
from dualwrite.kafka.client.kafka_errors import ErrorCode
from dualwrite.kafka.native.native_producer import NativeProducer
from dualwrite.state import TransactionDescription
from fixtures.broker import make_topic
from fixtures.pace import until
from simulator.brokers import Cluster

Identity = tuple[int, int]


@pytest.fixture
def coordinator(broker: DevCluster) -> Iterator[WireTransactionCoordinator]:
    with closing(WireTransactionCoordinator(KafkaConfig.of(broker.bootstrap_servers))) as opened:
        yield opened


class Broker:
    """The requests of one transactional id, sent to a broker."""

    def __init__(self, servers: str, coordinator: WireTransactionCoordinator, name: str, topic: str) -> None:
        self._servers, self._coordinator, self._name, self._topic = servers, coordinator, name, topic

    def init(self) -> tuple[str, Identity]:
        answer = self._coordinator.init_producer_id(self._name)
        return answer.name, (answer.producer_id, answer.epoch)

    def create(self) -> tuple[str, Identity]:
        (answer,) = self._coordinator.create_all([NewProducerId(self._name, 60_000, two_phase=False)])
        return answer.name, (answer.producer_id, answer.epoch)

    def end(self, of: Identity, *, commit: bool) -> tuple[str, Identity]:
        answer = self._coordinator.end_transaction(self._name, producer_id=of[0], epoch=of[1], commit=commit)
        return answer.name, (answer.producer_id, answer.epoch)

    def produce(self, of: Identity) -> bool:
        with closing(NativeProducer(KafkaConfig.of(self._servers), self._name, self._coordinator)) as producer:
            producer.adopt(*of, timeout_ms=60_000)
            producer.begin_transaction()
            try:
                producer.send(self._topic, b"1")
                producer.prepare_transaction()
            except BrokerError:
                return False
            return True

    def describe(self) -> TransactionDescription | None:
        def ended() -> tuple[TransactionDescription | None] | None:
            found = self._coordinator.describe(self._name)
            return None if found is not None and found.status.is_ending else (found,)

        return until(ended, "the markers")[0]


class Memory:
    """The same, sent to the coordinator in memory."""

    def __init__(self) -> None:
        self._cluster = Cluster("memory", time.time)

    def init(self) -> tuple[str, Identity]:
        answer = self._cluster.init("id", 60_000)
        return answer.name, (answer.producer_id, answer.epoch)

    def create(self) -> tuple[str, Identity]:
        answer = self._cluster.create("id", 60_000)
        return answer.name, (answer.producer_id, answer.epoch)

    def end(self, of: Identity, *, commit: bool) -> tuple[str, Identity]:
        answer = self._cluster.end("id", *of, commit=commit, by_epoch=True)
        return answer.name, (answer.producer_id, answer.epoch)

    def produce(self, of: Identity) -> bool:
        return self._cluster.produce("id", *of, 0, 0, 1, adds=True)[0] is ErrorCode.NONE

    def describe(self) -> TransactionDescription | None:
        return self._cluster.describe("id")


def _compared(real: Broker, memory: Memory, random: Random, requests: int) -> None:
    known: list[tuple[Identity, Identity]] = []
    asked = []
    for _ in range(requests):
        what = random.choice(("init", "create", "produce", "produce", "end", "end", "end")) if known else "create"
        arguments, options = (), {}
        if what in ("produce", "end"):
            arguments = (random.choice(known[-3:]),)
            options = {"commit": random.random() < 0.5} if what == "end" else {}
        asked.append((what, arguments, options))
        found = getattr(real, what)(*(each[0] for each in arguments), **options)
        wanted = getattr(memory, what)(*(each[1] for each in arguments), **options)
        if what == "produce":
            assert found == wanted, asked
        else:
            assert found[0] == wanted[0], asked
            if found[0] == "NONE":
                assert found[1][1] == wanted[1][1], asked
                known.append((found[1], wanted[1]))
        described, expected = real.describe(), memory.describe()
        assert described is not None
        assert expected is not None
        assert (described.status, described.epoch) == (expected.status, expected.epoch), asked
        known += {((described.producer_id, described.epoch), (expected.producer_id, expected.epoch))} - set(known)


def test_random_requests_have_the_same_answers(
    broker: DevCluster, coordinator: WireTransactionCoordinator, new_name: Callable[[str], str]
) -> None:
    topic = new_name("topic")
    make_topic(broker, topic)
    random = Random(1)
    for _ in range(12):
        _compared(Broker(broker.bootstrap_servers, coordinator, new_name("id"), topic), Memory(), random, 25)
