"""Kafka is down, and the processor's pool has a journal: batches go through it, positions move too, no message is blamed."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

import dualwrite
from crash.databases import Databases
from dualwrite import ConfigurationError, JournalLimits, Transaction, aio
from dualwrite.processor import AsyncDualProcessor, DualProcessor, ProcessorOptions
from fixtures.broker import make_topic, read_topic
from fixtures.broker_door import BrokerBehindDoor
from fixtures.pace import until
from fixtures.tiers import thinned
from journal.chains import assert_chains
from processor.journal_processing import JournalScene

pytestmark = pytest.mark.slow

PATIENT = {"session.timeout.ms": 300_000, "heartbeat.interval.ms": 1000}
"""The member keeps its partitions, and the messages that it has fetched, however long the broker is down."""

COUNT = 60


@pytest.fixture
def brisk(brisk_behind_door: BrokerBehindDoor) -> BrokerBehindDoor:
    """A broker that the tests make unreachable."""
    return brisk_behind_door


@pytest.fixture
def scene(
    databases: Databases, brisk: BrokerBehindDoor, new_name: Callable[[str], str], database: str, producer: str
) -> JournalScene:
    """A topic with numbers from 0 on."""
    del producer
    made = JournalScene(databases.scene(database, brisk).events, brisk, new_name)
    made.produce(range(COUNT))
    return made


@pytest.fixture
def dead(brisk: BrokerBehindDoor, new_name: Callable[[str], str]) -> str:
    """A topic for messages that can't be processed."""
    name = new_name("dead")
    make_topic(brisk, name)
    return name


def killing(scene: JournalScene, broker: BrokerBehindDoor, at: int = COUNT // 3) -> Callable[[Any, Transaction[Any]], None]:
    """A handler in the middle of whose batch the broker goes: before that of this number commits, the first time."""
    gone: list[int] = []

    def handle(message: Any, tx: Transaction[Any]) -> None:
        scene.add_link(message, tx)
        if int(message.value()) == at and not gone:
            gone.append(at)
            broker.kill()

    return handle


def logged(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """What dualwrite has logged, without librdkafka's own lines."""
    return [record for record in caplog.records if "librdkafka" not in record.getMessage()]


@pytest.mark.parametrize(
    ("database", "producer"),
    thinned(
        [("postgresql", "native"), ("postgresql", "librdkafka"), ("mariadb", "native"), ("sqlite", "native")],
        kept=[("postgresql", "native")],
    ),
    indirect=["producer"],
)
def test_a_batch_that_an_outage_has_interrupted_goes_through_the_journal(
    scene: JournalScene, brisk: BrokerBehindDoor, dead: str, caplog: pytest.LogCaptureFixture
) -> None:
    """And so do those after it that were fetched before; each process says once that Kafka is down, and its positions move."""
    handle = killing(scene, brisk)
    with caplog.at_level(logging.WARNING, "dualwrite"), scene.pool() as pool:
        options = {"batch": 5, "attempts": 1, "dead_letter_topic": dead}
        with scene.running(handle, runner=pool, **options, **PATIENT) as running:
            scene.until_journaled()
            until(lambda: scene.seen[-1].outcome == "journaled", "a batch is committed with its messages in the journal")
            booked, known = scene.events.numbers(scene.group), running.processor
            assert COUNT // 3 in booked
            assert scene.stored() >= len(booked)
            until(lambda: sum(each.offset for each in known.positions.values()) >= len(booked), "its positions follow")
            until(lambda: len(logged(caplog)) == 2, "the outage is logged, once it lasts 1.5 s")
            texts = {record.name.rpartition(".")[2]: record.getMessage() for record in logged(caplog)}
            brisk.start()
            scene.wait_for(range(COUNT))
            scene.until_closed()
            scene.produce(range(COUNT, COUNT + 10))
            scene.wait_for(range(COUNT + 10))
    scene.assert_once(COUNT + 10)
    assert read_topic(brisk.bootstrap_servers, dead) == []
    assert "Kafka does not answer: messages go into the journal from now on" in texts["journaling"]
    assert "does not answer" in texts["outages"]


@pytest.mark.parametrize("database", ["postgresql"])
@pytest.mark.parametrize("alone", [False, True])
def test_messages_go_into_the_journal_always(scene: JournalScene, brisk: BrokerBehindDoor, alone: bool) -> None:
    """With `acknowledge="journaled"`, by a pool or a writer."""
    writer = partial(dualwrite.connect, scene.events.database, kafka=brisk.bootstrap_servers, transactional_id=scene.prefix)
    with writer(acknowledge="journaled") if alone else scene.pool(acknowledge="journaled") as runner:
        with scene.running(scene.add_link, runner=runner, batch=5, attempts=1, **PATIENT):
            scene.wait_for(range(COUNT))
        assert {tx.outcome for tx in scene.seen} == {"journaled"}
    scene.assert_once_after_all(COUNT)


def test_an_outage_is_blamed_on_no_message(
    scene: JournalScene,
    brisk: BrokerBehindDoor,
    dead: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A pool runs units again only a few times when Kafka flaps; the processor then gets its error: here the first time."""
    monkeypatch.setattr("dualwrite.pool.group.MAX_SWITCHES", 0)
    handle = killing(scene, brisk)
    with caplog.at_level(logging.INFO, "dualwrite.processor"), scene.pool() as pool:
        options = {"batch": 5, "attempts": 1, "dead_letter_topic": dead}
        with scene.running(handle, runner=pool, **options, **PATIENT):
            scene.until_journaled()
            brisk.start()
            scene.wait_for(range(COUNT))
            scene.until_closed()
    scene.assert_once(COUNT)
    assert read_topic(brisk.bootstrap_servers, dead) == []
    again = [record for record in caplog.records if "messages go into the journal from now on" in record.getMessage()]
    assert {record.levelno for record in again if record.name == "dualwrite.processor.attempts"} == {logging.INFO}


def test_a_writer_with_a_journal_of_its_own_goes_on_as_well(scene: JournalScene, brisk: BrokerBehindDoor, dead: str) -> None:
    """Its block is interrupted by the outage, and can't run again by itself: the processor runs the batch again."""
    writer = dualwrite.connect(
        scene.events.database,
        kafka=brisk.bootstrap_servers,
        transactional_id=scene.prefix,
        when_kafka_is_down="journal",
    )
    options = {"batch": 5, "attempts": 1, "dead_letter_topic": dead}
    with writer, scene.running(killing(scene, brisk), runner=writer, **options, **PATIENT):
        scene.until_journaled()
        brisk.start()
        scene.wait_for(range(COUNT))
        scene.until_closed()
    scene.assert_once(COUNT)
    assert read_topic(brisk.bootstrap_servers, dead) == []


def test_an_outage_that_another_process_has_noticed_is_blamed_on_no_message(
    scene: JournalScene, brisk: BrokerBehindDoor, dead: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has opened the gate in the middle of a transaction, which can't be recorded any more."""
    monkeypatch.setattr("dualwrite.pool.group.MAX_SWITCHES", 0)
    opened: list[bool] = []

    def handle(message: Any, tx: Transaction[Any]) -> None:
        scene.add_link(message, tx)
        if int(message.value()) == COUNT // 3 and not opened:
            opened.append(scene.store.journal.open(scene.prefix, "another process", JournalLimits()))

    options = {"batch": 1, "attempts": 1, "dead_letter_topic": dead}
    with scene.pool() as pool, scene.running(handle, runner=pool, **options):
        scene.wait_for(range(COUNT))
        scene.until_closed()
    scene.assert_once(COUNT)
    assert opened == [True]
    assert read_topic(brisk.bootstrap_servers, dead) == []


@pytest.mark.soak
def test_a_full_journal_is_blamed_on_no_message(
    scene: JournalScene, brisk: BrokerBehindDoor, dead: str, caplog: pytest.LogCaptureFixture
) -> None:
    handle = killing(scene, brisk)
    is_refused = threading.Event()
    with caplog.at_level(logging.INFO, "dualwrite.processor"), scene.pool(journal=JournalLimits(entries=1)) as pool:

        def patient(message: Any, tx: Transaction[Any]) -> None:
            handle(message, tx)
            if not is_refused.is_set() and any(each.outcome == "journaled" for each in scene.seen):
                assert pool._keeper is not None
                until(lambda: pool._keeper.journal.full, "the journal full")

        options = {"batch": 5, "attempts": 1, "dead_letter_topic": dead}
        with scene.running(patient, runner=pool, **options, **PATIENT):
            until(lambda: "is full: it has" in caplog.text, "a batch is refused")
            is_refused.set()
            brisk.start()
            scene.wait_for(range(COUNT))
            scene.until_closed()
    scene.assert_once(COUNT)
    assert read_topic(brisk.bootstrap_servers, dead) == []


def test_a_poison_message_is_found_while_kafka_is_down(scene: JournalScene, brisk: BrokerBehindDoor, dead: str) -> None:
    """Its dead letter goes through the journal, and its position moves with it."""
    handle = killing(scene, brisk)
    bad = COUNT // 2

    def picky(message: Any, tx: Transaction[Any]) -> None:
        handle(message, tx)
        if int(message.value()) == bad:
            raise ValueError("poison")

    options = {"batch": 5, "attempts": 2, "dead_letter_topic": dead}
    with scene.pool() as pool, scene.running(picky, runner=pool, **options, **PATIENT):
        scene.until_journaled()
        brisk.start()
        scene.wait_for(number for number in range(COUNT) if number != bad)
        scene.letter(dead, b"%d" % bad)
        scene.until_closed()
    assert assert_chains(scene.chains) == COUNT - 1
    assert scene.stored() == COUNT


def test_positions_at_kafka_and_a_journal_exclude_each_other(scene: JournalScene) -> None:
    options = ProcessorOptions(offsets="kafka")
    refused = pytest.raises(ConfigurationError, match=r"Next step: set offsets='database'")
    with scene.pool() as pool:
        with refused:
            DualProcessor(pool, scene.settings(), [scene.source], handle=scene.add_link, options=options)

        async def main() -> None:
            async def handle(_: object, __: object) -> None: ...

            with refused:
                AsyncDualProcessor(aio.AsyncWriterPool(pool), scene.settings(), [scene.source], handle=handle, options=options)

        asyncio.run(main())
