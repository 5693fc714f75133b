"""KeyboardInterrupt anywhere: it propagates, and afterwards a row exists if and only if its message does.

More of the random ones: DUALWRITE_TEST_INTERRUPTS=1500 DUALWRITE_TEST_SEED=2 pytest tests/writer/test_interrupts.py -m soak
"""

# ruff: noqa: PT012  (a block of several statements is what is tested: the last one, or its end, must raise)

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from dualwrite import DualWriter, Phase
from dualwrite.stores.sql.sql_transaction import SqlStoreTransaction
from dualwrite.testing import failpoints
from fixtures.pace import ended, joined, limit
from fixtures.tiers import thinned
from writer.cases import DATABASES, LIBRDKAFKA, NATIVE, POSTGRESQL, PRODUCERS, SQLITE
from writer.interrupted import WARM_UP
from writer.scene import Scene

BEFORE_COMMIT_POINT = ["after_begin", "after_send", "after_prepare", "after_record", "before_db_commit"]
PAST_COMMIT_POINT = ["after_db_commit", "before_kafka_commit", "after_kafka_commit"]
WRITER_POINTS = BEFORE_COMMIT_POINT + PAST_COMMIT_POINT
RECOVERY_POINTS = [
    "recover_after_claim",
    "recover_after_describe",
    "recover_after_decision",
    "recover_after_end_txn",
    "recover_after_resolution",
]
TESTS = Path(__file__).parents[1]
INTERRUPTS = int(os.environ.get("DUALWRITE_TEST_INTERRUPTS", "150"))
EVERY_DAY = [(20, 1, LIBRDKAFKA, SQLITE), (20, 3, NATIVE, POSTGRESQL)]
SILENCE = limit(120)
"""Seconds without a line after which the process hangs: longer than a delay, and all its own time limits after it."""

LONGEST_DELAY = limit(20)
KINDS = [KeyboardInterrupt, RuntimeError]
LEFT = ["before_kafka_commit", "after_prepare"]
LANES = [1, 3]

everywhere = pytest.mark.parametrize(
    ("lanes", "producer", "database"),
    thinned(
        product(LANES, PRODUCERS, DATABASES),
        kept=[(3, NATIVE, POSTGRESQL)],  # librdkafka: below, at each point of a transaction, and at random moments
        quick=[(3, NATIVE, POSTGRESQL)],
    ),
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


def write_in_doubt(scene: Scene, writer: DualWriter, number: int) -> None:
    """A transaction that the database has committed and whose outcome at Kafka the writer could not find out."""
    with (
        failpoints.armed("before_kafka_commit", failpoints.raises(KeyboardInterrupt())),
        failpoints.armed("recover_after_claim", failpoints.raises(KeyboardInterrupt())),
        pytest.raises(KeyboardInterrupt),
    ):
        scene.write(writer, number)
    assert writer.phase is Phase.IN_DOUBT


# --- at each failpoint --------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "lanes", "producer", "database"),
    thinned(
        product(KINDS, LANES, PRODUCERS, DATABASES),
        kept=[
            (KeyboardInterrupt, 3, NATIVE, POSTGRESQL),
            (RuntimeError, 1, LIBRDKAFKA, SQLITE),
        ],
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
        product(LEFT, KINDS, LANES, PRODUCERS, DATABASES),
        kept=[
            ("before_kafka_commit", KeyboardInterrupt, 3, NATIVE, POSTGRESQL),
            ("after_prepare", RuntimeError, 1, NATIVE, SQLITE),
        ],
    ),
)
def test_an_exception_at_each_point_of_opening_and_recovery(scene: Scene, left: str, kind: type[BaseException]) -> None:
    for point in [*RECOVERY_POINTS, "before_take_over"]:
        if point == "recover_after_resolution" and left == "after_prepare":
            continue  # nothing is stored, nothing to clear
        fresh = scene.with_new_id()
        leave_open(fresh, left, 1)
        error = kind(point)
        with failpoints.armed(point, failpoints.raises(error)):
            for opens in (fresh.connect, fresh.recover) if point.startswith("recover_after_c") else (fresh.connect,):
                with pytest.raises(kind) as caught:
                    opens()
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
@pytest.mark.parametrize(
    ("left", "lanes", "producer"),
    thinned(
        product(LEFT, LANES, PRODUCERS),
        kept=[("before_kafka_commit", 3, NATIVE)],
    ),
)
def test_an_interrupt_at_each_point_of_a_recovery(sqlite_scene: Scene, left: str) -> None:
    for point in RECOVERY_POINTS:
        if point == "recover_after_resolution" and left == "after_prepare":
            continue  # nothing is stored, nothing to clear
        fresh = sqlite_scene.with_new_id()
        leave_open(fresh, left, 1)
        with failpoints.armed(point, failpoints.raises(KeyboardInterrupt())), pytest.raises(KeyboardInterrupt):
            fresh.recover()
        assert fresh.checked_out() == 0, point
        fresh.recover()
        assert fresh.agree() == ([1] if left == "before_kafka_commit" else []), point
        fresh.assert_resolved()


@pytest.mark.slow
@everywhere
def test_an_interrupt_at_each_point_of_reopening(scene: Scene) -> None:
    with scene.connect() as writer:
        for number, point in enumerate([*RECOVERY_POINTS[:3], "recover_after_resolution", "before_take_over"]):
            if point == "recover_after_resolution":  # not reached for a transaction that the writer knows to be committed
                writer.reopen()  # otherwise the write would first finish the interrupted reopening
                write_in_doubt(scene, writer, number)
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


class Process:
    """Runs interrupted.py to its end under many SIGINTs."""

    def __init__(self, scene: Scene, interrupts: int) -> None:
        arguments = [scene.url, scene.servers, scene.transactional_id, scene.topic, str(interrupts)]
        self.process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-X", "faulthandler", "-m", "writer.interrupted", *arguments],
            env={**os.environ, "PYTHONPATH": str(TESTS)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._errors: list[str] = []
        self._reading = threading.Thread(target=self._read_errors, daemon=True)
        self._reading.start()

    def _read_errors(self) -> None:
        assert self.process.stderr is not None
        self._errors.extend(self.process.stderr)

    def rain(self, chance: random.Random, wait: Callable[[random.Random, float], float]) -> dict[str, Any]:
        """Interrupt it whenever it is ready, after a delay that suits its pace; return its final report."""
        assert self.process.stdout is not None
        watchdog = self._watchdog()
        report: dict[str, Any] | None = None
        stop = threading.Event()
        pace = 0.0
        line = ""
        try:
            for line in self.process.stdout:
                watchdog.cancel()
                watchdog = self._watchdog()
                if line.startswith("pace "):
                    pace = float(line.removeprefix("pace "))
                    continue
                stop.set()
                if line.startswith("report "):
                    report = json.loads(line.removeprefix("report "))
                    break
                stop = threading.Event()
                second = chance.uniform(0, 0.03) if chance.random() < 0.3 else None
                delay = min(wait(chance, pace), LONGEST_DELAY)
                threading.Thread(target=self._interrupt, args=(delay, second, stop), daemon=True).start()
        finally:
            stop.set()
            watchdog.cancel()
            code = ended(self.process)
            joined(self._reading)
            for stream in (self.process.stdout, self.process.stderr):
                assert stream is not None
                stream.close()
        errors = "".join(self._errors)
        assert report is not None, f"ended with {code} after {line!r} (a transaction takes {pace:.3f} s): {errors[-6000:]}"
        report["stderr"] = errors
        return report

    def _watchdog(self) -> threading.Timer:
        """Unless it is cancelled, end the process if it hangs; faulthandler prints where each thread is."""
        watchdog = threading.Timer(SILENCE, self.process.send_signal, [signal.SIGABRT])
        watchdog.start()
        return watchdog

    def _interrupt(self, seconds: float, second: float | None, stop: threading.Event) -> None:
        """Send one or two SIGINTs, and another every two seconds: Python drops an exception raised in a destructor."""
        time.sleep(seconds)
        if second is not None:
            self.process.send_signal(signal.SIGINT)
            time.sleep(second)
        while not stop.is_set():
            self.process.send_signal(signal.SIGINT)
            stop.wait(2)


def soon(chance: random.Random, pace: float) -> float:
    """Somewhere in the first transactions, or in the recovery before them."""
    few = max(0.08, 5 * pace)
    return chance.uniform(0, few) if chance.random() < 0.8 else chance.uniform(few, 6 * few)


@pytest.mark.parametrize("seed", [int(os.environ.get("DUALWRITE_TEST_SEED", "1"))])
@pytest.mark.parametrize(
    ("interrupts", "lanes", "producer", "database"),
    thinned(
        [*EVERY_DAY, *product([INTERRUPTS], LANES, PRODUCERS, DATABASES)],
        kept=EVERY_DAY,
        quick=[],
    ),
)
def test_interrupts_at_random_moments(scene: Scene, seed: int, interrupts: int) -> None:
    report = Process(scene, interrupts).rain(random.Random(seed), soon)
    assert report["interrupts"] == interrupts
    assert report["locks_left"] == 0
    # SQLAlchemy's pool itself loses a slot (not a connection) when it is interrupted between two of its own lines, as in
    # _ConnectionRecord.checkout between `pool._do_get()` and the `try` behind it.
    assert report["checked_out"][-1] <= max(3, interrupts / 50), report
    rows = scene.agree()
    assert set(report["done"]) <= set(rows)
    assert len(report["done"]) > WARM_UP + 1, "some transactions were not interrupted"
    assert report["done"][-1] == max(rows), "the one after the last interrupt was not"
    scene.assert_resolved()
