"""With two-phase commit a prepared transaction waits for recovery, however long that takes; without it, it is LOST."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest

from crash.cases import PRODUCERS, crash_writer
from crash.databases import Databases
from crash.scene import Scene
from dualwrite.devcluster import DevCluster
from dualwrite.state import TransactionStatus
from fixtures.broker import PROMPT_TIMEOUTS, started
from fixtures.pace import limit

MAX_TIMEOUT_MS = round(limit(3.0) * 1000)  # a writer that stands still for longer before its crash is LOST, rightly
NO_TIMEOUT_MS = 2_147_483_647
BETWEEN_THE_COMMITS = ["after_db_commit", "before_kafka_commit"]

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_lane", "crashed")]


@pytest.fixture(scope="module")
def short_tempered() -> Iterator[DevCluster]:
    """A broker with a transaction timeout of a few seconds, which it checks continuously."""
    with started(config={**PROMPT_TIMEOUTS, "transaction.max.timeout.ms": str(MAX_TIMEOUT_MS)}) as cluster:
        yield cluster


@pytest.fixture
def scene(databases: Databases, short_tempered: DevCluster) -> Scene:
    return databases.scene("sqlite", short_tempered)


@pytest.fixture
def unhurried(databases: Databases, broker: DevCluster) -> Scene:
    """A scene in which a plain transaction does not time out before the next process has started, even on a busy machine."""
    return databases.scene("sqlite", broker)


@pytest.fixture(scope="module")
def crashed(databases: Databases, short_tempered: DevCluster) -> dict[tuple[str, str], tuple[Scene, float]]:
    """A scene for each producer and point, with a writer that died there, and the time: they wait during the other tests."""
    left = {}
    for producer, point in product(PRODUCERS, BETWEEN_THE_COMMITS):
        scene = databases.scene("sqlite", short_tempered)
        crash_writer(scene, point, DUALWRITE_PRODUCER=producer, DUALWRITE_LANES="1")
        left[producer, point] = (scene, time.monotonic())
        assert scene.described().timeout_ms == (NO_TIMEOUT_MS if producer == "native" else MAX_TIMEOUT_MS)
    return left


@pytest.mark.usefixtures("native")
def test_a_two_phase_transaction_has_no_timeout(scene: Scene) -> None:
    with (
        scene.connect() as writer,
        writer.transaction() as tx,
    ):
        tx.send(scene.topic, b"1")
        time.sleep(1.2 * MAX_TIMEOUT_MS / 1000)
        tx.send(scene.topic, b"2")
    assert scene.messages() == [1, 2]


@pytest.mark.usefixtures("native")
def test_switching_two_phase_commit_starts_a_new_generation(unhurried: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """EndTxn keeps an id's timeout, so that plain and two-phase transactions never share a Kafka id."""
    expected = []
    for number, two_phase in enumerate(("true", "true", "false", "false", "true"), start=1):
        monkeypatch.setenv("DUALWRITE_TWO_PHASE", two_phase)
        unhurried.write_here(number)
        expected.append(number)
    assert unhurried.agree() == expected
    assert unhurried.row().generation == 3


@pytest.mark.usefixtures("native")
def test_another_timeout_starts_a_new_generation(unhurried: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DUALWRITE_TWO_PHASE", "false")
    for number, (timeout_ms, generation) in enumerate(((30_000, 1), (30_000, 1), (60_000, 2), (60_000, 2)), start=1):
        replace(unhurried, kafka={"transaction.timeout.ms": timeout_ms}).write_here(number)
        assert unhurried.described(generation).timeout_ms == timeout_ms
        assert unhurried.row().generation == generation
    assert unhurried.agree() == [1, 2, 3, 4]


@pytest.mark.usefixtures("native")
def test_producers_of_both_kinds_take_over_an_id_from_each_other(unhurried: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, name in enumerate(("native", "librdkafka", "native", "librdkafka"), start=1):
        monkeypatch.setenv("DUALWRITE_PRODUCER", name)
        worker = unhurried.write(number, 1, "after_db_commit=kill")
        worker.killed()
    monkeypatch.setenv("DUALWRITE_PRODUCER", "auto")
    unhurried.write_here(5)
    assert unhurried.agree() == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("point", BETWEEN_THE_COMMITS)
def test_three_times_the_longest_timeout_after_a_crash(
    crashed: dict[tuple[str, str], tuple[Scene, float]], producer: str, point: str
) -> None:
    scene, crashed_at = crashed[producer, point]
    time.sleep(max(0.0, 3 * MAX_TIMEOUT_MS / 1000 + 1 - (time.monotonic() - crashed_at)))
    status = scene.described().status
    report = scene.recover()
    if producer == "native":
        assert status is TransactionStatus.ONGOING
        assert (report["outcomes"], report["unacknowledged"]) == (["COMMITTED"], [])
        assert scene.agree() == [1, 2]
    else:
        assert status is TransactionStatus.COMPLETE_ABORT
        assert (report["outcomes"], report["unacknowledged"]) == (["LOST", "PUBLISHED_AGAIN"], [])
        assert scene.agree() == [1, 2]
