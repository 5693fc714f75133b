"""Committing and aborting runs of a job, without a crash."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import product

import pytest
from job_scene import JobScene

from dualwrite.errors import BatchRefusedError, JobClosedError, PrefixLeasedError
from dualwrite.jobs.ledger import JobLedger
from dualwrite.jobs.rules import JobRow
from dualwrite.observability import Event, JobCommitted, TaskPrepared, observing
from dualwrite.testing import failpoints
from fixtures.pace import LIMIT, done, happened, limit
from fixtures.tiers import thinned

PARTS = [[1, 2, 3, 4], [5, 6], [], [7]]

mostly_postgresql = pytest.mark.parametrize(
    "database_url", thinned(["sqlite", "postgresql", "mariadb"], kept=["postgresql"]), indirect=True
)
"""For what `test_job_rules` decides, one task after the other: the tests with every database run the same statements."""


def test_a_batch(scene: JobScene) -> None:
    events: list[Event] = []
    with observing(events.append):
        outcomes = scene.write(scene.run(), PARTS)
    assert [outcome.rows for outcome in outcomes] == [4, 2, 0, 1]
    assert outcomes[2].prepared is None
    assert scene.table() == []
    with observing(events.append):
        assert scene.commit(outcomes) == 7
    scene.assert_holds([1, 2, 3, 4, 5, 6, 7])
    assert sorted(event.messages for event in events if isinstance(event, TaskPrepared)) == [1, 2, 4]
    assert [event.tasks for event in events if isinstance(event, JobCommitted)] == [3]


@pytest.mark.slow
def test_an_abort(scene: JobScene) -> None:
    run = scene.run()
    outcomes = scene.write(run, PARTS)
    scene.abort(outcomes)
    scene.assert_holds([])
    again = scene.write(scene.run(), PARTS)
    scene.commit(again)
    scene.assert_holds([1, 2, 3, 4, 5, 6, 7])


def test_an_abort_without_tasks(postgres_scene: JobScene) -> None:
    scene = postgres_scene
    scene.write(scene.run(3), PARTS)
    scene.abort_unknown(2)  # not the open batch
    assert len(scene.open_ids()) == 3
    scene.abort_unknown(3)
    scene.assert_holds([])


@pytest.mark.slow
def test_an_abort_without_tasks_leaves_a_run_whose_tasks_work(postgres_scene: JobScene) -> None:
    """As when a driver that was presumed dead gives up a micro-batch that its successor is writing."""
    scene = postgres_scene
    scene.site = replace(scene.site, lease_timeout=limit(6))
    run, begun, gate = scene.run(), threading.Event(), threading.Event()

    def batches() -> Iterator[list[int]]:
        yield [1]
        begun.set()
        happened(gate)
        yield [2]

    with ThreadPoolExecutor(1) as thread:
        task = thread.submit(scene.task_of, run, 0, batches())
        happened(begun)
        scene.abort_unknown()
        gate.set()
        outcome = done(task)
    scene.commit([outcome])
    scene.assert_holds([1, 2])


def test_an_abort_without_tasks_leaves_a_batch_write(postgres_scene: JobScene) -> None:
    """As when a query starts on the prefix of a write whose tasks have finished: its batch has the number 0, too."""
    scene = postgres_scene
    outcomes = scene.write(scene.run(keeps_lease=False), PARTS)
    scene.abort_unknown()
    scene.commit(outcomes)
    scene.assert_holds([1, 2, 3, 4, 5, 6, 7])


@mostly_postgresql
def test_an_abort_of_a_write_leaves_the_run_of_another_one(scene: JobScene) -> None:
    """As when a second write finds its prefix in use, before any of its tasks has reported."""
    one = scene.write(scene.run(job_id="one", keeps_lease=False), [[1], [2]])
    two = scene.run(job_id="two", keeps_lease=False)
    scene.abort_run(two)
    scene.commit(one)
    with pytest.raises(JobClosedError):
        scene.task(two, 0, [3])
    scene.assert_holds([1, 2])


def test_an_abort_of_a_committed_batch_completes_it(postgres_scene: JobScene) -> None:
    scene = postgres_scene
    outcomes = scene.write(scene.run(), PARTS)
    scene.commit(outcomes)
    scene.abort(outcomes)
    scene.abort_unknown()
    scene.assert_holds([1, 2, 3, 4, 5, 6, 7])


def test_a_batch_without_rows_replaces_an_earlier_run(scene: JobScene) -> None:
    first = scene.write(scene.run(), PARTS)  # by a driver that is paused
    assert scene.commit(scene.write(scene.run(), [[], []])) == 0
    scene.assert_holds([])
    assert scene.commit(first) == 0
    scene.assert_holds([])


@mostly_postgresql
def test_a_batch_without_rows_is_committed_once(scene: JobScene) -> None:
    assert scene.commit([]) == 0
    assert scene.commit(scene.write(scene.run(5), [[], []])) == 0
    again = scene.write(scene.run(5), PARTS)
    assert all(outcome.already_committed for outcome in again if outcome.partition != 2)
    assert scene.commit(again) == 0
    scene.assert_holds([])
    scene.commit(scene.write(scene.run(6), PARTS))
    scene.assert_holds([1, 2, 3, 4, 5, 6, 7])


@pytest.mark.slow
def test_reports_that_do_not_make_a_batch(postgres_scene: JobScene) -> None:
    """A task is missing, two attempts of one partition, tasks of two runs."""
    scene = postgres_scene
    run = scene.run()
    outcomes = [scene.task(run, 0, [1, 2]), scene.task(run, 0, [1, 2], attempt=1), scene.task(run, 1, [3])]
    for reported, refusal in [
        ([*outcomes, None], "1 of 4 tasks"),
        (outcomes, "3 tasks wrote 2 partitions"),
        ([outcomes[0], replace(outcomes[2], run=scene.run())], "2 different runs"),
    ]:
        with pytest.raises(BatchRefusedError, match=refusal):
            scene.commit(reported)
    assert scene.commit([outcomes[1], outcomes[2]]) == 3
    scene.assert_holds([1, 2, 3])


@pytest.mark.slow
def test_attempts_with_the_same_number(postgres_scene: JobScene) -> None:
    """As when Spark reruns a stage while tasks of its first attempt are still running."""
    scene = postgres_scene
    run = scene.run()
    outcomes = [scene.task(run, 0, [1, 2]) for _ in range(3)]
    assert [outcome.attempt for outcome in outcomes] == [0, 1, 2]
    assert scene.commit([outcomes[1]]) == 2
    scene.assert_holds([1, 2])
    scene.commit(scene.write(scene.run(1), [[3]]))
    assert scene.store.list(scene.prefix) == [f"{scene.prefix}.0.{attempt}" for attempt in range(3)]


@pytest.mark.slow
def test_a_winner_that_was_fenced(postgres_scene: JobScene) -> None:
    scene = postgres_scene
    outcomes = scene.write(scene.run(), PARTS)
    scene.store.claim(f"{scene.prefix}.1.0", "somebody else", timeout=LIMIT)
    with pytest.raises(BatchRefusedError, match=r"1\.0' was fenced"):
        scene.commit(outcomes)
    assert scene.table() == []
    scene.abort(outcomes)
    scene.assert_holds([])


def test_staged_rows_that_were_deleted(postgres_scene: JobScene) -> None:
    scene = postgres_scene
    outcomes = scene.write(scene.run(), PARTS)
    with scene.store.engine.begin() as connection:
        connection.exec_driver_sql("DELETE FROM staged WHERE number = 5")
    with pytest.raises(BatchRefusedError, match="staged 7 rows, but 6 were found"):
        scene.commit(outcomes)
    scene.abort(outcomes)
    scene.assert_holds([])


def test_a_batch_that_was_committed_before(scene: JobScene) -> None:
    scene.commit(scene.write(scene.run(5), PARTS))
    again = scene.write(scene.run(5), [[1, 2], [3, 4, 5], [6, 7]])  # grouped differently
    assert all(outcome.already_committed for outcome in again)
    assert scene.commit(again) == 0
    with pytest.raises(BatchRefusedError, match="batch 4 of job 'job' is out of order: batch 5"):
        scene.write(scene.run(4), [[2]])
    scene.assert_holds([1, 2, 3, 4, 5, 6, 7])


@pytest.mark.slow
def test_a_run_that_was_replaced(scene: JobScene) -> None:
    old = scene.run()
    outcomes = scene.write(old, PARTS)
    new = scene.write(scene.run(), [[1, 2, 3, 4, 5], [6, 7]])
    with pytest.raises(JobClosedError, match="was replaced"):
        scene.commit(outcomes)
    with pytest.raises(JobClosedError, match="was replaced"):
        scene.write(old, PARTS)
    scene.abort(outcomes)
    scene.commit(new)
    scene.assert_holds([1, 2, 3, 4, 5, 6, 7])


@mostly_postgresql
def test_a_prefix_belongs_to_one_job(scene: JobScene) -> None:
    """A batch write releases it, and a stream keeps it."""
    scene.commit(scene.write(scene.run(job_id="one", keeps_lease=False), [[1]]))
    scene.commit(scene.write(scene.run(job_id="stream"), [[2]]))
    with pytest.raises(PrefixLeasedError, match="held by job 'stream'") as caught:
        scene.write(scene.run(job_id="another"), [[3]])
    assert "streaming query holds" in str(caught.value)
    assert (caught.value.job_id, caught.value.batch_id) == ("stream", 0)
    scene.assert_holds([1, 2])


@pytest.mark.slow
@mostly_postgresql
def test_a_dead_batch_write_is_replaced(scene: JobScene) -> None:
    dead = scene.write(scene.run(job_id="dead", keeps_lease=False), [[1], [2]])
    scene.commit(scene.write(scene.run(job_id="next", keeps_lease=False), [[3]]))
    with pytest.raises(JobClosedError):
        scene.commit(dead)
    scene.assert_holds([3])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("database_url", "reads"),
    thinned(
        product(["sqlite", "postgresql", "mariadb"], ["before the takeover", "after it"]),
        kept=[
            ("sqlite", "after it"),
            ("postgresql", "before the takeover"),
            ("postgresql", "after it"),
            ("mariadb", "before the takeover"),
        ],
        quick=[],
    ),
    indirect=["database_url"],
)
def test_two_tasks_find_a_dead_batch_write(scene: JobScene, monkeypatch: pytest.MonkeyPatch, reads: str) -> None:
    """The second one is still watching it, or has not yet read whom to watch, when the first one takes over."""
    scene.write(scene.run(job_id="dead", keeps_lease=False), [[1], [2]])
    run, taken, second, seen = scene.run(job_id="next"), threading.Event(), threading.Event(), threading.local()
    job, of_the_first = JobLedger.job, threading.current_thread()

    def read(ledger: JobLedger, prefix: str) -> JobRow | None:
        """The second task reads the row before it watches, and once more when it begins to."""
        seen.times = getattr(seen, "times", 0) + 1
        is_second = threading.current_thread() is not of_the_first
        if is_second and reads == "after it":
            second.set()
            happened(taken)
        found = job(ledger, prefix)
        if is_second and seen.times == 2:
            second.set()
        return found

    monkeypatch.setattr(JobLedger, "job", read)
    with ThreadPoolExecutor(1) as thread:
        short, scene.site = scene.site, replace(scene.site, lease_timeout=LIMIT)
        watching = thread.submit(scene.task, run, 1, [4])
        happened(second)
        scene.site = short
        first = scene.task(run, 0, [3])
        taken.set()
        scene.commit([first, done(watching)])
    scene.assert_holds([3, 4])


@pytest.mark.slow
@mostly_postgresql
def test_a_write_whose_tasks_wait_for_their_first_rows_keeps_its_prefix(scene: JobScene) -> None:
    scene.site = replace(scene.site, lease_timeout=limit(6))
    one, gate = scene.run(job_id="one", keeps_lease=False), threading.Event()
    first = scene.task(one, 0, [1])

    def batches() -> Iterator[list[int]]:
        happened(gate)
        yield [2]

    with ThreadPoolExecutor(1) as thread:
        second = thread.submit(scene.task_of, one, 1, batches())
        try:
            with pytest.raises(PrefixLeasedError):
                scene.task(scene.run(job_id="two", keeps_lease=False), 0, [3])
        finally:
            gate.set()
        scene.commit([first, done(second)])
    scene.assert_holds([1, 2])


@pytest.mark.slow
@mostly_postgresql
def test_a_write_whose_task_cleans_up_keeps_its_prefix(scene: JobScene) -> None:
    scene.site = replace(scene.site, lease_timeout=limit(6))
    one, two = (scene.run(job_id=job, keeps_lease=False) for job in ("one", "two"))

    def another() -> None:
        with pytest.raises(PrefixLeasedError):
            scene.task(two, 0, [3])

    with failpoints.armed("job_after_open", failpoints.only_at(1, another)):
        scene.commit([scene.task(one, 0, [1])])
    scene.assert_holds([1])
