"""Lanes: a fence, a transaction in doubt or a loss on one lane, and closing with one of these."""

from __future__ import annotations

import pytest

import dualwrite
from dualwrite import (
    BrokerUnavailableError,
    DeliveryError,
    DualWriter,
    FencedError,
    InDoubtTransactionError,
    LostTransactionError,
    Outcome,
    Phase,
    StoreUnavailableError,
    UnverifiedTransactionError,
    WriterClosedError,
)
from dualwrite.kafka import NativeProducer
from dualwrite.recipe.idle import RECOVER_LIMIT
from dualwrite.recipe.ownership import Ownership
from dualwrite.stores.sql import SqlStateStore
from dualwrite.testing import failpoints
from dualwrite.transactional_id import TransactionalId
from fixtures.pace import LIMIT
from fixtures.tiers import thinned
from writer.cases import (
    POSTGRESQL,
    SQLITE,
    both_databases,
    mostly_native,
    native_on_postgresql,
    producers_and_databases,
    three_lanes,
)
from writer.lane_scene import leave_in_doubt, outcomes, unavailable
from writer.scene import Scene

pytestmark = [three_lanes, pytest.mark.usefixtures("no_recovery_when_idle")]


# --- errors on one lane -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("lane", "database"), thinned([(0, SQLITE), (1, POSTGRESQL), (2, SQLITE)], quick=[(1, POSTGRESQL)]))
def test_a_writer_fenced_on_one_lane_is_fenced_on_all(scene: Scene, lane: int) -> None:
    with scene.connect() as writer:
        SqlStateStore(scene.engine).claim(TransactionalId(scene.transactional_id, lane).row, "somebody", timeout=LIMIT)
        for number in range(lane):
            scene.write(writer, number)
        with pytest.raises(FencedError, match="somebody") as caught:
            scene.write(writer, 99)
        assert caught.value.transactional_id == scene.transactional_id
        assert caught.value.facts.get("lane") == (TransactionalId(scene.transactional_id, lane).row if lane else None)
        assert (repr(TransactionalId(scene.transactional_id, lane).row) in caught.value.what) == (lane > 0)
        assert writer.phase is Phase.FENCED
        for _ in range(4):
            with pytest.raises(FencedError, match="reopen"):
                scene.write(writer, 99)
        writer.reopen()
        assert writer.phase is Phase.READY
        scene.write(writer, 10, 11, 12, 13)
    assert scene.agree() == [*range(lane), 10, 11, 12, 13]
    scene.assert_resolved()


@native_on_postgresql
def test_recovery_of_an_id_fences_its_writer(scene: Scene) -> None:
    with scene.connect() as writer:
        scene.write(writer, 1, 2, 3)
        assert outcomes(scene.recover()) == {
            TransactionalId(scene.transactional_id, lane).row: [Outcome.ALREADY_COMMITTED] for lane in range(3)
        }
        for row, lane in zip(scene.state_rows(), writer._lanes, strict=True):
            assert row.fence > lane.ownership.claim.fence
        with pytest.raises(FencedError):
            scene.write(writer, 4)
    assert scene.agree() == [1, 2, 3]
    scene.assert_resolved()


def test_recovery_of_one_lane_by_its_id_does_not_touch_the_others(scene: Scene) -> None:
    with scene.connect() as writer:
        scene.write(writer, 1, 2, 3)
        name = TransactionalId(scene.transactional_id, 1).row
        report = dualwrite.recover(scene.engine, kafka=scene.servers, ids=[name], timeouts=scene.timeouts)
        assert outcomes(report) == {name: [Outcome.ALREADY_COMMITTED]}
        scene.write(writer, 4)
        with pytest.raises(FencedError) as caught:
            scene.write(writer, 5)
        assert (caught.value.transactional_id, caught.value.lane) == (scene.transactional_id, name)
    assert scene.agree() == [1, 2, 3, 4]


def test_no_id_is_recovered_twice(scene: Scene) -> None:
    scene.connect().close()
    names = [TransactionalId(scene.transactional_id, lane).row for lane in range(3)]
    kafka = {"bootstrap.servers": scene.servers}
    with dualwrite.open_recoverer(scene.engine, kafka=kafka) as recoverer:
        seen: list[str] = []
        report = recoverer.recover(
            [names[2], scene.transactional_id, *names], progress=lambda one: seen.append(one.transactional_id)
        )
        assert [one.transactional_id for one in report.ids] == seen == [names[2], names[0], names[1]]
        assert [one.transactional_id for one in recoverer.recover(prefix=scene.transactional_id).ids] == names
        assert recoverer.pending(prefix=scene.transactional_id) == ()


@native_on_postgresql
def test_a_transaction_in_doubt_is_resolved_before_the_next_begins_on_another_lane(scene: Scene) -> None:
    with scene.connect() as writer:
        scene.write(writer, 1)
        error = leave_in_doubt(scene, writer, 2)
        lane = TransactionalId(scene.transactional_id, 1).row
        assert (error.transactional_id, error.lane) == (scene.transactional_id, lane)
        assert (error.database_committed, lane in str(error)) == (True, True)
        assert writer.phase is Phase.IN_DOUBT
        assert scene.state_row(1).prepared_state is not None
        with writer.transaction() as tx:
            assert scene.state_row(1).prepared_state is None
            assert scene.messages() == [1, 2]
            scene.both(tx, 3)
        assert [row.transaction_number > 0 for row in scene.state_rows()] == [True, True, True]
        scene.write(writer, 4, 5, 6)
    assert scene.agree() == [1, 2, 3, 4, 5, 6]
    scene.assert_resolved()


@native_on_postgresql
def test_while_a_transaction_is_in_doubt_none_begins(scene: Scene) -> None:
    with scene.connect() as writer:
        scene.write(writer, 1)
        leave_in_doubt(scene, writer, 2)
        for _ in range(3):
            with (
                failpoints.armed("recover_after_describe", failpoints.raises(unavailable())),
                pytest.raises(BrokerUnavailableError),
                writer.transaction(),
            ):
                pytest.fail("the block was run")
            assert writer.phase is Phase.IN_DOUBT
        assert scene.recover().ok
        assert scene.agree() == [1, 2]
        with pytest.raises(FencedError) as caught:
            scene.write(writer, 3)
        assert caught.value.transactional_id == scene.transactional_id
        assert writer.phase is Phase.FENCED
        writer.reopen()
        scene.write(writer, 3, 4)
    assert scene.agree() == [1, 2, 3, 4]
    scene.assert_resolved()


@mostly_native
def test_an_exception_past_the_commit_point_names_the_lane(scene: Scene) -> None:
    with scene.connect() as writer:
        for lane in range(3):
            error = RuntimeError("mine")
            with failpoints.armed("after_db_commit", failpoints.raises(error)), pytest.raises(RuntimeError):
                scene.write(writer, lane)
            (note,) = error.__notes__
            assert "committed on both sides" in note
            assert repr(scene.transactional_id) in note
            assert ("lane" in note) == (lane > 0)
    assert scene.agree() == [0, 1, 2]


# --- closing ------------------------------------------------------------------------------------------------------------


@both_databases
def test_closing_continues_with_the_other_lanes_if_one_cannot_be_resolved(scene: Scene) -> None:
    writer = scene.connect()
    scene.write(writer, 1)
    leave_in_doubt(scene, writer, 2)
    with (
        failpoints.armed("recover_after_describe", failpoints.raises(unavailable())),
        pytest.raises(InDoubtTransactionError) as caught,
    ):
        writer.close()
    assert (caught.value.transactional_id, caught.value.lane) == (
        scene.transactional_id,
        TransactionalId(scene.transactional_id, 1).row,
    )
    assert writer.phase is Phase.CLOSED
    assert [list(row.unresolved_generations) for row in scene.state_rows()] == [[], [1], []]
    with pytest.raises(WriterClosedError):
        scene.write(writer, 3)
    writer.close()
    assert [found.outcome for found in scene.recover()] == [Outcome.COMMITTED]
    assert scene.agree() == [1, 2]
    scene.assert_resolved()
    writer = scene.connect()
    leave_in_doubt(scene, writer, 3)
    writer.close()  # without an error it resolves that lane
    assert scene.agree() == [1, 2, 3]
    scene.assert_resolved()


def test_closing_reports_every_lane_that_could_not_be_resolved(scene: Scene) -> None:
    writer = scene.connect()
    scene.write(writer, 1, 2, 3)
    with failpoints.armed("before_take_over", failpoints.raises(KeyboardInterrupt())), pytest.raises(KeyboardInterrupt):
        writer.reopen()
    assert writer.phase is Phase.NEEDS_RECOVERY
    refused = StoreUnavailableError("The database is away.")
    with (
        failpoints.armed("recover_after_claim", failpoints.raises(refused)),
        pytest.raises(InDoubtTransactionError) as caught,
    ):
        writer.close()
    assert len(caught.value.__notes__) == 2
    assert [TransactionalId(scene.transactional_id, 1).row in caught.value.__notes__[0]] == [True]
    assert [TransactionalId(scene.transactional_id, 2).row in caught.value.__notes__[1]] == [True]
    assert writer.phase is Phase.CLOSED
    assert scene.recover().ok
    scene.assert_resolved()


@pytest.mark.parametrize("passage", thinned([1, 2], kept=[2], quick=[2]))
def test_an_interrupt_while_lanes_are_resolved_for_closing_releases_all(scene: Scene, passage: int) -> None:
    writer = scene.connect()
    scene.write(writer, 1, 2, 3)
    with failpoints.armed("before_take_over", failpoints.raises(KeyboardInterrupt())), pytest.raises(KeyboardInterrupt):
        writer.reopen()
    interrupt = failpoints.only_at(passage, failpoints.raises(KeyboardInterrupt()))
    with failpoints.armed("recover_after_claim", interrupt), pytest.raises(KeyboardInterrupt):
        writer.close()
    assert writer.phase is Phase.CLOSED
    assert all(lane.ownership.producer_must_be_replaced for lane in writer._lanes)
    assert scene.checked_out() == 0
    with scene.connect() as writer:
        scene.write(writer, 4)
    assert scene.agree() == [1, 2, 3, 4]
    scene.assert_resolved()


@pytest.mark.parametrize(
    ("opens", "point", "passage"),
    thinned(
        [
            ("open", "recover_after_claim", 2),
            ("reopen", "recover_after_claim", 1),
            ("reopen", "recover_after_decision", 2),
            ("reopen", "before_take_over", 3),
        ],
        quick=[("open", "recover_after_claim", 2), ("reopen", "before_take_over", 3)],
    ),
)
def test_an_interrupt_while_lanes_are_claimed(scene: Scene, opens: str, point: str, passage: int) -> None:
    interrupt = failpoints.only_at(passage, failpoints.raises(KeyboardInterrupt()))
    if opens == "open":
        with failpoints.armed(point, interrupt), pytest.raises(KeyboardInterrupt):
            scene.connect()
        writer = scene.connect()
    else:
        writer = scene.connect()
        scene.write(writer, 1, 2, 3, 4)
        with failpoints.armed(point, interrupt), pytest.raises(KeyboardInterrupt):
            writer.reopen()
        assert writer.phase is Phase.NEEDS_RECOVERY
    with writer:
        assert scene.checked_out() == 0
        scene.write(writer, 5, 6, 7, 8)
    assert scene.agree() == ([5, 6, 7, 8] if opens == "open" else [1, 2, 3, 4, 5, 6, 7, 8])
    scene.assert_resolved()


# --- lost ---------------------------------------------------------------------------------------------------------------


@producers_and_databases
@pytest.mark.usefixtures("losses_stay")
def test_a_lost_transaction_of_a_lane_is_reported_until_acknowledged(scene: Scene) -> None:
    name = TransactionalId(scene.transactional_id, 2).row
    with scene.connect() as writer:
        scene.write(writer, 1, 2)
        error = scene.lose(writer, 3, lane=2)
        assert (error.transactional_id, error.lane) == (scene.transactional_id, name)
        assert f"--id {name} --republish" in str(error)
        scene.write(writer, 4, 5, 6)
    for lanes in (3, 1):  # even if the writer does not use that lane
        with pytest.raises(LostTransactionError) as caught:
            scene.connect(lanes=lanes)
        assert (caught.value.transactional_id, caught.value.lane) == (scene.transactional_id, name)
        assert caught.value.state == error.state
        with scene.connect(lanes=lanes, on_lost="report") as writer:
            assert [found for found, _ in writer.recovery_report.unacknowledged] == [name]
    with writer_after_acknowledging(scene, name) as writer:
        assert writer.recovery_report.ok
    assert (scene.rows(), scene.messages()) == ([1, 2, 3, 4, 5, 6], [1, 2, 4, 5, 6])


def writer_after_acknowledging(scene: Scene, name: str) -> DualWriter:
    with dualwrite.open_recoverer(scene.engine, kafka={"bootstrap.servers": scene.servers}) as recoverer:
        assert list(recoverer.acknowledge([scene.transactional_id])) == [name]
        assert recoverer.acknowledge([scene.transactional_id]) == {}
    return scene.connect()


@mostly_native
@pytest.mark.usefixtures("losses_stay")
def test_a_writer_that_reopens_with_an_unacknowledged_loss_can_use_its_other_lanes(scene: Scene) -> None:
    """As with one lane: reopen() raises, nothing stays in doubt, and the writer may be used all the same."""
    with scene.connect() as writer:
        scene.write(writer, 1, 2)
        scene.lose(writer, 3, lane=2)
        with pytest.raises((LostTransactionError, UnverifiedTransactionError)):
            writer.reopen()
        assert writer.phase is Phase.NEEDS_RECOVERY
        scene.write(writer, 4, 5, 6)
    assert (scene.rows(), scene.messages()) == ([1, 2, 3, 4, 5, 6], [1, 2, 4, 5, 6])
    scene.assert_resolved()


# --- Kafka does not answer ------------------------------------------------------------------------------------------------


def test_after_a_delivery_without_an_answer_the_abort_takes_seconds_only(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller waits for it, and the thread for idle writers does it as well; the locks are released before."""
    limits: list[float] = []

    def no_answer(producer: NativeProducer, *, timeout: float) -> None:
        limits.append(timeout)
        raise unavailable()

    with scene.connect(timeouts=dualwrite.Timeouts(kafka=600)) as writer:
        with monkeypatch.context() as patched:
            patched.setattr(NativeProducer, "abort_transaction", no_answer)
            patched.setattr(Ownership, "make_claim", lambda _: pytest.fail("it would wait for Kafka as well"))
            no_delivery = failpoints.raises(DeliveryError("Messages were not acknowledged."))
            with failpoints.armed("after_prepare", no_delivery), pytest.raises(DeliveryError):
                scene.write(writer, 1)
        assert limits == [RECOVER_LIMIT]
        scene.write(writer, 2)
    assert scene.agree() == [2]
