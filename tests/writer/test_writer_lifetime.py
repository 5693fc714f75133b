"""The lifetime of a writer: open, closed, fenced, reopened; one thread, one process; what a previous owner left."""

# ruff: noqa: PT012  (a block of several statements is what is tested: the last one, or its end, must raise)

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

import dualwrite
from dualwrite import (
    ConcurrentUseError,
    DualWriter,
    FencedError,
    LostTransactionError,
    Outcome,
    Phase,
    UsageError,
    WriterClosedError,
)
from dualwrite.kafka.base import ProducerFactory, TransactionalProducer
from dualwrite.kafka.client.config import KafkaConfig
from dualwrite.kafka.client.coordinator import WireTransactionCoordinator
from dualwrite.state import ProducerKind
from dualwrite.stores.base import LostKind
from dualwrite.stores.sql import SqlStateStore
from fixtures.tiers import thinned
from writer.cases import both_producers, native_on_postgresql, producers_and_databases
from writer.lane_scene import crash
from writer.scene import Scene

forks = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork.*:DeprecationWarning")


# --- closing ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@native_on_postgresql
def test_closing_clears_the_stored_state_and_leaves_nothing_prepared(scene: Scene) -> None:
    writer = scene.connect()
    scene.write(writer, 1)
    assert scene.state_row().prepared_state is not None
    assert list(scene.state_row().unresolved_generations) != []
    writer.close()
    assert writer.phase is Phase.CLOSED
    scene.assert_resolved()
    assert scene.agree() == [1]
    writer.close()
    assert writer.phase is Phase.CLOSED
    assert scene.recover().ids[0].outcomes == ()


def test_a_closed_writer_refuses_calls(scene: Scene) -> None:
    writer = scene.connect()
    writer.close()
    with pytest.raises(WriterClosedError, match="is closed") as caught, writer.transaction():
        pytest.fail("the block was run")
    assert caught.value.transactional_id == scene.transactional_id
    with pytest.raises(WriterClosedError, match="is closed"):
        writer.reopen()
    with pytest.raises(UsageError, match="is closed"):
        writer.open()


def test_an_unopened_writer_refuses_calls(scene: Scene) -> None:
    store = SqlStateStore(scene.engine)
    coordinator = WireTransactionCoordinator(KafkaConfig.of(scene.servers))

    def no_producer(_: str) -> TransactionalProducer:
        pytest.fail("a producer was made")

    writer = DualWriter(
        store,
        transactional_id=scene.transactional_id,
        producers=ProducerFactory(ProducerKind.NATIVE, no_producer),
        coordinator=coordinator,
        owns_store=True,
        owns_coordinator=True,
    )
    assert writer.phase is Phase.OPENING
    with pytest.raises(WriterClosedError, match="not open yet"), writer.transaction():
        pytest.fail("the block was run")
    writer.close()
    assert writer.phase is Phase.CLOSED
    assert store.read(scene.transactional_id) is None


def test_an_error_that_ends_the_with_block_is_not_replaced_by_closing(scene: Scene) -> None:
    error = ValueError("mine")
    with pytest.raises(ValueError, match="mine") as caught, scene.connect() as writer:
        scene.write(writer, 1)
        raise error
    assert caught.value is error
    assert writer.phase is Phase.CLOSED
    assert scene.agree() == [1]
    scene.assert_resolved()


# --- threads and processes ----------------------------------------------------------------------------------------------


@both_producers
def test_a_second_thread_is_refused_and_the_first_continues(scene: Scene) -> None:

    def use(writer: DualWriter) -> None:
        with writer.transaction():
            pytest.fail("the block was run")

    with scene.connect() as writer, ThreadPoolExecutor(1) as other:
        with writer.transaction() as tx:
            scene.both(tx, 1)
            for call in (lambda: use(writer), writer.reopen, writer.close):
                error = other.submit(call).exception()
                assert isinstance(error, ConcurrentUseError)
                assert "one writer" in str(error)
                assert error.transactional_id == scene.transactional_id
            for call in (lambda: tx.db, lambda: tx.session, lambda: scene.send(tx, 9)):
                error = other.submit(call).exception()
                assert isinstance(error, ConcurrentUseError)
                assert "another thread" in str(error)
            scene.both(tx, 2)
        other.submit(scene.write, writer, 3).result()  # one after another is allowed
        scene.write(writer, 4)
    assert scene.agree() == [1, 2, 3, 4]


def test_many_threads_succeed_or_get_a_clear_error(scene: Scene) -> None:
    done: list[int] = []
    refused: list[int] = []
    start = threading.Barrier(4)

    def work(first: int) -> None:
        start.wait()
        for number in range(first, first + 25):
            try:
                scene.write(writer, number)
                done.append(number)
            except ConcurrentUseError:
                refused.append(number)

    with scene.connect() as writer:
        with ThreadPoolExecutor(4) as pool:
            for future in [pool.submit(work, first) for first in (0, 100, 200, 300)]:
                future.result()
        assert len(done) + len(refused) == 100
        assert done
        assert scene.agree() == sorted(done)
        scene.write(writer, 999)
    scene.assert_resolved()


@forks
@producers_and_databases
def test_a_forked_child_is_refused_and_the_parent_continues(scene: Scene) -> None:
    with scene.connect() as writer:
        scene.write(writer, 1)
        with writer.transaction() as tx:
            scene.both(tx, 2)
            child = os.fork()
            if child == 0:
                os._exit(_refusals(scene, writer, tx))
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
            scene.both(tx, 3)
        child = os.fork()
        if child == 0:
            os._exit(_refusals(scene, writer, None))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        scene.write(writer, 4)
    assert scene.agree() == [1, 2, 3, 4]


def _refusals(scene: Scene, writer: DualWriter, tx: dualwrite.Transaction | None) -> int:
    """The number of calls that did not raise in this child process."""

    def begin() -> None:
        with writer.transaction():
            pass

    calls: list[Callable[[], object]] = [begin, writer.close, writer.reopen]
    if tx is not None:
        calls += [lambda: tx.db, lambda: tx.session, lambda: scene.send(tx, 9)]
    wrong = 0
    for call in calls:
        try:
            call()
            wrong += 1
        except UsageError as error:
            wrong += "fork" not in str(error)
        except BaseException:  # noqa: BLE001  (the child must not leave this function)
            wrong += 1
    return wrong


@forks
@pytest.mark.parametrize("fails", thinned([False, True], quick=[True]))
@native_on_postgresql
def test_a_forked_child_that_leaves_the_block_changes_neither_side(scene: Scene, fails: bool) -> None:
    """It shares the parent's connections: a rollback in the child would roll back the parent's transaction."""
    with scene.connect() as writer:
        in_parent = True
        try:
            with writer.transaction() as tx:
                scene.both(tx, 1)
                child = os.fork()
                in_parent = child != 0
                if in_parent:
                    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
                elif fails:
                    raise ValueError("in the child")  # noqa: TRY301  (the block's own exception is what is tested)
        except UsageError as error:
            if not in_parent:
                os._exit(7 if "fork" in str(error) and not fails else 8)
            raise
        except BaseException as error:
            if not in_parent:
                os._exit(7 if fails and isinstance(error, ValueError) else 9)
            raise
        finally:
            if not in_parent:
                os._exit(10)
        scene.write(writer, 2)
    assert scene.agree() == [1, 2]


# --- ownership of the id ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by", thinned(["recover", "connect"], quick=["connect"]))
@producers_and_databases
def test_a_writer_whose_id_was_claimed_is_fenced_until_it_reopens(scene: Scene, by: str) -> None:
    with scene.connect() as writer:
        scene.write(writer, 1)
        if by == "recover":
            assert [o.outcome for o in scene.recover()] == [Outcome.ALREADY_COMMITTED]
        else:
            with scene.connect() as second:
                assert [o.outcome for o in second.recovery_report] == [Outcome.ALREADY_COMMITTED]
                scene.write(second, 2)
        with pytest.raises(FencedError, match="replaced by claim") as caught, writer.transaction() as tx:
            scene.both(tx, 4)  # on PostgreSQL the block begins, but its first statement fails
            pytest.fail("the block was run")
        for text in (scene.transactional_id, "another process", "one writer for each transactional id"):
            assert text in str(caught.value)
        assert caught.value.current_fence > caught.value.fence
        assert f":{os.getpid()} " in caught.value.current_owner
        assert writer.phase is Phase.FENCED
        with pytest.raises(FencedError, match="claimed the id") as caught, writer.transaction():
            pytest.fail("the block was run")
        assert "reopen()" in str(caught.value)
        writer.reopen()
        assert writer.phase is Phase.READY
        scene.write(writer, 3)
    assert scene.agree() == ([1, 3] if by == "recover" else [1, 2, 3])
    scene.assert_resolved()


@both_producers
def test_a_writer_fenced_in_its_block_changes_nothing(scene: Scene) -> None:
    """On SQLite the block holds the only write lock, so no one can claim the id in the meantime."""
    with scene.connect() as writer:
        scene.write(writer, 1)
        with pytest.raises(FencedError), writer.transaction() as tx:
            scene.both(tx, 2)
            scene.wait_until_unfinished()
            with scene.connect() as second:
                assert [o.outcome for o in second.recovery_report] == [Outcome.ABORTED]
                scene.write(second, 3)
            scene.insert(tx, 4)
        assert scene.agree() == [1, 3]
        assert writer.phase is Phase.FENCED
        writer.reopen()
        writer.reopen()  # one that is open
        assert {o.outcome for o in writer.recovery_report} == {Outcome.NOTHING}
        with pytest.raises(UsageError, match=r"open\(\) was called"):
            writer.open()
        with pytest.raises(ValueError, match="mine"), writer.transaction() as tx:
            scene.both(tx, 5)
            with scene.connect() as second:
                scene.write(second, 6)
            raise ValueError("mine")
        with pytest.raises(FencedError), writer.transaction():
            pytest.fail("the block was run")
    assert scene.agree() == [1, 3, 6]
    scene.assert_resolved()


@producers_and_databases
def test_two_writers_that_reopen_fence_each_other(scene: Scene) -> None:
    with scene.connect() as one, scene.connect() as two:
        for number in range(0, 6, 2):
            one.reopen()
            scene.write(one, number)
            with pytest.raises(FencedError):
                scene.write(two, 99)
            two.reopen()
            scene.write(two, number + 1)
            with pytest.raises(FencedError):
                scene.write(one, 99)
        one.close()  # it is fenced, so this changes nothing
        scene.write(two, 6)
    assert scene.agree() == [0, 1, 2, 3, 4, 5, 6]


# --- what a previous owner left -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("point", "outcome", "left"),
    [("after_record", Outcome.ABORTED, []), ("before_kafka_commit", Outcome.COMMITTED, [1])],
)
@producers_and_databases
def test_opening_reports_what_it_resolved(scene: Scene, point: str, outcome: Outcome, left: list[int]) -> None:
    crash(scene, point, 1, 1, lanes=1)
    with scene.connect() as writer:
        (found,) = writer.recovery_report
        assert (found.transactional_id, found.outcome) == (scene.transactional_id, outcome)
        assert (found.state is not None) == (outcome is Outcome.COMMITTED)
        assert writer.recovery_report.ok
        assert scene.agree() == left
        scene.write(writer, 2)
    assert scene.agree() == [*left, 2]
    with scene.connect() as writer:
        assert list(writer.recovery_report) == []
    scene.assert_resolved()


@producers_and_databases
@pytest.mark.usefixtures("losses_stay")
def test_a_lost_transaction_is_reported_until_acknowledged(scene: Scene) -> None:
    with scene.connect() as writer:
        scene.write(writer, 1)
        error = scene.lose(writer, 2)
        assert error.transactional_id == scene.transactional_id
        assert error.state
        assert "--republish" in str(error)
        (place,) = error.delivery.places
        assert (error.delivery.messages, place.topic, place.partition, place.messages) == (1, scene.topic, 0, 1)
        assert str(error.delivery) in str(error)
        assert error.cause is not None
        assert ("transaction.timeout.ms" in error.cause) is not writer.is_two_phase
        scene.write(writer, 3)
    assert (scene.rows(), scene.messages()) == ([1, 2, 3], [1, 3])

    for _ in range(2):
        with pytest.raises(LostTransactionError) as caught:
            scene.connect()
        assert (caught.value.state, caught.value.transactional_id) == (error.state, scene.transactional_id)
        assert (caught.value.delivery.places, caught.value.cause) == (error.delivery.places, error.cause)

    with scene.connect(on_lost="report") as writer:
        ((found_id, lost),) = writer.recovery_report.unacknowledged
        assert (found_id, lost.kind, str(lost.state)) == (scene.transactional_id, LostKind.LOST, error.state)
        assert not writer.recovery_report.ok
        with writer.transaction() as tx:
            scene.send(tx, 2)  # published again
    assert scene.agree() == [1, 2, 3]

    kafka = {"bootstrap.servers": scene.servers}
    with dualwrite.open_recoverer(scene.engine, kafka=kafka) as recoverer:
        assert [str(lost.state) for lost in recoverer.acknowledge([scene.transactional_id])[scene.transactional_id]] == [
            error.state
        ]
    with scene.connect() as writer:
        assert writer.recovery_report.ok
        scene.write(writer, 4)
    assert scene.agree() == [1, 2, 3, 4]
    scene.assert_resolved()
