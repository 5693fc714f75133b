"""Lanes: what a crash leaves on any of them is resolved, and a paused writer is fenced by one with other lanes."""

# ruff: noqa: PT012  (a block of several statements is what is tested: the last one, or its end, must raise)

from __future__ import annotations

import pytest

from dualwrite import (
    FencedError,
    InvalidTransactionalIdError,
    Outcome,
    Phase,
)
from dualwrite.stores.sql import SqlStateStore
from dualwrite.testing import failpoints
from dualwrite.transactional_id import TransactionalId
from fixtures.pace import LIMIT
from fixtures.tiers import thinned
from writer.cases import (
    LIBRDKAFKA,
    NATIVE,
    POSTGRESQL,
    SQLITE,
    three_lanes,
)
from writer.lane_scene import BEFORE_COMMIT_POINT, crash, outcomes, stopped
from writer.scene import Scene

pytestmark = [three_lanes, pytest.mark.usefixtures("no_recovery_when_idle")]


# --- what a crash left --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("point", "by", "producer", "database"),
    thinned(
        [
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
    ("point", "passage"),
    thinned(
        [("recover_after_claim", 1), ("recover_after_decision", 2), ("before_take_over", 3)],
        quick=[("recover_after_decision", 2)],
    ),
)
def test_an_interrupted_opening_is_finished_by_the_next_one(scene: Scene, point: str, passage: int) -> None:
    crash(scene, "after_db_commit#5", 1, 5)
    crash(scene, f"{point}#{passage}", 50, 1)
    with scene.connect() as writer:
        assert scene.agree() == [1, 2, 3, 4, 5]
        scene.write(writer, 6, 7, 8, 9)
    assert scene.agree() == list(range(1, 10))
    scene.assert_resolved()


@pytest.mark.parametrize(("fewer", "database"), thinned([(1, POSTGRESQL), (2, SQLITE)], quick=[(1, POSTGRESQL)]))
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


@pytest.mark.slow
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
    assert [int(message.value or b"") for message in scene.raw_messages()] == list(range(number))  # in order


def test_ids_that_resemble_lanes_are_not_recovered(scene: Scene) -> None:
    """`w~1` is a lane of `w`; `wx`, `wx~1` and `w-1` are not, and the row of a lane of `w` is not one of theirs."""
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
    ("point", "old", "new"),
    thinned([("after_send", 3, 1), ("after_send", 3, 3), ("after_prepare", 1, 3)], quick=[("after_send", 3, 1)]),
)
def test_a_writer_paused_in_its_transaction_is_fenced_by_one_with_other_lanes(
    scene: Scene, point: str, old: int, new: int
) -> None:
    """On SQLite the block holds the only write lock, so no one can claim the id in the meantime."""
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
    thinned([(1, LIBRDKAFKA, SQLITE), (3, NATIVE, POSTGRESQL)], quick=[(3, NATIVE, POSTGRESQL)]),
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
    ("point", "passage", "new", "database"),
    thinned(
        [
            ("recover_after_claim", 1, 1, SQLITE),
            ("recover_after_describe", 3, 5, POSTGRESQL),
            ("before_take_over", 2, 5, SQLITE),
        ],
        quick=[("before_take_over", 2, 5, SQLITE)],
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
def test_a_writer_whose_lane_is_claimed_while_it_starts_a_later_one_does_not_open(scene: Scene, lane: int) -> None:
    def claim() -> None:
        SqlStateStore(scene.engine).claim(TransactionalId(scene.transactional_id, lane).row, "somebody", timeout=LIMIT)

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


@pytest.mark.parametrize(("old", "new"), thinned([(3, 1), (1, 3)], quick=[(3, 1)]))
def test_a_writer_is_fenced_even_if_its_successor_is_paused_while_it_opens(scene: Scene, old: int, new: int) -> None:
    """The older writer may complete transactions, on both sides, on lanes not claimed yet; it stops at a claimed one."""
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
    ("interrupted_at", "database"),
    thinned([("recover_after_claim", POSTGRESQL), ("before_take_over", SQLITE)], quick=[("recover_after_claim", POSTGRESQL)]),
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
