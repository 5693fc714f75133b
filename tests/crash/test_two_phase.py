"""Under two-phase commit a prepared transaction waits for its recovery, however long that takes; without it, it is LOST."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

import dualwrite
from crash.databases import Databases
from crash.scene import Scene
from dualwrite.devcluster import DevCluster
from dualwrite.kafka.config import KafkaConfig
from dualwrite.kafka.coordinator import WireTransactionCoordinator
from dualwrite.state import TransactionDescription, TransactionStatus
from fixtures.broker import started

MAX_TIMEOUT_MS = 2_000
NO_TIMEOUT_MS = 2_147_483_647

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def short_tempered() -> Iterator[DevCluster]:
    """A broker that gives a transaction two seconds, and looks for those that are over all the time."""
    config = {
        "transaction.max.timeout.ms": str(MAX_TIMEOUT_MS),
        "transaction.abort.timed.out.transaction.cleanup.interval.ms": "200",
    }
    with started(config=config) as cluster:
        yield cluster


@pytest.fixture
def scene(databases: Databases, short_tempered: DevCluster, monkeypatch: pytest.MonkeyPatch) -> Scene:
    monkeypatch.setenv("DUALWRITE_LANES", "1")
    return databases.scene("sqlite", short_tempered)


def described(scene: Scene) -> TransactionDescription:
    coordinator = WireTransactionCoordinator(KafkaConfig.of(scene.bootstrap))
    try:
        found = coordinator.describe(f"{scene.transactional_id}#1")
        assert found is not None
        return found
    finally:
        coordinator.close()


@pytest.mark.parametrize("point", ["after_db_commit", "before_kafka_commit"])
def test_three_times_the_longest_timeout_after_a_crash(scene: Scene, producer: str, point: str) -> None:
    worker = scene.write(1, 3, f"{point}#2=kill")
    assert worker.end() == -9, f"{worker.lines} {worker.errors[-2000:]}"
    crashed_at = time.monotonic()
    assert described(scene).timeout_ms == (NO_TIMEOUT_MS if producer == "native" else MAX_TIMEOUT_MS)
    time.sleep(max(0.0, 3 * MAX_TIMEOUT_MS / 1000 + 1 - (time.monotonic() - crashed_at)))
    status = described(scene).status
    report = scene.recover()
    if producer == "native":
        assert status is TransactionStatus.ONGOING
        assert (report["outcomes"], report["unacknowledged"]) == (["COMMITTED"], [])
        assert scene.agree() == [1, 2]
    else:
        assert status is TransactionStatus.COMPLETE_ABORT
        assert [kind for kind, _ in report["unacknowledged"]] == ["LOST"]
        assert (scene.rows(), scene.messages()) == ([1, 2], [1])


@pytest.mark.parametrize("producer", ["native"])
def test_a_writer_may_take_as_long_as_it_likes(scene: Scene) -> None:
    with (
        dualwrite.connect(scene.engine, kafka=scene.settings, transactional_id=scene.transactional_id) as writer,
        writer.transaction() as tx,
    ):
        tx.send(scene.topic, b"1")
        time.sleep(1.5 * MAX_TIMEOUT_MS / 1000)
        tx.send(scene.topic, b"2")
    assert scene.messages() == [1, 2]


@pytest.mark.parametrize("producer", ["native"])
def test_an_id_that_was_plain_goes_on_under_a_new_generation(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """EndTxn keeps an id's timeout, so that plain and two-phase transactions never share a Kafka id."""
    expected = []
    for number, two_phase in enumerate(("true", "true", "false", "false", "true"), start=1):
        monkeypatch.setenv("DUALWRITE_TWO_PHASE", two_phase)
        scene.write_here(number)
        expected.append(number)
    assert scene.agree() == expected
    row = dualwrite.SqlStateStore(scene.engine).read(scene.transactional_id)
    assert row is not None
    assert row.generation == 3


@pytest.mark.parametrize("producer", ["native"])
def test_producers_of_both_kinds_take_an_id_from_each_other(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, name in enumerate(("native", "librdkafka", "native", "librdkafka"), start=1):
        monkeypatch.setenv("DUALWRITE_PRODUCER", name)
        worker = scene.write(number, 1, "after_db_commit=kill")
        assert worker.end() == -9, f"{worker.lines} {worker.errors[-2000:]}"
    monkeypatch.setenv("DUALWRITE_PRODUCER", "auto")
    scene.write_here(5)
    assert scene.agree() == [1, 2, 3, 4, 5]
