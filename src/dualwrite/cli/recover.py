"""`dualwrite recover`: resolve the in-doubt transactions of crashed writers, publish lost ones again, or acknowledge them.

Exit codes: 0 everything is resolved, or another process has claimed an id in the meantime and resolves it; 1 an id could not be
recovered; 2 usage error; 3 lost or unverified transactions are not acknowledged. With `--dry-run`: 1 an id can't be recovered
now; 3 a transaction is, or would be, recorded as lost or unverified, and would not be published again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Final

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from dualwrite.cli.options import (
    AsJson,
    Ids,
    JsonGroup,
    Prefix,
    Target,
    Wide,
    Yes,
    chosen_ids,
    confirm,
    grouped,
    refuse,
    store_for,
)
from dualwrite.cli.output import print_json, say, show_facts
from dualwrite.cli.recovery_output import LOST, NOT_RECOVERED, UNACKNOWLEDGED, Entries, show_plan, show_report
from dualwrite.diagnosis.facts import Fact, Facts
from dualwrite.diagnosis.jobs import JOBS
from dualwrite.errors import DualWriteError, shell_word
from dualwrite.jobs.job_context import JobSite, OpenSite
from dualwrite.jobs.job_recovery import plan_job, recover_job
from dualwrite.jobs.rules import JobRow
from dualwrite.opening import open_recoverer
from dualwrite.recovery.plan import IdPlan, RecoveryPlan
from dualwrite.recovery.recoverer import Recoverer, ids_with_lanes
from dualwrite.recovery.report import IdReport, RecoveryReport
from dualwrite.settings import Settings
from dualwrite.stores.base import TxnStateStore
from dualwrite.stores.registry import keeps_a_table
from dualwrite.texts import counted, printable, time_text
from dualwrite.transactional_id import TransactionalId

app = typer.Typer(cls=JsonGroup)


@app.callback(invoke_without_command=True)
@grouped
def recover(
    *,
    target: Target,
    ids: Ids = None,
    prefix: Prefix = "",
    acknowledge: Annotated[
        bool, typer.Option("--acknowledge", help="After recovery, remove lost and unverified transactions from the rows.")
    ] = False,
    republish: Annotated[
        bool,
        typer.Option(
            "--republish", help="Publish the messages of lost transactions again, from Kafka's log; each exactly once."
        ),
    ] = False,
    release: Annotated[
        bool, typer.Option("--release", help="Let another job use the prefix: the job that owned it is gone for good.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be done, and why, and change nothing.")] = False,
    yes: Yes = False,
    wide: Wide = False,
    as_json: AsJson = False,
) -> None:
    """Resolve the in-doubt transactions of crashed writers: on all ids, those with a prefix, or those named.

    An id includes all of its lanes. Ids with nothing to recover are not changed. A live writer on a recovered id gets
    FencedError at its next step, and can acquire the id again with reopen(). Recovering twice changes nothing.

    Jobs (Spark): a prefix names the job that owns exactly this prefix. Its open run is ended, the transactions of its ids are
    resolved, its staged rows deleted. Without a prefix, a running job is left alone.
    """
    settings = target.settings().with_changes(on_lost="republish" if republish else "report")
    if dry_run and (acknowledge or release):
        raise typer.BadParameter("can't be combined with --acknowledge or --release.", param_hint="--dry-run")
    with store_for(settings) as store, open_recoverer(store, settings=settings) as recoverer:
        chosen = chosen_ids(store, ids, prefix)
        with jobs_to_recover(settings, chosen, prefix, named=bool(ids), release=release) as jobs:
            skipped = jobs.skipped
            chosen = [name for name in chosen if name not in jobs.attempts]
            if dry_run:
                plans = jobs.plans()
                name_skipped(skipped)
                show_plan(recoverer.plan(chosen), plans, skipped, as_json=as_json, wide=wide)
                return
            report = _recovered(recoverer, store, chosen, yes=yes, quiet=as_json)
            with _shown_on_errors(report, skipped, as_json=as_json):
                of_jobs = jobs.recover(release=release, yes=yes)
            report = RecoveryReport(report.ids + of_jobs.ids)
            name_skipped(skipped)
        if not as_json:
            show_report(report)
        removed, left = Entries(), list(report.unacknowledged)
        if acknowledge:
            with _shown_on_errors(report, skipped, as_json=as_json, if_text=False):
                removed, left = _acknowledged(recoverer, report, yes=yes)
    if as_json:
        _print(report, removed, left, skipped)
    elif removed:
        _show_acknowledged(removed, left)
    if report.failed:
        raise typer.Exit(NOT_RECOVERED)
    if left:
        raise typer.Exit(UNACKNOWLEDGED)


@contextmanager
def _shown_on_errors(
    report: RecoveryReport, skipped: Iterable[JobRow], *, as_json: bool, if_text: bool = True
) -> Iterator[None]:
    """If the block ends with an error or is not confirmed, first print what was recovered before; as text only `if_text`."""
    try:
        yield
    except Exception as failed:
        if as_json:
            error = failed if isinstance(failed, DualWriteError) else None
            _print(report, [], list(report.unacknowledged), skipped, error)
        elif if_text and report.ids:
            show_report(report)
        raise


def _acknowledged(recoverer: Recoverer, report: RecoveryReport, *, yes: bool) -> tuple[Entries, Entries]:
    """Remove the reported transactions from the rows, after asking for confirmation; those that were removed, and are left."""
    count = len(report.unacknowledged)
    if not count:
        return [], []
    confirm(f"Acknowledge {counted(count, 'transaction')}, because the messages have been dealt with?", yes=yes)
    by_id = recoverer.acknowledge(dict.fromkeys(name for name, _ in report.unacknowledged), only=report.unacknowledged)
    rows = (recoverer.store.read(one.transactional_id) for one in report.ids)
    left = [(row.transactional_id, entry) for row in rows if row is not None for entry in row.lost]
    return [(name, entry) for name, entries in by_id.items() for entry in entries], left


def _show_acknowledged(removed: Entries, left: Entries) -> None:
    typer.echo("Acknowledged:")
    show_facts(LOST, removed)
    if left:
        typer.echo("Recorded in the meantime, not acknowledged:")
        show_facts(LOST, left)


def _recovered(recoverer: Recoverer, store: TxnStateStore, chosen: list[str], *, yes: bool, quiet: bool) -> RecoveryReport:
    """Recover the ids that are pending now, after asking for confirmation.

    An id that becomes pending later is left alone, since the confirmation did not include it. A lane that becomes pending
    later is recovered if its id was included.
    """
    rows = {name: store.read(name) for name in chosen}
    pending = recoverer.pending_lanes(chosen)
    if pending:
        confirm(
            f"Recovery claims {counted(len(_by_id(pending)), 'transactional id')}: {_named(pending)}. "
            "A live writer on one of them gets FencedError at its next step. Continue?",
            yes=yes,
        )
    to_do = ids_with_lanes(store, [name for name in chosen if name in pending or rows[name] is None])
    left_alone = {name: IdReport(name, unacknowledged=row.lost) for name, row in rows.items() if row is not None}
    done = {report.transactional_id: report for report in _with_progress(recoverer, to_do, quiet=quiet).ids}
    return RecoveryReport(tuple((left_alone | done)[name] for name in dict.fromkeys((*chosen, *done))))


def _by_id(names: Iterable[str]) -> dict[str, list[int]]:
    """The lane numbers by logical id."""
    found: dict[str, list[int]] = {}
    for each in map(TransactionalId.of_row, names):
        found.setdefault(each.logical, []).append(each.lane)
    return found


def _named(names: Iterable[str]) -> str:
    return ", ".join(
        name if lanes == [0] else f"{name} (lane{'s' if len(lanes) > 1 else ''} {', '.join(map(str, lanes))})"
        for name, lanes in _by_id(names).items()
    )


def _with_progress(recoverer: Recoverer, ids: list[str], *, quiet: bool) -> RecoveryReport:
    console = Console(stderr=True)
    columns = (
        TextColumn("Recovering"),
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        TextColumn("{task.description}", markup=False),
    )
    with Progress(*columns, console=console, transient=True, disable=quiet or not console.is_terminal) as bar:
        task = bar.add_task("", total=len(ids))
        return recoverer.recover(
            ids, progress=lambda done: bar.update(task, advance=1, description=printable(done.transactional_id))
        )


_OUTCOME: Final = Facts(Fact("generation"), Fact("outcome"), Fact("state"))
_NOT_PUBLISHED: Final = Facts(Fact("state", value="entry.state"), Fact("reasons"))
_ID: Final = Facts(
    Fact("transactional_id"),
    Fact("outcomes", value=lambda one: _OUTCOME.records(one.outcomes)),
    Fact("taken_over_by"),
    Fact("error", value=lambda one: None if one.error is None else str(one.error)),
    Fact("not_published", value=lambda one: _NOT_PUBLISHED.records(one.not_published)),
)


def _print(
    report: RecoveryReport, removed: Entries, left: Entries, skipped: Iterable[JobRow], error: DualWriteError | None = None
) -> None:
    fields = {
        "ids": _ID.records(report.ids),
        "unacknowledged": LOST.records(left),
        "acknowledged": LOST.records(removed),
        "skipped_jobs": JOBS.records(skipped),
        "error": error,
    }
    print_json("recover", fields)


# --- jobs: a prefix names exactly one, and one that runs is left alone unless it is named -------------------------------------


@dataclass(frozen=True)
class JobsToRecover:
    """The jobs that one call of `recover` covers."""

    site: OpenSite | None
    """None if the database has no jobs, or ids were named: then there are no rows."""

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
        assert self.site is not None
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
        assert self.site is not None
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
) -> Iterator[JobsToRecover]:
    """The jobs that `recover` covers for the chosen ids; none if the database has no job tables, or ids were `named`."""
    if release and not prefix:
        raise typer.BadParameter("also give --prefix: the prefix to release.", param_hint="--release")
    if named or settings.database_url is None or not keeps_a_table(settings.database_url):
        yield JobsToRecover(None, (), frozenset(), named=named, skipped=[])
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
        attempts = frozenset(site.ledger.attempt_fences()).intersection(chosen) if rows else frozenset()
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
