"""Only one process can open a RocksDB database, so its zombies are threads: paused at each failpoint, overtaken, continued."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import product

import pytest

import dualwrite
from crash import worker
from crash.cases import (
    LEFT,
    OPENING_POINTS,
    PAST_COMMIT_POINT,
    RECOVERY_POINTS,
    ROW_LOCKED,
    ROW_NOT_LOCKED,
    crash_writer,
)
from crash.databases import Databases
from crash.scene import Scene
from dualwrite.devcluster import DevCluster
from dualwrite.testing import failpoints
from fixtures.pace import happened, joined
from fixtures.tiers import thinned

pytestmark = pytest.mark.usefixtures("native")


@pytest.fixture
def scene(databases: Databases, broker: DevCluster) -> Scene:
    return databases.scene("rocksdb", broker)


class Zombie(threading.Thread):
    """A thread that opens a writer and writes two events, paused at a failpoint in the second one, or in opening."""

    def __init__(self, scene: Scene, first: int, point: str) -> None:
        super().__init__(daemon=True)
        self._scene = scene
        self._first = first
        self._opening = point in (*RECOVERY_POINTS, *OPENING_POINTS)
        self._paused, self._woken = threading.Event(), threading.Event()
        self._armed = self._opening
        self.committed: list[int] = []
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            with self._scene.connect() as writer:
                for number in (self._first, self._first + 1):
                    self._armed = self._opening or number > self._first
                    worker.write_event(writer, self._scene.topic, number)
                    self.committed.append(number)
        except BaseException as error:  # noqa: BLE001  (checked by the test)
            self.error = error

    def pause(self) -> None:
        """The failpoint's action: only in this thread, and only in the second transaction or in opening."""
        if threading.current_thread() is self and self._armed and not self._paused.is_set():
            self._paused.set()
            happened(self._woken)

    def wait_until_paused(self) -> None:
        happened(self._paused, lambda: f"it pauses: {self.error!r}")

    def wake(self) -> BaseException | None:
        self._woken.set()
        joined(self)
        return self.error


@contextmanager
def paused(scene: Scene, first: int, point: str) -> Iterator[Zombie]:
    zombie = Zombie(scene, first, point)
    with ExitStack() as stack:
        stack.enter_context(failpoints.armed(point, zombie.pause))
        stack.callback(zombie.wake)
        zombie.start()
        zombie.wait_until_paused()
        yield zombie


@pytest.mark.parametrize("point", thinned(ROW_NOT_LOCKED, quick=["after_prepare"]))
def test_a_writer_paused_before_it_recorded_is_fenced(scene: Scene, point: str) -> None:
    with paused(scene, 1, point) as zombie:
        scene.write_here(100)
        assert isinstance(zombie.wake(), dualwrite.FencedError), zombie.error
    assert scene.agree() == [1, 100]
    scene.write_here(101)
    assert scene.agree() == [1, 100, 101]


@pytest.mark.slow
@pytest.mark.parametrize("point", ROW_LOCKED)
def test_a_writer_paused_with_its_row_locked_blocks_others_and_commits(scene: Scene, point: str) -> None:
    with paused(scene, 1, point) as zombie:
        with pytest.raises(dualwrite.ClaimTimeoutError):
            scene.connect(timeouts=dualwrite.Timeouts(claim=0.5))
        assert zombie.wake() is None
    assert scene.agree() == [1, 2]


@pytest.mark.parametrize("point", thinned(PAST_COMMIT_POINT, quick=["after_db_commit"]))
def test_a_writer_paused_past_its_commit_point_is_in_doubt_or_learns_that_it_committed(scene: Scene, point: str) -> None:
    with paused(scene, 1, point) as zombie:
        scene.write_here(100)
        error = zombie.wake()
        if point == "after_kafka_commit":
            assert (error, zombie.committed) == (None, [1, 2])
        else:
            assert isinstance(error, dualwrite.InDoubtTransactionError), error
            assert error.database_committed is True
    assert scene.agree() == [1, 2, 100]


OPENING = [*RECOVERY_POINTS, *OPENING_POINTS]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("left", "point"),
    thinned(  # each step on PostgreSQL: test_zombie
        product(LEFT, OPENING),
        kept=[
            ("after_prepare", "recover_after_describe"),
            ("after_db_commit", "recover_after_claim"),
            ("after_db_commit", "recover_after_resolution"),
            ("after_db_commit", "before_take_over"),
        ],
    ),
)
def test_a_writer_paused_while_it_opens_is_fenced(scene: Scene, left: str, point: str) -> None:
    crash_writer(scene, left)
    expected = LEFT[left]
    with paused(scene, 50, point) as zombie:
        scene.write_here(100)
        assert isinstance(zombie.wake(), dualwrite.FencedError), zombie.error
    assert scene.agree() == [*expected, 100]
    scene.write_here(101)
    assert scene.agree() == [*expected, 100, 101]
