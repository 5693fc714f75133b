"""Who may open a batch on a prefix; and ids of task attempts, which never collide."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualwrite.errors import BatchRefusedError, InvalidTransactionalIdError, JobClosedError, PrefixLeasedError
from dualwrite.jobs.rules import (
    MAX_PREFIX_LENGTH,
    AttemptId,
    Committed,
    JobRow,
    JobRun,
    OpeningResult,
    after_close,
    opened,
    validate_prefix,
    with_given_up,
)
from fixtures.tables import table

NONE = Committed(this=False, newest=None)
STREAM = JobRun("orders", "query", 7, keeps_lease=True)
WRITE = JobRun("orders", "nightly")


def open_on(
    row: JobRow | None, run: JobRun, committed: Committed = NONE, *, dead: str | None = None
) -> tuple[OpeningResult, JobRow | None]:
    return opened(row, run, committed, owner="me", staging_table="staged", dead=dead)


def row_of(run: JobRun, before: JobRow | None = None, committed: Committed = NONE) -> JobRow:
    """The row after the run was opened."""
    outcome, row = open_on(before, run, committed)
    assert outcome is OpeningResult.OPENED
    assert row is not None
    return row


def again(run: JobRun, **changes: object) -> JobRun:
    """Another run, with its own token."""
    return replace(JobRun(run.prefix, run.job_id, run.batch_id, run.keeps_lease), **changes)  # type: ignore[arg-type]


def test_the_first_run() -> None:
    row = row_of(STREAM)
    assert row.is_open_for(STREAM)
    assert (row.job_id, row.batch_id, row.keeps_lease, row.earlier_tokens) == ("query", 7, True, ())


def test_the_tasks_of_a_run_join_it() -> None:
    assert open_on(row_of(STREAM), STREAM) == (OpeningResult.JOINED, None)


def test_a_closed_run_stays_closed() -> None:
    with pytest.raises(JobClosedError, match="has been closed"):
        open_on(after_close(row_of(STREAM)), STREAM)


@pytest.mark.parametrize("closed_before", [False, True])
def test_a_newer_run_of_the_batch(closed_before: bool) -> None:
    row = row_of(STREAM)
    newer = again(STREAM)
    new = row_of(newer, after_close(row) if closed_before else row)
    assert new.is_open_for(newer)
    with pytest.raises(JobClosedError, match="was replaced"):
        open_on(new, STREAM)
    with pytest.raises(JobClosedError, match="was replaced"):
        open_on(after_close(new), STREAM)


def test_the_next_batch() -> None:
    new = row_of(again(STREAM, batch_id=8), after_close(row_of(STREAM)), Committed(this=False, newest=7))
    assert new.earlier_tokens == ()
    with pytest.raises(JobClosedError):
        open_on(new, STREAM)


def test_a_batch_that_is_committed() -> None:
    assert open_on(row_of(STREAM), again(STREAM), Committed(this=True, newest=7)) == (OpeningResult.ALREADY_COMMITTED, None)


@pytest.mark.parametrize("is_committed", [True, False])
def test_an_outdated_batch(is_committed: bool) -> None:
    """A query repeats only its newest batch. An earlier one comes from a checkpoint that was reset: it has other rows."""
    with pytest.raises(BatchRefusedError, match="out of order: batch 9"):
        open_on(row_of(STREAM), again(STREAM), Committed(this=is_committed, newest=9))


def test_a_batch_that_is_committed_for_another_query() -> None:
    run = again(STREAM, batch_id=0, bound_to="the query new")
    for newest in (0, 9):
        with pytest.raises(BatchRefusedError, match=r"(?s)committed for the query old; this run is of the query new.*job_id"):
            open_on(row_of(STREAM), run, Committed(this=True, newest=newest, bound_to="the query old"))
    committed = Committed(this=True, newest=0, bound_to="the query new")
    assert open_on(row_of(STREAM), run, committed) == (OpeningResult.ALREADY_COMMITTED, None)


def test_a_query_keeps_its_prefix() -> None:
    row = row_of(STREAM)
    for held in (row, after_close(row)):
        with pytest.raises(PrefixLeasedError, match="--release") as caught:
            open_on(held, WRITE)
        assert (caught.value.job_id, caught.value.batch_id, caught.value.owner) == ("query", 7, "me")
    assert pickle.loads(pickle.dumps(caught.value)).job_id == "query"
    assert open_on(after_close(row, keeps_lease=False), WRITE)[0] is OpeningResult.OPENED


def test_an_open_write_holds_its_prefix() -> None:
    row = row_of(WRITE)
    other = JobRun("orders", "another")
    with pytest.raises(PrefixLeasedError, match="sends heartbeats"):
        open_on(row, other)
    with pytest.raises(PrefixLeasedError):
        open_on(row, other, dead="somebody else's token")
    assert open_on(row, other, dead=row.token)[0] is OpeningResult.OPENED
    assert open_on(after_close(row), other)[0] is OpeningResult.OPENED


@pytest.mark.parametrize("others", [1, 2])
def test_a_closed_run_stays_closed_after_runs_of_other_jobs(others: int) -> None:
    """Without `jobId` every write is a job of its own."""
    row = after_close(row_of(WRITE))
    for number in range(others):
        row = row_of(JobRun("orders", f"another {number}"), row)
        with pytest.raises(JobClosedError, match="was replaced"):
            open_on(row, WRITE)
        row = after_close(row)
        with pytest.raises(JobClosedError, match="was replaced"):
            open_on(row, WRITE)


def test_a_run_that_was_given_up_stays_so_after_another_job() -> None:
    given_up = JobRun("orders", "another")
    row = after_close(with_given_up(row_of(WRITE), given_up))
    row = after_close(row_of(JobRun("orders", "a third"), row))
    for run in (given_up, WRITE):
        with pytest.raises(JobClosedError):
            open_on(row, run)


PREFIXES = st.text(st.characters(codec="ascii", categories=["L", "N", "P"], exclude_characters="#~"), min_size=1, max_size=40)
NUMBERS = st.integers(0, 2**31)


@given(st.tuples(PREFIXES, NUMBERS, NUMBERS), st.tuples(PREFIXES, NUMBERS, NUMBERS))
def test_no_two_attempts_share_an_id(one: tuple[str, int, int], other: tuple[str, int, int]) -> None:
    assert (str(AttemptId(*one)) == str(AttemptId(*other))) == (one == other)


@given(PREFIXES, NUMBERS, NUMBERS, NUMBERS, NUMBERS)
def test_prefixes_with_a_common_beginning_share_no_id(prefix: str, first: int, second: int, third: int, fourth: int) -> None:
    assert str(AttemptId(prefix, first, second)) != str(AttemptId(f"{prefix}.{first}", third, fourth))


@table("prefix", ["", "a#b", "a~b", "a\n", "x" * (MAX_PREFIX_LENGTH + 1)])
def test_invalid_prefixes_are_refused(prefix: str) -> None:
    with pytest.raises(InvalidTransactionalIdError):
        validate_prefix(prefix)


def test_the_longest_prefix_leaves_room_for_the_numbers() -> None:
    longest = validate_prefix("x" * MAX_PREFIX_LENGTH)
    assert len(str(AttemptId(longest, 2**31, 2**31))) <= 255
