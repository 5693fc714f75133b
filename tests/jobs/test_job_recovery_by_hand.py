"""`dualwrite recover` and jobs: it resolves everything that a driver left behind that never returns."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import typer
from job_scene import JobScene
from typer.testing import CliRunner, Result

import dualwrite
from dualwrite.cli import recover, status, transactions
from dualwrite.cli.options import Target
from dualwrite.cli.recover import jobs_to_recover, name_skipped
from dualwrite.errors import BatchRefusedError, JobClosedError, StoreError
from dualwrite.jobs.job_context import OpenSite
from dualwrite.jobs.job_recovery import plan_job, recover_job
from dualwrite.jobs.ledger import JobLedger
from dualwrite.testing import failpoints
from dualwrite.testing.failpoints import FailpointError
from fixtures.pace import LIMIT

PARTS = [[1, 2, 3], [4, 5], [6]]


def run(scene: JobScene, *arguments: str) -> Result:
    return CliRunner().invoke(recover.app, ["--url", scene.url, "--kafka", scene.servers, *arguments])


@pytest.mark.slow
def test_a_driver_that_never_returns(scene: JobScene) -> None:
    outcomes = scene.write(scene.run(), PARTS)
    assert len(scene.open_ids()) == 3
    result = run(scene, "--prefix", scene.prefix, "--yes")
    assert result.exit_code == 0, result.output
    assert result.output.count("ABORTED") == 3
    scene.assert_holds([])
    with pytest.raises(JobClosedError):
        scene.commit(outcomes)
    scene.assert_holds([])


@pytest.mark.slow
def test_with_kafka_unreachable_recovery_leaves_a_running_job(
    postgres_scene: JobScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DUALWRITE_TIMEOUT_KAFKA", "0.5")
    scene = postgres_scene
    outcomes = scene.write(scene.run(), PARTS)
    result = run(scene, "--kafka", "127.0.0.1:1", "--prefix", scene.prefix, "--yes")
    assert result.exit_code == 1
    assert f"{scene.prefix}: " in result.output
    assert "127.0.0.1:1" in result.output
    scene.commit(outcomes)
    scene.assert_holds([1, 2, 3, 4, 5, 6])


def test_the_error_of_a_job_does_not_stop_the_others(postgres_scene: JobScene, monkeypatch: pytest.MonkeyPatch) -> None:
    scene = postgres_scene
    dies = failpoints.raises(FailpointError("dead"))
    for prefix, number in (("first", 1), ("second", 2)):
        outcomes = scene.write(scene.run(job_id=prefix, prefix=prefix), [[number]])
        with failpoints.armed("job_after_commit", dies), pytest.raises(FailpointError):
            scene.commit(outcomes)

    def fails_for_the_first(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(site: OpenSite, prefix: str, **options: Any) -> Any:
            if prefix == "first":
                raise StoreError("This job's rows can't be read.")
            return real(site, prefix, **options)

        return call

    with monkeypatch.context() as patch:
        patch.setattr(recover, "plan_job", fails_for_the_first(plan_job))
        patch.setattr(recover, "recover_job", fails_for_the_first(recover_job))
        planned = run(scene, "--dry-run", "--json")
        recovered = run(scene, "--json")
    assert (planned.exit_code, recovered.exit_code) == (1, 1)
    failed, done = json.loads(planned.stdout)["ids"]
    assert (failed["transactional_id"], "can't be read" in failed["error"]) == ("first", True)
    assert [each["decision"] for each in done["generations"]] == ["commit"]
    failed, done = json.loads(recovered.stdout)["ids"]
    assert (failed["transactional_id"], "can't be read" in failed["error"]) == ("first", True)
    assert [each["outcome"] for each in done["outcomes"]] == ["COMMITTED"]
    assert run(scene).exit_code == 0
    scene.assert_holds([1, 2])


def test_an_open_run_is_ended_only_by_name_and_with_confirmation(postgres_scene: JobScene) -> None:
    scene = postgres_scene
    outcomes = scene.write(scene.run(7), PARTS)
    planned = run(scene, "--prefix", scene.prefix, "--dry-run")
    assert planned.exit_code == 0, planned.output
    assert "batch 7 of job 'job'" in planned.output
    assert planned.output.count(" abort ") == 3
    asked = run(scene, "--prefix", scene.prefix)
    assert asked.exit_code == 2
    assert "Recovery ends batch 7 of job 'job'" in asked.output
    skipped = run(scene, "--yes")
    assert skipped.exit_code == 0, skipped.output
    assert f"Skipped: batch 7 of job 'job' is open on the prefix '{scene.prefix}'" in skipped.output
    scene.commit(outcomes)
    scene.assert_holds([1, 2, 3, 4, 5, 6])


def test_without_a_prefix_a_batch_that_is_opened_meanwhile_is_skipped(
    postgres_scene: JobScene, capsys: pytest.CaptureFixture[str]
) -> None:
    scene = postgres_scene
    scene.commit(scene.write(scene.run(0), PARTS))
    settings = Target(url=scene.url, kafka=scene.servers).settings()
    with jobs_to_recover(settings, scene.store.list(), "", named=False, release=False) as recover_jobs:
        assert [row.prefix for row in recover_jobs.rows] == [scene.prefix]
        outcomes = scene.write(scene.run(1), [[7]])
        recover_jobs.recover(release=False, yes=True)
        name_skipped(recover_jobs.skipped)
        assert [(row.prefix, row.batch_id) for row in recover_jobs.skipped] == [(scene.prefix, 1)]
    assert "Skipped: batch 1 of job 'job' is open" in capsys.readouterr().err
    scene.commit(outcomes)
    scene.assert_holds([1, 2, 3, 4, 5, 6, 7])


def test_a_prefix_whose_next_batch_is_opened_meanwhile_is_confirmed_again(postgres_scene: JobScene) -> None:
    scene = postgres_scene
    scene.commit(scene.write(scene.run(0), PARTS))
    settings = Target(url=scene.url, kafka=scene.servers).settings()
    with jobs_to_recover(settings, scene.store.list(), scene.prefix, named=False, release=False) as recover_jobs:
        outcomes = scene.write(scene.run(1), [[7]])
        with pytest.raises(typer.Exit):
            recover_jobs.recover(release=False, yes=False)
        scene.commit(outcomes)
        outcomes = scene.write(scene.run(2), [[8]])
        recover_jobs.recover(release=False, yes=True)
    with pytest.raises(JobClosedError):
        scene.commit(outcomes)
    scene.assert_holds([1, 2, 3, 4, 5, 6, 7])


def test_a_service_that_starts_while_a_job_opens_its_next_batch(
    postgres_scene: JobScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = postgres_scene
    scene.commit(scene.write(scene.run(0), PARTS))
    listed, outcomes = JobLedger.attempt_fences, []

    def listed_too_early(ledger: JobLedger) -> dict[str, int | None]:
        found = listed(ledger)
        outcomes.extend(scene.write(scene.run(1), [[7]]))
        return found

    monkeypatch.setattr(JobLedger, "attempt_fences", listed_too_early)
    dualwrite.recover(scene.url, kafka=scene.servers).raise_for_problems()
    scene.commit(outcomes)
    scene.assert_holds([1, 2, 3, 4, 5, 6, 7])


@pytest.mark.parametrize("prefix", ["", "shop"])
def test_a_service_that_starts_beside_a_running_job(postgres_scene: JobScene, prefix: str) -> None:
    scene, orders = postgres_scene, "shop.orders"
    outcomes = scene.write(scene.run(prefix="shop.nightly"), PARTS)
    scene.store.claim(orders, "a service that is gone", timeout=LIMIT)
    report = dualwrite.recover(scene.url, kafka=scene.servers, prefix=prefix)
    assert [one.transactional_id for one in report.ids] == [orders]
    report.raise_for_problems()
    scene.commit(outcomes)
    scene.assert_holds([1, 2, 3, 4, 5, 6])


def test_tasks_given_by_id_are_recovered(postgres_scene: JobScene) -> None:
    scene = postgres_scene
    outcomes = scene.write(scene.run(), PARTS)
    ids = [one.prepared.transactional_id for one in outcomes if one.prepared is not None]
    report = dualwrite.recover(scene.url, kafka=scene.servers, ids=ids)
    assert [one.outcome for one in report] == [dualwrite.Outcome.ABORTED] * 3
    with pytest.raises(BatchRefusedError):
        scene.commit(outcomes)
    scene.abort(outcomes)
    scene.assert_holds([])


def test_tasks_of_a_committed_batch_are_recovered(postgres_scene: JobScene) -> None:
    scene = postgres_scene
    outcomes = scene.write(scene.run(), PARTS)
    dies = failpoints.raises(FailpointError("dead"))
    with failpoints.armed("job_after_commit", dies), pytest.raises(FailpointError):
        scene.commit(outcomes)
    report = dualwrite.recover(scene.url, kafka=scene.servers)
    assert [one.outcome for one in report] == [dualwrite.Outcome.COMMITTED] * 3
    scene.commit(outcomes)
    scene.assert_holds([1, 2, 3, 4, 5, 6])


@pytest.mark.parametrize("options", [(), ("--dry-run",)])
def test_a_prefix_is_matched_exactly(postgres_scene: JobScene, options: tuple[str, ...]) -> None:
    scene = postgres_scene
    outcomes = scene.write(scene.run(prefix=f"{scene.prefix}.eu"), PARTS)
    result = run(scene, "--prefix", scene.prefix, "--yes", *options)
    assert result.exit_code == 0, result.output
    assert f"`dualwrite recover --prefix {scene.prefix}.eu` ends it" in result.stderr
    (skipped,) = json.loads(run(scene, "--prefix", scene.prefix, "--json", *options).stdout)["skipped_jobs"]
    assert (skipped["prefix"], skipped["is_open"]) == (f"{scene.prefix}.eu", True)
    scene.commit(outcomes)
    scene.assert_holds([1, 2, 3, 4, 5, 6])


def test_what_an_ended_job_has_left_on_ids_of_a_longer_prefix_is_named(postgres_scene: JobScene) -> None:
    scene = postgres_scene
    outcomes = scene.write(scene.run(), PARTS)
    dies = failpoints.raises(FailpointError("dead"))
    with failpoints.armed("job_after_commit", dies), pytest.raises(FailpointError):
        scene.commit(outcomes)
    assert outcomes[0].prepared is not None
    longer = outcomes[0].prepared.transactional_id
    result = run(scene, "--prefix", longer, "--yes")
    assert f"`dualwrite recover --prefix {scene.prefix}` resolves them" in result.stderr
    assert run(scene, "--prefix", scene.prefix).exit_code == 0
    assert "Skipped" not in run(scene, "--prefix", longer).output
    scene.assert_holds([1, 2, 3, 4, 5, 6])


def test_a_prefix_is_released(postgres_scene: JobScene) -> None:
    scene = postgres_scene
    scene.commit(scene.write(scene.run(job_id="old query"), PARTS))
    unknown = run(scene, "--prefix", "nobody", "--release", "--yes")
    assert unknown.exit_code == 2
    assert "No job owns the prefix 'nobody'" in unknown.output
    assert run(scene, "--release", "--yes").exit_code == 2
    assert run(scene, "--prefix", scene.prefix, "--release", "--yes").exit_code == 0
    scene.commit(scene.write(scene.run(job_id="new query"), [[7]]))
    scene.assert_holds([1, 2, 3, 4, 5, 6, 7])


def test_status_shows_jobs(postgres_scene: JobScene) -> None:
    scene = postgres_scene
    outcomes = scene.write(scene.run(3, job_id="nightly"), PARTS)
    result = CliRunner().invoke(status.app, ["--url", scene.url])
    assert result.exit_code == 0, result.output
    (line,) = [line for line in result.output.splitlines() if "nightly" in line]
    assert line.split()[:4] == [scene.prefix, "nightly", "3", "open"]
    told = CliRunner().invoke(status.app, ["--url", scene.url, "--json"])
    (job,) = json.loads(told.stdout)["jobs"]
    assert (job["prefix"], job["job_id"], job["batch_id"]) == (scene.prefix, "nightly", 3)
    assert (job["is_open"], job["is_held"]) == (True, True)
    assert job["owner"]
    scene.abort(outcomes)
    assert "ended" in CliRunner().invoke(status.app, ["--url", scene.url]).output


def test_the_transaction_of_an_open_batch_is_not_ended_alone(postgres_scene: JobScene) -> None:
    scene = postgres_scene
    scene.write(scene.run(7), PARTS)
    name, where = scene.open_ids()[0], ["--url", scene.url, "--kafka", scene.servers, "--yes"]
    for command in ("complete", "force-terminate"):
        refused = CliRunner().invoke(transactions.app, [command, name, *where])
        assert refused.exit_code == 1
        assert "A task of batch 7 of job 'job' uses the id, and the batch is open" in refused.output
        assert f"dualwrite recover --prefix {scene.prefix}" in refused.output
    assert len(scene.open_ids()) == 3
    assert run(scene, "--prefix", scene.prefix, "--yes").exit_code == 0
    done = CliRunner().invoke(transactions.app, ["complete", name, *where])
    assert done.exit_code == 0, done.output
