"""A transaction that a broker without two-phase commit aborts after its timeout is published again, or reported as lost.

With `on_lost="raise"` it is proven lost, recorded, and always reported as lost; see `test_republish.py` for what may go wrong
while it is published.

All writers are killed or stopped first, so that they wait for the timeout together. On one database, since its kind makes no
difference.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product

import pytest

import dualwrite
from crash.cases import PRODUCERS
from crash.databases import Databases
from crash.scene import Scene, Worker
from dualwrite.cli import main
from dualwrite.devcluster import DevCluster
from dualwrite.kafka.client.time_budget import reserve_for
from dualwrite.state import TransactionStatus
from fixtures.pace import LIMIT, limit, until
from fixtures.tiers import thinned

TIMEOUT = float(math.ceil(limit(5)))
"""The first transactions must be prepared in time, the second ones must not."""
SHORT = {"transaction.timeout.ms": int(TIMEOUT * 1000)}
QUICK = dualwrite.Timeouts(claim=LIMIT, kafka=LIMIT, delivery=limit(2))

RECOVERY_DEATHS = ["recover_after_decision", "recover_after_resolution"]
KILLED = ["until acknowledged", "may go on", *RECOVERY_DEATHS]
"""Writers that are killed after the database's commit, by their purpose."""
PUBLISHED = "published again"
"""The same, and its messages are published again."""
STOPPED_BEFORE = ["after_send", "after_prepare", "after_record"]
STOPPED_AFTER = ["before_db_commit", "after_db_commit", "before_kafka_commit"]

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("without_two_phase_commit")]


@pytest.fixture
def without_two_phase_commit(producer: str, one_lane: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """No two-phase commit, so that transactions can time out; one lane, so that the id is known."""
    monkeypatch.setenv("DUALWRITE_TWO_PHASE", "false" if producer == "native" else "")
    monkeypatch.setenv("DUALWRITE_ON_LOST", "raise")


@pytest.fixture
def scene(databases: Databases, prompt_broker: DevCluster) -> Scene:
    return databases.scene("postgresql", prompt_broker, **SHORT)


@dataclass
class Left:
    """A writer that was killed or stopped in its second transaction."""

    scene: Scene
    worker: Worker
    point: str
    since: float

    def wait_until_timed_out(self) -> Scene:
        if self.point == "after_send":  # librdkafka was stopped before it sent: the broker may know nothing
            time.sleep(max(0.0, self.since + TIMEOUT - time.monotonic()))
            return self.scene
        with self.scene.coordinator() as coordinator:

            def aborted() -> bool:
                found = coordinator.describe(self.scene.kafka_id())
                return found is not None and found.status is TransactionStatus.COMPLETE_ABORT

            until(aborted, "the broker has aborted it", pause=0.1)
        return self.scene


@pytest.fixture(scope="module")
def left(databases: Databases, prompt_broker: DevCluster) -> Iterator[Callable[..., Left]]:
    """The writer that was prepared for one of these tests, by producer."""

    def leave(scene: Scene, producer: str, what: str, on_lost: str = "raise") -> Left:
        is_killed = what in (*KILLED, PUBLISHED)
        point, action = ("after_db_commit", "kill") if is_killed else (what, "stop")
        options = {"DUALWRITE_PRODUCER": producer, "DUALWRITE_LANES": "1", "DUALWRITE_ON_LOST": on_lost}
        plain = {"DUALWRITE_TWO_PHASE": "false"} if producer == "native" else {}
        worker = scene.write(1, 3, f"{point}#2={action}", **options, **plain)
        if is_killed:
            worker.killed()
        else:
            worker.wait_until_stopped()
        return Left(scene, worker, point, time.monotonic())

    with ThreadPoolExecutor(3) as pool:
        all_left = {
            case: pool.submit(leave, databases.scene("postgresql", prompt_broker, **SHORT), *case)
            for case in (
                *product(PRODUCERS, [*KILLED, *STOPPED_BEFORE, *STOPPED_AFTER]),
                *product(PRODUCERS, [PUBLISHED, *STOPPED_AFTER], ["republish"]),
            )
        }
        yield lambda *case: all_left[case].result()
        for leaving in all_left.values():
            if leaving.exception() is None:
                leaving.result().worker.kill()


def test_a_prepared_transaction_past_its_timeout_is_reported_lost_until_acknowledged(
    left: Callable[..., Left], producer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    scene = left(producer, "until acknowledged").wait_until_timed_out()
    report = scene.recover()
    assert report["outcomes"] == ["LOST"]
    ((kind, state),) = report["unacknowledged"]
    assert kind == "LOST"
    assert (scene.rows(), scene.messages()) == ([1, 2], [1])

    with pytest.raises(dualwrite.LostTransactionError, match="lost") as caught:
        scene.connect(timeouts=QUICK)
    assert (caught.value.transactional_id, caught.value.state) == (scene.transactional_id, state)

    where = ["--url", scene.url, "--kafka", scene.bootstrap, "--id", scene.transactional_id, "--yes"]
    assert main(["recover", *where]) == 3
    assert "LOST" in capsys.readouterr().out
    assert main(["recover", *where, "--acknowledge"]) == 0
    assert main(["recover", *where]) == 0
    with scene.connect(timeouts=QUICK) as writer:
        assert writer.recovery_report.ok


def test_a_writer_may_continue_with_lost_transactions_reported(left: Callable[..., Left], producer: str) -> None:
    scene = left(producer, "may go on").wait_until_timed_out()
    with scene.connect(timeouts=QUICK, on_lost="report") as writer:
        ((_, lost),) = writer.recovery_report.unacknowledged
        assert lost.kind.value == "LOST"
    with scene.connect(timeouts=QUICK, on_lost="report") as writer:
        assert len(writer.recovery_report.unacknowledged) == 1


@pytest.mark.parametrize("point", RECOVERY_DEATHS)
def test_a_recovery_that_dies_between_finding_lost_and_reporting_it_keeps_it(
    left: Callable[..., Left], producer: str, point: str
) -> None:
    scene = left(producer, point).wait_until_timed_out()
    scene.recovery(f"{point}=kill").killed()
    report = scene.recover()
    assert [kind for kind, _ in report["unacknowledged"]] == ["LOST"]
    again = scene.recover()
    assert again["unacknowledged"] == report["unacknowledged"]


@pytest.mark.parametrize("point", STOPPED_AFTER)
def test_a_writer_paused_past_its_timeout_reports_the_loss_itself(left: Callable[..., Left], producer: str, point: str) -> None:
    paused = left(producer, point)
    scene = paused.wait_until_timed_out()
    paused.worker.resume()
    assert paused.worker.end() == 1
    assert paused.worker.last().startswith("error LostTransactionError"), paused.worker.lines
    assert [kind for kind, _ in scene.recover()["unacknowledged"]] == ["LOST"]
    assert (scene.rows(), scene.messages()) == ([1, 2], [1])


def test_a_transaction_past_its_timeout_is_published_again(left: Callable[..., Left], producer: str) -> None:
    scene = left(producer, PUBLISHED, "republish").wait_until_timed_out()
    with scene.connect(timeouts=QUICK, on_lost="republish") as writer:
        assert writer.recovery_report.ok
    assert scene.agree() == [1, 2]
    scene.assert_resolved()


@pytest.mark.parametrize("point", STOPPED_AFTER)
def test_a_writer_paused_past_its_timeout_publishes_again_and_goes_on(
    left: Callable[..., Left], producer: str, point: str
) -> None:
    paused = left(producer, point, "republish")
    scene = paused.wait_until_timed_out()
    paused.worker.resume()
    assert paused.worker.end() == 0, paused.worker.lines
    assert paused.worker.lines[-5:] == ["begin 2", "done 2", "begin 3", "done 3", "closed"]
    assert scene.agree() == [1, 2, 3]
    scene.assert_resolved()


@pytest.mark.parametrize("point", STOPPED_BEFORE)
def test_a_writer_paused_past_its_timeout_before_the_commit_point_rolls_both_sides_back(
    left: Callable[..., Left], producer: str, point: str
) -> None:
    paused = left(producer, point)
    scene = paused.wait_until_timed_out()
    paused.worker.resume()
    assert paused.worker.end() == 1
    said = paused.worker.last().split()[1]
    assert said in ("TransactionTimeoutError", "PrepareError", "ProducerFencedError", "DeliveryError"), paused.worker.lines
    assert scene.recover()["unacknowledged"] == []
    assert scene.agree() == [1]


@pytest.mark.parametrize("producer", thinned(PRODUCERS, kept=["native"]), indirect=True)
def test_a_block_that_exceeds_the_timeout_is_rolled_back_on_both_sides(scene: Scene) -> None:
    seconds = float(math.ceil(limit(2)))
    scene.kafka = {"transaction.timeout.ms": int(seconds * 1000)}
    with scene.connect(timeouts=QUICK) as writer:
        with pytest.raises(dualwrite.TransactionTimeoutError) as caught, writer.transaction() as tx:  # noqa: PT012
            tx.send(scene.topic, "1")
            time.sleep(seconds - 0.75 * reserve_for(seconds))  # into the time that is reserved for committing
        assert caught.value.timeout == seconds
        assert caught.value.retriable
        with writer.transaction() as tx:
            tx.send(scene.topic, "2")
    assert scene.messages() == [2]


@pytest.mark.parametrize("producer", thinned(PRODUCERS, kept=["native"]), indirect=True)
def test_a_block_that_is_suspended_past_the_timeout_is_rolled_back_on_both_sides(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Simulated: the machine is suspended, and only the clock that goes on then shows it."""
    clock_gettime = time.clock_gettime

    def after_suspend(clock: int) -> float:
        return clock_gettime(clock) + (TIMEOUT if clock == time.CLOCK_BOOTTIME else 0)

    with scene.connect(timeouts=QUICK) as writer:
        with pytest.raises(dualwrite.TransactionTimeoutError), writer.transaction() as tx:  # noqa: PT012
            scene.events.write(tx.db, scene.transactional_id, 1)
            tx.send(scene.topic, "1")
            monkeypatch.setattr(time, "clock_gettime", after_suspend)
        with writer.transaction() as tx:
            scene.events.write(tx.db, scene.transactional_id, 2)
            tx.send(scene.topic, "2")
    assert scene.agree() == [2]
