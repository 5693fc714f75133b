"""Lanes: transactions rotate over several ids of one writer; crashes, zombies and errors on one lane do not harm the others."""

# ruff: noqa: PT012  (a block of several statements is what is tested: the last one, or its end, must raise)

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import sqlalchemy as sa

import dualwrite
from crash.scene import Worker
from dualwrite import (
    BrokerUnavailableError,
    ConfigurationError,
    DualWriter,
    FencedError,
    InDoubtTransactionError,
    InvalidTransactionalIdError,
    LostTransactionError,
    Outcome,
    Phase,
    StoreUnavailableError,
    UnverifiedTransactionError,
    WriterClosedError,
)
from dualwrite.stores.sql import SqlStateStore
from dualwrite.testing import failpoints
from dualwrite.transactional_id import TransactionalId
from fixtures.fork_server import ForkedProcess
from fixtures.pace import ended
from fixtures.tiers import thinned
from writer import ordered
from writer.cases import (
    DATABASES,
    LIBRDKAFKA,
    NATIVE,
    POSTGRESQL,
    PRODUCERS,
    SQLITE,
    both_databases,
    both_producers,
    producers_and_databases,
)
from writer.scene import Scene

BEFORE_COMMIT_POINT = ["after_begin", "after_send", "after_prepare", "after_record", "before_db_commit"]
PAST_COMMIT_POINT = ["after_db_commit", "before_kafka_commit", "after_kafka_commit"]


@pytest.fixture
def lanes() -> int:
    """Three by default."""
    return 3


def url_of(scene: Scene) -> str:
    return scene.engine.url.render_as_string(hide_password=False)


def start(scene: Scene, first: int, count: int, stop: str = "", lanes: int = 3, **environment: str) -> Worker:
    """A writer in a separate process."""
    where = [url_of(scene), scene.servers, scene.transactional_id, scene.topic]
    return Worker(["write", *where, str(first), str(count)], stop, DUALWRITE_LANES=str(lanes), **environment)


def crash(scene: Scene, point: str, first: int, count: int, lanes: int = 3) -> None:
    """A process that writes and is killed at the point."""
    worker = start(scene, first, count, f"{point}=kill", lanes)
    assert worker.end() == -9, f"{worker.lines} {worker.errors[-2000:]}"


def stopped(scene: Scene, point: str, first: int, count: int, lanes: int = 3) -> Worker:
    """A process that writes and is paused at the point."""
    worker = start(scene, first, count, f"{point}=stop", lanes)
    worker.wait_until_stopped()
    return worker


def outcomes(report: dualwrite.RecoveryReport) -> dict[str, list[Outcome]]:
    """The outcomes by lane."""
    return {one.transactional_id: [found.outcome for found in one.outcomes] for one in report.ids}


def unavailable() -> BrokerUnavailableError:
    return BrokerUnavailableError("Nobody answers.")


def leave_in_doubt(scene: Scene, writer: DualWriter, number: int) -> InDoubtTransactionError:
    """A transaction that the database commits while Kafka does not answer."""
    with (
        failpoints.armed("before_kafka_commit", failpoints.raises(unavailable())),
        failpoints.armed("recover_after_describe", failpoints.raises(unavailable())),
        pytest.raises(InDoubtTransactionError) as caught,
    ):
        scene.write(writer, number)
    return caught.value


# --- rotating -----------------------------------------------------------------------------------------------------------


@producers_and_databases
def test_transactions_take_turns(scene: Scene) -> None:
    states = []
    with scene.connect() as writer:
        for number in range(7):
            with writer.transaction() as tx:
                scene.both(tx, number)
            assert tx.state is not None
            states.append(tx.state)
        assert [row.transactional_id for row in scene.state_rows()] == [
            TransactionalId(scene.transactional_id, lane).row for lane in range(3)
        ]
        assert [row.transaction_number for row in scene.state_rows()] == [3, 2, 2]
        assert [row.prepared_state for row in scene.state_rows()] == [states[6], states[4], states[5]]
        assert scene.agree() == list(range(7))
    producer_ids = [state.producer_id for state in states]
    assert producer_ids == [producer_ids[number % 3] for number in range(7)]
    assert len(set(producer_ids)) == 3
    scene.assert_resolved()


@both_producers
def test_a_rolled_back_transaction_uses_up_its_turn(sqlite_scene: Scene) -> None:
    scene = sqlite_scene
    with scene.connect() as writer:
        for number in range(5):
            if number % 2:
                with pytest.raises(ValueError, match="mine"), writer.transaction() as tx:
                    scene.both(tx, number)
                    raise ValueError("mine")
            else:
                scene.write(writer, number)
        assert [row.transaction_number for row in scene.state_rows()] == [1, 2, 1]  # 3: lane 0's second, not recorded
    assert scene.agree() == [0, 2, 4]
    scene.assert_resolved()


@producers_and_databases
def test_messages_are_in_the_order_of_the_transactions(scene: Scene) -> None:
    with scene.connect() as writer:
        for number in range(60):
            ordered.write(writer, scene.topic, number)
    assert_ordered(scene, list(range(60)))


def assert_ordered(scene: Scene, numbers: list[int]) -> None:
    assert scene.rows() == numbers
    assert [m.value for m in scene.raw_messages()] == [f"{n}{part}".encode() for n in numbers for part in "ab"]


@pytest.mark.parametrize(
    ("producer", "database"),
    thinned(product(PRODUCERS, DATABASES), kept=[(LIBRDKAFKA, SQLITE)], quick=[]),
)
def test_messages_are_in_the_order_of_the_transactions_over_crashes(scene: Scene) -> None:
    """Processes are killed one after another, each at another point and lane; the next one recovers and continues.

    CI runs the other producer and database in test_a_writer_may_have_another_number_of_lanes_each_time.
    """
    expected = []
    for run, point in enumerate([*BEFORE_COMMIT_POINT, *PAST_COMMIT_POINT]):
        first, dies_at = 10 * run, 3 + run % 3
        passage = 2 * dies_at if point == "after_send" else dies_at
        with ForkedProcess(
            "writer.ordered",
            [url_of(scene), scene.servers, scene.transactional_id, scene.topic, str(first), "9"],
            failpoints=f"{point}#{passage}=kill",
            environment={**os.environ, "DUALWRITE_LANES": str(1 + run % 4)},
            stderr=subprocess.PIPE,
        ) as process:
            assert process.stderr is not None
            errors = process.stderr.read()
            assert ended(process) == -signal.SIGKILL, errors[-3000:]
        expected += range(first, first + dies_at - (point in BEFORE_COMMIT_POINT))
    with scene.connect() as writer:
        ordered.write(writer, scene.topic, 1000)
    assert_ordered(scene, [*expected, 1000])
    scene.assert_resolved()


# --- what a crash left --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("point", "by", "producer", "database"),
    thinned(
        product(
            ["after_send", "after_record", "after_db_commit", "after_kafka_commit"],
            ["connect", "recover"],
            PRODUCERS,
            DATABASES,
        ),
        kept=[
            ("after_send", "recover", LIBRDKAFKA, POSTGRESQL),
            ("after_record", "recover", NATIVE, POSTGRESQL),
            ("after_db_commit", "connect", NATIVE, POSTGRESQL),
            ("after_kafka_commit", "connect", NATIVE, SQLITE),
        ],
        quick=[("after_db_commit", "connect", NATIVE, POSTGRESQL)],
    ),
)
def test_transactions_left_by_a_crash_on_every_lane_are_resolved(scene: Scene, point: str, by: str) -> None:
    names = [TransactionalId(scene.transactional_id, lane).row for lane in range(3)]
    crash(scene, f"{point}#6", 1, 6)  # lane 0, 1, 2, 0, 1, and dies on 2
    expected = [1, 2, 3, 4, 5] if point in BEFORE_COMMIT_POINT else [1, 2, 3, 4, 5, 6]
    died = {
        "after_send": Outcome.ABORTED,
        "after_record": Outcome.ABORTED,
        "after_db_commit": Outcome.COMMITTED,
        "after_kafka_commit": Outcome.ALREADY_COMMITTED,
    }[point]
    if by == "recover":
        report = scene.recover()
    else:
        with scene.connect() as writer:
            report = writer.recovery_report
    found = outcomes(report)
    assert list(found) == names
    assert found[names[0]] == found[names[1]] == [Outcome.ALREADY_COMMITTED]
    # after_send: librdkafka may not have sent anything yet, so the last transaction that Kafka knows is the previous one
    assert found[names[2]] == [died] or (point == "after_send" and found[names[2]] == [Outcome.ALREADY_COMMITTED])
    assert report.ok
    assert scene.agree() == expected
    scene.assert_resolved()
    assert outcomes(scene.recover()) == {name: [] for name in names}
    with scene.connect() as writer:
        scene.write(writer, 7, 8, 9, 10)
    assert scene.agree() == [*expected, 7, 8, 9, 10]


@pytest.mark.parametrize(
    ("point", "passage", "producer"),
    thinned(
        product(["recover_after_claim", "recover_after_decision", "before_take_over"], [1, 2, 3], PRODUCERS),
        kept=[
            ("recover_after_claim", 1, LIBRDKAFKA),
            ("recover_after_decision", 2, NATIVE),
            ("before_take_over", 3, NATIVE),
        ],
        quick=[("recover_after_decision", 2, NATIVE)],
    ),
)
def test_an_interrupted_opening_is_finished_by_the_next_one(sqlite_scene: Scene, point: str, passage: int) -> None:
    scene = sqlite_scene
    crash(scene, "after_db_commit#5", 1, 5)
    crash(scene, f"{point}#{passage}", 50, 1)
    with scene.connect() as writer:
        assert scene.agree() == [1, 2, 3, 4, 5]
        scene.write(writer, 6, 7, 8, 9)
    assert scene.agree() == list(range(1, 10))
    scene.assert_resolved()


@pytest.mark.parametrize(
    ("fewer", "producer", "database"),
    thinned(
        product([1, 2], PRODUCERS, DATABASES),
        kept=[(1, NATIVE, POSTGRESQL), (2, LIBRDKAFKA, SQLITE)],
        quick=[(1, NATIVE, POSTGRESQL)],
    ),
)
def test_a_writer_with_fewer_lanes_resolves_the_unused_ones(scene: Scene, fewer: int) -> None:
    crash(scene, "after_db_commit#6", 1, 6)
    with scene.connect(lanes=fewer) as writer:
        found = outcomes(writer.recovery_report)
        assert list(found) == [TransactionalId(scene.transactional_id, lane).row for lane in range(3)]
        assert found[TransactionalId(scene.transactional_id, 2).row] == [Outcome.COMMITTED]
        assert scene.agree() == [1, 2, 3, 4, 5, 6]
        generations = [row.generation for row in scene.state_rows()]
        scene.write(writer, 7, 8, 9)
        assert [row.generation for row in scene.state_rows()] == generations
        assert [bool(row.unresolved_generations) for row in scene.state_rows()] == [lane < fewer for lane in range(3)]
    assert scene.agree() == list(range(1, 10))
    scene.assert_resolved()


@pytest.mark.parametrize(
    ("producer", "database"),
    thinned(product(PRODUCERS, DATABASES), kept=[(NATIVE, POSTGRESQL)], quick=[]),
)
def test_a_writer_may_have_another_number_of_lanes_each_time(scene: Scene) -> None:
    number = 0
    for run, lanes in enumerate([1, 5, 2, 4]):
        crash(scene, f"after_{'db_commit' if run % 2 else 'prepare'}#{lanes + 1}", number, lanes + 2, lanes)
        number += lanes + (run % 2)
        with scene.connect(lanes=lanes) as writer:
            assert len(writer.recovery_report.ids) == len(scene.state_rows())
            scene.write(writer, number)
            number += 1
        assert scene.agree() == list(range(number))
        scene.assert_resolved()
    assert len(scene.state_rows()) == 5


def test_ids_that_resemble_lanes_are_not_recovered(sqlite_scene: Scene) -> None:
    """`w~1` is a lane of `w`; `wx`, `wx~1` and `w-1` are not, and the row of a lane of `w` is not one of theirs."""
    scene = sqlite_scene
    others = [Scene(scene.engine, scene.servers, transactional_id=scene.transactional_id + end) for end in ("x", "-1", "~")]
    with others[0].connect() as one, others[1].connect() as two:
        others[0].write(one, 1, 2)
        others[1].write(two, 1, 2)
        with scene.connect() as writer:
            scene.write(writer, 1, 2, 3, 4)
        assert len(scene.recover().ids) == 3
        others[0].write(one, 3, 4, 5)
        others[1].write(two, 3, 4, 5)
    with pytest.raises(InvalidTransactionalIdError):
        others[2].connect()
    assert [other.agree() for other in (scene, *others[:2])] == [[1, 2, 3, 4], [1, 2, 3, 4, 5], [1, 2, 3, 4, 5]]


# --- zombies ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("point", "old", "new", "producer"),
    thinned(
        (
            (point, *lanes, producer)
            for point in ("after_send", "after_prepare")
            for lanes in ((3, 1), (1, 3), (3, 3))
            for producer in PRODUCERS
        ),
        kept=[
            ("after_send", 3, 1, NATIVE),
            ("after_send", 3, 3, LIBRDKAFKA),
            ("after_prepare", 1, 3, NATIVE),
        ],
        quick=[("after_send", 3, 1, NATIVE)],
    ),
)
def test_a_writer_paused_in_its_transaction_is_fenced_by_one_with_other_lanes(
    postgres_scene: Scene, point: str, old: int, new: int
) -> None:
    """On SQLite the block holds the only write lock, so no one can claim the id in the meantime."""
    scene = postgres_scene
    zombie = stopped(scene, f"{point}#2", 1, 6, old)
    with scene.connect(lanes=new) as writer:
        scene.write(writer, 100, 101)
        zombie.resume()
        assert zombie.end() == 1
        assert zombie.last().startswith("error FencedError"), zombie.lines
        assert scene.agree() == [1, 100, 101]
        scene.write(writer, 102, 103)
    assert scene.agree() == [1, 100, 101, 102, 103]
    scene.assert_resolved()


@pytest.mark.parametrize(
    ("new", "producer", "database"),
    thinned(
        product([1, 3], PRODUCERS, DATABASES),
        kept=[(1, LIBRDKAFKA, SQLITE), (3, NATIVE, POSTGRESQL)],
        quick=[(3, NATIVE, POSTGRESQL)],
    ),
)
def test_a_writer_paused_past_its_commit_point_never_says_that_it_was_rolled_back(scene: Scene, new: int) -> None:
    """It finds out that it committed, or that it can't know (native: its successor uses the same Kafka id)."""
    zombie = stopped(scene, "before_kafka_commit#2", 1, 6)
    with scene.connect(lanes=new) as writer:
        scene.write(writer, 100, 101)
        assert scene.agree() == [1, 2, 100, 101]
        zombie.resume()
        assert zombie.end() == 1
        said = zombie.last().split()[1]
        assert said == ("FencedError" if "done 2" in zombie.lines else "InDoubtTransactionError"), zombie.lines
        scene.write(writer, 102, 103)
    assert scene.agree() == [1, 2, 100, 101, 102, 103]


@pytest.mark.parametrize(
    ("point", "passage", "new", "producer", "database"),
    thinned(
        product(["recover_after_claim", "recover_after_describe", "before_take_over"], [1, 2, 3], [1, 5], PRODUCERS, DATABASES),
        kept=[
            ("recover_after_claim", 1, 1, LIBRDKAFKA, SQLITE),
            ("recover_after_describe", 3, 5, NATIVE, POSTGRESQL),
            ("before_take_over", 2, 5, NATIVE, SQLITE),
        ],
        quick=[("before_take_over", 2, 5, NATIVE, SQLITE)],
    ),
)
def test_a_writer_paused_while_it_opens_does_not_fence_its_successor(scene: Scene, point: str, passage: int, new: int) -> None:
    crash(scene, "after_db_commit#2", 1, 2)
    zombie = stopped(scene, f"{point}#{passage}", 50, 3)
    with scene.connect(lanes=new) as writer:
        scene.write(writer, 100, 101)
        zombie.resume()
        assert zombie.end() == 1
        assert zombie.last().startswith("error FencedError"), zombie.lines
        scene.write(writer, *range(102, 108))
        assert writer.phase is Phase.READY
    assert scene.agree() == [1, 2, *range(100, 108)]
    scene.assert_resolved()


@pytest.mark.parametrize("lane", thinned([0, 1], quick=[1]))
def test_a_writer_whose_lane_is_claimed_while_it_starts_a_later_one_does_not_open(sqlite_scene: Scene, lane: int) -> None:
    scene = sqlite_scene

    def claim() -> None:
        SqlStateStore(scene.engine).claim(TransactionalId(scene.transactional_id, lane).row, "somebody", timeout=5)

    with (
        failpoints.armed("before_take_over", failpoints.only_at(3, claim)),
        pytest.raises(FencedError, match="somebody") as caught,
    ):
        scene.connect()
    assert caught.value.transactional_id == scene.transactional_id
    with scene.connect() as writer:
        scene.write(writer, 1, 2, 3)
    assert scene.agree() == [1, 2, 3]
    scene.assert_resolved()


@pytest.mark.parametrize(
    ("old", "new", "producer"),
    thinned(
        ((*lanes, producer) for lanes in ((3, 1), (1, 3), (2, 3)) for producer in PRODUCERS),
        kept=[(3, 1, NATIVE), (1, 3, NATIVE), (2, 3, LIBRDKAFKA)],
        quick=[(3, 1, NATIVE)],
    ),
)
def test_a_writer_is_fenced_even_if_its_successor_is_paused_while_it_opens(postgres_scene: Scene, old: int, new: int) -> None:
    """The older writer may complete transactions, on both sides, on lanes not claimed yet; it stops at a claimed one."""
    scene = postgres_scene
    done = []
    with scene.connect(lanes=old) as writer:
        scene.write(writer, 1)
        successor = stopped(scene, "recover_after_claim#1", 100, 4, new)
        with pytest.raises(FencedError):
            for number in range(2, 9):
                scene.write(writer, number)
                done.append(number)
        assert len(done) <= old - 1
        assert scene.agree() == [1, *done]
        successor.resume()
        assert successor.end() == 0, f"{successor.lines} {successor.errors[-2000:]}"
    assert scene.agree() == [1, *done, 100, 101, 102, 103]
    scene.assert_resolved()


@pytest.mark.parametrize(
    ("interrupted_at", "producer", "database"),
    thinned(
        product(["recover_after_claim", "before_take_over"], PRODUCERS, DATABASES),
        kept=[
            ("recover_after_claim", NATIVE, POSTGRESQL),
            ("before_take_over", LIBRDKAFKA, SQLITE),
        ],
        quick=[("recover_after_claim", NATIVE, POSTGRESQL)],
    ),
)
def test_an_interrupted_reopening_is_repeated_for_all_lanes(scene: Scene, interrupted_at: str) -> None:
    """If it recovered only its single lane, it would run at the same time as a writer that still owns the other lanes."""
    with scene.connect(lanes=1) as one, scene.connect(lanes=3) as three:
        scene.write(three, 1)
        with failpoints.armed(interrupted_at, failpoints.raises(KeyboardInterrupt())), pytest.raises(KeyboardInterrupt):
            one.reopen()
        assert one.phase is Phase.NEEDS_RECOVERY
        scene.write(one, 2)
        with pytest.raises(FencedError):
            scene.write(three, 99)  # its next lane is lane 1
        scene.write(one, 3)
    assert scene.agree() == [1, 2, 3]
    scene.assert_resolved()


# --- errors on one lane -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lane", "database"),
    thinned(
        product([0, 1, 2], DATABASES),
        kept=[(0, SQLITE), (1, POSTGRESQL), (2, SQLITE)],
        quick=[(1, POSTGRESQL)],
    ),
)
def test_a_writer_fenced_on_one_lane_is_fenced_on_all(scene: Scene, lane: int) -> None:
    with scene.connect() as writer:
        SqlStateStore(scene.engine).claim(TransactionalId(scene.transactional_id, lane).row, "somebody", timeout=5)
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


@producers_and_databases
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


def test_recovery_of_one_lane_by_its_id_does_not_touch_the_others(sqlite_scene: Scene) -> None:
    scene = sqlite_scene
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


def test_no_id_is_recovered_twice(sqlite_scene: Scene) -> None:
    scene = sqlite_scene
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


@producers_and_databases
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


@producers_and_databases
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
        scene.write(writer, 3)
    assert scene.agree() == [1, 2, 3]
    scene.assert_resolved()


@producers_and_databases
def test_a_lane_whose_id_was_claimed_while_in_doubt_fences_all(scene: Scene) -> None:
    with scene.connect() as writer:
        scene.write(writer, 1)
        leave_in_doubt(scene, writer, 2)
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


@both_producers
def test_an_exception_past_the_commit_point_names_the_lane(sqlite_scene: Scene) -> None:
    scene = sqlite_scene
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


@producers_and_databases
def test_closing_resolves_one_lane_and_clears_the_others(scene: Scene) -> None:
    writer = scene.connect()
    scene.write(writer, 1)
    leave_in_doubt(scene, writer, 2)
    writer.close()
    assert writer.phase is Phase.CLOSED
    assert scene.agree() == [1, 2]
    scene.assert_resolved()


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


def test_closing_reports_every_lane_that_could_not_be_resolved(sqlite_scene: Scene) -> None:
    scene = sqlite_scene
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


@pytest.mark.parametrize(
    ("passage", "producer", "database"),
    thinned(
        product([1, 2], PRODUCERS, DATABASES),
        kept=[(1, LIBRDKAFKA, SQLITE), (2, NATIVE, POSTGRESQL)],
        quick=[(2, NATIVE, POSTGRESQL)],
    ),
)
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
    ("opens", "point", "passage", "producer"),
    thinned(
        product(
            ["open", "reopen"], ["recover_after_claim", "recover_after_decision", "before_take_over"], [1, 2, 3], PRODUCERS
        ),
        kept=[
            ("open", "recover_after_claim", 2, NATIVE),
            ("reopen", "recover_after_claim", 1, LIBRDKAFKA),
            ("reopen", "recover_after_decision", 2, NATIVE),
            ("reopen", "before_take_over", 3, NATIVE),
        ],
        quick=[("open", "recover_after_claim", 2, NATIVE), ("reopen", "before_take_over", 3, NATIVE)],
    ),
)
def test_an_interrupt_while_lanes_are_claimed(sqlite_scene: Scene, opens: str, point: str, passage: int) -> None:
    scene = sqlite_scene
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
def test_a_lost_transaction_of_a_lane_is_reported_until_acknowledged(scene: Scene) -> None:
    name = TransactionalId(scene.transactional_id, 2).row
    with scene.connect() as writer:
        scene.write(writer, 1, 2)
        error = scene.lose(writer, 3, lane=2)
        assert (error.transactional_id, error.lane) == (scene.transactional_id, name)
        assert f"--id {name} --acknowledge" in str(error)
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


@both_producers
def test_a_writer_that_reopens_with_an_unacknowledged_loss_can_use_its_other_lanes(sqlite_scene: Scene) -> None:
    """As with one lane: reopen() raises, nothing stays in doubt, and the writer may be used all the same."""
    scene = sqlite_scene
    with scene.connect() as writer:
        scene.write(writer, 1, 2)
        scene.lose(writer, 3, lane=2)
        with pytest.raises((LostTransactionError, UnverifiedTransactionError)):
            writer.reopen()
        assert writer.phase is Phase.NEEDS_RECOVERY
        scene.write(writer, 4, 5, 6)
    assert (scene.rows(), scene.messages()) == ([1, 2, 3, 4, 5, 6], [1, 2, 4, 5, 6])
    scene.assert_resolved()


# --- number of lanes ----------------------------------------------------------------------------------------------------


def test_an_invalid_number_of_lanes_is_refused_before_any_claim(sqlite_scene: Scene) -> None:
    scene = sqlite_scene
    wrong: tuple[Any, ...] = (0, -1, 101, "3", 2.0, True)
    with scene.connect() as writer:
        before = scene.state_rows()
        for lanes in wrong:
            with pytest.raises(ConfigurationError, match="lanes must be") as caught:
                scene.connect(lanes=lanes)
            assert repr(lanes) in str(caught.value)
            assert scene.state_rows() == before
        scene.write(writer, 1)


def test_an_id_must_leave_room_for_the_numbers_of_its_lanes(new_scene: Callable[..., Scene]) -> None:
    longest = "w" * 253
    with pytest.raises(InvalidTransactionalIdError, match="253 is the limit with 3 lanes"):
        new_scene("sqlite", transactional_id=longest + "w").connect()
    scene = new_scene("postgresql", transactional_id=longest)
    with scene.connect() as writer:
        for _ in range(3):
            with writer.transaction() as tx:
                tx.db.execute(sa.text("SELECT 1"))
    scene.assert_resolved()


@both_databases
def test_a_single_lane_uses_the_logical_id_for_its_row_and_in_kafka(scene: Scene) -> None:
    with scene.connect(lanes=1) as writer:
        scene.write(writer, 1, 2, 3)
        assert [row.transactional_id for row in scene.state_rows()] == [scene.transactional_id]
        assert [one.transactional_id for one in writer.recovery_report.ids] == [scene.transactional_id]
        assert scene.state_row().transaction_number == 3
