"""Pools and writers start while the only broker is down: they write at once, and recover before they send anything to it."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from itertools import product
from typing import Any

import pytest

import dualwrite
from crash.cases import OPENING_POINTS, RECOVERY_POINTS, WRITER_POINTS, crash_writer
from crash.scene import Scene, Worker
from dualwrite import (
    BrokerAuthorizationError,
    DualWriter,
    FencedError,
    InDoubtTransactionError,
    InvalidTransactionalIdError,
    LostTransactionError,
    Phase,
    StoreCommitUnknownError,
    Timeouts,
    Transaction,
)
from dualwrite.devcluster import DevCluster
from dualwrite.state import PreparedTxnState
from dualwrite.stores.base import LostKind, LostTransaction, Resolution
from dualwrite.stores.journal import GateStatus
from dualwrite.stores.sql import SqlStateStore
from fixtures.broker import read_values
from fixtures.broker_door import BrokerBehindDoor
from fixtures.logins import login_as
from fixtures.pace import LIMIT, until
from fixtures.tiers import thinned
from journal.journal_scene import journal_pool, until_closed
from journal.start_worker import last_event
from pool.pool_scene import both

pytestmark = pytest.mark.slow

DATABASES = ["postgresql", "mariadb", "sqlite"]
PATIENT = Timeouts(claim=LIMIT, kafka=100_000, delivery=100_000)
"""Whoever waits for Kafka with these waits for longer than the test."""


def assert_in_order(scene: Scene, numbers: Sequence[int]) -> None:
    """Both sides have the events, the topic in their order."""
    assert scene.agree() == list(numbers)
    assert [int(value or 0) for value in read_values(scene.bootstrap, scene.topic)] == list(numbers)


def journal_writer(scene: Scene, **changes: Any) -> DualWriter[Any]:
    return scene.connect(when_kafka_is_down="journal", **changes)


def write(writer: DualWriter[Any], scene: Scene, *numbers: int) -> list[str | None]:
    """Write events, each in a transaction of its own; return the outcomes."""

    @writer.transactional
    def event(tx: Transaction[Any], number: int) -> Transaction[Any]:
        both(tx, scene, number)
        return tx

    return [event(number).outcome for number in numbers]


def gate(scene: Scene) -> GateStatus:
    journal = SqlStateStore(scene.engine).journal
    (status,) = journal.gates(scene.transactional_id, counts=True)
    return status


def until_writer_closed(scene: Scene) -> None:
    until(lambda: not gate(scene).is_open, "the journal's gate closed")


# --- pools ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("database", "producer", "two_phase"),
    thinned(
        [*product(DATABASES, ["native"], [None, False]), ("postgresql", "librdkafka", None)],
        kept=[*product(DATABASES, ["native"], [None]), ("postgresql", "native", False), ("postgresql", "librdkafka", None)],
    ),
    indirect=["producer"],
)
def test_a_pool_starts_while_the_broker_is_down(scene: Scene, own_broker: BrokerBehindDoor, two_phase: bool | None) -> None:
    own_broker.kill()
    with journal_pool(scene, two_phase=two_phase, timeouts=PATIENT) as pool:
        for number in range(10):
            pool.run(both, scene, number)
        own_broker.start()
        until_closed(pool, scene)
        for number in range(10, 15):
            pool.run(both, scene, number)
    assert_in_order(scene, range(15))


def test_a_pool_warns_once_and_recovers_ids_of_dead_processes_later(
    scene: Scene, own_broker: BrokerBehindDoor, caplog: pytest.LogCaptureFixture
) -> None:
    """Meanwhile it is maintained: a writer whose id somebody else has claimed is replaced."""
    left = Scene(scene.events, scene.bootstrap, f"{scene.transactional_id}.7")
    left.write(1, 1, "after_db_commit=kill").killed()
    own_broker.kill()
    caplog.set_level(logging.WARNING, "dualwrite.recipe")
    with journal_pool(scene, pool_options={"lease": 0.5}, timeouts=PATIENT) as pool:
        for number in range(3):
            pool.run(both, scene, number)
        pool.resize(4)
        taken = pool.transactional_ids[0]
        pool.store.claim(taken, "writer somewhere else", timeout=LIMIT)
        until(lambda: pool.run(lambda _: True) and taken not in pool.transactional_ids and pool.size == 4, "another writer")
        pool.run(both, scene, 3)
        warned = Counter(str(record.msg) for record in caplog.get_records("call"))
        own_broker.start()
        until_closed(pool, scene)
        until(lambda: left.unfinished() == [], "the dead process's transaction recovered")
    assert set(warned.values()) == {1}, warned
    assert any("messages go into the journal" in text for text in warned)
    assert_in_order(scene, range(4))


# --- writers --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("database", DATABASES)
def test_a_writer_goes_on_while_the_broker_is_down(scene: Scene, own_broker: BrokerBehindDoor) -> None:
    with journal_writer(scene) as writer:
        assert write(writer, scene, 1) == ["published"]
        own_broker.kill()
        assert write(writer, scene, 2, 3) == ["journaled", "journaled"]
        own_broker.start()
        until_writer_closed(scene)
        assert write(writer, scene, 4) == ["published"]
    assert_in_order(scene, range(1, 5))


@pytest.mark.parametrize(
    ("database", "producer"),
    thinned([*product(DATABASES, ["native"]), ("postgresql", "librdkafka")], kept=list(product(DATABASES, ["native"]))),
    indirect=["producer"],
)
def test_a_writer_starts_and_finds_what_the_one_before_has_left(scene: Scene, own_broker: BrokerBehindDoor) -> None:
    """The transaction that the killed writer had committed in the database only comes first."""
    crash_writer(scene, "after_db_commit")
    own_broker.kill()
    with journal_writer(scene, timeouts=PATIENT) as writer:
        assert writer.phase is Phase.NEEDS_RECOVERY
        assert list(writer.recovery_report) == []
        assert write(writer, scene, 3, 4) == ["journaled", "journaled"]
        own_broker.start()
        until_writer_closed(scene)
        assert write(writer, scene, 5) == ["published"]
    assert_in_order(scene, range(1, 6))
    assert scene.unfinished() == []


def test_lanes_that_the_new_writer_does_not_use_are_recovered(scene: Scene, own_broker: BrokerBehindDoor) -> None:
    """What the writer before had in doubt was on its second lane."""
    crash_writer(scene, "after_db_commit")
    own_broker.kill()
    with journal_writer(scene, lanes=1) as writer:
        own_broker.start()
        until_writer_closed(scene)
        assert write(writer, scene, 3) == ["published"]
        assert scene.unfinished() == []
    assert_in_order(scene, [1, 2, 3])


def test_a_claim_without_an_answer_is_repeated(
    scene: Scene, own_broker: BrokerBehindDoor, monkeypatch: pytest.MonkeyPatch
) -> None:
    own_broker.kill()
    with journal_writer(scene) as writer:
        real = SqlStateStore.claim_lanes

        def unanswered(store: SqlStateStore, *arguments: Any, **what: Any) -> None:
            monkeypatch.undo()
            real(store, *arguments, **what)
            raise StoreCommitUnknownError("no answer")

        monkeypatch.setattr(SqlStateStore, "claim_lanes", unanswered)
        with pytest.raises(StoreCommitUnknownError):
            writer.reopen()
        assert write(writer, scene, 1) == ["journaled"]
        own_broker.start()
        until_writer_closed(scene)
        assert write(writer, scene, 2) == ["published"]
    assert_in_order(scene, [1, 2])


def test_of_two_writers_that_start_the_later_one_goes_on(scene: Scene, own_broker: BrokerBehindDoor) -> None:
    own_broker.kill()
    with journal_writer(scene, lanes=3) as first, journal_writer(scene, lanes=1) as second:
        for _ in range(3):
            with pytest.raises(FencedError):
                write(first, scene, 9)
        assert write(second, scene, 1) == ["journaled"]
        first.reopen()
        assert write(first, scene, 2) == ["journaled"]
        with pytest.raises(FencedError):
            write(second, scene, 9)
        own_broker.start()
        until_writer_closed(scene)
        assert write(first, scene, 3) == ["published"]
    assert_in_order(scene, [1, 2, 3])


def test_a_writer_that_is_closed_leaves_its_journal_to_the_next(scene: Scene, own_broker: BrokerBehindDoor) -> None:
    """Closing does not try to recover what it can't."""
    own_broker.kill()
    with journal_writer(scene, timeouts=PATIENT) as writer:
        write(writer, scene, 1)
        claimed = scene.row().fence
    assert scene.row().fence == claimed
    own_broker.start()
    with journal_writer(scene) as writer:
        until_writer_closed(scene)
        write(writer, scene, 2)
    assert_in_order(scene, [1, 2])


# --- what a start can't find out ------------------------------------------------------------------------------------------


def test_wrong_credentials_are_no_outage(scene: Scene, strict_broker: DevCluster) -> None:
    kafka = login_as(strict_broker, "writer") | {"sasl.password": "wrong"}
    with pytest.raises(BrokerAuthorizationError):
        replace(scene, kafka=kafka).connect(when_kafka_is_down="journal")
    assert not gate(scene).is_open


def test_a_journal_is_not_drained_into_another_cluster(
    scene: Scene, other_broker: DevCluster, own_broker: BrokerBehindDoor, caplog: pytest.LogCaptureFixture
) -> None:
    """The rows of the id name a cluster, which could not be compared when the writer started."""
    replace(scene, bootstrap=other_broker.bootstrap_servers).write_here(1)
    own_broker.kill()
    writer = journal_writer(scene)
    write(writer, scene, 2)
    own_broker.start()
    until(lambda: "are in use on cluster" in caplog.text or not gate(scene).is_open, "draining refused")
    assert write(writer, scene, 3) == ["journaled"]
    with pytest.raises(InDoubtTransactionError, match="the id is in use on cluster"):
        writer.close()
    assert (gate(scene).is_open, gate(scene).entries) == (True, 2)
    assert read_values(own_broker.bootstrap_servers, scene.topic) == []


def test_lost_transactions_are_found_when_the_cluster_answers(scene: Scene, own_broker: BrokerBehindDoor) -> None:
    own_broker.kill()
    with journal_writer(scene, on_lost="raise") as writer:
        claim = writer.store.read(scene.transactional_id)
        assert claim is not None
        lost = LostTransaction(LostKind.LOST, PreparedTxnState(1, 1), 1, datetime.now(UTC))
        writer.store.record_resolution(claim.claim, Resolution(lost=lost))
        write(writer, scene, 1)
        own_broker.start()
        until_writer_closed(scene)
        for _ in range(2):
            with pytest.raises(LostTransactionError):
                write(writer, scene, 2)
        writer.store.acknowledge(scene.transactional_id)
        assert write(writer, scene, 2) == ["published"]
    assert_in_order(scene, [1, 2])


def test_an_id_must_leave_room_for_the_one_that_drains_its_journal(scene: Scene) -> None:
    with pytest.raises(InvalidTransactionalIdError, match="journal"):
        dualwrite.connect(scene.events.database, kafka=scene.settings, transactional_id="w" * 250, when_kafka_is_down="journal")


# --- writers that die -----------------------------------------------------------------------------------------------------


def start_worker(scene: Scene, count: int, failpoints: str = "") -> Worker:
    where = [scene.url, scene.bootstrap, scene.transactional_id, scene.topic, str(count)]
    return Worker(where, failpoints, module="journal.start_worker")


REACHED_WITHOUT_KAFKA = ["journal_after_open", "recover_after_claim", "journal_after_entries", *WRITER_POINTS]
REACHED_WITH_KAFKA = [*(each for each in RECOVERY_POINTS if each != "recover_after_claim"), *OPENING_POINTS]
POINTS = [*REACHED_WITHOUT_KAFKA, *REACHED_WITH_KAFKA, "journal_before_close"]
KEPT = ["journal_after_open", "journal_after_entries", "after_db_commit", "recover_after_end_txn", "after_take_over"]


@pytest.mark.parametrize(
    ("database", "point"),
    thinned(
        [*product(["postgresql", "mariadb", "sqlite"], POINTS)],
        kept=[
            *product(["postgresql"], KEPT),
            ("mariadb", "after_db_commit"),
            ("sqlite", "after_db_commit"),
        ],
    ),
)
def test_a_writer_that_has_started_dies_and_the_next_one_goes_on(
    scene: Scene, own_broker: BrokerBehindDoor, point: str
) -> None:
    """One transaction is in doubt at Kafka from the beginning."""
    crash_writer(scene, "after_db_commit")
    own_broker.kill()
    dying = start_worker(scene, 2, f"{point}=kill")
    if point not in REACHED_WITHOUT_KAFKA:
        dying.wait_for("done 4")
        own_broker.start()
    dying.killed()
    following = start_worker(scene, 2)
    if point in REACHED_WITHOUT_KAFKA:
        following.wait_for("done")
        own_broker.start()
    following.tell("stop")
    assert following.end() == 0, following.errors[-3000:]
    with journal_writer(scene) as writer:
        until_writer_closed(scene)
        last = last_event(scene.engine, scene.transactional_id)
        assert write(writer, scene, last + 1) == ["published"]
    assert_in_order(scene, range(1, last + 2))
    assert scene.unfinished() == []
