"""Where a processor begins, and what it does when its place is gone: on real brokers, with both recipes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from itertools import count, product
from typing import Any

import pytest
from confluent_kafka import Consumer, KafkaError, Producer, TopicPartition
from confluent_kafka.admin import NewPartitions
from processor_scene import PARTITIONS, ProcessorScene, Running

import dualwrite
from crash.databases import Databases
from dualwrite.cli import main
from dualwrite.errors import (
    ConfigurationError,
    LogTruncatedError,
    MessageFailedError,
    MessagesDeletedError,
    PositionForgottenError,
    TopicReplacedError,
)
from dualwrite.kafka.librdkafka.consumer import GroupConsumer
from dualwrite.kafka.librdkafka.topic_admin import admin_client
from dualwrite.processor.progress import Progress
from dualwrite.stores.positions import Move, Partition, Position, Positions
from fixtures.broker import BRISK, make_topic, started
from fixtures.pace import LIMIT, until, until_received
from fixtures.producing import producing
from fixtures.tiers import thinned

NewName = Callable[[str], str]
RECIPES = ["database", "kafka"]
PROTOCOLS: dict[str, dict[str, Any]] = {
    "classic": {},
    "cooperative": {"partition.assignment.strategy": "cooperative-sticky"},
    "consumer": {"group.protocol": "consumer", **dict.fromkeys(("session.timeout.ms", "heartbeat.interval.ms"))},
}


@pytest.fixture
def positions(scene: ProcessorScene) -> Iterator[Positions]:
    with scene.writer("operator") as operator:
        assert operator.store.positions is not None
        yield operator.store.positions


@pytest.fixture
def looks_often(monkeypatch: pytest.MonkeyPatch) -> list[Mapping[Partition, int]]:
    """Positions, topics and ends are looked at after each turn; what was found there."""
    found: list[Mapping[Partition, int]] = []
    look = Progress.moved_by_others

    def moved_by_others(progress: Progress, consumer: GroupConsumer) -> Mapping[Partition, int]:
        found.append(look(progress, consumer))
        return found[-1]

    monkeypatch.setattr("dualwrite.processor.loop._CHECK_SECONDS", 0.1)
    monkeypatch.setattr(Progress, "moved_by_others", moved_by_others)
    return found


def delete_until(scene: ProcessorScene, offset: int, *partitions: int) -> None:
    """As retention does."""
    admin = admin_client({"bootstrap.servers": scene.broker.bootstrap_servers}, LIMIT)
    wanted = [TopicPartition(scene.source, number, offset) for number in partitions or range(PARTITIONS)]
    for done in admin.delete_records(wanted).values():
        done.result(LIMIT)


def make_again(scene: ProcessorScene) -> None:
    admin = admin_client({"bootstrap.servers": scene.broker.bootstrap_servers}, LIMIT)
    admin.delete_topics([scene.source])[scene.source].result(LIMIT)
    until(lambda: scene.source not in admin.list_topics(timeout=LIMIT).topics, "the topic is gone")
    make_topic(scene.broker, scene.source, PARTITIONS)


def produce_until(scene: ProcessorScene, numbers: Iterator[int], happened: Callable[[], Any]) -> list[int]:
    """Produce one number after the other until something has happened; those that were produced."""
    produced: list[int] = []

    def again() -> Any:
        scene.produce([number := next(numbers)])
        produced.append(number)
        return happened()

    until(again, "a message has arrived", pause=0.2)
    return produced


# --- start="latest" ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("offsets", "protocol"),
    thinned(
        product(RECIPES, PROTOCOLS),
        kept=[("database", "classic"), ("kafka", "consumer")],
    ),
)
def test_messages_after_the_first_start_are_kept_for_the_next_start(scene: ProcessorScene, offsets: Any, protocol: str) -> None:
    """The first consumer ends before it has committed anything."""
    scene.produce(range(8))
    seen: list[int] = []

    def fail(message: Any, tx: Any) -> None:
        seen.append(int(message.value()))
        raise ValueError(tx)

    with scene.running(fail, offsets=offsets, start="latest", attempts=1, **PROTOCOLS[protocol]) as running:
        produced = produce_until(scene, count(8, PARTITIONS), lambda: running.has_ended)
        assert isinstance(running.ended(), MessageFailedError)
    expected = [number for number in produced if number >= min(seen)]
    with scene.running(offsets=offsets, start="latest", **PROTOCOLS[protocol]):
        scene.wait_for(expected)
    assert scene.agree() == expected


@pytest.mark.slow
@pytest.mark.parametrize("offsets", thinned(RECIPES, kept=["database"]))
def test_messages_before_the_first_start_are_never_processed(scene: ProcessorScene, offsets: Any) -> None:
    """Nothing has come in three of the partitions when it starts for the second time."""
    scene.produce(range(8))
    with scene.running(offsets=offsets, start="latest"):
        produce_until(scene, count(8, PARTITIONS), lambda: scene.events.numbers(scene.group))
    done = len(scene.agree())
    with scene.running(offsets=offsets, start="latest"):
        scene.produce([9])
        until_received(lambda: scene.events.numbers(scene.group), "one more", at_least=done + 1)
    assert scene.agree()[:2] != [0, 1]
    assert not set(range(8)) & set(scene.agree())


@pytest.mark.slow
@pytest.mark.parametrize("offsets", thinned(RECIPES, kept=["database"]))
def test_two_members_start_at_once(scene: ProcessorScene, offsets: Any) -> None:
    """Neither takes the partitions of the other for some that were added."""
    scene.produce(range(8))
    with scene.running(offsets=offsets, start="latest"), scene.running(name="2", offsets=offsets, start="latest"):
        produced = produce_until(
            scene, count(8), lambda: len({number % PARTITIONS for number in scene.events.numbers(scene.group)}) == PARTITIONS
        )
        first = {number % PARTITIONS: number for number in reversed(scene.events.numbers(scene.group))}
        expected = [number for number in produced if number >= first[number % PARTITIONS]]
        scene.wait_for(expected)
    assert scene.agree() == sorted(expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("offsets", "protocol"),
    thinned(
        product(RECIPES, PROTOCOLS),
        kept=[("database", "cooperative"), ("kafka", "consumer")],
    ),
)
def test_an_added_partition_begins_at_its_first_message(
    scene: ProcessorScene, offsets: Any, protocol: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "dualwrite")  # which partitions are assigned, and where they begin
    scene.produce(range(8))
    settings = {**PROTOCOLS[protocol], "topic.metadata.refresh.interval.ms": 300}
    with scene.running(offsets=offsets, start="latest", **settings):
        produced = produce_until(scene, count(8, PARTITIONS), lambda: scene.events.numbers(scene.group))
        admin = admin_client({"bootstrap.servers": scene.broker.bootstrap_servers}, LIMIT)
        admin.create_partitions([NewPartitions(scene.source, PARTITIONS + 1)])[scene.source].result(LIMIT)
        until(
            lambda: PARTITIONS in admin.list_topics(scene.source, timeout=LIMIT).topics[scene.source].partitions,
            "the broker knows the new partition",
        )
        with producing(scene.broker.bootstrap_servers) as produce:
            produce(scene.source, b"1001", partition=PARTITIONS)
        numbers = scene.events.numbers
        until_received(lambda: [one for one in numbers(scene.group) if one == 1001], "the first message of the new partition")
    done = scene.agree()
    assert len(set(done)) == len(done)
    assert set(done) <= {*produced, 1001}


# --- positions that are removed, and other recipes --------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.usefixtures("looks_often")
@pytest.mark.parametrize("is_busy", [True, False], ids=["busy", "idle"])
def test_positions_forgotten_while_the_processor_runs(scene: ProcessorScene, positions: Positions, *, is_busy: bool) -> None:
    scene.produce(range(8))
    with scene.running() as running:
        scene.wait_for(range(8))
        assert positions.forget(scene.group) == PARTITIONS
        if is_busy:
            scene.produce(range(8, 12))
        error = running.ended()
    assert isinstance(error, PositionForgottenError)
    assert (error.topic, error.position) == (scene.source, 2)
    assert scene.agree() == list(range(8))


@pytest.mark.slow
def test_switching_where_positions_are_stored(scene: ProcessorScene, new_name: NewName) -> None:
    """To Kafka and back; the group's offsets at Kafka are never those that monitors have seen last."""
    url = scene.events.database.url.render_as_string(hide_password=False)
    forget = ["offsets", "forget", "--group", scene.group, "--url", url, "--kafka", scene.broker.bootstrap_servers, "--yes"]
    scene.produce(range(8))
    with scene.running():
        scene.wait_for(range(8))
    put_back(scene)
    with scene.running(offsets="kafka") as running:
        error = running.ended()
    assert isinstance(error, ConfigurationError)
    assert "dualwrite offsets forget" in str(error)
    assert main(forget) == 0
    scene.produce(range(8, 16))
    with scene.running(offsets="kafka"):
        scene.wait_for(range(16))
    scene.produce(range(16, 24))
    with scene.running():
        scene.wait_for(range(24))
    assert scene.agree() == list(range(24))


def put_back(scene: ProcessorScene, offset: int = 0) -> None:
    """Set the group's offsets at Kafka, as a kill leaves them behind, or a consumer before this one."""
    with closing(Consumer(scene.settings(**{"enable.auto.commit": False}))) as consumer:
        consumer.commit(offsets=[TopicPartition(scene.source, n, offset) for n in range(PARTITIONS)], asynchronous=False)


# --- recreated topics -------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.usefixtures("looks_often")
@pytest.mark.parametrize(
    ("offsets", "protocol", "messages"),
    thinned(
        product(RECIPES, ["classic", "consumer"], [4, 16]),
        kept=[
            ("database", "consumer", 16),
            ("kafka", "classic", 16),
            ("database", "classic", 4),
        ],
    ),
)
def test_a_topic_recreated_while_the_processor_runs(scene: ProcessorScene, offsets: Any, protocol: str, messages: int) -> None:
    """With fewer messages than were read, or more: it stops."""
    scene.produce(range(8))
    with scene.running(offsets=offsets, **PROTOCOLS[protocol]) as running:
        scene.wait_for(range(8))
        make_again(scene)
        scene.produce(range(100, 100 + messages))
        error = running.ended()
    assert isinstance(error, TopicReplacedError), error
    assert error.topic == scene.source
    found = scene.agree()
    assert len(set(found)) == len(found)


@pytest.mark.soak
def test_kafka_4_4_refuses_offsets_of_the_topic_before(
    databases: Databases, new_name: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a look at the topic's id, which comes only every few seconds."""
    monkeypatch.setattr("dualwrite.processor.loop._CHECK_SECONDS", 10**6)
    with started(kafka_version="4.4.0", config=BRISK) as cluster:
        scene = ProcessorScene(databases.scene("sqlite", cluster).events, cluster, new_name)
        scene.produce(range(8))
        with scene.running(offsets="kafka") as running:
            scene.wait_for(range(8))
            make_again(scene)
            scene.produce(range(100, 116))
            error = running.ended()
    assert isinstance(error, TopicReplacedError), error
    assert "the offsets of the transaction belong to the old one" in str(error)


@pytest.mark.slow
@pytest.mark.parametrize("protocol", thinned(["classic", "consumer"], kept=["consumer"]))
def test_a_recreated_topic_is_read_from_its_first_message(
    scene: ProcessorScene, looks_often: list[Mapping[Partition, int]], protocol: str
) -> None:
    """If none of its messages can have been taken for messages of the one before."""
    scene.produce(range(8))
    with scene.running(on_new_topic="begin", **PROTOCOLS[protocol]):
        scene.wait_for(range(8))
        looks = len(looks_often)
        until(lambda: len(looks_often) > looks + 1, "it has seen that the topic is still the same")
        make_again(scene)
        scene.produce(range(8, 12))
        scene.wait_for(range(12))
        scene.produce(range(12, 20))
        scene.wait_for(range(20))
    assert scene.agree() == list(range(20))


# --- messages that are deleted ----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("offsets", thinned(RECIPES, kept=["database"]))
def test_messages_deleted_before_the_start(scene: ProcessorScene, offsets: Any) -> None:
    scene.produce(range(8))
    with scene.running(offsets=offsets):
        scene.wait_for(range(8))
    scene.produce(range(8, 16))
    delete_until(scene, 3)
    with scene.running(offsets=offsets) as running:
        error = running.ended()
    assert isinstance(error, MessagesDeletedError)
    assert (error.topic, error.position, error.first_offset) == (scene.source, 2, 3)
    with scene.running(offsets=offsets, on_gap="skip"):
        scene.wait_for([*range(8), *range(12, 16)])
    assert scene.agree() == [*range(8), *range(12, 16)]


@pytest.mark.slow
def test_messages_beyond_the_offset_of_an_earlier_consumer(scene: ProcessorScene) -> None:
    scene.produce(range(8))
    put_back(scene)
    delete_until(scene, 1)
    with scene.running() as running:
        assert isinstance(running.ended(), MessagesDeletedError)
    with scene.running(on_gap="skip"):
        scene.wait_for(range(4, 8))
    assert scene.agree() == list(range(4, 8))


@pytest.mark.slow
@pytest.mark.usefixtures("looks_often")
@pytest.mark.parametrize(
    ("on_gap", "protocol"),
    thinned(
        product(["stop", "skip"], PROTOCOLS),
        kept=[("stop", "classic"), ("skip", "consumer")],
    ),
)
def test_a_position_out_of_range_while_the_processor_runs(
    scene: ProcessorScene, positions: Positions, on_gap: Any, protocol: str
) -> None:
    """It is moved to where retention has deleted messages: what reading too slowly leads to."""
    scene.produce(range(8))
    with scene.running(on_gap=on_gap, **PROTOCOLS[protocol]) as running:
        scene.wait_for(range(8))
        delete_until(scene, 1, 0)
        stored = positions.read(scene.group)[scene.source, 0]
        positions.reset(scene.group, [Move(stored, Position(scene.source, 0, 0, stored.topic_id))])
        if on_gap == "stop":
            assert isinstance(running.ended(), MessagesDeletedError)
            return
        scene.wait_for([*range(8), 4])
        scene.produce(range(8, 16))
        scene.wait_for([*range(16), 4])
    assert scene.agree() == sorted([*range(16), 4])


@pytest.mark.slow
@pytest.mark.parametrize("on_gap", ["stop", "skip"])
def test_a_log_that_ends_before_the_position_in_the_database(scene: ProcessorScene, positions: Positions, on_gap: Any) -> None:
    scene.produce(range(8))
    with scene.running():
        scene.wait_for(range(8))
    stored = positions.read(scene.group)[scene.source, 0]
    positions.reset(scene.group, [Move(stored, Position(scene.source, 0, 9, stored.topic_id))])
    with scene.running(on_gap=on_gap) as running:
        if on_gap == "stop":
            error = running.ended()
            assert isinstance(error, LogTruncatedError)
            assert (error.topic, error.partition, error.position, error.end_offset) == (scene.source, 0, 9, 2)
            return
        produced = produce_until(scene, count(8, PARTITIONS), lambda: len(scene.events.numbers(scene.group)) > 8)
    assert scene.agree()[-1] in produced


@pytest.mark.parametrize("on_gap", ["stop", "skip"])
def test_a_truncation_that_is_reported_together_with_messages(
    scene: ProcessorScene, on_gap: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mock reports it, as librdkafka does: without an offset, behind messages that the same `poll` returns."""
    polled = GroupConsumer._polled

    def with_report(consumer: GroupConsumer, timeout: float) -> Any:
        message = polled(consumer, timeout)
        if message is not None and message.value() == b"4":
            consumer._note_refused(
                (scene.source, 0), None, KafkaError(KafkaError._AUTO_OFFSET_RESET, "log truncation detected")
            )
        return message

    monkeypatch.setattr(GroupConsumer, "_polled", with_report)
    scene.produce(range(8))
    with scene.running(on_gap=on_gap) as running:
        if on_gap == "stop":
            error = running.ended()
            assert isinstance(error, LogTruncatedError)
            assert (error.topic, error.partition, error.position, error.end_offset) == (scene.source, 0, 2, 2)
            return
        scene.produce(range(8, 16))
        scene.wait_for(range(16))
    assert scene.agree() == list(range(16))


# --- transactional input ----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.usefixtures("looks_often")
@pytest.mark.parametrize("offsets", thinned(RECIPES, kept=["kafka"]))
def test_deleted_markers_are_not_missing_messages(scene: ProcessorScene, offsets: Any, new_name: NewName) -> None:
    """A partition that was read to its end: the position is behind the markers, and behind what was aborted."""
    producer = Producer({"bootstrap.servers": scene.broker.bootstrap_servers, "transactional.id": new_name("id")})
    producer.init_transactions(LIMIT)
    for numbers, is_kept in ((range(8), True), (range(100, 104), False)):
        producer.begin_transaction()
        for number in numbers:
            producer.produce(scene.source, b"%d" % number, partition=number % PARTITIONS)
        if is_kept:
            producer.commit_transaction(LIMIT)
        else:
            producer.flush(LIMIT)
            producer.abort_transaction(LIMIT)
    with scene.running(offsets=offsets) as running:
        scene.wait_for(range(8))
        at_the_end = {5}  # two messages and a marker, a message and a marker
        until(
            lambda: {one.offset for one in running.processor.positions.values()} == at_the_end,
            lambda: running.processor.positions,
        )
    delete_until(scene, 5)
    with scene.running(offsets=offsets):
        scene.produce(range(8, 12))
        scene.wait_for(range(12))
    assert scene.agree() == list(range(12))


@pytest.mark.slow
@pytest.mark.usefixtures("looks_often")
def test_the_end_is_not_committed_while_messages_are_retried(scene: ProcessorScene) -> None:
    """It has read to the end, and is stopped before the messages have taken effect."""
    scene.produce(range(8))
    calls = count()

    def book(message: Any, tx: dualwrite.Transaction[Any]) -> None:
        if next(calls) == 30:
            started.processor.stop()
        raise ValueError(message, tx)

    with scene.running(book, attempts=1000, pause=0.01, longest_pause=0.01) as running:
        started: Running = running
        assert running.ended() is None
    with scene.running():
        scene.wait_for(range(8))
    assert scene.agree() == list(range(8))
