"""DualProcessor on real brokers and databases: each message takes effect once."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import sqlalchemy as sa
from processor_scene import PARTITIONS, ProcessorScene
from sqlalchemy.orm import sessionmaker

import dualwrite
from dualwrite.errors import (
    ConfigurationError,
    MessageFailedError,
    MessageTooLargeError,
    StoreUnavailableError,
    UsageError,
)
from dualwrite.kafka.librdkafka.consumer import GroupConsumer
from dualwrite.kafka.librdkafka.group_offsets import Batch
from dualwrite.processor import DualProcessor
from dualwrite.processor.progress import Progress
from dualwrite.stores.positions import Move, Position
from fixtures.broker import make_topic, read_topic
from fixtures.pace import LIMIT, until, until_received, until_recorded
from fixtures.producing import producing
from fixtures.tables import table
from fixtures.tiers import thinned

NewName = Callable[[str], str]
PROTOCOLS = ["classic", "consumer"]


@pytest.fixture
def scene(make_scene: Callable[[str], ProcessorScene]) -> ProcessorScene:
    return make_scene("postgresql")


@pytest.mark.parametrize(
    ("database", "offsets"),
    thinned(
        product(["sqlite", "postgresql", "mariadb"], ["database", "kafka"]),
        kept=[("sqlite", "database"), ("postgresql", "kafka")],
        quick=[("sqlite", "database"), ("sqlite", "kafka")],
    ),
)
def test_each_message_is_processed_once(make_scene: Callable[[str], ProcessorScene], database: str, offsets: Any) -> None:
    scene = make_scene(database)
    scene.produce(range(50))
    with scene.running(offsets=offsets):
        scene.wait_for(range(50))
        scene.produce(range(50, 100))
        scene.wait_for(range(100))
    assert scene.agree() == list(range(100))
    with scene.running(offsets=offsets):
        scene.produce(range(100, 110))
        scene.wait_for(range(110))
    assert scene.agree() == list(range(110))


@pytest.mark.slow
@pytest.mark.parametrize("protocol", thinned(PROTOCOLS, kept=["classic"]))  # consumer, in CI: one of them is paused
def test_members_share_the_partitions(scene: ProcessorScene, protocol: str) -> None:
    """Rebalances while messages are processed: the second joins, the first leaves."""
    more = {} if protocol == "classic" else {"group.protocol": "consumer"}
    if protocol == "consumer":
        more |= dict.fromkeys(("session.timeout.ms", "heartbeat.interval.ms"))  # the group's, in this protocol
    scene.produce(range(100))
    with scene.running(**more):
        with scene.running(name="2", **more) as second:
            until(lambda: len(second.processor.positions) or None, "the second has partitions", pause=0.1)
            scene.produce(range(100, 200))
            scene.wait_for(range(200))
        scene.produce(range(200, 250))
        scene.wait_for(range(250))
    assert scene.agree() == list(range(250))


@pytest.mark.slow
def test_committed_offsets_show_the_progress(scene: ProcessorScene) -> None:
    """The group's offsets at Kafka follow, also while nothing more comes and when it stops."""
    with scene.running():
        scene.produce(range(8))
        scene.wait_for(range(8))
        until_recorded(scene.shown, dict.fromkeys(range(PARTITIONS), 2), pause=0.1)
        for last in (16, 24):  # the second too soon to be shown at once
            scene.produce(range(last - 8, last))
            scene.wait_for(range(last))
    assert scene.shown() == dict.fromkeys(range(PARTITIONS), 6)


@pytest.mark.slow
def test_committed_offsets_are_updated_when_partitions_are_revoked(scene: ProcessorScene) -> None:
    scene.produce(range(40))
    with scene.running() as first:
        scene.wait_for(range(40))
        with scene.running(name="2") as second:
            until(lambda: len(second.processor.positions) or None, "the second has partitions", pause=0.1)
            first.stop()
            until_recorded(scene.shown, dict.fromkeys(range(PARTITIONS), 10), pause=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("offsets", thinned(["database", "kafka"], kept=["database"]))
def test_processors_share_a_pool(scene: ProcessorScene, offsets: Any) -> None:
    """Twice, another process claims the pool's ids in the middle of a handler, as after a pause; nothing stops."""
    scene.produce(range(200))
    claims = [scene.claim, scene.claim]

    def handle(message: Any, tx: dualwrite.Transaction[Any]) -> None:
        if claims and int(message.value()) >= 100:
            claims.pop()()
        scene.book(message, tx)

    with (
        scene.pool() as pool,
        scene.running(handle, runner=pool, offsets=offsets),
        scene.running(handle, runner=pool, offsets=offsets),
    ):
        scene.wait_for(range(200))
    assert not claims
    assert scene.agree() == list(range(200))


@pytest.mark.slow
def test_processors_share_a_commit(scene: ProcessorScene) -> None:
    """Units of both are in one transaction of the database, and so in one of Kafka: they share a writer."""
    found: dict[str, set[int]] = {}

    def book_as(number: int) -> Any:
        def book(message: Any, tx: dualwrite.Transaction[Any]) -> None:
            scene.book(message, tx)
            found.setdefault(tx.db.scalar(sa.text("SELECT pg_current_xact_id()::text")), set()).add(number)

        return book

    with (
        scene.pool(size=1) as pool,
        scene.running(book_as(0), runner=pool, batch=1),
        scene.running(book_as(1), runner=pool, batch=1),
    ):
        produced = itertools.count(0, 40)

        def shared() -> bool:
            first = next(produced)
            scene.produce(range(first, first + 40))
            scene.wait_for(range(first + 40))
            return {0, 1} in found.values()

        until(shared, "a commit of both")
    numbers = scene.agree()
    assert numbers == list(range(len(numbers)))
    assert len(found) < len(numbers)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "offsets"),
    thinned(
        [("writer", "database"), ("writer", "kafka"), ("pool", "database"), ("pool", "kafka")],
        kept=[("writer", "database"), ("pool", "database")],
    ),
)
def test_a_setting_for_one_message_is_not_seen_by_the_next(scene: ProcessorScene, kind: str, offsets: Any) -> None:
    """Each third message sets a tenant, and options of the connection."""
    seen: set[tuple[Any, ...]] = set()

    def handle(message: Any, tx: dualwrite.Transaction[Any]) -> None:
        tenant = tx.db.scalar(sa.text("SELECT current_setting('app.tenant', true)"))
        seen.add((tenant or "", tx.db.get_execution_options().get("mark")))
        scene.book(message, tx)
        tx.db.execution_options(mark=1)
        if int(message.value()) % 12 == 0:
            tx.db.execute(sa.text("SELECT set_config('app.tenant', 'one', true)"))

    scene.produce(range(60))
    opened: Any = scene.writer() if kind == "writer" else scene.pool()
    with opened as runner, scene.running(handle, runner=runner, offsets=offsets):
        scene.wait_for(range(60))
    assert scene.agree() == list(range(60))
    assert seen == {("", None)}


@pytest.mark.slow
def test_a_failed_message_goes_to_the_dead_letter_topic(scene: ProcessorScene, new_name: NewName) -> None:
    """If a topic refuses it, the processor stops: nothing is lost, and the message goes to a topic that accepts it."""
    small, dead = new_name("small"), new_name("dead")
    make_topic(scene.broker, small, max_message_bytes="100")
    make_topic(scene.broker, dead)
    with producing(scene.broker.bootstrap_servers) as produce:
        produce(scene.source, b"bad", key=b"k", partition=1, headers={"origin": b"test"})
    scene.produce(range(8))
    with scene.running(attempts=2, dead_letter_topic=small) as running:
        error = running.ended()
    assert isinstance(error, MessageFailedError)
    assert (error.topic, error.partition, error.offset, error.attempts) == (scene.source, 1, 0, 2)
    assert isinstance(error.__cause__, MessageTooLargeError)
    assert f"could not be sent to the dead-letter topic {small!r}" in str(error)
    assert "its processing raised ValueError" in str(error)
    assert read_topic(scene.broker.bootstrap_servers, small) == []
    with scene.running(attempts=2, dead_letter_topic=dead):
        scene.wait_for(range(8))
        letter = scene.letter(dead, b"bad")
    assert scene.agree() == list(range(8))
    headers = dict(letter.headers())
    assert (letter.key(), letter.value(), headers["origin"]) == (b"k", b"bad", b"test")
    assert headers["dualwrite.topic"] == scene.source.encode()
    assert (headers["dualwrite.partition"], headers["dualwrite.offset"]) == (b"1", b"0")
    assert (headers["dualwrite.attempts"], headers["dualwrite.error"]) == (b"2", b"ValueError")


@pytest.mark.slow
def test_a_paused_consumer_cannot_commit(scene: ProcessorScene) -> None:
    """It loses its partitions while it works on a batch: what it has written is rolled back."""
    scene.produce(range(PARTITIONS))
    slow: list[int] = []

    def book(message: Any, tx: dualwrite.Transaction[Any]) -> None:
        scene.book(message, tx)
        if not slow:
            slow.append(1)
            until_received(lambda: scene.events.numbers(scene.group), "another has processed them", at_least=PARTITIONS)

    with scene.running(book, **{"max.poll.interval.ms": 6000, "session.timeout.ms": 6000}):
        until(lambda: slow, "the first works")
        with scene.running(name="2"):
            scene.wait_for(range(PARTITIONS))
            scene.produce(range(PARTITIONS, 4 * PARTITIONS))
            scene.wait_for(range(4 * PARTITIONS))
    assert scene.agree() == list(range(4 * PARTITIONS))


@pytest.mark.slow
def test_a_position_reset_while_the_processor_runs(scene: ProcessorScene) -> None:
    """Forwards: what is in between is never processed. Backwards, while nothing comes: it is processed again."""
    scene.produce(range(8))
    with scene.writer("operator") as operator, scene.running():
        scene.wait_for(range(8))
        positions = operator.store.positions
        assert positions is not None
        stored = positions.read(scene.group)
        positions.reset(
            scene.group, [Move(one, Position(one.topic, one.partition, 1, one.topic_id)) for one in stored.values()]
        )
        expected = sorted([*range(8), *range(4, 8)])
        scene.wait_for(expected)
    assert scene.agree() == expected


@pytest.mark.slow
def test_a_moved_position_that_cannot_be_read(scene: ProcessorScene, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first look fails, as if the database had gone away just then; the next attempt looks again."""
    scene.produce([0, 4, 8])
    look, failures = Progress.catch_up, iter([StoreUnavailableError("away")])

    def catch_up(progress: Progress, consumer: Any, batch: Any) -> Any:
        for error in failures:
            raise error
        return look(progress, consumer, batch)

    monkeypatch.setattr(Progress, "catch_up", catch_up)
    with scene.writer("operator") as operator:
        positions = operator.store.positions
        assert positions is not None
        elsewhere = iter([[Move(None, Position(scene.source, 0, 2))]])

        def book(message: Any, tx: dualwrite.Transaction[Any]) -> None:
            for moves in elsewhere:
                positions.reset(scene.group, moves)
            scene.book(message, tx)

        with scene.running(book):
            scene.wait_for([8])
    assert scene.agree() == [8]
    assert next(failures, None) is None


@pytest.mark.slow
def test_what_another_has_processed_is_not_processed_one_by_one(scene: ProcessorScene, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch of all partitions: another member has processed that of one, and then the rest fails."""
    scene.produce(range(8))
    poll, first = GroupConsumer.poll, iter([True])

    def whole(consumer: GroupConsumer, most: int, timeout: float) -> Batch:
        found = poll(consumer, most, timeout)
        if found.messages and next(first, False):
            while len(found.messages) < 8:
                more = poll(consumer, most, timeout)
                found = Batch((*found.messages, *more.messages), {**found.terms, **more.terms})
        return found

    monkeypatch.setattr(GroupConsumer, "poll", whole)
    batches: list[list[int]] = []
    with scene.writer("another") as another:

        def handle(messages: Any, tx: dualwrite.Transaction[Any]) -> None:
            batches.append([int(message.value()) for message in messages])
            for message in messages:
                scene.book(message, tx)
            if len(batches) == 1:
                another.store.positions.reset(scene.group, [Move(None, Position(scene.source, 0, 2))])
            if len(batches) == 2:
                messages.clear()
                raise ValueError("poison")

        with scene.running(handle_batch=handle):
            scene.wait_for([1, 2, 3, 5, 6, 7])
            scene.produce([8])
            scene.wait_for([1, 2, 3, 5, 6, 7, 8])
    assert [sorted(batch) for batch in batches[:2]] == [list(range(8)), [1, 2, 3, 5, 6, 7]]
    assert scene.agree() == [1, 2, 3, 5, 6, 7, 8]


@pytest.mark.slow
def test_an_error_is_not_blamed_on_a_message_that_was_processed_already(scene: ProcessorScene) -> None:
    """As a handler that finds the row of its message there already."""
    scene.produce([0])
    begun = threading.Event()
    with scene.writer("another") as another:

        def handle(message: Any, tx: dualwrite.Transaction[Any]) -> None:
            if message.offset() == 0:
                begun.set()
                another.store.positions.reset(scene.group, [Move(None, Position(scene.source, 0, 1))])
                raise ValueError("it is there already")
            scene.book(message, tx)

        with scene.running(handle, attempts=1):
            assert begun.wait(LIMIT)
            scene.produce([4])
            scene.wait_for([4])
    assert scene.agree() == [4]


@pytest.mark.slow
def test_a_failing_listener_of_the_commit_stops_nothing(scene: ProcessorScene, caplog: pytest.LogCaptureFixture) -> None:
    maker = sessionmaker()
    sa.event.listen(maker, "after_commit", lambda _: 1 / 0)

    def handle(message: Any, tx: dualwrite.Transaction[Any]) -> None:
        tx.session.execute(sa.text("SELECT 1"))
        scene.book(message, tx)

    servers = scene.broker.bootstrap_servers
    scene.produce(range(10))
    with (
        dualwrite.connect(scene.events.database, kafka=servers, transactional_id=scene.prefix, session=maker) as writer,
        scene.running(handle, runner=writer, batch=3, attempts=1),
    ):
        scene.wait_for(range(10))
    assert scene.agree() == list(range(10))
    assert "ZeroDivisionError" in caplog.text


@table(
    "arguments, message",
    [
        ({}, "either handle or handle_batch"),
        ({"handle": print, "handle_batch": print}, "either handle or handle_batch"),
        ({"handle": print, "topics": "orders"}, "list of at least one topic"),
        ({"handle": print, "topics": []}, "list of at least one topic"),
        ({"handle": print, "consumer": {}}, "A group.id must be"),
        ({"handle": print, "topics": ["orders", "^payments.*"]}, "is a pattern"),
    ],
)
def test_invalid_arguments(scene: ProcessorScene, arguments: dict[str, Any], message: str) -> None:
    given = {"topics": [scene.source], "consumer": scene.settings(), **arguments}
    with scene.writer() as writer, pytest.raises(ConfigurationError, match=message):
        DualProcessor(writer, given.pop("consumer"), given.pop("topics"), **given)


def test_without_a_database_there_is_a_pointer_to_confluent_kafka() -> None:
    runner: Any = object()
    with pytest.raises(UsageError, match="needs a DualWriter or a WriterPool") as caught:
        DualProcessor(runner, {"group.id": "group"}, ["orders"], handle=print)
    assert "send_offsets_to_transaction" in (caught.value.next_step or "")


@table(
    "setting, value",
    [
        ("enable.auto.commit", True),
        ("enable.auto.offset.store", True),
        ("auto.offset.reset", "latest"),
        ("isolation.level", "read_uncommitted"),
    ],
)
def test_settings_that_the_processor_controls_are_refused(scene: ProcessorScene, setting: str, value: Any) -> None:
    with scene.running(**{setting: value}) as running:
        error = running.ended()
    assert isinstance(error, ConfigurationError)
    assert setting in str(error)
