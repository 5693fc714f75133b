"""The end of a run with interference by another process: the cases that tests/model found."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
from job_scene import JobScene, MakeScene, NumberLoader, staged
from typer.testing import CliRunner

import dualwrite
from dualwrite.cli import recover
from dualwrite.errors import (
    BatchRefusedError,
    DualWriteError,
    FencedError,
    JobClosedError,
    LostTransactionError,
    PrefixLeasedError,
)
from dualwrite.jobs.job_recovery import cleanup, delete_staged, recover_job
from dualwrite.jobs.job_tables import AttemptRow, StagedRows
from dualwrite.jobs.ledger import JobLedger
from dualwrite.jobs.rules import Prepared, TaskOutcome
from dualwrite.kafka.client.config import KafkaConfig
from dualwrite.kafka.client.coordinator import WireTransactionCoordinator
from dualwrite.recipe.republish import HEADER
from dualwrite.recovery.recoverer import Recoverer
from dualwrite.testing import failpoints
from dualwrite.testing.failpoints import FailpointError
from fixtures.broker import read_topic
from fixtures.pace import LIMIT, done, happened

PARTS = [[1, 2], [3]]


def decided_only(scene: JobScene, outcomes: list[TaskOutcome]) -> None:
    """A driver that dies right after the database commit."""
    with failpoints.armed("job_after_commit", failpoints.raises(FailpointError("dead"))), pytest.raises(FailpointError):
        scene.commit(outcomes)


@contextmanager
def ended_at(point: str, scene: JobScene) -> Iterator[None]:
    """Another process recovers the job manually while a task is at this point."""

    def end() -> None:
        with scene.site.opened() as opened:
            recover_job(opened, scene.prefix)

    with failpoints.armed(point, failpoints.only_at(1, end)):
        yield


def test_a_task_that_starts_after_the_abort_of_an_unopened_run(scene: JobScene) -> None:
    run = scene.run()
    scene.abort_run(run)
    with pytest.raises(JobClosedError, match="has been closed"):
        scene.task(run, 1, [9])
    scene.commit(scene.write(scene.run(), PARTS))
    scene.assert_holds([1, 2, 3])


@pytest.mark.parametrize("is_fresh", [True, False])
def test_a_run_that_is_aborted_before_it_has_written_does_not_take_the_prefix(postgres_scene: JobScene, is_fresh: bool) -> None:
    """As when all tasks of a query's first batch fail, and the query is started again with a new checkpoint."""
    scene = postgres_scene
    if not is_fresh:
        scene.commit(scene.write(scene.run(job_id="before", keeps_lease=False), [[9]]))
    aborted = scene.run(job_id="one")
    scene.abort_run(aborted)
    scene.commit(scene.write(scene.run(job_id="two"), PARTS))
    with pytest.raises(JobClosedError, match="was replaced"):
        scene.task(aborted, 1, [8])
    scene.assert_holds([1, 2, 3] if is_fresh else [1, 2, 3, 9])


def test_an_abort_before_anything_was_written_keeps_the_lease(postgres_scene: JobScene) -> None:
    scene = postgres_scene
    scene.commit(scene.write(scene.run(0), PARTS))
    scene.abort_run(scene.run(1))
    with pytest.raises(PrefixLeasedError):
        scene.task(scene.run(job_id="another"), 0, [9])
    scene.commit(scene.write(scene.run(1), [[4]]))
    scene.assert_holds([1, 2, 3, 4])


def test_a_task_that_starts_after_the_abort_of_an_unopened_run_while_another_run_is_open(postgres_scene: JobScene) -> None:
    scene = postgres_scene
    outcomes = scene.write(scene.run(), PARTS)
    given_up = scene.run()
    scene.abort_run(given_up)
    with pytest.raises(JobClosedError, match="was replaced"):
        scene.task(given_up, 1, [9])
    scene.commit(outcomes)
    scene.assert_holds([1, 2, 3])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("point", "error"),
    [
        ("job_after_open", JobClosedError),
        ("job_after_claim", FencedError),
        ("job_after_start", DualWriteError),
        ("job_after_batch", DualWriteError),
        ("job_before_staged", FencedError),
    ],
)
def test_a_run_that_is_ended_while_a_task_runs(postgres_scene: JobScene, point: str, error: type[DualWriteError]) -> None:
    """The task stops, and leaves nothing behind that only a later cleanup would find."""
    scene = postgres_scene
    scene.commit([scene.task(scene.run(), 0, [9])])  # so that the id was used before, and is resolved
    with ended_at(point, scene), pytest.raises(error):
        scene.task(scene.run(1), 0, [1, 2])
    scene.assert_holds([9])


def test_a_run_that_is_ended_once_its_last_task_has_prepared(postgres_scene: JobScene) -> None:
    with ended_at("job_after_prepare", postgres_scene):
        outcome = postgres_scene.task(postgres_scene.run(), 0, [1, 2])
    with pytest.raises(JobClosedError):
        postgres_scene.commit([outcome])
    postgres_scene.assert_holds([])


@pytest.mark.slow
def test_staged_rows_locked_by_another_transaction(scene: JobScene) -> None:
    """They are left to the next cleanup; this is not an error."""
    outcomes = scene.write(scene.run(), PARTS)
    fences = {one.prepared.transactional_id: one.prepared.fence for one in outcomes if one.prepared is not None}
    with scene.store.short_transactions.begin(5) as connection, scene.site.opened() as opened:
        connection.execute(staged.update().values(number=staged.c.number))
        assert delete_staged(opened, fences, StagedRows("staged")) == 0
    assert scene.staged() == 3
    scene.commit(outcomes)
    scene.assert_holds([1, 2, 3])


def test_a_sink_that_loses_a_row(postgres_scene: JobScene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NumberLoader, "finish", lambda _: 1)
    with pytest.raises(BatchRefusedError, match="sent 2 messages and staged 1 rows"):
        postgres_scene.task(postgres_scene.run(), 0, [1, 2])


@pytest.mark.slow
def test_a_task_that_opened_the_run_and_died_before_cleanup(postgres_scene: JobScene) -> None:
    scene = postgres_scene
    scene.write(scene.run(), [[1], [2], [3], [4]])  # by a driver that died
    run = scene.run()
    with failpoints.armed("job_after_open", failpoints.raises(FailpointError("dead"))), pytest.raises(FailpointError):
        scene.task(run, 0, [1, 2, 3, 4])
    scene.commit([scene.task(run, 0, [1, 2, 3, 4], attempt=1)])
    scene.assert_holds([1, 2, 3, 4])


@pytest.mark.slow
def test_commit_waits_for_the_recoverer_of_a_winner_of_the_previous_run(postgres_scene: JobScene) -> None:
    scene = postgres_scene
    decided_only(scene, scene.write(scene.run(), PARTS))
    again = scene.write(scene.run(), PARTS)
    assert all(outcome.already_committed for outcome in again)
    name = f"{scene.prefix}.0.0"
    claimed = threading.Event()

    listed = JobLedger.attempts

    def listed_too_early(ledger: JobLedger, *arguments: Any) -> list[AttemptRow]:
        """Another process claims the id after commit has read it and before commit's own claim."""
        found = listed(ledger, *arguments)
        scene.store.claim(name, "a slow recoverer", timeout=LIMIT)
        claimed.set()
        return found

    with ThreadPoolExecutor(1) as thread:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(JobLedger, "attempts", listed_too_early)
            committing = thread.submit(scene.commit, again)
            happened(claimed)
            assert wait([committing], 2).not_done, "commit returned though a message is not visible yet"
        coordinator = WireTransactionCoordinator(KafkaConfig.of(scene.servers))
        Recoverer(scene.store, coordinator).recover([name])
        coordinator.close()
        done(committing)
    scene.assert_holds([1, 2, 3])


def lose_decided(scene: JobScene) -> Prepared:
    """A driver that dies right after the database's commit; Kafka aborts the first task's transaction after its timeout."""
    outcomes = scene.write(scene.run(), PARTS)
    decided_only(scene, outcomes)
    prepared = outcomes[0].prepared
    assert prepared is not None
    state = prepared.state
    with scene.site.opened() as opened:
        row = opened.store.read(prepared.transactional_id)
        assert row is not None
        kafka_id = row.kafka_id(prepared.generation)
        ended = opened.coordinator.end_transaction(kafka_id, producer_id=state.producer_id, epoch=state.epoch, commit=False)
    assert ended.proven
    return prepared


@pytest.mark.slow
@pytest.mark.parametrize("finder", ["the next run", "recovery", "a run after a recovery that published nothing"])
def test_lost_messages_of_a_batch_are_published_again(finder: str, make_scene: MakeScene, postgres_url: str) -> None:
    scene = make_scene(postgres_url, two_phase=False)
    lose_decided(scene)
    if finder != "the next run":
        site = scene.site if finder == "recovery" else replace(scene.site, on_lost="raise")
        with site.opened() as opened:
            report = recover_job(opened, scene.prefix)
        assert report is not None
        assert report.ok == (finder == "recovery")
        assert scene.topic() == ([1, 2, 3] if finder == "recovery" else [3])
    assert scene.commit(scene.write(scene.run(), PARTS)) == 0
    scene.assert_holds([1, 2, 3])


@pytest.mark.slow
@pytest.mark.parametrize("command", [False, True])
def test_messages_that_are_published_again_are_marked_if_it_is_asked_for(
    make_scene: MakeScene, postgres_url: str, command: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = make_scene(postgres_url, two_phase=False, mark_republished=True)
    state = str(lose_decided(scene).state).encode()
    if command:
        monkeypatch.setenv("DUALWRITE_MARK_REPUBLISHED", "true")
        where = ["--url", scene.url, "--kafka", scene.servers, "--prefix", scene.prefix, "--republish"]
        told = CliRunner().invoke(recover.app, where)
        assert told.exit_code == 0, told.output
    assert scene.commit(scene.write(scene.run(), PARTS)) == 0
    marked = {int(each.value() or b""): each.headers() for each in read_topic(scene.servers, scene.sink.topic)}
    assert marked == {1: [(HEADER, state)], 2: [(HEADER, state)], 3: None}


@pytest.mark.slow
def test_a_task_of_a_newer_run_keeps_an_id_on_which_something_is_lost(make_scene: MakeScene, postgres_url: str) -> None:
    """A cleanup that has listed the attempts before does not take the id to publish what is lost."""
    scene = make_scene(postgres_url, two_phase=False, on_lost="raise")
    prepared = lose_decided(scene)
    with scene.site.opened() as opened:
        recover_job(opened, scene.prefix)
    with replace(scene.site, on_lost="republish").opened() as opened:
        left = opened.ledger.attempts(scene.prefix)
        outcomes = scene.write(scene.run(batch_id=1), [[7, 8], [9]])
        before = opened.store.read(prepared.transactional_id)
        assert before is not None
        assert before.lost
        cleanup(opened, left, StagedRows(scene.sink.staging_table))
        assert opened.store.read(prepared.transactional_id) == before
    assert scene.commit(outcomes) == 3


@pytest.mark.slow
def test_a_loss_found_by_another_recovery(make_scene: MakeScene, postgres_url: str) -> None:
    scene = make_scene(postgres_url, two_phase=False, on_lost="raise")
    prepared = lose_decided(scene)
    with scene.site.opened() as opened:
        report = recover_job(opened, scene.prefix)
    assert report is not None
    assert [one.transactional_id for one in report.ids if one.unacknowledged] == [prepared.transactional_id]
    with pytest.raises(LostTransactionError):
        scene.commit(scene.write(scene.run(), PARTS))
    told = CliRunner().invoke(
        recover.app, ["--url", scene.url, "--kafka", scene.servers, "--prefix", scene.prefix, "--acknowledge", "--yes"]
    )
    assert told.exit_code == 0, told.output
    assert str(prepared.state) in told.output.partition("Acknowledged:")[2]
    assert scene.commit(scene.write(scene.run(), PARTS)) == 0
    assert scene.table() == [1, 2, 3]
    assert scene.topic() == [3]  # the loss is final and was reported


@pytest.mark.slow
def test_commit_does_not_return_while_a_copy_is_lost_as_well(make_scene: MakeScene, postgres_url: str) -> None:
    scene = make_scene(postgres_url, two_phase=False)
    prepared = lose_decided(scene)

    def abort() -> None:
        with scene.site.opened() as opened:
            row = opened.store.read(prepared.transactional_id)
            assert row is not None
            state = row.prepared_state
            assert state is not None
            kafka_id = row.kafka_id(row.prepared_generation)
            opened.coordinator.end_transaction(kafka_id, producer_id=state.producer_id, epoch=state.epoch, commit=False)

    outcomes = scene.write(scene.run(), PARTS)
    with (
        failpoints.armed("republish_after_record", failpoints.only_at(1, abort)),
        pytest.raises(dualwrite.InDoubtTransactionError),
    ):
        scene.commit(outcomes)
    assert scene.topic() == [3]
    assert scene.commit(scene.write(scene.run(), PARTS)) == 0
    scene.assert_holds([1, 2, 3])
