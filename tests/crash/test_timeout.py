"""What a broker without two-phase commit can lose is proven, recorded, reported, and never called anything else."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

import dualwrite
from crash.databases import Databases
from crash.scene import Scene
from dualwrite.cli import main
from dualwrite.devcluster import DevCluster
from dualwrite.kafka.config import KafkaConfig
from dualwrite.kafka.coordinator import WireTransactionCoordinator
from dualwrite.state import TransactionStatus
from fixtures.broker import PROMPT_TIMEOUTS, started

SHORT = {"transaction.timeout.ms": 3000}
QUICK = dualwrite.Timeouts(claim=20, kafka=30, delivery=2)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def impatient() -> Iterator[DevCluster]:
    """A broker that looks for timed-out transactions all the time, not every 10 s."""
    with started(config=PROMPT_TIMEOUTS) as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def without_two_phase_commit(producer: str, one_lane: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only without it can something time out; and one lane, so that it is known which id does."""
    if producer == "native":
        monkeypatch.setenv("DUALWRITE_TWO_PHASE", "false")


@pytest.fixture(params=["sqlite", "postgresql"])
def scene(request: pytest.FixtureRequest, databases: Databases, impatient: DevCluster) -> Scene:
    return databases.scene(request.param, impatient, **SHORT)


def wait_until_timed_out(scene: Scene) -> None:
    coordinator = WireTransactionCoordinator(KafkaConfig.of(scene.bootstrap))
    try:
        deadline = time.monotonic() + 30
        while True:
            found = coordinator.describe(f"{scene.transactional_id}#1")
            if found is not None and found.status is TransactionStatus.COMPLETE_ABORT:
                return
            assert time.monotonic() < deadline, found
            time.sleep(0.1)
    finally:
        coordinator.close()


def lost_by_a_crash(scene: Scene) -> None:
    worker = scene.write(1, 3, "after_db_commit#2=kill")
    assert worker.end() == -9, f"{worker.lines} {worker.errors[-2000:]}"
    wait_until_timed_out(scene)


def connected(scene: Scene, **more: str) -> dualwrite.DualWriter:
    kafka = {"bootstrap.servers": scene.bootstrap, **SHORT}
    return dualwrite.connect(
        scene.engine,
        kafka=kafka,
        transactional_id=scene.transactional_id,
        timeouts=QUICK,
        **more,  # type: ignore[arg-type]
    )


def test_a_prepared_transaction_past_its_timeout_is_reported_lost_until_acknowledged(
    scene: Scene, capsys: pytest.CaptureFixture[str]
) -> None:
    lost_by_a_crash(scene)
    report = scene.recover()
    assert report["outcomes"] == ["LOST"]
    ((kind, state),) = report["unacknowledged"]
    assert kind == "LOST"
    assert (scene.rows(), scene.messages()) == ([1, 2], [1])

    with pytest.raises(dualwrite.LostTransactionError, match="lost") as caught:
        connected(scene)
    assert (caught.value.transactional_id, caught.value.state) == (scene.transactional_id, state)

    where = ["--url", scene.url, "--kafka", scene.bootstrap, "--id", scene.transactional_id, "--yes"]
    assert main(["recover", *where]) == 3
    assert "LOST" in capsys.readouterr().out
    assert main(["recover", *where, "--acknowledge"]) == 0
    assert main(["recover", *where]) == 0
    with connected(scene) as writer:
        assert writer.recovery_report.ok


def test_a_writer_may_go_on_with_lost_transactions_reported(scene: Scene) -> None:
    lost_by_a_crash(scene)
    with connected(scene, on_lost="report") as writer:
        ((_, lost),) = writer.recovery_report.unacknowledged
        assert lost.kind.value == "LOST"
    with connected(scene, on_lost="report") as writer:
        assert len(writer.recovery_report.unacknowledged) == 1


@pytest.mark.parametrize("point", ["recover_after_decision", "recover_after_settle"])
def test_a_recovery_that_dies_between_finding_lost_and_reporting_it_keeps_it(scene: Scene, point: str) -> None:
    lost_by_a_crash(scene)
    dying = scene.recovery(f"{point}=kill")
    assert dying.end() == -9
    report = scene.recover()
    assert [kind for kind, _ in report["unacknowledged"]] == ["LOST"]
    again = scene.recover()
    assert again["unacknowledged"] == report["unacknowledged"]


@pytest.mark.parametrize("point", ["before_db_commit", "after_db_commit", "before_kafka_commit"])
def test_a_writer_paused_past_its_timeout_finds_out_itself(scene: Scene, point: str) -> None:
    paused = scene.write(1, 2, f"{point}#2=stop")
    paused.wait_until_stopped()
    wait_until_timed_out(scene)
    paused.resume()
    assert paused.end() == 1
    assert paused.last().startswith("error LostTransactionError"), paused.lines
    assert [kind for kind, _ in scene.recover()["unacknowledged"]] == ["LOST"]
    assert (scene.rows(), scene.messages()) == ([1, 2], [1])


@pytest.mark.parametrize("point", ["after_send", "after_prepare", "after_record"])
def test_a_writer_paused_past_its_timeout_before_the_commit_point_rolls_both_sides_back(scene: Scene, point: str) -> None:
    paused = scene.write(1, 2, f"{point}#2=stop")
    paused.wait_until_stopped()
    if point == "after_send":
        time.sleep(SHORT["transaction.timeout.ms"] / 1000)  # librdkafka was stopped before it sent: the broker knows nothing
    else:
        wait_until_timed_out(scene)
    paused.resume()
    assert paused.end() == 1
    said = paused.last().split()[1]
    assert said in ("TransactionTimeoutError", "PrepareError", "ProducerFencedError", "DeliveryError"), paused.lines
    assert scene.recover()["unacknowledged"] == []
    assert scene.agree() == [1]


def test_a_block_that_takes_too_long_is_rolled_back_on_both_sides(scene: Scene) -> None:
    with connected(scene) as writer:
        with pytest.raises(dualwrite.TransactionTimeoutError) as caught:
            send_slowly(scene, writer)
        assert caught.value.timeout == 3
        assert caught.value.retriable
        with writer.transaction() as tx:
            tx.send(scene.topic, "2")
    assert scene.messages() == [2]


def test_a_state_that_another_cluster_never_saw_is_unverified(scene: Scene) -> None:
    worker = scene.write(1, 3, "after_db_commit#2=kill")
    assert worker.end() == -9
    with started() as other:
        moved = Scene(scene.events, other.bootstrap_servers, scene.transactional_id)
        report = moved.recover()
        assert report["outcomes"][-1] == "UNVERIFIED"
        with pytest.raises(dualwrite.UnverifiedTransactionError):
            connected(moved)


def send_slowly(scene: Scene, writer: dualwrite.DualWriter) -> None:
    with writer.transaction() as tx:
        tx.send(scene.topic, "1")
        time.sleep(2.6)  # of 3 s, 20 % are kept for committing
