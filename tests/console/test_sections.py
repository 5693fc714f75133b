"""What each section shows, on PostgreSQL and a real broker."""

from __future__ import annotations

import re

import pytest
from confluent_kafka import Consumer, Producer

import dualwrite
from console.console_scene import Browser, ConsoleScene
from dualwrite.console import sections
from dualwrite.diagnosis import jobs as jobs_module
from dualwrite.diagnosis.jobs import JobWatch
from dualwrite.jobs.ledger import JobLedger
from dualwrite.jobs.rules import AttemptId, JobRun
from dualwrite.stores.positions import Move, Position
from dualwrite.transactional_id import journaled_prefix
from fixtures.broker import make_topic
from fixtures.pace import LIMIT, until


@pytest.fixture(autouse=True)
def _young_transactions_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sections, "LONGER_SECONDS", 0.0)


def test_all_is_well(quiet_scene: ConsoleScene) -> None:
    browser = quiet_scene.client()
    assert "No consumer waits in" in browser.until("stuck", "No consumer waits in")
    assert "No id is in use" in browser.section("ids")
    assert "Nothing is lost or unverified." in browser.section("lost")
    assert "There are no journals." in browser.section("journals")
    assert "No relay is given to this console." in browser.section("relays")
    assert "There are no dead letters." in browser.section("letters")
    assert "No dead-letter topic is named." in browser.section("topics")
    assert "No consumer group has positions in this database." in browser.section("consumers")
    assert "There are no jobs." in browser.section("jobs")
    assert "All is well: 0 ids in use, nothing to recover." in browser.until("verdict", "All is well")
    assert browser.until("waiting", "none now").count('<li class="tile none">') == 7


def test_an_open_transaction_is_shown_with_its_groups_and_the_decision(scene: ConsoleScene) -> None:
    name, group = scene.name("shop"), scene.name("billing")
    make_topic(scene.broker, f"{name}-events", 1)
    row = scene.crash(name)
    with Consumer({"bootstrap.servers": scene.servers, "group.id": group, "auto.offset.reset": "earliest"}) as consumer:
        consumer.subscribe([f"{name}-events"])
        while not consumer.assignment():
            consumer.poll(0.1)
        browser = scene.client()
        stuck = browser.until("stuck", group)
        assert f"<span>{name}-events-0</span>" in stuck
        assert f"/id/{name}%23" in stuck
        assert "commit: the database committed the transaction, and Kafka has it prepared" in stuck
        assert f"/id/{name}" in browser.until("todo", "1 transaction waits.", group)
    assert name in browser.section("ids")
    assert "open for" in browser.until("ids", "open for")
    detail = browser.get(f"/detail/{name}")
    assert "<strong>commit</strong>, because the database committed the transaction, and Kafka has it prepared" in detail
    assert "began at Kafka" in detail
    assert row.kafka_id(1) in detail
    assert "<strong>commit</strong>" in browser.get(f"/detail/{row.kafka_id(1).replace('#', '%23')}"), "by the id at Kafka, too"


def test_a_journal_into_which_pools_write_always(scene: ConsoleScene) -> None:
    prefix = scene.name("shop")
    scene.journal(prefix, topic=f"{prefix}-events")
    assert scene.store.leases is not None
    scene.store.leases.acquire([f"{journaled_prefix(prefix)}.1"], "a pool on a host", seconds=600)
    left = scene.client().until("journals", prefix)
    assert "Its pools write into it always (a pool on a host): 0 messages to be published; 0 for later." in left
    assert "Published by nobody" in left
    assert "messages go to Kafka" not in left


def test_what_is_lost_and_unverified_and_in_a_journal(scene: ConsoleScene) -> None:
    lost = scene.lose(scene.name("lost"))
    scene.unverified(scene.name("old"), lost)
    scene.journal(scene.name("shop"), "one", "two")
    browser = scene.client()
    assert f"{lost.lost[0].state}" in browser.until("lost", "unverified")
    assert "with 2 messages to be published" in browser.until("journals", "nobody")
    browser.until("todo", "1 transaction lost, to publish again.", "1 transaction unverified")
    verdict = browser.section("verdict")
    assert re.search(r"Not all is well: \d things to look at\.", verdict)
    assert re.search(r'/journals">Journals, relays <span class="mark bad" title="to look at">', verdict)
    assert "2 messages</strong>" in browser.until("waiting", "2 messages</strong>", "2 ids</strong>")
    detail = browser.get(f"/detail/{lost.transactional_id}")
    assert f"can be published again: 1 to {lost.transactional_id}-events-0 (from offset 0)" in detail


def test_consumer_positions_with_what_is_behind_and_held_back(scene: ConsoleScene) -> None:
    name, group = scene.name("shop"), scene.name("billing")
    assert scene.store.positions is not None
    make_topic(scene.broker, f"{name}-events", 2)
    producer = Producer({"bootstrap.servers": scene.servers})
    for _ in range(5):
        producer.produce(f"{name}-events", b"x", partition=1)
    assert producer.flush(LIMIT) == 0
    moves = [Move(None, Position(f"{name}-events", 1, 2)), Move(None, Position(f"{name}-old", 0, 9, "an id of before"))]
    scene.store.positions.reset(group, moves)
    browser = scene.client(authorize=None)
    shown = browser.until("consumers", "behind</span>")
    assert f"<h3>{group}</h3>" in shown
    assert re.search(rf"{name}-events-1</span></th>.*?>2</span></td>\n<.*?>3</span></td>\n<.*?>0</span></td>", shown, re.DOTALL)
    assert "not known" in shown, "of a topic that is gone"
    browser.until("waiting", "3 behind</strong>")
    assert group in browser.get("/consumers")


def test_jobs_with_their_tasks_and_heartbeats(scene: ConsoleScene, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = JobLedger(scene.store)
    run = JobRun(scene.name("nightly"), "report <1>", 7)
    ledger.open(run, owner="driver on host a", staging_table="stage")
    attempt, _ = ledger.claim(run, AttemptId(run.prefix, 0, 0), "a task", "task on host b", timeout=LIMIT)
    make_topic(scene.broker, f"{run.prefix}-events", 1)
    scene.crash(str(attempt))  # its transaction stays open, as that of a task that takes long
    browser = scene.client(authorize=None)
    jobs = browser.until("jobs", run.prefix)
    browser.until("stuck", f"/id/{run.prefix}")
    browser.until("ids", "open for")
    assert str(attempt) not in browser.section("todo"), "it is the work of a run that is alive"
    assert all(text in jobs for text in ("report &lt;1&gt;", "a run is open", "1, 1 not ended", "driver on host a"))
    watch = JobWatch(scene.store)
    watch.read()
    (silent,) = watch.read()
    assert silent.silent, "nothing has changed between the two"
    assert ledger.beat(run, str(attempt))
    (alive,) = watch.read()
    assert (alive.silent, alive.is_alive) == (0, True)
    monkeypatch.setattr(jobs_module, "SILENT_SECONDS", -1.0)
    browser.until("todo", "1 transaction waits.", str(attempt))
    browser.until("jobs", "no heartbeat for")


def test_dead_letters(scene: ConsoleScene) -> None:
    with scene.relay("not a topic!") as relay:
        left = scene.client(relays=[relay]).until("letters", "1 dead letter")
        assert "InvalidMessageError" in left
        assert "Publish the chosen again" in left
        ids = re.findall(r'<input type="checkbox" id="([^"]+)" name="letter" value="1">', left)
        assert ids == [f"{action}-{relay.name}-1" for action in ("replay", "drop")], "htmx must not reuse the box of another"
    assert "does not know the layout" in scene.client().until("letters", "1 dead letter")


def test_rates_and_durations_of_a_pool(scene: ConsoleScene) -> None:
    def unit(tx: dualwrite.Transaction) -> None:
        tx.send(f"{prefix}-events", b"x")

    prefix = scene.name("shop")
    kafka = {"bootstrap.servers": scene.servers}
    with dualwrite.create_pool(scene.store, prefix=prefix, kafka=kafka, size=1, lanes=1) as pool:
        browser = scene.client(pool=pool)
        for _ in range(3):
            pool.run(unit)
        rates = browser.section("rates")
        assert "3 transactions committed" in rates
        assert "Database commit" in rates
        assert rates.count('<figure class="chart large">') == 2
        assert f"{prefix}.1" in browser.until("ids", f"{prefix}.1")
        detail = browser.get(f"/detail/{prefix}.1")
        assert detail.count('<svg class="bar"') == 3
        assert "committed" in detail


def test_rates_without_a_process_are_those_of_the_rows(scene: ConsoleScene) -> None:
    with dualwrite.connect(scene.store, settings=scene.settings, transactional_id=scene.name("shop")) as writer:
        browser = scene.client()
        browser.section("ids")
        for number in range(3):
            with writer.transaction() as tx:
                tx.send(scene.name("shop"), str(number).encode())
        browser.until("rates", "Per second: at most")


def test_the_doctor(scene: ConsoleScene) -> None:
    doctor = scene.client(topics=[scene.name("missing")]).until("doctor", "Looked at")
    assert scene.name("missing") in doctor
    assert "Atomic, without a time limit" in doctor


def test_an_id_that_the_database_does_not_have(scene: ConsoleScene) -> None:
    assert "Not an id of this database" in scene.client().get("/detail/nobody")


@pytest.mark.usefixtures("impatient")
@pytest.mark.soak
def test_a_broker_that_hangs(scene: ConsoleScene) -> None:
    """What was read last stays, with the reason; the database's parts go on; it is read again when the broker answers."""
    name, group = scene.name("shop"), scene.name("billing")
    scene.crash(name)
    assert scene.store.positions is not None
    scene.store.positions.reset(group, [Move(None, Position(f"{name}-events", 0, 0))])
    browser = scene.client()
    browser.until("stuck", f"{name}-events-0")
    scene.broker.pause()
    try:
        stuck = browser.until("stuck", "could not be read", f"{name}-events-0")
        assert "What is shown is from" in stuck
        assert "Nothing is lost or unverified" in browser.section("lost")
        assert name in browser.section("ids")
        browser.until("consumers", "The ends of the partitions could not be read", group)
        browser.until("todo", "Not read: partitions")
        assert "Kafka does not answer" in browser.section("verdict")
    finally:
        scene.broker.resume()
    browser.until("stuck", f"{name}-events-0", "Recovery would")
    wait_until_read(browser)


def wait_until_read(browser: Browser) -> None:
    until(lambda: "could not be read" not in browser.section("stuck"), "the partitions are read again", pause=0.5)
