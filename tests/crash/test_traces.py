"""The interleavings that the model of the recipe found, replayed on real brokers and PostgreSQL.

A failpoint's action runs where a process would be paused: the process that overtakes it runs to its end inside the action, or
in another thread that the action releases. Each test names the rule (docs/how-it-works/rules.md) that closes the trace.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import product

import pytest
from confluent_kafka import KafkaError, KafkaException

import dualwrite
from crash import events
from crash.cases import LEFT
from crash.databases import Databases
from crash.retention import delete_records
from crash.scene import InThread, Scene
from dualwrite.deadline import Deadline, Limit
from dualwrite.devcluster import DevCluster
from dualwrite.kafka.base import ProducerFactory
from dualwrite.kafka.client.config import KafkaConfig
from dualwrite.kafka.client.coordinator import WireTransactionCoordinator
from dualwrite.kafka.librdkafka.librdkafka_producer import LibrdkafkaProducer
from dualwrite.state import ProducerKind, TransactionStatus
from dualwrite.testing import failpoints
from fixtures.pace import happened, joined, until
from fixtures.tiers import thinned


@pytest.fixture(params=thinned(["native", "v5", "v4"], quick=["native"]))
def variant(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The model's variants: the native producer; librdkafka on a broker with EndTxn v5, and on one without."""
    monkeypatch.setenv("DUALWRITE_PRODUCER", "native" if request.param == "native" else "librdkafka")
    return str(request.param)


@pytest.fixture
def scene(request: pytest.FixtureRequest, variant: str, databases: Databases, one_lane: None) -> Scene:
    """On one lane: the traces are about one id."""
    cluster: DevCluster = request.getfixturevalue("broker_v4" if variant == "v4" else "broker")
    return databases.scene("postgresql", cluster)


def recovered(scene: Scene) -> dualwrite.IdReport:
    return dualwrite.recover(scene.engine, kafka=scene.bootstrap, ids=[scene.transactional_id]).ids[0]


def killed_at(scene: Scene, number: int, point: str) -> None:
    worker = scene.write(number, 1, f"{point}=kill")
    worker.killed()


STALE = ["recover_after_claim", "recover_after_describe", "recover_after_decision"]


@pytest.mark.parametrize(
    ("variant", "left", "point"),
    thinned(
        product(["native", "v5", "v4"], LEFT, STALE),
        kept=[
            *product(["native"], ["after_db_commit"], STALE),
            ("native", "after_prepare", "recover_after_describe"),
            ("v5", "after_prepare", "recover_after_describe"),
            ("v4", "after_db_commit", "recover_after_describe"),
        ],
        quick=[("native", "after_db_commit", "recover_after_describe")],
    ),
    indirect=["variant"],
)
def test_f1_a_recoverer_with_a_stale_state_does_not_touch_its_successors_transaction(
    scene: Scene, point: str, left: str
) -> None:
    killed_at(scene, 1, left)
    overtaken = [1] if left == "after_db_commit" else []

    def overtake() -> None:
        with scene.connect() as successor:
            scene.event(successor, 2)
        killed_at(scene, 3, "after_db_commit")  # prepared, committed by the database, not yet by Kafka

    with failpoints.armed(point, failpoints.only_at(1, overtake)):
        report = recovered(scene)
    assert report.taken_over_by is not None
    assert recovered(scene).outcomes[0].outcome is dualwrite.Outcome.COMMITTED
    assert scene.agree() == [*overtaken, 2, 3]


def test_f3_a_transaction_that_its_writer_ends_after_recovery_described_it_is_not_called_lost(
    scene: Scene, variant: str
) -> None:
    """The writer's own EndTxn overtakes recovery's. If one is v4 and the next v5, the second answers 48, INVALID_TXN_STATE."""
    described, committed = threading.Event(), threading.Event()
    with scene.connect() as writer:
        one = InThread(lambda: scene.event(writer, 1))

        def wait_for_recovery() -> None:
            happened(described)

        def let_the_writer_commit() -> None:
            described.set()
            joined(one)
            committed.set()

        with (
            failpoints.armed("before_kafka_commit", failpoints.only_at(1, wait_for_recovery)),
            failpoints.armed("recover_after_decision", failpoints.only_at(1, let_the_writer_commit)),
        ):
            one.start()
            until(lambda: writer.phase is dualwrite.Phase.COMMITTING_KAFKA, "the database has committed", pause=0.001)
            report = recovered(scene)
        assert committed.is_set()
        one.result()
        expected = dualwrite.Outcome.ALREADY_COMMITTED
        if variant in ("native", "v4"):
            expected = dualwrite.Outcome.COMMITTED  # the same version answers NONE to the same outcome again
        assert [o.outcome for o in report.outcomes] == [expected]
        assert report.unacknowledged == ()
        with pytest.raises(dualwrite.FencedError):
            scene.event(writer, 2)
    assert scene.agree() == [1]


def test_f2_a_writer_that_was_claimed_begins_no_further_transaction(scene: Scene) -> None:
    """It commits after recovery has described its transaction, and continues: its next one would stay open behind recovery."""
    described, begun, ended, sent, over = (threading.Event() for _ in range(5))
    with scene.connect() as writer:
        both = InThread(lambda: scene.event(writer, 1, 2))

        def let_it_go_as_far_as(point: threading.Event) -> None:
            until(lambda: point.is_set() or not both.is_alive(), "the writer has gone on", pause=0.001)

        def let_it_commit() -> None:
            described.set()
            let_it_go_as_far_as(begun)

        def let_it_send() -> None:
            ended.set()
            let_it_go_as_far_as(sent)

        def wait_until_ended() -> None:
            begun.set()
            happened(ended)

        def stay_open() -> None:
            sent.set()
            happened(over)

        with (
            failpoints.armed("before_kafka_commit", failpoints.only_at(1, lambda: happened(described))),
            failpoints.armed("after_begin", failpoints.only_at(2, wait_until_ended)),
            failpoints.armed("after_send", failpoints.only_at(2, stay_open)),
            failpoints.armed("recover_after_describe", failpoints.only_at(1, let_it_commit)),
            failpoints.armed("recover_after_end_txn", failpoints.only_at(1, let_it_send)),
        ):
            both.start()
            until(lambda: writer.phase is dualwrite.Phase.COMMITTING_KAFKA, "the database has committed", pause=0.001)
            report = recovered(scene)
            status = scene.described().status
            over.set()
            with pytest.raises(dualwrite.FencedError):
                both.result()
    assert report.error is None
    assert status is not TransactionStatus.ONGOING
    assert scene.agree() == [1]


def test_f2_a_next_transaction_that_recovery_meets_is_not_taken_for_the_recorded_one(scene: Scene) -> None:
    """With librdkafka the next transaction has the same producer id and epoch; the start time distinguishes them."""
    with scene.connect() as writer:
        scene.event(writer, 1)
        started, recovered_meanwhile = threading.Event(), threading.Event()

        def pause_in_the_second() -> None:
            started.set()
            happened(recovered_meanwhile)

        two = InThread(lambda: scene.event(writer, 2))
        with failpoints.armed("after_prepare", failpoints.only_at(1, pause_in_the_second)):
            two.start()
            happened(started)
            report = recovered(scene)
            recovered_meanwhile.set()
            with pytest.raises(dualwrite.FencedError):
                two.result()
        assert [o.outcome for o in report.outcomes] == [dualwrite.Outcome.ABORTED]
    assert scene.agree() == [1]


def test_f2_a_transaction_that_begins_between_describe_and_fencing_is_fenced(scene: Scene) -> None:
    """The writer has passed its check of the fencing token; recovery finds the last transaction committed; the writer sends."""
    with scene.connect() as writer:
        scene.event(writer, 1)
        begun, described, sent = threading.Event(), threading.Event(), threading.Event()

        def pause_before_the_first_message() -> None:
            begun.set()
            happened(described)

        def write_and_pause() -> None:
            with writer.transaction() as tx:
                events.write_event(writer.store.description, tx.db, writer.transactional_id, 2)
                pause_before_the_first_message()
                tx.send(scene.topic, "2", key=writer.transactional_id)

        two = InThread(write_and_pause)

        def let_it_send() -> None:
            described.set()
            happened(sent)

        with (
            failpoints.armed("recover_after_describe", failpoints.only_at(1, let_it_send)),
            failpoints.armed("after_prepare", failpoints.only_at(1, sent.set)),
        ):
            two.start()
            happened(begun)
            report = recovered(scene)
        with pytest.raises(dualwrite.FencedError):
            two.result()
        assert report.error is None
    assert recovered(scene).error is None
    assert scene.agree() == [1]


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["v5", "v4"], indirect=True)
def test_o2_a_late_init_producer_id_of_a_zombie_does_not_kill_its_successors_prepared_transaction(scene: Scene) -> None:
    config = KafkaConfig.of(scene.bootstrap)
    coordinator = WireTransactionCoordinator(config)

    class Late(LibrdkafkaProducer):
        """Its InitProducerId is sent when another writer already owns the id."""

        def init_transactions(self, *, timeout: Limit) -> None:
            killed_at(scene, 1, "after_db_commit")
            super().init_transactions(timeout=timeout)

    zombie = dualwrite.DualWriter(
        dualwrite.SqlStateStore(scene.engine),
        transactional_id=scene.transactional_id,
        producers=ProducerFactory(ProducerKind.LIBRDKAFKA, lambda kafka_id: Late(config, kafka_id, coordinator)),
        coordinator=coordinator,
    )
    with pytest.raises(dualwrite.FencedError):
        zombie.open()
    zombie.close()
    coordinator.close()
    outcomes = [o.outcome for o in recovered(scene).outcomes]
    assert dualwrite.Outcome.COMMITTED in outcomes
    assert dualwrite.Outcome.ABORTED not in outcomes
    assert scene.agree() == [1]


@pytest.mark.parametrize("variant", thinned(["v5", "v4"], quick=["v5"]), indirect=True)
def test_f9_after_a_commit_that_was_sent_again_the_next_transaction_has_another_id_at_kafka(scene: Scene) -> None:
    """A delayed first request would fit the next transaction of the same session, which has the same epoch."""
    config = KafkaConfig.of(scene.bootstrap)
    coordinator = WireTransactionCoordinator(config)
    sent: list[str] = []

    class Unanswered(LibrdkafkaProducer):
        """Its first EndTxn is not answered in time."""

        def _until_done(self, call: Callable[[float], None], what: str, deadline: Deadline, *, ends: bool = False) -> None:
            def unanswered_once(left: float) -> None:
                if what == "commit_transaction":
                    sent.append(self.kafka_transactional_id)
                    if len(sent) == 1:
                        raise KafkaException(KafkaError(KafkaError._TIMED_OUT, retriable=True))
                call(left)

            super()._until_done(unanswered_once, what, deadline, ends=ends)

    with dualwrite.DualWriter(
        dualwrite.SqlStateStore(scene.engine),
        transactional_id=scene.transactional_id,
        producers=ProducerFactory(ProducerKind.LIBRDKAFKA, lambda kafka_id: Unanswered(config, kafka_id, coordinator)),
        coordinator=coordinator,
    ) as writer:
        for number in (1, 2, 3):
            scene.event(writer, number)
    coordinator.close()
    assert sent[0] == sent[1] != sent[2] == sent[3]
    assert scene.agree() == [1, 2, 3]


def test_f7_two_recoverers_after_one_another_do_not_destroy_each_others_evidence(scene: Scene) -> None:
    """The first has committed Kafka but not yet resolved the row; the second must still see that it was committed."""
    killed_at(scene, 1, "after_db_commit")
    inner: list[dualwrite.IdReport] = []
    with failpoints.armed("recover_after_end_txn", failpoints.only_at(1, lambda: inner.append(recovered(scene)))):
        outer = recovered(scene)
    assert [o.outcome for o in inner[0].outcomes] == [dualwrite.Outcome.ALREADY_COMMITTED]
    assert inner[0].unacknowledged == ()
    assert outer.taken_over_by is not None
    assert scene.agree() == [1]


@pytest.mark.slow
def test_sa_a_state_is_cleared_before_a_later_transaction_is_aborted(scene: Scene) -> None:
    """The writer aborts the later one itself, just before recovery does, and retention has deleted the messages of both."""
    with scene.connect() as writer:
        scene.event(writer, 1)
        assert scene.agree() == [1]
        prepared, decided = threading.Event(), threading.Event()
        two = InThread(lambda: scene.event(writer, 2))

        def wait_for_recovery() -> None:
            prepared.set()
            happened(decided)

        def let_the_writer_abort() -> None:
            decided.set()
            joined(two)
            until(lambda: scene.described().status is TransactionStatus.COMPLETE_ABORT, "the markers of the abort")
            delete_records(scene, scene.topic)

        with (
            failpoints.armed("after_prepare", failpoints.only_at(1, wait_for_recovery)),
            failpoints.armed("recover_after_decision", failpoints.only_at(1, let_the_writer_abort)),
        ):
            two.start()
            happened(prepared)
            report = recovered(scene)
        with pytest.raises(dualwrite.FencedError):
            two.result()
    assert report.error is None
    assert report.unacknowledged == ()
    assert dualwrite.Outcome.UNVERIFIED not in [found.outcome for found in report.outcomes]
    assert scene.rows() == [1]
