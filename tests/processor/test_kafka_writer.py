"""Processors without a database: consume, transform, produce, each message once."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
from processor_scene import ProcessorScene, Running

import dualwrite
from dualwrite.devcluster import DevCluster
from dualwrite.errors import (
    BrokerUnavailableError,
    ConfigurationError,
    FencedError,
    InvalidTransactionalIdError,
    MessageFailedError,
    UsageError,
    WriterClosedError,
)
from dualwrite.kafka import LibrdkafkaProducer, NativeProducer
from dualwrite.processor import KafkaWriter
from fixtures.fork_server import ForkedProcess
from fixtures.pace import LIMIT, ended, limit, until, until_recorded
from fixtures.tiers import thinned
from processor.kafka_worker import answer

NewName = Callable[[str], str]
PRODUCERS: list[Any] = ["native", "librdkafka"]
BRIEF = {"session.timeout.ms": 1500, "heartbeat.interval.ms": 300}
"""For `brisk`: others soon get the partitions of a member that has died."""


class KafkaScene(ProcessorScene):
    """Input and output, and a group, without a database."""

    def __init__(self, broker: DevCluster, new_name: NewName) -> None:
        super().__init__(None, broker, new_name)  # type: ignore[arg-type]
        self.servers, self.id = broker.bootstrap_servers, self.prefix

    def runs(self, writer: KafkaWriter, handle: Any = None, **more: Any) -> AbstractContextManager[Running]:
        options = {"batch": 5, "attempts": 2, "offsets": "kafka", **more}
        return self.running(handle or answer(self.target), runner=writer, **options)

    def wait_for_answers(self, count: int) -> None:
        until_recorded(self.answers, range(count), pause=0.2)


@pytest.fixture
def scene(broker: DevCluster, new_name: NewName) -> KafkaScene:
    return KafkaScene(broker, new_name)


@pytest.mark.parametrize("producer", PRODUCERS)
def test_each_message_is_processed_once(scene: KafkaScene, producer: Any) -> None:
    scene.produce(range(30))
    with KafkaWriter(scene.servers, transactional_id=scene.id, producer=producer) as writer:
        with scene.runs(writer):
            scene.wait_for_answers(30)
            scene.produce(range(30, 60))
            scene.wait_for_answers(60)
        with scene.runs(writer):
            scene.produce(range(60, 70))
            scene.wait_for_answers(70)
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
        with scene.runs(writer, fail) as running:
            error = running.ended()
        assert isinstance(error, MessageFailedError)
        assert (error.partition, error.offset) == (1, 1)
        assert 5 not in scene.answers()
        with scene.runs(writer):
            scene.wait_for_answers(8)
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
        with scene.runs(writer, **BRIEF):
            until(lambda: back.ident is not None and not back.is_alive(), "the broker is back")
            scene.wait_for_answers(40)
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
        with scene.runs(writer) as running:
            until_recorded(scene.answers, [*range(10), 100], pause=0.2)
            with KafkaWriter(scene.servers, transactional_id=scene.id, producer=producer):
                scene.produce(range(10, 20))
                assert isinstance(running.ended(), FencedError)
    assert scene.answers() == [*range(10), 100]


@pytest.mark.slow
@pytest.mark.parametrize("producer", thinned(PRODUCERS, kept=["native"]))
def test_another_process_with_the_same_id_fences_it(scene: KafkaScene, producer: Any) -> None:
    scene.produce(range(10))
    with KafkaWriter(scene.servers, transactional_id=scene.id, producer=producer) as first, scene.runs(first) as running:
        scene.wait_for_answers(10)
        with KafkaWriter(scene.servers, transactional_id=scene.id, producer=producer) as second:
            scene.produce(range(10, 20))
            error = running.ended()
            assert isinstance(error, FencedError)
            assert "an id of its own" in str(error)
            with scene.runs(second):
                scene.wait_for_answers(20)
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
    with pytest.raises(ConfigurationError, match="offsets='kafka'"), scene.runs(writer, offsets="database"):
        pass
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
        scene.wait_for_answers(60)
        process.send_signal(signal.SIGTERM)
        assert ended(process) == 0
    assert scene.answers() == list(range(60))
