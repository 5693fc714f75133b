"""KeyboardInterrupt anywhere: it propagates, and afterwards a row exists if and only if its message does.

More of the random ones: DUALWRITE_TEST_INTERRUPTS=1500 DUALWRITE_TEST_SEED=2 pytest tests/writer/test_interrupts.py -m soak
"""

# ruff: noqa: PT012  (a block of several statements is what is tested: the last one, or its end, must raise)

from __future__ import annotations

import gc
import itertools
import os
import random
import signal
import time
from collections.abc import Callable
from itertools import product

import pytest
from sqlalchemy import NullPool

from dualwrite import DualWriter, FencedError, Phase
from dualwrite.stores.sql.sql_transaction import SqlStoreTransaction
from dualwrite.testing import failpoints
from fixtures.tiers import thinned
from writer.cases import LIBRDKAFKA, NATIVE, POSTGRESQL, SQLITE
from writer.lane_scene import BEFORE_COMMIT_POINT, PAST_COMMIT_POINT
from writer.scene import Scene

WRITER_POINTS = BEFORE_COMMIT_POINT + PAST_COMMIT_POINT
RECOVERY_POINTS = [
    "recover_after_claim",
    "recover_after_describe",
    "recover_after_decision",
    "recover_after_end_txn",
    "recover_after_resolution",
]
KINDS = [KeyboardInterrupt, RuntimeError]
LEFT = ["before_kafka_commit", "after_prepare"]
COMBINATIONS = [(3, NATIVE, POSTGRESQL), (1, LIBRDKAFKA, SQLITE)]
INTERRUPTS = int(os.environ.get("DUALWRITE_TEST_INTERRUPTS", "150"))

everywhere = pytest.mark.parametrize(
    ("lanes", "producer", "database"), thinned(COMBINATIONS, kept=COMBINATIONS[:1], quick=COMBINATIONS[:1])
)


def leave_open(scene: Scene, point: str, number: int) -> None:
    """Leave what a writer leaves that dies at `point`: the exception disables dualwrite's cleanup."""
    writer = scene.connect()

    def dies() -> None:
        for lane in writer._lanes:
            lane.ownership.producer.close()
        raise KeyboardInterrupt

    with failpoints.armed("recover_after_claim", failpoints.raises(KeyboardInterrupt())):
        with failpoints.armed(point, dies), pytest.raises(KeyboardInterrupt):
            scene.write(writer, number)
        with pytest.raises(KeyboardInterrupt):
            writer.close()
    assert writer.phase is Phase.CLOSED


# --- at each failpoint --------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "lanes", "producer", "database"),
    thinned(
        [(kind, *combination) for kind, combination in product(KINDS, COMBINATIONS)],
        kept=[(KeyboardInterrupt, *COMBINATIONS[0]), (RuntimeError, *COMBINATIONS[1])],
    ),
)
def test_an_exception_at_each_point_of_a_transaction(scene: Scene, kind: type[BaseException]) -> None:
    expected = [99]
    with scene.connect() as writer:
        scene.write(writer, 99)
        for number, point in enumerate(WRITER_POINTS):
            error = kind(point)
            with failpoints.armed(point, failpoints.raises(error)), pytest.raises(kind) as caught:
                scene.write(writer, number)
            assert caught.value is error
            notes = " ".join(getattr(error, "__notes__", []))
            assert ("committed on both sides" in notes) == (point in ("after_db_commit", "before_kafka_commit")), point
            if point in PAST_COMMIT_POINT:
                expected.append(number)
            assert scene.agree() == sorted(expected), point
            assert scene.checked_out() == 0, point
            scene.write(writer, 100 + number)
            expected.append(100 + number)
    assert scene.agree() == sorted(expected)
    scene.assert_resolved()


@pytest.mark.slow
@everywhere
def test_closing_right_after_an_interrupt_resolves(scene: Scene) -> None:
    expected = []
    for number, point in enumerate(WRITER_POINTS):
        with pytest.raises(KeyboardInterrupt), scene.connect() as writer:
            scene.write(writer, 100 + number)
            with failpoints.armed(point, failpoints.raises(KeyboardInterrupt())):
                scene.write(writer, number)
        expected += [100 + number, number] if point in PAST_COMMIT_POINT else [100 + number]
        assert scene.agree() == sorted(expected), point
        scene.assert_resolved()


@pytest.mark.slow
@everywhere
def test_an_interrupt_while_an_interrupt_is_handled(scene: Scene) -> None:
    """The first interrupt is past the commit point, the second while the writer finds out the outcome."""
    expected = []
    with scene.connect() as writer:
        for number, second in enumerate([*RECOVERY_POINTS, "before_take_over"]):
            with (
                failpoints.armed("after_db_commit", failpoints.raises(KeyboardInterrupt())),
                failpoints.armed(second, failpoints.raises(KeyboardInterrupt())),
                pytest.raises(KeyboardInterrupt),
            ):
                scene.write(writer, number)
            assert writer.phase in (Phase.IN_DOUBT, Phase.NEEDS_RECOVERY), second
            scene.write(writer, 100 + number)
            expected += [number, 100 + number]
            assert scene.agree() == sorted(expected), second
    scene.assert_resolved()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("left", "kind", "lanes", "producer", "database"),
    thinned(
        [(left, kind, *combination) for left, kind, combination in product(LEFT, KINDS, COMBINATIONS)],
        kept=[("before_kafka_commit", KeyboardInterrupt, *COMBINATIONS[0]), ("after_prepare", RuntimeError, *COMBINATIONS[1])],
    ),
)
def test_an_exception_at_each_point_of_opening_and_recovery(scene: Scene, left: str, kind: type[BaseException]) -> None:
    for point, opens in [*product(RECOVERY_POINTS, (Scene.connect, Scene.recover)), ("before_take_over", Scene.connect)]:
        if point == "recover_after_resolution" and left == "after_prepare":
            continue  # nothing is stored, nothing to clear
        if kind is RuntimeError and opens is Scene.recover and not point.startswith("recover_after_c"):
            continue  # it is reported in the id's report
        fresh = scene.with_new_id()
        leave_open(fresh, left, 1)
        error = kind(point)
        with failpoints.armed(point, failpoints.raises(error)), pytest.raises(kind) as caught:
            opens(fresh)
        assert caught.value is error
        assert fresh.checked_out() == 0, point
        expected = [1] if left == "before_kafka_commit" else []
        assert fresh.recover().ok, point
        assert fresh.agree() == expected, point
        with fresh.connect() as writer:
            fresh.write(writer, 2)
        assert fresh.agree() == [*expected, 2], point
        fresh.assert_resolved()


@pytest.mark.slow
@everywhere
def test_an_interrupt_at_each_point_of_reopening(scene: Scene) -> None:
    with scene.connect() as writer:
        for number, point in enumerate([*RECOVERY_POINTS[:3], "recover_after_resolution", "before_take_over"]):
            if point == "recover_after_resolution":  # not reached for a transaction that the writer knows to be committed
                writer.reopen()  # otherwise the write would first finish the interrupted reopening
                with (
                    failpoints.armed("before_kafka_commit", failpoints.raises(KeyboardInterrupt())),
                    failpoints.armed("recover_after_claim", failpoints.raises(KeyboardInterrupt())),
                    pytest.raises(KeyboardInterrupt),
                ):
                    scene.write(writer, number)
                assert writer.phase is Phase.IN_DOUBT
            else:
                scene.write(writer, number)
            with failpoints.armed(point, failpoints.raises(KeyboardInterrupt())), pytest.raises(KeyboardInterrupt):
                writer.reopen()
            assert scene.checked_out() == 0, point
            assert scene.agree() == list(range(number + 1)), point
    scene.assert_resolved()


# --- where no failpoint is ---------------------------------------------------------------------------------------------------


@everywhere
def test_an_interrupt_between_the_block_and_its_end(scene: Scene) -> None:
    """Python may raise it before the first line of `__exit__`; then only the traceback refers to the transaction."""
    held = []
    with pytest.raises(KeyboardInterrupt), scene.connect() as writer:
        scene.write(writer, 1)
        held.append(writer.transaction())
        scene.both(held[0].__enter__(), 2)
        raise KeyboardInterrupt
    assert writer.phase is Phase.CLOSED
    assert scene.agree() == [1]
    scene.assert_resolved()
    held.clear()
    with scene.connect() as writer:
        scene.write(writer, 3)
    assert scene.agree() == [1, 3]


@everywhere
def test_an_interrupt_while_both_sides_are_rolled_back(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """No real component can be made to interrupt there, so rollback is replaced by one that first raises twice."""
    roll_back = SqlStoreTransaction.rollback
    interrupts = [KeyboardInterrupt(), KeyboardInterrupt()]

    def interrupted(transaction: SqlStoreTransaction) -> None:
        if interrupts:
            raise interrupts.pop()
        roll_back(transaction)

    with scene.connect() as writer:
        scene.write(writer, 1)
        monkeypatch.setattr(SqlStoreTransaction, "rollback", interrupted)
        with pytest.raises(KeyboardInterrupt), writer.transaction() as tx:
            scene.both(tx, 2)
            raise ValueError
        assert not interrupts
        scene.write(writer, 3)
        assert scene.agree() == [1, 3]
    scene.assert_resolved()


# --- at random ----------------------------------------------------------------------------------------------------------


def interrupt(call: Callable[[], object], seconds: float, second: float | None) -> None:
    """Call, and raise KeyboardInterrupt by a signal after so many seconds; perhaps again, a moment later.

    SQLAlchemy and drivers may raise an error of their own instead, since the interrupt kept them from reaching a state.
    """
    shots = [1] if second is None else [1, 2]
    received_any = False

    def received(*_: object) -> None:
        nonlocal received_any
        if shots:
            shots.pop()
            received_any = True
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, received)
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds, second or 0.0)
        try:
            call()
        finally:
            shots.clear()
    except KeyboardInterrupt:
        pass
    except Exception:
        if not received_any:
            raise
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
    gc.collect()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # an interrupt inside a destructor
@pytest.mark.filterwarnings("ignore::ResourceWarning")  # of a driver that is opening or closing a connection
@pytest.mark.parametrize("seed", [int(os.environ.get("DUALWRITE_TEST_SEED", "1"))])
@pytest.mark.parametrize(
    ("interrupts", "lanes", "producer", "database"),
    thinned(
        [(count, *COMBINATIONS[0]) for count in (12, INTERRUPTS)],  # confluent-kafka may raise another error, later
        kept=[(12, *COMBINATIONS[0])],
        quick=[],
    ),
)
@pytest.mark.soak
def test_interrupts_at_random_moments(new_scene: Callable[..., Scene], database: str, interrupts: int, seed: int) -> None:
    """Without a pool: SQLAlchemy's own loses slots, and may leave its lock locked, when it is interrupted."""
    scene = new_scene(database, engine_options={"poolclass": NullPool})
    chance, numbers, done = random.Random(seed), itertools.count(1), list[int]()
    writer: DualWriter | None = scene.connect()

    def work() -> None:
        nonlocal writer
        if writer is None:
            writer = scene.connect()
        for number in itertools.islice(numbers, 20):
            try:
                scene.write(writer, number)
            except FencedError:
                writer.reopen()
            else:
                done.append(number)
        closing, writer = writer, None
        closing.close()

    began = time.monotonic()
    work()
    few = max(0.08, (time.monotonic() - began) / 4)
    for _ in range(interrupts):
        delay = chance.uniform(0, few) if chance.random() < 0.8 else chance.uniform(few, 6 * few)
        interrupt(work, delay, chance.uniform(0.001, 0.03) if chance.random() < 0.3 else None)
    work()
    if writer is not None:
        writer.close()
    scene.recover()
    rows = scene.agree()
    assert set(done) <= set(rows)
    assert done[-1] == max(rows), "the one after the last interrupt was not interrupted"
    scene.assert_resolved()
