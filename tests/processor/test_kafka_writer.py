"""Processors without a database: consume, transform, produce, each message once."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
from processor_scene import GENTLE, PARTITIONS, Running

import dualwrite
from dualwrite.devcluster import DevCluster
from dualwrite.errors import (
    AfterCommitError,
    BrokerUnavailableError,
    ConfigurationError,
    FencedError,
    InvalidTransactionalIdError,
    MessageFailedError,
    UsageError,
    WriterClosedError,
)
from dualwrite.kafka import LibrdkafkaProducer, NativeProducer
from dualwrite.processor import DualProcessor, KafkaWriter, ProcessorOptions
from fixtures.broker import make_topic, read_topic
from fixtures.fork_server import ForkedProcess
from fixtures.pace import LIMIT, ended, limit, until, until_recorded
from fixtures.producing import producing
from fixtures.tiers import thinned
from processor.kafka_worker import answer

NewName = Callable[[str], str]
PRODUCERS: list[Any] = ["native", "librdkafka"]
BRIEF = {"session.timeout.ms": 1500, "heartbeat.interval.ms": 300}
"""For `brisk`: others soon get the partitions of a member that has died."""
OPTIONS = ProcessorOptions(batch=5, attempts=2, pause=0.05, longest_pause=0.5, offsets="kafka")


class KafkaScene:
    """Input and output, and a group."""

    def __init__(self, broker: DevCluster, new_name: NewName) -> None:
        self.broker = broker
        self.servers = broker.bootstrap_servers
        self.source, self.target, self.group, self.id = map(new_name, ("source", "target", "group", "id"))
        make_topic(broker, self.source, PARTITIONS)
        make_topic(broker, self.target, PARTITIONS)

    def produce(self, numbers: range) -> None:
        with producing(self.servers) as produce:
            for number in numbers:
                produce(self.source, b"%d" % number, partition=number % PARTITIONS)

    def processor(
        self, writer: KafkaWriter, handle: Any = None, pace: Mapping[str, Any] = GENTLE, **more: Any
    ) -> DualProcessor:
        settings = {"bootstrap.servers": self.servers, "group.id": self.group, **pace}
        arguments = {"options": OPTIONS, **more}
        return DualProcessor(writer, settings, [self.source], handle=handle or answer(self.target), **arguments)

    def answers(self) -> list[int]:
        return sorted(int(message.value() or b"") for message in read_topic(self.servers, self.target))

    def wait_for(self, count: int) -> None:
        until_recorded(self.answers, range(count), pause=0.2)


@pytest.fixture
def scene(broker: DevCluster, new_name: NewName) -> KafkaScene:
    return KafkaScene(broker, new_name)


@pytest.mark.parametrize("producer", PRODUCERS)
def test_each_message_is_processed_once(scene: KafkaScene, producer: Any) -> None:
    scene.produce(range(30))
    with KafkaWriter(scene.servers, transactional_id=scene.id, producer=producer) as writer:
        running = Running(scene.processor(writer))
        scene.wait_for(30)
        scene.produce(range(30, 60))
        scene.wait_for(60)
        running.stop()
        running = Running(scene.processor(writer))
        scene.produce(range(60, 70))
        scene.wait_for(70)
        running.stop()
        kind = NativeProducer if producer == "native" else LibrdkafkaProducer
        assert isinstance(writer._producer, kind)
    assert scene.answers() == list(range(70))


@pytest.mark.slow
def test_a_message_that_cannot_be_processed(scene: KafkaScene) -> None:
    """What its batch has sent is aborted."""
    scene.produce(range(8))

    def fail(message: Any, tx: dualwrite.Transaction[Any]) -> None:
        answer(scene.target)(message, tx)
        if message.value() == b"5":
            raise ValueError("five")

    with KafkaWriter(scene.servers, transactional_id=scene.id) as writer:
        error = Running(scene.processor(writer, fail)).ended()
        assert isinstance(error, MessageFailedError)
        assert (error.partition, error.offset) == (1, 1)
        assert 5 not in scene.answers()
        running = Running(scene.processor(writer))
        scene.wait_for(8)
        running.stop()
    assert scene.answers() == list(range(8))


def test_another_transaction_has_committed_in_the_handler(scene: KafkaScene) -> None:
    """And its listener has failed: that is an error of the handler, and what it has sent is aborted."""
    first = iter([1])

    def handle(message: Any, tx: dualwrite.Transaction[Any]) -> None:
        answer(scene.target)(message, tx)
        if message.offset() == 0 and next(first, None):
            raise AfterCommitError("another writer's")

    scene.produce(range(8))
    with KafkaWriter(scene.servers, transactional_id=scene.id) as writer:
        running = Running(scene.processor(writer, handle, options=replace(OPTIONS, batch=1)))
        scene.wait_for(8)
        running.stop()
    assert scene.answers() == list(range(8))


@pytest.mark.slow
@pytest.mark.parametrize("producer", thinned(PRODUCERS, kept=["native"]))
def test_the_broker_is_killed_during_the_commit(
    brisk: DevCluster, new_name: NewName, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, producer: Any
) -> None:
    """And starts again after the writer's limit: the offsets show the outcome of the transaction."""
    scene = KafkaScene(brisk, new_name)
    scene.produce(range(40))
    kind = NativeProducer if producer == "native" else LibrdkafkaProducer
    commit, count = kind.commit_transaction, 0
    back = threading.Timer(limit(3), brisk.start)

    def dying(self: Any, *, timeout: float) -> None:
        nonlocal count
        count += 1
        if count == 3:
            brisk.kill()
            back.start()
        commit(self, timeout=timeout)

    monkeypatch.setattr(kind, "commit_transaction", dying)
    timeouts = dualwrite.Timeouts(kafka=LIMIT)
    with (
        caplog.at_level(logging.WARNING, "dualwrite.processor"),
        KafkaWriter(scene.servers, transactional_id=scene.id, producer=producer, timeouts=timeouts) as writer,
    ):
        writer._timeouts = dualwrite.Timeouts(kafka=limit(1))
        running = Running(scene.processor(writer, pace=BRIEF))
        until(lambda: back.ident is not None and not back.is_alive(), "the broker is back")
        scene.wait_for(40)
        running.stop()
    assert scene.answers() == list(range(40))
    assert "not known whether the transaction committed" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("producer", thinned(PRODUCERS, kept=["native"]))
def test_its_own_registration_comes_late(scene: KafkaScene, monkeypatch: pytest.MonkeyPatch, producer: Any) -> None:
    """A registration without an answer may be executed after the next one, and fence it. A second time, it is somebody else."""
    kind = NativeProducer if producer == "native" else LibrdkafkaProducer
    register = kind.init_transactions

    def unanswered(self: Any, *, timeout: float) -> None:
        monkeypatch.setattr(kind, "init_transactions", register)
        raise BrokerUnavailableError("no answer")

    scene.produce(range(10))
    with KafkaWriter(scene.servers, transactional_id=scene.id, producer=producer) as writer:
        writer._drop_producer()
        monkeypatch.setattr(kind, "init_transactions", unanswered)
        with pytest.raises(BrokerUnavailableError), writer.transaction():
            pass
        with writer.transaction() as tx:
            tx.send(scene.target, b"100")
        with KafkaWriter(scene.servers, transactional_id=scene.id, producer=producer):
            pass  # the late registration
        running = Running(scene.processor(writer))
        until_recorded(scene.answers, [*range(10), 100], pause=0.2)
        with KafkaWriter(scene.servers, transactional_id=scene.id, producer=producer):
            scene.produce(range(10, 20))
            assert isinstance(running.ended(), FencedError)
    assert scene.answers() == [*range(10), 100]


@pytest.mark.slow
@pytest.mark.parametrize("producer", thinned(PRODUCERS, kept=["native"]))
def test_another_process_with_the_same_id_fences_it(scene: KafkaScene, producer: Any) -> None:
    scene.produce(range(10))
    with KafkaWriter(scene.servers, transactional_id=scene.id, producer=producer) as first:
        running = Running(scene.processor(first))
        scene.wait_for(10)
        with KafkaWriter(scene.servers, transactional_id=scene.id, producer=producer) as second:
            scene.produce(range(10, 20))
            error = running.ended()
            assert isinstance(error, FencedError)
            assert "an id of its own" in str(error)
            running = Running(scene.processor(second))
            scene.wait_for(20)
            running.stop()
    assert scene.answers() == list(range(20))


def test_a_transaction_has_no_database(scene: KafkaScene) -> None:
    with KafkaWriter(scene.servers, transactional_id=scene.id) as writer, writer.transaction() as tx:
        with pytest.raises(UsageError, match="has no database"):
            _ = tx.db
        with pytest.raises(UsageError, match="has no database"):
            _ = tx.session


def test_invalid_uses(scene: KafkaScene) -> None:
    writer = KafkaWriter(scene.servers, transactional_id=scene.id)
    with pytest.raises(WriterClosedError), writer.transaction():
        pass
    with pytest.raises(ConfigurationError, match="offsets='kafka'"):
        scene.processor(writer, options=ProcessorOptions())
    with pytest.raises(InvalidTransactionalIdError):
        KafkaWriter(scene.servers, transactional_id="a#b")
    with pytest.raises(ConfigurationError, match="at least 1000"):
        KafkaWriter({"bootstrap.servers": scene.servers, "transaction.timeout.ms": 500}, transactional_id=scene.id)


@pytest.mark.slow
@pytest.mark.parametrize("producer", thinned(PRODUCERS, kept=["native"]))
def test_a_writer_killed_repeatedly(brisk: DevCluster, new_name: NewName, producer: Any) -> None:
    """In the middle of its transactions; the next process continues where the last committed one ended."""
    scene = KafkaScene(brisk, new_name)
    scene.produce(range(60))
    brief = [f"{name}={value}" for name, value in BRIEF.items()]
    arguments = [scene.servers, scene.group, scene.source, scene.target, scene.id, producer, *brief]
    for failpoint in ("after_send#3=kill", "after_send#8=kill", "after_send#14=kill"):
        with ForkedProcess("processor.kafka_worker", arguments, failpoints=failpoint) as process:
            assert ended(process) == -signal.SIGKILL
    with ForkedProcess("processor.kafka_worker", arguments) as process:
        scene.wait_for(60)
        process.send_signal(signal.SIGTERM)
        assert ended(process) == 0
    assert scene.answers() == list(range(60))
