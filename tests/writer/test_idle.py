"""An idle writer clears the state of its last transaction from the row, or resolves it, without disturbing those who use it."""

from __future__ import annotations

import logging
import threading
from concurrent.futures import ThreadPoolExecutor, wait

import pytest

import dualwrite.writer
from dualwrite import DualWriter, FencedError, Phase, StoreUnavailableError
from dualwrite.recipe import idle
from dualwrite.testing import failpoints
from fixtures.pace import LIMIT, done, happened, until, until_recorded
from writer.cases import native_on_postgresql, producers_and_databases
from writer.lane_scene import leave_in_doubt, unavailable
from writer.scene import Scene

THREAD = "dualwrite idle writers"


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lane is idle after a moment, instead of a minute or a second."""
    monkeypatch.setattr(idle, "CLEAR_AFTER", 0.05)
    monkeypatch.setattr(idle, "RECOVER_AFTER", 0.05)


def clear_now(writer: DualWriter, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the thread does once the writer is idle, at once and in this thread."""
    with monkeypatch.context() as patched:
        patched.setattr(idle, "CLEAR_AFTER", 0.0)
        writer._clear_if_idle()


def is_cleared(scene: Scene) -> bool:
    return all(row.prepared_state is None and row.delivery is None for row in scene.state_rows())


@pytest.mark.parametrize("lanes", [2])
@producers_and_databases
def test_the_states_of_an_idle_writer_are_cleared_and_it_continues(scene: Scene, soon: None) -> None:
    with scene.connect() as writer:
        for first in (1, 4):
            scene.write(writer, first, first + 1, first + 2)
            until(lambda: is_cleared(scene), "the states are cleared", pause=0.01)
            assert writer.phase is Phase.READY
        assert any(thread.name == THREAD and thread.daemon for thread in threading.enumerate())
    assert not [thread for thread in threading.enumerate() if thread.name == THREAD]
    assert scene.agree() == [1, 2, 3, 4, 5, 6]
    scene.assert_resolved()


def test_nothing_is_cleared_while_a_transaction_is_open(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    with scene.connect() as writer, ThreadPoolExecutor(1) as another:
        scene.write(writer, 1)
        before = scene.state_row()
        assert before.prepared_state is not None
        with writer.transaction() as tx:
            scene.both(tx, 2)
            done(another.submit(clear_now, writer, monkeypatch))
            assert scene.state_row() == before
        during = scene.state_row()
        assert during.prepared_state not in (None, before.prepared_state)
        clear_now(writer, monkeypatch)
        assert is_cleared(scene)
    assert scene.agree() == [1, 2]


def test_clearing_in_many_short_pauses_disturbs_no_transaction(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread comes all the time, while two threads take turns with the writer."""
    monkeypatch.setattr(idle, "CLEAR_AFTER", 0.001)
    turn = threading.Lock()
    with scene.connect() as writer:

        def work(first: int) -> None:
            for number in range(first, first + 20):
                with turn:
                    scene.write(writer, number)

        with ThreadPoolExecutor(2) as users:
            for working in [users.submit(work, first) for first in (0, 100)]:
                working.result()
    assert scene.agree() == [*range(20), *range(100, 120)]
    scene.assert_resolved()


@pytest.mark.parametrize(
    "error", [StoreUnavailableError("It is away."), RuntimeError("A bug in a store.")], ids=["away", "bug"]
)
def test_clearing_is_retried_after_an_error_of_the_database(
    scene: Scene, soon: None, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    with scene.connect() as writer:
        with monkeypatch.context() as away:
            failed = threading.Event()

            def fail(*_: object) -> None:
                failed.set()
                raise error

            away.setattr(writer.store, "record_resolution", fail)
            scene.write(writer, 1)
            happened(failed)
            scene.write(writer, 2)
        until(lambda: is_cleared(scene), "the states are cleared", pause=0.01)
    assert scene.agree() == [1, 2]


def test_a_fenced_writer_clears_nothing(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    with scene.connect() as writer:
        scene.write(writer, 1)
        with scene.connect() as successor:
            scene.write(successor, 2)
            row = scene.state_row()
            clear_now(writer, monkeypatch)
            assert scene.state_row() == row
            with pytest.raises(FencedError):
                scene.write(writer, 3)
            clear_now(writer, monkeypatch)  # not in this phase
            assert writer.phase is Phase.FENCED
    assert scene.agree() == [1, 2]


def test_idle_states_of_a_pool_are_cleared(scene: Scene, soon: None) -> None:
    kafka = {"bootstrap.servers": scene.servers}
    with dualwrite.create_pool(scene.engine, prefix=scene.transactional_id, size=2, kafka=kafka) as pool:
        for number in (1, 2, 3):
            pool.run(scene.both, number)

            def are_cleared() -> bool:
                rows = map(pool.store.read, pool.store.list(f"{scene.transactional_id}."))
                return all(row is not None and row.prepared_state is None for row in rows)

            until(are_cleared, "the states of the pool's writers are cleared", pause=0.01)
    assert scene.agree() == [1, 2, 3]


# --- recovering -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lanes", [2])
@native_on_postgresql
def test_a_transaction_in_doubt_is_resolved_although_no_other_begins(scene: Scene, soon: None) -> None:
    with scene.connect() as writer:
        scene.write(writer, 1)
        leave_in_doubt(scene, writer, 2)
        until_recorded(scene.messages, [1, 2], "consumers get the messages")
        until(lambda: writer.phase is Phase.READY, "the writer is ready", pause=0.01)
        with failpoints.armed("before_take_over", failpoints.raises(KeyboardInterrupt())), pytest.raises(KeyboardInterrupt):
            writer.reopen()
        until(lambda: writer.phase is Phase.READY, "it has opened all lanes again", pause=0.01)
        scene.write(writer, 3, 4)
    assert scene.agree() == [1, 2, 3, 4]
    scene.assert_resolved()


def test_what_a_failed_abort_has_left_open_is_aborted_although_no_other_transaction_begins(scene: Scene, soon: None) -> None:
    def fail() -> None:
        for lane in writer._lanes:
            lane.ownership.producer.close()
        raise ZeroDivisionError

    with scene.connect() as writer:
        with failpoints.armed("recover_after_claim", failpoints.raises(StoreUnavailableError("It is away."))):
            with failpoints.armed("after_prepare", fail), pytest.raises(ZeroDivisionError):
                scene.write(writer, 1)
            assert scene.unfinished()
        until(lambda: not scene.unfinished(), "nothing is open at Kafka", pause=0.01)
        scene.write(writer, 2)
    assert scene.agree() == [2]


def test_recovery_is_tried_again_until_kafka_answers(scene: Scene, soon: None) -> None:
    tried = 0

    def away() -> None:
        nonlocal tried
        tried += 1
        raise unavailable()

    with scene.connect() as writer:
        with failpoints.armed("recover_after_describe", away):
            leave_in_doubt(scene, writer, 1)
            until(lambda: tried >= 3, "it has been tried three times", pause=0.01)
            assert writer.phase is Phase.IN_DOUBT
        until_recorded(scene.messages, [1])
    assert scene.agree() == [1]


@pytest.mark.usefixtures("no_recovery_when_idle")
def test_a_transaction_that_begins_waits_while_the_writer_is_recovered(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    entered, go_on = threading.Event(), threading.Event()

    def slow() -> None:
        entered.set()
        assert go_on.wait(LIMIT)

    with scene.connect() as writer, ThreadPoolExecutor(1) as another, ThreadPoolExecutor(1) as user:
        leave_in_doubt(scene, writer, 1)
        with failpoints.armed("recover_after_claim", failpoints.only_at(1, slow)):
            recovering = another.submit(clear_now, writer, monkeypatch)
            happened(entered)
            using = user.submit(scene.write, writer, 2)
            assert not wait([using], 0.2).done
            go_on.set()
            done(recovering)
            done(using)
    assert scene.agree() == [1, 2]


@pytest.mark.usefixtures("no_recovery_when_idle")
def test_an_id_that_another_process_has_claimed_is_not_claimed_again(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    with scene.connect() as writer:
        leave_in_doubt(scene, writer, 1)
        assert scene.recover().ok
        row = scene.state_row()
        clear_now(writer, monkeypatch)
        clear_now(writer, monkeypatch)
        assert scene.state_row() == row
        assert writer.phase is Phase.FENCED
    assert scene.agree() == [1]


@pytest.mark.usefixtures("losses_stay")
def test_a_loss_that_nobody_waits_for_is_logged(scene: Scene, soon: None, caplog: pytest.LogCaptureFixture) -> None:
    with scene.connect() as writer:
        with failpoints.armed("recover_after_claim", failpoints.raises(StoreUnavailableError("It is away."))):
            with pytest.raises(dualwrite.InDoubtTransactionError):
                scene.lose(writer, 1)
            caplog.clear()
        with caplog.at_level(logging.ERROR):
            until(lambda: "its messages are lost" in caplog.text, "the loss is logged", pause=0.01)
    assert scene.rows() == [1]
    assert scene.messages() == []
