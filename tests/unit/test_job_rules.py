"""Who may open a batch on a prefix."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dualwrite.errors import BatchRefusedError, JobClosedError, PrefixLeasedError
from dualwrite.jobs.rules import Committed, JobRow, JobRun, Opening, after_close, opened, with_given_up

NONE = Committed(this=False, newest=None)
STREAM = JobRun("orders", "query", 7, keeps_lease=True)
WRITE = JobRun("orders", "nightly")


def row_of(run: JobRun) -> JobRow:
    outcome, row = opened(None, run, NONE, owner="me", staging_table="staged")
    assert outcome is Opening.OPENED
    assert row is not None
    return row


def open_on(
    row: JobRow | None, run: JobRun, committed: Committed = NONE, *, dead: str | None = None
) -> tuple[Opening, JobRow | None]:
    return opened(row, run, committed, owner="me", staging_table="staged", dead=dead)


def again(run: JobRun, **changes: object) -> JobRun:
    """Another run, with its own token."""
    return replace(JobRun(run.prefix, run.job_id, run.batch_id, run.keeps_lease), **changes)  # type: ignore[arg-type]


def test_the_first_run() -> None:
    row = row_of(STREAM)
    assert row.is_open_for(STREAM)
    assert (row.job_id, row.batch_id, row.keeps_lease, row.earlier_tokens) == ("query", 7, True, ())


def test_the_tasks_of_a_run_join_it() -> None:
    assert open_on(row_of(STREAM), STREAM) == (Opening.JOINED, None)


def test_a_closed_run_stays_closed() -> None:
    with pytest.raises(JobClosedError, match="has been closed"):
        open_on(after_close(row_of(STREAM)), STREAM)


@pytest.mark.parametrize("closed_before", [False, True])
def test_a_newer_run_of_the_batch(closed_before: bool) -> None:
    row = row_of(STREAM)
    newer = again(STREAM)
    outcome, new = open_on(after_close(row) if closed_before else row, newer)
    assert outcome is Opening.OPENED
    assert new is not None
    assert new.is_open_for(newer)
    with pytest.raises(JobClosedError, match="was replaced"):
        open_on(new, STREAM)
    with pytest.raises(JobClosedError, match="was replaced"):
        open_on(after_close(new), STREAM)


def test_the_next_batch() -> None:
    outcome, new = open_on(after_close(row_of(STREAM)), again(STREAM, batch_id=8), Committed(this=False, newest=7))
    assert outcome is Opening.OPENED
    assert new is not None
    assert new.earlier_tokens == ()
    with pytest.raises(JobClosedError):
        open_on(new, STREAM)


def test_a_batch_that_is_committed() -> None:
    assert open_on(row_of(STREAM), again(STREAM), Committed(this=True, newest=7)) == (Opening.ALREADY_COMMITTED, None)


@pytest.mark.parametrize("is_committed", [True, False])
def test_an_outdated_batch(is_committed: bool) -> None:
    """A query repeats only its newest batch. An earlier one comes from a checkpoint that was reset: it has other rows."""
    with pytest.raises(BatchRefusedError, match="out of order: batch 9"):
        open_on(row_of(STREAM), again(STREAM), Committed(this=is_committed, newest=9))


def test_a_batch_that_is_committed_for_another_query() -> None:
    run = again(STREAM, batch_id=0, bound_to="the query new")
    for newest in (0, 9):
        with pytest.raises(BatchRefusedError, match=r"committed for the query old; this run is of the query new.*job_id"):
            open_on(row_of(STREAM), run, Committed(this=True, newest=newest, bound_to="the query old"))
    committed = Committed(this=True, newest=0, bound_to="the query new")
    assert open_on(row_of(STREAM), run, committed) == (Opening.ALREADY_COMMITTED, None)


@pytest.mark.parametrize("is_open", [True, False])
def test_a_query_keeps_its_prefix(is_open: bool) -> None:
    row = row_of(STREAM)
    with pytest.raises(PrefixLeasedError, match="--release") as caught:
        open_on(row if is_open else after_close(row), WRITE)
    assert (caught.value.job_id, caught.value.batch_id, caught.value.owner) == ("query", 7, "me")


def test_a_released_prefix() -> None:
    row = after_close(row_of(STREAM), keeps_lease=False)
    assert open_on(row, WRITE)[0] is Opening.OPENED


def test_an_open_write_holds_its_prefix() -> None:
    row = row_of(WRITE)
    other = JobRun("orders", "another")
    with pytest.raises(PrefixLeasedError, match="sends heartbeats"):
        open_on(row, other)
    with pytest.raises(PrefixLeasedError):
        open_on(row, other, dead="somebody else's token")
    assert open_on(row, other, dead=row.token)[0] is Opening.OPENED
    assert open_on(after_close(row), other)[0] is Opening.OPENED


def next_row(row: JobRow | None, run: JobRun) -> JobRow:
    outcome, new = open_on(row, run)
    assert outcome is Opening.OPENED
    assert new is not None
    return new


@pytest.mark.parametrize("others", [1, 2])
def test_a_closed_run_stays_closed_after_runs_of_other_jobs(others: int) -> None:
    """Without `jobId` every write is a job of its own."""
    row = after_close(row_of(WRITE))
    for number in range(others):
        row = next_row(row, JobRun("orders", f"another {number}"))
        with pytest.raises(JobClosedError, match="was replaced"):
            open_on(row, WRITE)
        row = after_close(row)
        with pytest.raises(JobClosedError, match="was replaced"):
            open_on(row, WRITE)


def test_a_run_that_was_given_up_stays_so_after_another_job() -> None:
    given_up = JobRun("orders", "another")
    row = after_close(with_given_up(row_of(WRITE), given_up))
    row = after_close(next_row(row, JobRun("orders", "a third")))
    for run in (given_up, WRITE):
        with pytest.raises(JobClosedError):
            open_on(row, run)


def test_errors_survive_pickling() -> None:
    import pickle  # noqa: PLC0415

    with pytest.raises(PrefixLeasedError) as caught:
        open_on(row_of(STREAM), WRITE)
    assert pickle.loads(pickle.dumps(caught.value)).job_id == "query"
