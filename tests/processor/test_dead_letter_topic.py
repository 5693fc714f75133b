"""Dead letters are listed, and replayed once, for the group that could not process them; and too many in a row stop it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from confluent_kafka.admin import AdminClient
from opentelemetry.sdk.trace import TracerProvider
from processor_scene import ProcessorScene

import dualwrite
from dualwrite.devcluster import DevCluster
from dualwrite.errors import (
    BrokerUnavailableError,
    DeliveryError,
    InDoubtTransactionError,
    MessageFailedError,
    ProducerFencedError,
    UnknownTopicError,
)
from dualwrite.kafka import NativeProducer
from dualwrite.observability import otel_traces
from dualwrite.processor import dead_letter_topic
from dualwrite.processor.dead_letter_topic import DeadLetterTopic
from dualwrite.processor.dead_letters import MARK, REPLAYED_FOR
from dualwrite.testing.server_process import free_port
from fixtures.broker import make_topic, read_topic
from fixtures.command import output_of
from fixtures.pace import LIMIT, until, until_recorded

BAD = (3, 6, 9)


@pytest.fixture
def dead(broker: DevCluster, new_name: Callable[[str], str]) -> str:
    name = new_name("dead")
    make_topic(broker, name, 2)
    return name


class Service:
    """A processor whose handler fails on some numbers until it is mended."""

    def __init__(self, scene: ProcessorScene) -> None:
        self.scene = scene
        self.is_mended = False
        self.seen: list[int] = []

    def handle(self, message: Any, tx: dualwrite.Transaction[Any]) -> None:
        number = int(message.value())
        self.seen.append(number)
        if number in BAD and not self.is_mended:
            raise ValueError(f"{number} is bad")
        self.scene.book(message, tx)


@pytest.fixture
def failed(scene: ProcessorScene, dead: str) -> Iterator[tuple[Service, DeadLetterTopic, Any]]:
    """A service with three dead letters, which goes on running."""
    service = Service(scene)
    topic = DeadLetterTopic(dead, scene.broker.bootstrap_servers)
    scene.produce(range(12))
    with scene.running(service.handle, attempts=2, dead_letter_topic=dead) as running:
        until_recorded(lambda: [int(each.value()) for each in read_topic(scene.broker.bootstrap_servers, dead)], BAD)
        yield service, topic, running


def replays(producer: NativeProducer) -> bool:
    """Whether it is a replay's producer: the service goes on with its last messages, and has one, too."""
    return producer.kafka_transactional_id.endswith("#kafka")


def test_letters_say_where_they_came_from_and_are_replayed_once(
    scene: ProcessorScene, failed: tuple[Service, DeadLetterTopic, Any]
) -> None:
    service, topic, _ = failed
    letters = topic.letters()
    assert sorted(int(each.value or b"") for each in letters) == list(BAD)
    assert {(each.group, each.topic, each.error, each.attempts, each.is_replayed) for each in letters} == {
        (scene.group, scene.source, "ValueError", 2, False)
    }
    assert {each.source_partition for each in letters} == {number % 4 for number in BAD}
    assert topic.letters("another group") == []
    service.is_mended = True
    assert topic.replay(scene.group) == 3
    scene.wait_for(range(12))
    assert topic.replay(scene.group) == 0
    assert all(each.is_replayed for each in topic.letters())
    assert scene.agree() == list(range(12))


def test_what_was_replayed_is_known_as_long_as_the_letters_are_there(
    scene: ProcessorScene, failed: tuple[Service, DeadLetterTopic, Any], dead: str
) -> None:
    """Kafka forgets the offsets of consumer groups without members: after a week, or whenever somebody deletes the group."""
    service, topic, _ = failed
    service.is_mended = True
    assert topic.replay(scene.group) == 3
    admin = AdminClient({"bootstrap.servers": scene.broker.bootstrap_servers})
    groups = [each.group_id for each in admin.list_consumer_groups().result().valid]
    assert scene.group in groups
    assert not [each for each in groups if dead in each]
    marks = [each.value() for each in read_topic(scene.broker.bootstrap_servers, dead) if each.value() == MARK]
    assert 1 <= len(marks) <= 2, "one for each partition of the dead-letter topic that has letters"


def test_traces_are_in_no_letters_way(scene: ProcessorScene, dead: str) -> None:
    """A tracer adds its headers to the dead letter of a message without any, and to the mark of a replay."""
    service = Service(scene)
    topic = DeadLetterTopic(dead, scene.broker.bootstrap_servers)
    scene.produce(range(12))
    otel_traces.install(TracerProvider())
    try:
        with scene.running(service.handle, attempts=1, dead_letter_topic=dead):
            until(lambda: len(topic.letters()) == 3, lambda: f"{topic.letters()}")
            assert {name for each in topic.letters() for name, _ in each.headers} == {"traceparent"}
            service.is_mended = True
            assert topic.replay(scene.group) == 3
            scene.wait_for(range(12))
            assert topic.replay(scene.group) == 0
    finally:
        otel_traces.uninstall()
    assert scene.agree() == list(range(12))


def test_a_processor_of_the_dead_letter_topic_does_not_get_marks(
    scene: ProcessorScene, make_scene: Callable[[str], ProcessorScene], failed: tuple[Service, DeadLetterTopic, Any], dead: str
) -> None:
    service, topic, _ = failed
    service.is_mended = True
    assert topic.replay(scene.group) == 3
    second = make_scene("sqlite")
    second.source = dead
    with second.running() as running:
        second.wait_for(BAD)
        assert not running.has_ended
    assert second.agree() == list(BAD)


def test_a_letter_that_fails_again_is_a_new_one(scene: ProcessorScene, failed: tuple[Service, DeadLetterTopic, Any]) -> None:
    service, topic, _ = failed
    assert topic.replay(scene.group) == 3
    until(lambda: len(topic.letters()) == 6, lambda: f"{topic.letters()}")
    again = [each for each in topic.letters() if not each.is_replayed]
    assert sorted(int(each.value or b"") for each in again) == list(BAD)
    assert all(name != REPLAYED_FOR for each in again for name, _ in each.headers)
    service.is_mended = True
    assert topic.replay(scene.group) == 3
    scene.wait_for(range(12))
    assert scene.agree() == list(range(12))


@pytest.mark.slow
def test_processors_of_other_groups_skip_what_is_replayed(
    scene: ProcessorScene,
    make_scene: Callable[[str], ProcessorScene],
    failed: tuple[Service, DeadLetterTopic, Any],
) -> None:
    service, topic, _ = failed
    other = make_scene("sqlite")
    other.source = scene.source
    bystander = Service(other)
    bystander.is_mended = True
    with other.running(bystander.handle) as running:
        other.wait_for(range(12))
        service.is_mended = True
        assert topic.replay(scene.group) == 3
        scene.wait_for(range(12))
        scene.produce([100, 101, 102, 103])  # one in each partition, after what was replayed
        other.wait_for([*range(12), *range(100, 104)])
        assert not running.has_ended
    assert sorted(bystander.seen) == [*range(12), *range(100, 104)]
    assert other.agree() == [*range(12), *range(100, 104)]


def test_a_replay_that_cannot_send_has_no_effect_and_can_be_repeated(
    scene: ProcessorScene, failed: tuple[Service, DeadLetterTopic, Any], new_name: Callable[[str], str]
) -> None:
    service, topic, _ = failed
    compacted, retry = new_name("compacted"), new_name("retry")
    make_topic(scene.broker, compacted, **{"cleanup.policy": "compact"})  # accepts no message without a key
    make_topic(scene.broker, retry)
    with pytest.raises(DeliveryError):
        topic.replay(scene.group, to=compacted)
    assert not any(each.is_replayed for each in topic.letters())
    service.is_mended = True
    assert topic.replay(scene.group, to=retry) == 3
    sent = read_topic(scene.broker.bootstrap_servers, retry)
    assert sorted(int(message.value()) for message in sent) == list(BAD)
    assert all((REPLAYED_FOR, scene.group.encode()) in message.headers() for message in sent)


@pytest.mark.slow
def test_a_replay_that_is_killed_has_no_effect(
    scene: ProcessorScene, failed: tuple[Service, DeadLetterTopic, Any], dead: str
) -> None:
    service, topic, _ = failed
    service.is_mended = True
    command = [sys.executable, "-m", "dualwrite", "dead-letters", "replay", "--yes", "--topic", dead]
    environment = {**os.environ, "DUALWRITE_TESTING": "1", "DUALWRITE_FAILPOINTS": "after_send=kill"}
    where = ["--kafka", scene.broker.bootstrap_servers]
    killed = subprocess.run([*command, *where], env=environment, capture_output=True, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert topic.replay(scene.group) == 3
    scene.wait_for(range(12))
    assert scene.agree() == list(range(12))


def test_a_replay_whose_commit_is_not_answered_is_in_doubt_and_the_next_one_knows(
    scene: ProcessorScene, failed: tuple[Service, DeadLetterTopic, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    service, topic, _ = failed
    service.is_mended = True
    commit = NativeProducer.commit_transaction

    def unanswered(producer: NativeProducer, *, timeout: float) -> None:
        commit(producer, timeout=timeout)
        if replays(producer):
            raise BrokerUnavailableError("no answer")

    with monkeypatch.context() as patched:
        patched.setattr(NativeProducer, "commit_transaction", unanswered)
        with pytest.raises(InDoubtTransactionError, match="were replayed"):
            topic.replay(scene.group)
    assert topic.replay(scene.group) == 0
    scene.wait_for(range(12))
    assert scene.agree() == list(range(12))


def test_of_two_replays_at_the_same_time_one_is_fenced(
    scene: ProcessorScene, failed: tuple[Service, DeadLetterTopic, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    service, topic, _ = failed
    service.is_mended = True
    prepare = NativeProducer.prepare_transaction
    counts: list[int] = []

    def overtaken(producer: NativeProducer, *, timeout: float) -> Any:
        if replays(producer):
            monkeypatch.setattr(NativeProducer, "prepare_transaction", prepare)
            counts.append(topic.replay(scene.group))
        return prepare(producer, timeout=timeout)

    monkeypatch.setattr(NativeProducer, "prepare_transaction", overtaken)
    with pytest.raises((ProducerFencedError, InDoubtTransactionError)) as raised:
        topic.replay(scene.group)
    assert counts == [3], f"the replay that fences the other one has failed: {raised.value!r}"
    scene.wait_for(range(12))
    assert scene.agree() == list(range(12))


def test_a_replay_with_a_producer_that_must_be_replaced_goes_on_with_the_next_one(
    scene: ProcessorScene, failed: tuple[Service, DeadLetterTopic, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    service, topic, _ = failed
    service.is_mended = True
    monkeypatch.setattr(dead_letter_topic, "_LOT_SIZE", 2)
    monkeypatch.setattr(NativeProducer, "must_be_replaced", True)
    assert topic.replay(scene.group) == 3
    scene.wait_for(range(12))
    assert scene.agree() == list(range(12))


def test_many_dead_letters_in_a_row_stop_the_processor(scene: ProcessorScene, dead: str) -> None:
    def refuse(message: Any, _: dualwrite.Transaction[Any]) -> None:
        raise LookupError(f"the registry answers 404 for {message.offset()}")

    scene.produce(range(12))
    with scene.running(refuse, attempts=1, dead_letter_topic=dead, dead_letters_in_a_row=3) as running:
        error = running.ended()
    assert isinstance(error, MessageFailedError)
    assert "neither could the 3 before it" in str(error)
    assert "replay" in (error.next_step or "")
    topic = DeadLetterTopic(dead, scene.broker.bootstrap_servers)
    assert len(topic.letters()) == 3
    with scene.running(dead_letter_topic=dead):
        assert topic.replay(scene.group) == 3
        scene.wait_for(range(12))
    assert scene.agree() == list(range(12))


def test_the_commands(
    scene: ProcessorScene, failed: tuple[Service, DeadLetterTopic, Any], capsys: pytest.CaptureFixture[str], dead: str
) -> None:
    service, *_ = failed

    def run(*words: str, code: int = 0) -> str:
        ended, out, err = output_of(capsys, "dead-letters", words[0], *where, *words[1:])
        assert ended == code, err
        return out + err

    where = ["--topic", dead, "--kafka", scene.broker.bootstrap_servers]
    listed = json.loads(run("list", "--json"))["letters"]
    assert [each["error"] for each in listed] == ["ValueError"] * 3
    assert "is bad" in run("show", "--letter", listed[0]["letter"])
    assert "no dead letter 9:9" in run("show", "--letter", "9:9", code=2)
    assert "Confirming needs a terminal" in run("replay", code=2)
    service.is_mended = True
    assert "Replayed 3 dead letters." in run("replay", "--yes")
    assert "There is nothing to replay." in run("replay", "--yes")
    assert "There are no dead letters" in run("list", "--group", "nobody")
    scene.wait_for(range(12))


def test_without_a_broker_there_is_one_error_and_no_noise(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(BrokerUnavailableError) as caught:
        DeadLetterTopic("orders.dead", f"127.0.0.1:{free_port()}", timeout=1.0).letters()
    assert "check that the brokers are running" in (caught.value.next_step or "")
    assert capfd.readouterr() == ("", "")


def test_a_topic_that_does_not_exist_is_named_and_not_created(broker: DevCluster, new_name: Callable[[str], str]) -> None:
    """The broker creates topics automatically."""
    name = new_name("typo")
    with pytest.raises(UnknownTopicError, match=name):
        DeadLetterTopic(name, broker.bootstrap_servers).letters()
    assert name not in AdminClient({"bootstrap.servers": broker.bootstrap_servers}).list_topics(timeout=LIMIT).topics
