"""What a message can cause is counted and ends in the dead-letter topic; what says nothing about messages is not counted."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

import pytest
import sqlalchemy as sa
from confluent_kafka import Message
from processor_scene import PARTITIONS, ProcessorScene
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

import dualwrite
from crash.databases import Databases
from dualwrite import Topic
from dualwrite.devcluster import DevCluster
from dualwrite.errors import AfterCommitError, MessageFailedError, SerializationError, UsageError
from dualwrite.kafka.librdkafka.consumer import GroupConsumer
from dualwrite.observability import BatchFailed, BatchProcessed, DeadLettered, Event, observing
from dualwrite.processor import DualProcessor, ProcessorOptions, loop
from dualwrite.testing import failpoints
from fixtures.broker import make_topic, read_topic
from fixtures.open_transactions import abort_ongoing, left_open
from fixtures.pace import LIMIT, until, until_received
from fixtures.tiers import thinned

NewName = Callable[[str], str]
Handle = Callable[[Any, dualwrite.Transaction[Any]], None]
RUNNERS = ["writer", "pool"]
BAD = 5
GOOD = [number for number in range(12) if number != BAD]


class Base(DeclarativeBase):
    pass


class Checked(Base):
    """A table that refuses some rows: at the INSERT, and at COMMIT."""

    __tablename__ = "checked_numbers"
    id: Mapped[int] = mapped_column(primary_key=True)
    number: Mapped[int] = mapped_column(sa.CheckConstraint(f"number <> {BAD}"))
    once: Mapped[str | None] = mapped_column(sa.String(100))
    __table_args__ = (sa.UniqueConstraint("once", deferrable=True, initially="DEFERRED"),)


@pytest.fixture
def scene(make_scene: Callable[[str], ProcessorScene]) -> ProcessorScene:
    found = make_scene("postgresql")
    Base.metadata.create_all(found.events.database)
    return found


@pytest.fixture
def dead(broker: DevCluster, new_name: NewName) -> str:
    name = new_name("dead")
    make_topic(broker, name)
    return name


@contextmanager
def running(
    scene: ProcessorScene, handle: Handle, runner: str = "writer", *, writer: dict[str, Any] | None = None, **options: Any
) -> Iterator[Any]:
    """A processor on a writer, with more arguments of `connect`, or on a pool."""
    opened: Any = scene.pool()
    if runner == "writer":
        chosen = {"kafka": scene.broker.bootstrap_servers, **(writer or {})}
        opened = dualwrite.connect(scene.events.database, transactional_id=f"{scene.prefix}.1", **chosen)
    with opened as made, scene.running(handle, runner=made, **options) as found:
        yield found


def letters(scene: ProcessorScene, dead: str, found: Any) -> list[Message]:
    """The dead letters now; there are some, or the processor runs."""
    is_running = not found.has_ended
    now = read_topic(scene.broker.bootstrap_servers, dead)
    assert now or is_running, "it has ended without a dead letter"
    return now


def flush(scene: ProcessorScene, number: int, tx: Any) -> None:
    """The session is flushed after the handler."""
    tx.session.add(Checked(number=number))


def deferred(scene: ProcessorScene, number: int, tx: Any) -> None:
    """Refused at COMMIT."""
    for _ in range(1 + (number == BAD)):
        tx.db.execute(sa.insert(Checked), {"number": 0, "once": f"{scene.prefix} {number}"})


def swallowed(scene: ProcessorScene, number: int, tx: Any) -> None:
    """PostgreSQL refuses every statement after one that has failed."""
    if number == BAD:
        with pytest.raises(sa.exc.DBAPIError):
            tx.db.execute(sa.text("SELECT 1/0"))


def too_slow(scene: ProcessorScene, number: int, tx: Any) -> None:
    """The database's limit for one statement."""
    if number == BAD:
        tx.db.execute(sa.text("SET LOCAL statement_timeout = 50"))
        tx.db.execute(sa.text("SELECT pg_sleep(30)"))


POISON = [flush, deferred, swallowed, too_slow]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("poison", "runner"),
    thinned(
        product(POISON, RUNNERS),
        kept=[(flush, "pool"), (deferred, "writer"), (swallowed, "writer"), (too_slow, "pool")],
    ),
)
def test_errors_after_the_handler_count_as_attempts(
    scene: ProcessorScene, dead: str, poison: Callable[..., None], runner: str, caplog: pytest.LogCaptureFixture
) -> None:
    tried = Counter[int]()

    def handle(message: Any, tx: dualwrite.Transaction[Any]) -> None:
        number = int(message.value())
        tried[number] += 1
        scene.book(message, tx)
        poison(scene, number, tx)

    scene.produce(range(12))
    with running(scene, handle, runner, attempts=2, dead_letter_topic=dead) as found:
        scene.wait_for(GOOD)
        (letter,) = until_received(lambda: letters(scene, dead, found), "the dead letter")
    assert (letter.value(), dict(letter.headers())["dualwrite.attempts"]) == (b"%d" % BAD, b"2")
    assert scene.agree() == GOOD
    assert 2 <= tried[BAD] <= 2 + 1, "in its batch, and by itself"
    (last,) = [record for record in caplog.records if "could not be processed in 2 attempts" in record.getMessage()]
    assert last.exc_info, "the traceback shows where it failed"
    assert (last.__dict__["group_id"], last.__dict__["topic"]) == (scene.group, scene.source)
    assert (last.__dict__["partition"], last.__dict__["offset"]) == (BAD % PARTITIONS, BAD // PARTITIONS)


def test_without_a_dead_letter_topic_the_processor_stops(scene: ProcessorScene, caplog: pytest.LogCaptureFixture) -> None:
    def handle(message: Any, tx: dualwrite.Transaction[Any]) -> None:
        scene.book(message, tx)
        flush(scene, int(message.value()), tx)

    scene.produce(range(8))
    with running(scene, handle, attempts=2) as found:
        error = found.ended()
    assert isinstance(error, MessageFailedError)
    assert (error.partition, error.offset, error.attempts) == (1, 1, 2)
    assert isinstance(error.__cause__, sa.exc.IntegrityError)
    assert BAD not in scene.agree()
    with scene.running():
        scene.wait_for(range(8))
    assert scene.agree() == list(range(8))
    (stopping,) = [record for record in caplog.records if "the processor stops" in record.getMessage()]
    assert stopping.exc_info
    assert stopping.exc_info[1] is error


@pytest.mark.parametrize("producer", thinned(["native", "librdkafka"], kept=["native"]))
@pytest.mark.soak
def test_a_message_that_exceeds_the_transaction_timeout(scene: ProcessorScene, dead: str, producer: Any) -> None:
    """Without two-phase commit Kafka would abort what the database commits."""

    def handle(message: Any, tx: dualwrite.Transaction[Any]) -> None:
        scene.book(message, tx)
        if int(message.value()) == BAD:
            time.sleep(3)

    scene.produce(range(12))
    kafka = {"bootstrap.servers": scene.broker.bootstrap_servers, "transaction.timeout.ms": 2000}
    brief = {"kafka": kafka, "two_phase": False, "producer": producer}
    with running(scene, handle, writer=brief, attempts=2, dead_letter_topic=dead) as found:
        scene.wait_for(GOOD)
        (letter,) = until_received(lambda: letters(scene, dead, found), "the dead letter")
    assert letter.value() == b"%d" % BAD
    assert scene.agree() == GOOD


def conflict(scene: ProcessorScene, tx: Any) -> None:
    """As of two transactions that can't be ordered."""
    tx.db.execute(sa.text("DO $$ BEGIN RAISE EXCEPTION 'a conflict' USING ERRCODE = '40001'; END $$"))


def cut(scene: ProcessorScene, tx: Any) -> None:
    """The next statement notices it: that of the positions."""
    pid = tx.db.scalar(sa.text("SELECT pg_backend_pid()"))
    with scene.events.database.connect() as other:
        other.execute(sa.text("SELECT pg_terminate_backend(:pid, 60000)"), {"pid": pid})


def cut_and_noticed(scene: ProcessorScene, tx: Any) -> None:
    """By a statement of the handler; the database answers again by then."""
    cut(scene, tx)
    tx.db.execute(sa.text("SELECT 1"))


def cut_and_swallowed(scene: ProcessorScene, tx: Any) -> None:
    """The handler ignores what it has noticed."""
    with pytest.raises(sa.exc.DBAPIError):
        cut_and_noticed(scene, tx)


def cut_and_wrapped(scene: ProcessorScene, tx: Any) -> None:
    """The handler raises an exception of its own."""
    try:
        cut_and_noticed(scene, tx)
    except sa.exc.DBAPIError as error:
        raise RuntimeError("booking has failed") from error


def cut_before_the_flush(scene: ProcessorScene, tx: Any) -> None:
    """The flush after the handler notices it."""
    tx.session.add(Checked(number=0))
    cut(scene, tx)


TRANSIENT = [conflict, cut, cut_and_noticed, cut_and_swallowed, cut_and_wrapped, cut_before_the_flush]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trouble", "runner"),
    thinned(
        product(TRANSIENT, RUNNERS),
        kept=[
            (conflict, "writer"),
            (cut_and_swallowed, "pool"),
            (cut_and_wrapped, "writer"),
            (cut_before_the_flush, "writer"),
        ],
    ),
)
def test_errors_not_caused_by_the_message_are_not_counted(
    scene: ProcessorScene, dead: str, trouble: Callable[..., None], runner: str
) -> None:
    """One attempt only, and a dead-letter topic: a connection that was cut does not make a dead letter of a good message."""
    first = iter([1])

    def handle(message: Any, tx: dualwrite.Transaction[Any]) -> None:
        scene.book(message, tx)
        if int(message.value()) == BAD and next(first, None):
            trouble(scene, tx)

    scene.produce(range(12))
    with running(scene, handle, runner, batch=1, attempts=1, dead_letter_topic=dead):
        scene.wait_for(range(12))
    assert scene.agree() == list(range(12))
    assert read_topic(scene.broker.bootstrap_servers, dead) == []


@pytest.mark.slow
@pytest.mark.parametrize(("runner", "offsets"), [("writer", "database"), ("pool", "database"), ("pool", "kafka")])
def test_a_further_attempt_gets_all_messages_again(scene: ProcessorScene, runner: str, offsets: Any) -> None:
    """New objects in a new list: the first attempt has used up both."""
    seen: list[list[int]] = []

    def handle(messages: list[Any], tx: dualwrite.Transaction[Any]) -> None:
        seen.append([message.value().pop() for message in messages])
        messages.clear()
        for number in seen[-1]:
            scene.events.write(tx.db, scene.group, number)
            tx.send(scene.target, b"%d" % number)
        if len(seen) == 1:
            conflict(scene, tx)

    topic: Topic[Any, Any] = Topic(scene.source, value_deserializer=lambda content, _: [int(content)])
    scene.produce(range(8))
    opened: Any = scene.writer() if runner == "writer" else scene.pool()
    with opened as made, scene.running(handle_batch=handle, runner=made, topics=[topic], attempts=1, offsets=offsets):
        scene.wait_for(range(8))
    assert scene.agree() == list(range(8))
    assert seen[0] == seen[1]


def other_server() -> None:
    sa.create_engine("postgresql+psycopg://127.0.0.1:1/nowhere").connect()


@pytest.mark.slow
def test_an_outage_before_does_not_make_a_bad_message_retriable(scene: ProcessorScene) -> None:
    """The program calls `run` while it handles one, and the first attempt fails by one, of another server."""
    calls: list[int] = []
    answers: Topic[Any, Any] = Topic(scene.target, value_serializer=lambda value, _: value + b"")

    def handle(message: Any, tx: dualwrite.Transaction[Any]) -> None:
        calls.append(message.offset())
        if len(calls) == 1:
            other_server()
        answers.send(tx, 17)

    scene.produce([0])
    options = ProcessorOptions(attempts=3, pause=0.01)
    with scene.writer() as writer:
        processor = DualProcessor(writer, scene.settings(), [scene.source], handle=handle, options=options)
        try:
            other_server()
        except sa.exc.OperationalError:
            with pytest.raises(MessageFailedError) as raised:
                processor.run()
    assert isinstance(raised.value.__cause__, SerializationError)
    assert (raised.value.attempts, len(calls)) == (3, 4)


async def coroutine(_messages: Any, _tx: Any) -> None:
    pass


def generator(_messages: Any, _tx: Any) -> Iterator[None]:
    yield


@pytest.mark.slow
@pytest.mark.parametrize("handler", [{"handle": coroutine}, {"handle_batch": generator}])
def test_a_handler_that_only_returns_a_coroutine_or_a_generator_is_refused(scene: ProcessorScene, handler: Any) -> None:
    """Otherwise every message would count as processed."""
    scene.produce([0])
    with scene.running(**handler) as running:
        error = running.ended()
    assert isinstance(error, UsageError)
    (name,) = (each.__name__ for each in handler.values())
    assert f"{name} returned a {name}" in str(error)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("runner", "offsets"),
    thinned(product(RUNNERS, ["database", "kafka"]), kept=[("writer", "kafka"), ("pool", "database")]),
)
def test_another_transaction_has_committed_in_the_handler(scene: ProcessorScene, runner: str, offsets: Any) -> None:
    """And its listener has failed: that is an error of the handler, and the processor's transaction is rolled back."""
    first = iter([1])

    def handle(message: Any, tx: dualwrite.Transaction[Any]) -> None:
        scene.book(message, tx)
        if int(message.value()) == BAD and next(first, None):
            raise AfterCommitError("another writer's")

    scene.produce(range(12))
    with running(scene, handle, runner, batch=1, attempts=2, offsets=offsets):
        scene.wait_for(range(12))
    assert scene.agree() == list(range(12))


@pytest.mark.slow
def test_a_message_processed_by_another_member_between_two_attempts(
    scene: ProcessorScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the first waits for its next attempt, it loses its partitions, and gets them back with their new positions."""
    failed, is_processed = threading.Event(), threading.Event()
    wait = GroupConsumer.wait

    def wait_too_long(consumer: GroupConsumer, seconds: float, stopped: Callable[[], bool]) -> None:
        if not failed.is_set():
            wait(consumer, seconds, stopped)
            return
        assert is_processed.wait(LIMIT)
        monkeypatch.undo()
        term = consumer.owned().get((scene.source, 0))

        def has_it_again() -> bool:
            wait(consumer, 0.2, stopped)
            return consumer.owned().get((scene.source, 0)) not in (None, term)

        until(has_it_again, "the partition is assigned again")

    def fail_once(message: Any, tx: dualwrite.Transaction[Any]) -> None:
        scene.book(message, tx)
        if not failed.is_set():
            failed.set()
            raise ValueError("the first attempt")

    monkeypatch.setattr(GroupConsumer, "wait", wait_too_long)
    numbers = range(0, 10 * PARTITIONS, PARTITIONS)
    scene.produce(numbers)
    brief = {"max.poll.interval.ms": 6000, "session.timeout.ms": 6000}
    with scene.running(fail_once, batch=1, **brief):
        until(failed.is_set, "the first attempt")
        with scene.running(name="2"):
            scene.wait_for(numbers)
        is_processed.set()
        scene.produce([numbers.stop])
        scene.wait_for([*numbers, numbers.stop])
    assert scene.agree() == [*numbers, numbers.stop]


@pytest.mark.slow
@pytest.mark.parametrize("runner", thinned(RUNNERS, kept=["pool"]))
def test_dead_letters_with_offsets_at_kafka(scene: ProcessorScene, dead: str, runner: str) -> None:
    def handle(message: Any, tx: dualwrite.Transaction[Any]) -> None:
        scene.book(message, tx)
        flush(scene, int(message.value()), tx)

    scene.produce(range(12))
    events: list[Event] = []
    with (
        observing(events.append),
        running(scene, handle, runner, attempts=2, dead_letter_topic=dead, offsets="kafka") as found,
    ):
        scene.wait_for(GOOD)
        (letter,) = until_received(lambda: letters(scene, dead, found), "the dead letter")
    assert letter.value() == b"%d" % BAD
    assert scene.agree() == GOOD
    assert sum(scene.shown().values()) == 12
    processed = [event for event in events if isinstance(event, BatchProcessed)]
    assert sum((Counter(event.messages) for event in processed), Counter()) == {scene.source: 12}
    assert {event.group_id for event in processed} == {scene.group}
    assert any(isinstance(event, BatchFailed) for event in events)
    assert [(event.source, event.topic) for event in events if isinstance(event, DeadLettered)] == [(scene.group, scene.source)]


@pytest.mark.slow
def test_on_zookeeper_a_changed_node_is_a_conflict_and_an_existing_one_an_error(
    databases: Databases, broker: DevCluster, new_name: NewName, dead: str
) -> None:
    """Both are refused at the commit: the one is a conflict, and the other the message's fault."""
    scene = ProcessorScene(databases.scene("zookeeper", broker).events, broker, new_name)
    hot, changed = f"/{new_name('hot')}", iter([1])

    def handle(message: Any, tx: dualwrite.Transaction[Any]) -> None:
        number = int(message.value())
        scene.book(message, tx)
        if number == 0:
            tx.db.create(hot)
        if number == BAD:
            tx.db.create(hot)
        if number == 4:
            _, stat = tx.db.get(hot)
            if next(changed, None):
                with scene.writer("2") as other, other.transaction() as sooner:
                    sooner.db.set_data(hot, b"meanwhile")
            tx.db.set_data(hot, b"later", stat.version)

    scene.produce(range(0, 8, PARTITIONS))
    with running(scene, handle, batch=1, attempts=1, dead_letter_topic=dead) as found:
        scene.wait_for(range(0, 8, PARTITIONS))
        scene.produce([BAD])
        (letter,) = until_received(lambda: letters(scene, dead, found), "the dead letter")
    assert letter.value() == b"%d" % BAD
    assert scene.agree() == [0, 4]


@pytest.mark.slow
def test_messages_whose_commit_comes_too_late_are_published_again(scene: ProcessorScene) -> None:
    scene.produce(range(30))
    late = failpoints.only_at(1, lambda: abort_ongoing(scene.broker.bootstrap_servers, scene.prefix))
    with failpoints.armed("before_kafka_commit", late), scene.running():
        scene.wait_for(range(30))
    assert scene.agree() == [*range(30)]


@pytest.mark.slow
def test_a_processor_tells_behind_whose_open_transaction_it_waits(
    scene: ProcessorScene, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "_PATIENCE_SECONDS", 0.5)
    monkeypatch.setattr(loop, "_CHECK_SECONDS", 0.2)
    servers = scene.broker.bootstrap_servers
    scene.produce([0])
    with scene.running() as running, caplog.at_level(logging.INFO, "dualwrite.processor"):
        scene.wait_for([0])
        holder = left_open(servers, f"{scene.prefix}-holder", scene.source, value=b"9")
        scene.produce([4])  # committed, and invisible until the open transaction has ended
        at = f"{scene.source}-0 offset 1 for the open transaction of '{scene.prefix}-holder'"
        until(lambda: at in running.processor.check().partitions.text, "the check tells it")
        assert running.processor.check().is_ready  # a restart would not help
        (told,) = [each for each in caplog.records if each.levelname == "WARNING" and " waits at " in each.getMessage()]
        assert told.getMessage() == f"{scene.group}: waits at {at}: `dualwrite stuck --topic {scene.source}`"
        assert (vars(told)["topic"], vars(told)["partition"], vars(told)["offset"]) == (scene.source, 0, 1)
        holder.abort_transaction(LIMIT)
        scene.wait_for([0, 4])
        until(lambda: "waits" not in running.processor.check().partitions.text, "it goes on")
    assert f"{scene.source}-0 goes on after offset 1" in caplog.text


@pytest.mark.slow
def test_each_failed_attempt_is_logged(scene: ProcessorScene, caplog: pytest.LogCaptureFixture) -> None:
    def refuse(message: Any, _tx: Any) -> None:
        raise ValueError(f"no {message.offset()}")

    scene.produce([0])
    with scene.running(refuse, attempts=3) as running:
        assert isinstance(running.ended(), MessageFailedError)
    failed = [each.getMessage() for each in caplog.records if " failed (attempt " in each.getMessage()]
    assert [text.partition("(")[2] for text in failed] == [f"attempt {n}): ValueError: no 0" for n in (1, 2, 3)]
