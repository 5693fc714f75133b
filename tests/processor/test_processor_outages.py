"""The broker is down: between the two commits, where the outcome is unknown until it restarts; at an assignment; at the end.

Between the two commits its process is killed; where the subject is only that it can't be reached, it is behind a door.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import pytest
from processor_scene import ProcessorScene

import dualwrite
from crash.databases import Databases
from dualwrite.devcluster import DevCluster
from dualwrite.observability.outages import kafka_at
from dualwrite.processor import ProcessorOptions
from dualwrite.processor.progress import Progress
from dualwrite.recipe.phases import Phase
from dualwrite.stores.positions import Partition
from dualwrite.testing import failpoints
from fixtures.broker_door import BrokerBehindDoor
from fixtures.pace import LIMIT, done, limit, until
from fixtures.tiers import thinned

pytestmark = pytest.mark.slow

NewName = Callable[[str], str]
PRODUCERS = ("native", "librdkafka")
OPTIONS = ProcessorOptions(batch=5, pause=0.05, longest_pause=0.5)
BRIEF = {"session.timeout.ms": 1500, "heartbeat.interval.ms": 300}
"""The member loses its partitions during the outage."""
PATIENCE = limit(1)
AWAY = limit(3)


@pytest.mark.parametrize("offsets", thinned(["database", "kafka"], kept=["database"]))
def test_the_broker_is_killed_between_the_two_commits(
    databases: Databases, brisk: DevCluster, new_name: NewName, caplog: pytest.LogCaptureFixture, offsets: Any
) -> None:
    scene = ProcessorScene(databases.scene("sqlite", brisk).events, brisk, new_name)
    scene.produce(range(40))
    back = threading.Timer(AWAY, brisk.start)

    def die() -> None:
        brisk.kill()
        back.start()

    with (
        caplog.at_level(logging.WARNING, "dualwrite.processor"),
        dualwrite.connect(
            scene.events.database,
            kafka=brisk.bootstrap_servers,
            transactional_id=scene.prefix,
            timeouts=dualwrite.Timeouts(kafka=LIMIT),
        ) as writer,
        failpoints.armed("before_kafka_commit", failpoints.only_at(3, die)),
    ):
        for lane in writer._lanes:
            lane.ownership.parties.timeouts = dualwrite.Timeouts(kafka=PATIENCE)

        def book(message: Any, tx: dualwrite.Transaction[Any]) -> None:
            """As with a unique key: a message that was processed already is an error."""
            if int(message.value()) in scene.events.numbers(scene.group):
                raise ValueError("it is there already")
            scene.book(message, tx)

        with scene.running(book, runner=writer, batch=5, offsets=offsets, attempts=1, **BRIEF):
            scene.wait_for(range(40))
    back.join(LIMIT)
    assert scene.agree() == list(range(40))
    assert "the outcome on Kafka's side is unknown" in caplog.text


def about_kafka(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What was logged about outages of Kafka."""
    texts = [record.getMessage() for record in caplog.records if record.name == "dualwrite.outages"]
    return [text for text in texts if text.startswith("Kafka at")]


def test_an_outage_is_logged_once_for_all_that_notice_it(
    databases: Databases,
    brisk_behind_door: BrokerBehindDoor,
    new_name: NewName,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Pools with either producer and a consumer; while they wait, and when Kafka answers again."""
    scenes = [
        ProcessorScene(databases.scene("sqlite", brisk_behind_door).events, brisk_behind_door, new_name) for _ in range(3)
    ]
    patient = dualwrite.Timeouts(kafka=LIMIT, delivery=LIMIT)
    kafka = kafka_at(brisk_behind_door.bootstrap_servers)
    with caplog.at_level(logging.INFO, "dualwrite"), ExitStack() as opened:
        futures = []
        pools = [
            opened.enter_context(
                dualwrite.create_pool(
                    scene.events.database,
                    kafka=brisk_behind_door.bootstrap_servers,
                    prefix=scene.prefix,
                    producer=producer,
                    timeouts=patient,
                )
            )
            for scene, producer in zip(scenes, PRODUCERS, strict=False)
        ]
        for pool, scene in zip(pools, scenes, strict=False):
            pool.run(lambda tx, scene=scene: tx.send(scene.target, "1"))
        opened.enter_context(scenes[-1].running(**BRIEF))
        scenes[-1].produce(range(4))
        scenes[-1].wait_for(range(4))
        brisk_behind_door.kill()
        try:
            for pool, scene in zip(pools, scenes, strict=False):
                futures += [pool.submit(lambda tx, scene=scene: tx.send(scene.target, "2")) for _ in range(3)]
            until(lambda: kafka.is_out and len(kafka.calls) >= len(pools), "both wait")
            assert len(about_kafka(caplog)) == 1
        finally:
            brisk_behind_door.start()
        for future in futures:
            done(future)
        until(lambda: not kafka.is_out, "the end of the outage is logged")
    texts = about_kafka(caplog)  # more than two, if the broker has then been slow
    assert ["does not answer" in text for text in texts] == [True, False] * (len(texts) // 2), texts
    others = Counter(r.getMessage() for r in caplog.records if r.levelno > logging.INFO and r.name != "dualwrite.outages")
    assert not [text for text, times in others.items() if times > 1 or "librdkafka" not in text], others
    assert "%3|" not in capfd.readouterr().err


def test_a_consumer_that_hears_of_an_outage_late_reports_no_second_one(
    databases: Databases,
    brisk_behind_door: BrokerBehindDoor,
    new_name: NewName,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its thread was in a handler all the time; what librdkafka has to say about the outage comes when it is over."""
    scene, other = (
        ProcessorScene(databases.scene("sqlite", brisk_behind_door).events, brisk_behind_door, new_name) for _ in range(2)
    )
    kafka = kafka_at(brisk_behind_door.bootstrap_servers)
    monkeypatch.setattr("dualwrite.kafka.librdkafka.consumer._LOOK_LIMIT", LIMIT)  # however slow the broker is then
    is_busy, may_end = threading.Event(), threading.Event()

    def slow(message: Any, tx: dualwrite.Transaction[Any]) -> None:
        scene.book(message, tx)
        is_busy.set()
        assert may_end.wait(LIMIT)

    patient = {"session.timeout.ms": 300_000, "heartbeat.interval.ms": 1000}
    with caplog.at_level(logging.WARNING, "dualwrite.outages"), other.pool() as pool, scene.running(slow, **patient):
        pool.run(lambda tx: tx.send(other.target, "1"))
        scene.produce([0])
        assert is_busy.wait(LIMIT)
        brisk_behind_door.kill()
        try:
            future = pool.submit(lambda tx: tx.send(other.target, "2"))
            until(lambda: kafka.is_out, "the outage is noticed")
        finally:
            brisk_behind_door.start()
        done(future)
        until(lambda: not kafka.is_out, "the end of the outage is logged")
        caplog.clear()
        may_end.set()
        scene.produce(range(1, 5))
        scene.wait_for(range(5))
    assert not [text for text in about_kafka(caplog) if "a consumer reached no broker" in text]


@pytest.mark.soak  # in CI: it is killed between the two commits
@pytest.mark.parametrize("offsets", ["database", "kafka"])
def test_the_broker_is_killed_while_it_assigns_partitions(
    databases: Databases, brisk: DevCluster, new_name: NewName, monkeypatch: pytest.MonkeyPatch, offsets: Any
) -> None:
    """librdkafka then reports errors in the `poll` whose callback has looked up where to begin; that aborted the process."""
    scene = ProcessorScene(databases.scene("sqlite", brisk).events, brisk, new_name)
    scene.produce(range(8))
    back = threading.Timer(AWAY, brisk.start)
    begin = Progress.begin

    def begin_and_die(progress: Progress, *args: Any) -> Mapping[Partition, int]:
        found = begin(progress, *args)
        if not back.ident:
            brisk.kill()
            back.start()
        return found

    monkeypatch.setattr(Progress, "begin", begin_and_die)
    with scene.running(offsets=offsets, start="latest", **BRIEF):
        until(lambda: back.ident, "the partitions are assigned")
        back.join(LIMIT)
        scene.produce(range(8, 16))
        scene.wait_for(range(8, 16))
    assert scene.agree() == list(range(8, 16))


@pytest.mark.parametrize("offsets", thinned(["database", "kafka"], kept=["database"]))
@pytest.mark.soak
def test_stop_does_not_wait_for_a_coordinator_that_is_down(
    databases: Databases, brisk_behind_door: BrokerBehindDoor, new_name: NewName, offsets: Any
) -> None:
    """librdkafka would wait for it for session.timeout.ms: five minutes here, longer than the test's limit."""
    scene = ProcessorScene(databases.scene("sqlite", brisk_behind_door).events, brisk_behind_door, new_name)
    scene.produce(range(8))
    endless = {"session.timeout.ms": 300_000, "heartbeat.interval.ms": 1000}
    with scene.writer() as writer, scene.running(runner=writer, batch=5, offsets=offsets, **endless) as running:
        scene.wait_for(range(8))
        until(lambda: writer.phase is Phase.READY, "the last transaction has ended at Kafka, too")
        brisk_behind_door.kill()
        try:
            running.stop()
        finally:
            brisk_behind_door.start()
    assert scene.agree() == list(range(8))
