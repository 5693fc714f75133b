"""`dualwrite recover` for jobs: a prefix names exactly one job, and a running job is left alone unless it is named."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import typer

from dualwrite.cli.options import confirm, refuse, say
from dualwrite.cli.output import Columns, Record
from dualwrite.errors import DualWriteError, shell_word
from dualwrite.jobs.job_context import JobSite, OpenSite
from dualwrite.jobs.job_recovery import plan_job, recover_job
from dualwrite.jobs.rules import JobRow
from dualwrite.recovery.plan import IdPlan, RecoveryPlan
from dualwrite.recovery.report import IdReport, RecoveryReport
from dualwrite.settings import Settings
from dualwrite.stores.registry import keeps_a_table
from dualwrite.texts import time_text


def job_record(row: JobRow) -> Record:
    """The row of a job."""
    return {
        "prefix": row.prefix,
        "job_id": row.job_id,
        "batch_id": row.batch_id,
        "is_open": row.is_open,
        "is_held": row.keeps_lease or row.is_open,
        "owner": row.owner,
        "updated_at": row.updated_at,
    }


JOBS: Final[Columns] = {
    "prefix": "prefix",
    "job": "job_id",
    "batch": "batch_id",
    "": lambda row: "open" if row["is_open"] else "ended",
    "owned": lambda row: "by this job" if row["is_held"] else "no",
    "owner": "owner",
    "updated": "updated_at",
}


@dataclass(frozen=True)
class JobsToRecover:
    """The jobs that one call of `recover` covers."""

    site: OpenSite
    rows: tuple[JobRow, ...]
    attempts: frozenset[str]
    """The ids of the tasks of all jobs, which must not be recovered individually."""

    named: bool
    """Whether the jobs were named, so that an open batch is ended, too."""

    skipped: list[JobRow]
    """Jobs that were not named: those that have an open batch, or with a prefix, those on another prefix whose tasks have left
    something on the requested ids. `recover` adds those that have opened their batch since."""

    def plans(self) -> list[tuple[JobRow, RecoveryPlan]]:
        """What `recover` would do for each. Changes nothing. An error of a job is reported under its prefix."""
        return [(row, self._plan(row)) for row in self.rows]

    def _plan(self, row: JobRow) -> RecoveryPlan:
        try:
            return plan_job(self.site, row.prefix)
        except DualWriteError as error:
            return RecoveryPlan((IdPlan(row.prefix, error=error),))

    def recover(self, *, release: bool, yes: bool) -> RecoveryReport:
        """Recover them, after asking for confirmation for each one that is open. An error is reported as in `plans`."""
        reports = [self._recovered(row, release=release, yes=yes) for row in self.rows]
        return RecoveryReport(tuple(one for report in reports for one in report.ids))

    def _recovered(self, row: JobRow, *, release: bool, yes: bool) -> RecoveryReport:
        """Recover a job, unless it was not named and has an open batch by now."""
        while True:
            if row.is_open and not self.named:
                self.skipped.append(row)
                return RecoveryReport()
            if row.is_open:
                confirm(
                    f"Recovery ends batch {row.batch_id} of job {row.job_id!r} on the prefix {row.prefix!r}, opened by "
                    f"{row.owner!r}, last change at {time_text(row.updated_at)}; that run can no longer commit. "
                    "Continue?",
                    yes=yes,
                )
            try:
                report = recover_job(self.site, row.prefix, expected=row, release=release)
                changed = None if report is not None else self.site.ledger.job(row.prefix)
            except DualWriteError as error:
                return RecoveryReport((IdReport(row.prefix, error=error),))
            if changed is None:
                return report or RecoveryReport()
            row = changed


def name_skipped(rows: Iterable[JobRow]) -> None:
    """Print on stderr which jobs are skipped, and the command that recovers each."""
    for row in rows:
        command = f"`dualwrite recover --prefix {shell_word(row.prefix)}`"
        if row.is_open:
            left = f"batch {row.batch_id} of job {row.job_id!r} is open on the prefix {row.prefix!r} ({row.owner})"
            say(f"Skipped: {left}; {command} ends it.", err=True)
        else:
            left = f"tasks of job {row.job_id!r} on the prefix {row.prefix!r} have left transactions"
            say(f"Skipped: {left}; {command} resolves them.", err=True)


@contextmanager
def jobs_to_recover(
    settings: Settings, chosen: list[str], prefix: str, *, named: bool, release: bool
) -> Iterator[JobsToRecover | None]:
    """The jobs that `recover` covers for the chosen ids; None if the database has no job tables, or ids were `named`."""
    if release and not prefix:
        raise typer.BadParameter("also give --prefix: the prefix to release.", param_hint="--release")
    if named or settings.database_url is None or not keeps_a_table(settings.database_url):
        yield None
        return
    where = JobSite(
        settings.database_url,
        dict(settings.kafka),
        timeouts=settings.timeouts,
        schema=settings.schema,
        on_lost=settings.on_lost,
        mark_republished=settings.mark_republished,
    )
    with where.opened() as site:
        rows = site.ledger.jobs()
        if prefix:
            ours = [row for row in rows if row.prefix == prefix]
            if release and not ours:
                refuse(f"No job owns the prefix {prefix!r}.")
        else:
            ours = [row for row in rows if not row.is_open]
        attempts = site.ledger.attempts_among(chosen) if rows else frozenset()
        others = [row for row in rows if row not in ours]
        skipped = [row for row in others if _has_left(site, row, attempts)] if prefix else others
        yield JobsToRecover(site, tuple(ours), attempts, named=bool(prefix), skipped=skipped)


def _has_left(site: OpenSite, job: JobRow, ids: frozenset[str]) -> bool:
    """Whether a task of the job has left something on one of the ids: a transaction to recover, or a lost one."""
    return any(
        not attempt.is_resolved or (row is not None and row.lost)
        for attempt in site.ledger.attempts(job.prefix, ids)
        for row in [site.store.read(attempt.transactional_id)]
    )
