"""The last epoch of a producer id, and the change to the next producer id: a crash before, at and after the change.

A producer id can produce with epochs up to 32766; EndTxn v5 of the last one answers with another producer id and epoch 0
(KIP-890). A state with the old producer id can be proven only by EndTxn v5, and only for a while, so a writer takes the id over
again when only the last epoch is left. If another client has used the last epoch (`USE_LAST_EPOCH`), it is proven all the same.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import replace

import pytest

import dualwrite
from crash.databases import Databases
from crash.epochs import set_epochs
from crash.scene import Scene, report_of
from dualwrite.deadline import Deadline
from dualwrite.devcluster import DevCluster
from dualwrite.kafka.client.config import KafkaConfig
from dualwrite.kafka.client.coordinator import WireTransactionCoordinator
from dualwrite.kafka.native.native_producer import NativeProducer
from dualwrite.state import PreparedTxnState, TransactionDescription, TransactionStatus
from fixtures.broker import started, wait_for_markers
from fixtures.pace import LIMIT

LAST_EPOCH = 32766

PREPARED = {1: 2, LAST_EPOCH - 4: 2, LAST_EPOCH - 3: 5, LAST_EPOCH - 2: 4, LAST_EPOCH - 1: 10}
"""How many tests need which epoch, plus a spare one for a test that is rerun."""

# the producer with a separate epoch for each transaction; on one lane, so that all belong to one id
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("native", "one_lane")]


@pytest.fixture(scope="module")
def cluster() -> Iterator[DevCluster]:
    """A separate broker, which can be restarted."""
    with started() as made:
        yield made


@pytest.fixture(scope="module")
def scenes(databases: Databases, cluster: DevCluster) -> dict[int, list[Scene]]:
    """Scenes with one committed transaction, by the id's epoch; each is used by one test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DUALWRITE_PRODUCER", "native")
        patch.setenv("DUALWRITE_LANES", "1")
        made = {epoch: [databases.scene("sqlite", cluster) for _ in range(count)] for epoch, count in PREPARED.items()}
        for scene in itertools.chain.from_iterable(made.values()):
            scene.write_here(1)
        wait_for_markers(cluster.bootstrap_servers)
        set_epochs(cluster, {scene.kafka_id(): epoch for epoch in made for scene in made[epoch]})
        for epoch, those in made.items():
            assert {scene.described().epoch for scene in those} == {epoch}
    return made


def crashed_at_epoch(scene: Scene, epoch: int, point: str) -> PreparedTxnState | None:
    """Kill a writer in its next transaction, which has this epoch: opening uses one epoch, the transaction the next."""
    assert scene.described().epoch == epoch - 1
    environment = {"USE_LAST_EPOCH": "1"} if epoch == LAST_EPOCH else {}
    worker = scene.write(2, 2, f"{point}=kill", **environment)
    worker.killed()
    return scene.row().prepared_state


@pytest.mark.parametrize(
    ("point", "outcome"),
    [("after_db_commit", "COMMITTED"), ("after_kafka_commit", "ALREADY_COMMITTED")],
)
@pytest.mark.parametrize("epoch", [LAST_EPOCH - 1, LAST_EPOCH])
def test_a_transaction_that_the_database_committed(
    scenes: dict[int, list[Scene]], epoch: int, point: str, outcome: str
) -> None:
    scene = scenes[epoch - 1].pop()
    state = crashed_at_epoch(scene, epoch, point)
    assert state is not None
    assert state.epoch == epoch
    report = scene.recover()
    assert (report["outcomes"], report["unacknowledged"], report["error"]) == ([outcome], [], None)
    scene.assert_continues([1, 2], 3)


@pytest.mark.parametrize("point", ["recover_after_end_txn", "recover_after_resolution"])
def test_a_recovery_that_dies_right_at_the_change_is_finished_by_proof(scenes: dict[int, list[Scene]], point: str) -> None:
    scene = scenes[LAST_EPOCH - 1].pop()
    crashed_at_epoch(scene, LAST_EPOCH, "after_db_commit")
    scene.recovery(f"{point}=kill").killed()
    report = report_of(scene.recovery())
    expected = "ALREADY_COMMITTED" if point == "recover_after_end_txn" else "NOTHING"
    assert (report["outcomes"], report["unacknowledged"], report["error"]) == ([expected], [], None)
    scene.assert_continues([1, 2], 3)


def test_a_transaction_that_the_database_did_not_commit(scenes: dict[int, list[Scene]]) -> None:
    scene = scenes[LAST_EPOCH - 1].pop()
    crashed_at_epoch(scene, LAST_EPOCH, "after_prepare")
    assert scene.recover()["outcomes"] == ["ABORTED"]
    scene.assert_continues([1], 3)


def test_a_stored_state_passed_before_the_change_is_not_reported_unverified(
    scenes: dict[int, list[Scene]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The transaction of the last epoch was rolled back, so the row still names the previous one, which committed."""
    monkeypatch.setattr("dualwrite.kafka.native.native_producer.LAST_EPOCH", LAST_EPOCH + 1)
    scene = scenes[LAST_EPOCH - 2].pop()
    with scene.connect() as writer:
        scene.event(writer, 2)
        roll_one_back(writer, scene)
        report = scene.recover()  # as after a crash: it takes the id from the writer
    assert (report["outcomes"], report["unacknowledged"], report["error"]) == (["ALREADY_COMMITTED"], [], None)
    assert scene.agree() == [1, 2]


@pytest.mark.parametrize("point", ["after_prepare", "after_db_commit", "after_kafka_commit"])
def test_a_writer_that_opens_on_the_last_epoch_uses_the_next_producer_id(scenes: dict[int, list[Scene]], point: str) -> None:
    scene = scenes[LAST_EPOCH - 1].pop()
    old = scene.described().producer_id
    worker = scene.write(2, 2, f"{point}=kill")
    worker.killed()
    assert scene.described().producer_id != old
    assert scene.recover()["unacknowledged"] == []
    assert scene.agree() == ([1] if point == "after_prepare" else [1, 2])


def test_a_writer_waits_for_a_change_in_progress(scenes: dict[int, list[Scene]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the markers are written the coordinator shows epoch 32767. A mock lengthens that: it takes a millisecond."""
    scene = scenes[LAST_EPOCH - 1].pop()
    old = scene.described().producer_id
    describe_all = WireTransactionCoordinator.describe_all
    shown = []

    def a_moment_before(
        self: WireTransactionCoordinator, names: Iterable[str], *, timeout: float | Deadline | None = None
    ) -> dict[str, TransactionDescription | None]:
        found = describe_all(self, names, timeout=timeout)
        for name, described in found.items():
            if described is not None and described.producer_id != old and not shown:
                shown.append(described)
                found[name] = replace(described, status=TransactionStatus.PREPARE_ABORT, producer_id=old, epoch=LAST_EPOCH + 1)
        return found

    monkeypatch.setattr(WireTransactionCoordinator, "describe_all", a_moment_before)
    scene.write_here(2)
    assert shown
    assert scene.described().producer_id != old
    assert scene.agree() == [1, 2]


@pytest.mark.parametrize("rolled_back", [0, 1, 2, 3])
def test_a_writer_continues_over_the_change(scenes: dict[int, list[Scene]], rolled_back: int) -> None:
    scene = scenes[LAST_EPOCH - 3].pop()
    with scene.connect() as writer:
        scene.event(writer, 2)
        for _ in range(rolled_back):
            roll_one_back(writer, scene)
        for number in (3, 4, 5):
            scene.event(writer, number)
            roll_one_back(writer, scene)
        report = scene.recover()
    assert report["outcomes"] in (["ALREADY_COMMITTED"], ["NOTHING"])
    assert report["unacknowledged"] == []
    assert scene.agree() == [1, 2, 3, 4, 5]


def roll_one_back(writer: dualwrite.DualWriter, scene: Scene) -> None:
    with contextlib.suppress(ZeroDivisionError), writer.transaction() as tx:
        tx.send(scene.topic, b"0")
        raise ZeroDivisionError


@pytest.mark.parametrize("by", ["record", pytest.param("transactions", marks=[pytest.mark.soak, pytest.mark.timeout(900)])])
def test_every_transaction_around_the_change_crashes_and_is_recovered(scenes: dict[int, list[Scene]], by: str) -> None:
    """A crash and its recovery before, at and after the change; the soak run reaches it by 33,000 real commits."""
    scene = scenes[LAST_EPOCH - 4 if by == "record" else 1].pop()
    written = spin(scene, until=LAST_EPOCH - 4)
    ids, numbers = set(), [1]
    for number in range(2, 7):
        worker = scene.write(number, 1, "after_db_commit=kill")
        worker.killed()
        state = scene.row().prepared_state
        assert state is not None
        ids.add(state.producer_id)
        assert scene.recover()["outcomes"] == ["COMMITTED"]
        numbers.append(number)
        assert scene.agree() == numbers
    assert len(ids) == 2  # the producer id has changed in between
    written += spin(scene, until=100)
    assert written > (32_000 if by == "transactions" else 80)


def spin(scene: Scene, until: int) -> int:
    """Commit transactions of one message on the writer's Kafka id until its epoch is `until`; return how many."""
    producer = NativeProducer(KafkaConfig.of(scene.bootstrap), scene.kafka_id(), two_phase=True)
    try:
        producer.init_transactions(timeout=LIMIT)
        written = 0
        while producer.identity[1] < until:
            producer.begin_transaction()
            producer.send(f"spin-{scene.transactional_id}", b"x")
            producer.prepare_transaction(timeout=LIMIT)
            producer.commit_transaction(timeout=LIMIT)
            written += 1
        return written
    finally:
        producer.close()
