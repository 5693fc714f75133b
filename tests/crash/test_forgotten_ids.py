"""Ids that expire at their coordinator (`transactional.id.expiration.ms`): writers continue; the log proves outcomes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from confluent_kafka import Producer

import dualwrite
from crash.cases import PRODUCERS, crash_writer
from crash.databases import Databases
from crash.retention import delete_records
from crash.scene import Scene
from dualwrite.devcluster import DevCluster
from dualwrite.errors import BrokerUnavailableError
from dualwrite.kafka.client.coordinator import WireTransactionCoordinator
from dualwrite.recipe import ownership
from dualwrite.recovery.decision import Decision
from dualwrite.state import Fate, Place, PreparedTxnState
from dualwrite.stores.base import LostKind, LostTransaction, Resolution
from dualwrite.testing.topics import read_committed
from fixtures.broker import PROMPT_TIMEOUTS, started
from fixtures.pace import LIMIT, limit, until
from fixtures.tiers import thinned

FORGETFUL = {
    **PROMPT_TIMEOUTS,
    "transactional.id.expiration.ms": str(round(limit(2.0) * 1000)),  # an id must not expire inside a block
    "transaction.remove.expired.transaction.cleanup.interval.ms": "200",
}

pytestmark = pytest.mark.slow

mostly_native = pytest.mark.parametrize("producer", thinned(PRODUCERS, kept=["native"]), indirect=True)
"""Recovery reads the log behind a forgotten id the same way for both producers, so librdkafka is left to `-m soak`."""


@pytest.fixture(scope="module")
def forgetful() -> Iterator[DevCluster]:
    """A broker that forgets a transactional id seconds after its last use; the default is 7 days."""
    with started(config=FORGETFUL) as cluster:
        yield cluster


@pytest.fixture
def scene(databases: Databases, forgetful: DevCluster) -> Scene:
    return databases.scene("sqlite", forgetful)


Forgotten = Callable[[str], Scene]
PREPARED = {("native", "after_kafka_commit"): 3, ("librdkafka", "after_kafka_commit"): 1, ("librdkafka", "after_db_commit"): 2}
"""How many of CI's tests need a writer with this producer that died at this point in its second transaction."""


@pytest.fixture(scope="module")
def crashed(databases: Databases, forgetful: DevCluster) -> Iterator[Callable[[str, str], Scene]]:
    """The scene of a writer with one lane that died; all of `PREPARED` die at once, and expire together."""

    def crash(scene: Scene, producer: str, point: str) -> Scene:
        environment = {"DUALWRITE_PRODUCER": producer, "DUALWRITE_LANES": "1"}
        if point == "after_db_commit":  # without two-phase commit, so that the broker aborts it: the first one must be in time
            scene.kafka = {"transaction.timeout.ms": int(limit(1.5) * 1000)}
            environment |= {"DUALWRITE_TWO_PHASE": "false"} if producer == "native" else {}
        crash_writer(scene, point, **environment)
        return scene

    with ThreadPoolExecutor(3) as pool:

        def died(*case: str) -> Future[Scene]:
            return pool.submit(crash, databases.scene("sqlite", forgetful), *case)

        ready = {case: [died(*case) for _ in range(count)] for case, count in PREPARED.items()}
        yield lambda *case: (ready[case].pop() if ready.get(case) else died(*case)).result()


@pytest.fixture
def forgotten(crashed: Callable[[str, str], Scene], producer: str, monkeypatch: pytest.MonkeyPatch) -> Forgotten:
    """A scene whose writer died at a point, and whose id Kafka has forgotten since."""
    monkeypatch.setenv("DUALWRITE_LANES", "1")

    def wait(point: str) -> Scene:
        if point == "after_db_commit" and producer == "native":
            monkeypatch.setenv("DUALWRITE_TWO_PHASE", "false")
        scene = crashed(producer, point)
        wait_until_forgotten(scene)
        return scene

    return wait


def wait_until_forgotten(scene: Scene) -> None:
    with scene.coordinator() as coordinator:
        until(lambda: not coordinator.list_transactions(scene.transactional_id), "the broker still knows the ids")


def lost_entries(scene: Scene) -> list[LostTransaction]:
    store = dualwrite.SqlStateStore(scene.engine)
    rows = map(store.read, store.list(scene.transactional_id))
    return [lost for row in rows if row is not None for lost in row.lost]


@pytest.mark.parametrize(
    ("producer", "times"),
    thinned(product(PRODUCERS, [1, 2]), kept=[("native", 1)]),
    indirect=["producer"],
)
def test_a_live_writer_continues_after_kafka_has_forgotten_its_ids(scene: Scene, producer: str, times: int) -> None:
    with scene.connect() as writer:
        scene.event(writer, 1, 2, 3, 4)  # once on every lane, and once more
        for first in (5, 9)[:times]:
            wait_until_forgotten(scene)
            scene.event(writer, *range(first, first + 4))
        assert lost_entries(scene) == []
    assert scene.agree() == list(range(1, 5 + 4 * times))


@mostly_native
def test_an_id_forgotten_during_a_block_fails_that_block_only(scene: Scene, producer: str, one_lane: None) -> None:
    """The check is before the block; if the id is forgotten after it, the first message fails, and nothing else.

    This is decided: the block's database transaction can't go on under the new claim that registering the id needs.
    """
    with scene.connect() as writer:
        scene.event(writer, 1)
        with pytest.raises(dualwrite.DualWriteError), writer.transaction() as tx:  # noqa: PT012  (its end may raise)
            wait_until_forgotten(scene)
            tx.send(scene.topic, "2")
        scene.event(writer, 3)
        assert lost_entries(scene) == []
    assert scene.agree() == [1, 3]


def test_a_transaction_without_messages_commits_while_kafka_is_unreachable(
    scene: Scene, forgetful: DevCluster, native: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ownership, "CHECK_AFTER", 0.0)
    with scene.connect(lanes=1) as writer:
        scene.event(writer, 1)
        forgetful.pause()
        try:
            with writer.transaction() as tx:
                scene.events.write(tx.db, scene.transactional_id, 2)
        finally:
            forgetful.resume()
    assert (scene.rows(), scene.messages()) == ([1, 2], [1])


@pytest.mark.parametrize(
    ("producer", "point"),
    thinned(
        product(PRODUCERS, ["before_kafka_commit", "after_kafka_commit"]),
        kept=[("librdkafka", "after_kafka_commit")],
    ),
    indirect=["producer"],
)
def test_a_service_opens_again_after_its_id_was_forgotten(
    crashed: Callable[[str, str], Scene], forgotten: Forgotten, producer: str, point: str
) -> None:
    if point == "after_kafka_commit":
        scene = forgotten(point)
    else:  # the id is recovered; its row keeps the last state all the same
        scene = crashed(producer, point)
        scene.recover()
        scene.write(3, 1, "after_kafka_commit=kill").killed()
        wait_until_forgotten(scene)
    report = scene.recover()
    assert report["error"] is None
    assert set(report["outcomes"]) <= {"ALREADY_COMMITTED", "NOTHING"}
    assert "ALREADY_COMMITTED" in report["outcomes"]
    assert report["unacknowledged"] == []
    scene.write_here(9)
    assert scene.agree() == ([1, 2, 9] if point == "after_kafka_commit" else [1, 2, 3, 9])


@mostly_native
def test_a_transaction_beyond_an_open_one_is_proven_by_its_marker(scene: Scene, producer: str, one_lane: None) -> None:
    """An open transaction holds back the last stable offset; ours, later in the partition, has its marker."""
    scene.write_here(8)  # it makes the topic
    rival = Producer({"bootstrap.servers": scene.bootstrap, "transactional.id": f"rival-{scene.transactional_id}"})
    rival.init_transactions(LIMIT)
    rival.begin_transaction()
    rival.produce(scene.topic, "open")
    rival.flush(LIMIT)
    crash_writer(scene, "after_kafka_commit")
    wait_until_forgotten(scene)
    report = scene.recover()
    assert (report["error"], report["unacknowledged"]) == (None, [])
    assert "ALREADY_COMMITTED" in report["outcomes"]
    rival.abort_transaction(LIMIT)
    assert scene.agree() == [1, 2, 8]


@pytest.mark.parametrize("producer", thinned(PRODUCERS, kept=["librdkafka"]), indirect=True)
@pytest.mark.usefixtures("losses_stay")
def test_a_transaction_aborted_and_forgotten_by_kafka_is_reported_lost_with_its_messages(forgotten: Forgotten) -> None:
    scene = forgotten("after_db_commit")
    report = scene.recover()
    assert [kind for kind, _ in report["unacknowledged"]] == ["LOST"]
    (lost,) = lost_entries(scene)
    assert lost.delivery is not None
    (place,) = lost.delivery.places
    assert (place.topic, place.partition, place.messages) == (scene.topic, 0, 1)
    with pytest.raises(dualwrite.LostTransactionError) as told:
        scene.write_here(9)
    assert str(lost.delivery) in str(told.value)
    assert (scene.rows(), scene.messages()) == ([1, 2], [1])


@pytest.mark.parametrize("producer", thinned(PRODUCERS, kept=["native"]), indirect=True)
def test_an_idle_service_opens_again_after_kafka_has_forgotten_everything(scene: Scene, producer: str) -> None:
    """The state of an idle lane is cleared, so nothing has to be proven when neither coordinator nor log know it any more."""
    store = dualwrite.SqlStateStore(scene.engine)
    service = scene.write(1, 3, STAY_IDLE="1")
    service.wait_for("idle")

    def states_are_cleared() -> bool:
        rows = map(store.read, store.list(scene.transactional_id))
        return all(row is not None and row.prepared_state is None for row in rows)

    until(states_are_cleared, "the states of the idle lanes are cleared")
    service.kill()
    wait_until_forgotten(scene)
    delete_records(scene, scene.topic)
    scene.write_here(4)
    assert lost_entries(scene) == []
    assert (scene.rows(), scene.messages()) == ([1, 2, 3, 4], [4])


@mostly_native
def test_a_transaction_whose_records_retention_deleted_is_unverified(forgotten: Forgotten) -> None:
    scene = forgotten("after_kafka_commit")
    delete_records(scene, scene.topic)
    report = scene.recover()
    assert [kind for kind, _ in report["unacknowledged"]] == ["UNVERIFIED"]
    assert read_committed(scene.settings, scene.topic) == []


@mostly_native
def test_any_topic_of_the_transaction_can_prove_its_outcome(
    scene: Scene, producer: str, one_lane: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first topic's partition has no leader, then its messages are gone; those in the second one are still there."""
    fate = WireTransactionCoordinator.fate

    def without_leader(self: WireTransactionCoordinator, state: PreparedTxnState, place: Place, **limit: Any) -> Fate:
        if place.topic == scene.topic:
            raise BrokerUnavailableError("the partition has no leader")
        return fate(self, state, place, **limit)

    with scene.connect() as writer:
        with writer.transaction() as tx:
            tx.send(scene.topic, "1")
            tx.send(f"{scene.topic}-long", "1")
        wait_until_forgotten(scene)
        with monkeypatch.context() as patched:
            patched.setattr(WireTransactionCoordinator, "fate", without_leader)
            (found,) = dualwrite.plan_recovery(scene.events.database, kafka=scene.settings, ids=[scene.transactional_id])
        assert found.decision is Decision.ALREADY_COMMITTED
        delete_records(scene, scene.topic)
        report = scene.recover()
    assert (report["error"], report["outcomes"], report["unacknowledged"]) == (None, ["ALREADY_COMMITTED"], [])


def recovered_without_read(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> LostTransaction:
    """Recover as a principal that may not read the topic; return the entry that this leaves in the row."""
    with monkeypatch.context() as patched:
        patched.setattr(WireTransactionCoordinator, "fate", lambda *_, **__: Fate.GONE)
        assert scene.recover()["outcomes"] == ["UNVERIFIED"]
    (entry,) = lost_entries(scene)
    return entry


@mostly_native
@pytest.mark.parametrize("opens", thinned([False, True], kept=[False]))  # to open is to recover first
def test_an_unverified_transaction_is_proven_by_the_log_once_it_can_be_read(
    forgotten: Forgotten, opens: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = forgotten("after_kafka_commit")
    recovered_without_read(scene, monkeypatch)
    if opens:
        scene.write_here(9)
    else:
        plan = dualwrite.plan_recovery(scene.events.database, kafka=scene.settings, ids=[scene.transactional_id])
        assert [found.decision for found in plan] == [Decision.ALREADY_COMMITTED]
        assert scene.recover()["outcomes"] == ["ALREADY_COMMITTED"]
    assert lost_entries(scene) == []
    assert scene.agree() == ([1, 2, 9] if opens else [1, 2])


@pytest.mark.parametrize("producer", thinned(PRODUCERS, kept=["librdkafka"]), indirect=True)
@pytest.mark.usefixtures("losses_stay")
def test_an_unverified_transaction_is_lost_once_the_log_shows_its_abort(
    forgotten: Forgotten, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = forgotten("after_db_commit")
    entry = recovered_without_read(scene, monkeypatch)
    assert scene.recover()["outcomes"] == ["LOST"]
    (lost,) = lost_entries(scene)
    assert lost == replace(entry, kind=LostKind.LOST, recorded_at=lost.recorded_at)


@mostly_native
def test_the_log_of_another_cluster_proves_nothing(forgotten: Forgotten, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a move, the same offset of the new cluster may have another transaction with the same producer id and epoch."""
    scene = forgotten("after_kafka_commit")
    entry = recovered_without_read(scene, monkeypatch)
    assert entry.cluster_id
    elsewhere = replace(entry, cluster_id="of the old cluster")
    store = dualwrite.SqlStateStore(scene.engine)
    claim = store.claim(scene.transactional_id, "tests", timeout=LIMIT)
    store.record_resolution(claim, Resolution(resolved_entry=entry, lost=elsewhere))
    assert scene.recover()["outcomes"] == ["NOTHING"]
    assert lost_entries(scene) == [elsewhere]
