"""A processor that waits, is slow, or is stopped: it stays in its group as long as it can, and ends when it is asked to."""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from processor_scene import PARTITIONS, ProcessorScene

import dualwrite
from crash.databases import Databases
from dualwrite.devcluster import DevCluster
from dualwrite.errors import MessageFailedError, StoreUnavailableError
from dualwrite.kafka.base import GroupMetadata
from dualwrite.kafka.librdkafka.consumer import GroupConsumer
from dualwrite.process import StopFlag
from dualwrite.processor.progress import Progress
from fixtures.broker import make_topic
from fixtures.fork_server import ForkedProcess
from fixtures.pace import LIMIT, ended, limit, until, until_received
from fixtures.producing import producing
from fixtures.tiers import thinned
from processor.ledger import ledger

NewName = Callable[[str], str]
BRIEF = {"session.timeout.ms": 1500, "heartbeat.interval.ms": 300, "max.poll.interval.ms": 2000}


@pytest.fixture
def scene(databases: Databases, brisk: DevCluster, new_name: NewName) -> ProcessorScene:
    return ProcessorScene(databases.scene("sqlite", brisk).events, brisk, new_name)


class Reading:
    """The positions can't be read when partitions are assigned, until `is_back`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_back = threading.Event()
        self.tried = 0
        begin = Progress.begin

        def away(progress: Any, *arguments: Any) -> Any:
            self.tried += 1
            if not self.is_back.is_set():
                raise StoreUnavailableError("away")
            return begin(progress, *arguments)

        monkeypatch.setattr(Progress, "begin", away)


@pytest.mark.slow
def test_a_processor_can_be_stopped_while_positions_cannot_be_read(
    scene: ProcessorScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading = Reading(monkeypatch)
    with scene.running(pause=10 * LIMIT, longest_pause=10 * LIMIT):
        until(lambda: reading.tried, "the partitions are assigned")


@pytest.mark.slow
@pytest.mark.parametrize("protocol", thinned(["classic", "consumer"], kept=["consumer"]))
def test_an_assignment_waits_for_the_database_beyond_the_poll_interval(
    scene: ProcessorScene, monkeypatch: pytest.MonkeyPatch, protocol: str
) -> None:
    """Past max.poll.interval.ms the member has left the group; it joins again, and continues."""
    reading = Reading(monkeypatch)
    more: dict[str, Any] = dict(BRIEF)
    if protocol == "consumer":
        more |= {"group.protocol": "consumer", "session.timeout.ms": None, "heartbeat.interval.ms": None}
    scene.produce(range(8))
    with scene.running(**more):
        until(lambda: reading.tried, "the partitions are assigned")
        time.sleep(3)
        reading.is_back.set()
        scene.wait_for(range(8))
        scene.produce(range(8, 16))
        scene.wait_for(range(16))
    assert scene.agree() == list(range(16))


def test_a_flag_that_a_signal_handler_sets() -> None:
    """While the main thread waits for it."""
    flag = StopFlag()
    before = signal.signal(signal.SIGALRM, lambda *_: flag.set())
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        flag.wait(10 * LIMIT)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert flag.is_set()


@pytest.mark.slow
def test_sigterm_between_two_attempts(brisk: DevCluster, new_name: NewName, tmp_path: Path) -> None:
    """The process ends at once, without an error."""
    url = f"sqlite:///{tmp_path}/app.db"
    ledger(url).create()
    group, source, target = new_name("group"), new_name("source"), new_name("target")
    for topic in (source, target):
        make_topic(brisk, topic)
    with producing(brisk.bootstrap_servers) as produce:
        for value in (b"0", b"not a number"):
            produce(source, value)
    arguments = [url, brisk.bootstrap_servers, group, source, target, new_name("id"), "1", "attempts=1000000"]
    with ForkedProcess("processor.processor_worker", arguments) as process:
        until_received(lambda: ledger(url).numbers(group), "the message before it is booked", pause=0.2)
        process.send_signal(signal.SIGTERM)
        assert ended(process) == 0
    assert ledger(url).numbers(group) == [0]


@pytest.mark.soak
def test_retries_beyond_the_poll_interval_keep_the_assignment(scene: ProcessorScene) -> None:
    """The consumer is polled between two attempts: its membership is the same in all of them."""
    scene.produce([0])
    members: list[GroupMetadata] = []

    def fail_twice(message: Any, tx: dualwrite.Transaction[Any]) -> None:
        members.append(GroupMetadata.from_librdkafka(consumer().consumer_group_metadata()))
        if len(members) < 3:
            raise ValueError("not yet")
        scene.book(message, tx)

    def consumer() -> Any:
        found = running.processor._loop._consumer
        assert found is not None
        return found.member

    longest = int(1000 * limit(3))
    rare = {**BRIEF, "session.timeout.ms": longest, "max.poll.interval.ms": longest}
    with scene.running(fail_twice, pause=limit(4), longest_pause=limit(4), **rare) as running:
        scene.wait_for([0])
    assert len(members) == 3
    assert len(set(members)) == 1
    assert members[0].member_id
    assert scene.agree() == [0]


@pytest.mark.soak
def test_a_batch_that_takes_too_long_for_offsets_at_kafka(scene: ProcessorScene, caplog: pytest.LogCaptureFixture) -> None:
    """The coordinator takes no offsets of a member that has left: the next batches are smaller."""

    def slowly(message: Any, tx: dualwrite.Transaction[Any]) -> None:
        time.sleep(1.2)
        scene.book(message, tx)

    scene.produce([0, 4, 8])
    with caplog.at_level(logging.WARNING), scene.running(slowly, offsets="kafka", **BRIEF):
        scene.wait_for([0, 4, 8])
    assert scene.agree() == [0, 4, 8]
    assert "From now on 1 are taken at once" in caplog.text


@pytest.mark.soak  # in CI: a batch
def test_a_single_message_that_takes_too_long_for_offsets_at_kafka(scene: ProcessorScene) -> None:
    def too_slowly(message: Any, tx: dualwrite.Transaction[Any]) -> None:
        time.sleep(2.5)
        scene.book(message, tx)

    scene.produce([0])
    with scene.running(too_slowly, offsets="kafka", attempts=2, **BRIEF) as running:
        error = running.ended()
    assert isinstance(error, MessageFailedError)
    assert (error.offset, error.attempts) == (0, 2)
    assert "max.poll.interval.ms" in str(error)
    assert scene.agree() == []


@pytest.mark.slow
def test_offsets_of_a_consumer_without_a_membership_are_refused(
    scene: ProcessorScene, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Kafka takes them from anybody, as those of a consumer without a group; the batch comes again."""
    nobody = iter([GroupMetadata(scene.group)])
    member = GroupConsumer.member

    class Nobody:
        def __init__(self, metadata: GroupMetadata) -> None:
            self._metadata = metadata

        def consumer_group_metadata(self) -> Any:
            return self._metadata.for_librdkafka()

    def once_nobody(consumer: GroupConsumer) -> Any:
        metadata = next(nobody, None)
        return member.__get__(consumer) if metadata is None else Nobody(metadata)

    monkeypatch.setattr(GroupConsumer, "member", property(once_nobody))
    scene.produce(range(4))
    with caplog.at_level(logging.WARNING), scene.running(offsets="kafka"):
        scene.wait_for(range(4))
    assert scene.agree() == list(range(4))
    assert "no longer a member of the group" in caplog.text


@pytest.mark.slow
def test_an_unknown_topic_is_named(scene: ProcessorScene, new_name: NewName, caplog: pytest.LogCaptureFixture) -> None:
    """And read as soon as it exists."""
    known, scene.source = scene.source, new_name("later")
    del known
    with (
        caplog.at_level(logging.WARNING),
        scene.running(**{"topic.metadata.refresh.interval.ms": 200, "allow.auto.create.topics": False}),
    ):
        until(lambda: f"don't know the topic '{scene.source}'" in caplog.text, "the warning")
        make_topic(scene.broker, scene.source, PARTITIONS)
        scene.produce(range(4))
        scene.wait_for(range(4))
    assert scene.agree() == list(range(4))
    assert caplog.text.count("don't know the topic") == 1
