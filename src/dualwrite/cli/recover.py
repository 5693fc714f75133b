"""`dualwrite recover`: resolve the in-doubt transactions of crashed writers, publish lost ones again, or acknowledge them.

Exit codes: 0 everything is resolved, or another process has claimed an id in the meantime and resolves it; 1 an id could not be
recovered; 2 usage error; 3 lost or unverified transactions are not acknowledged. With `--dry-run`: 1 an id can't be recovered
now; 3 a transaction is, or would be, recorded as lost or unverified, and would not be published again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any, Final

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from dualwrite.api import open_recoverer
from dualwrite.cli.options import AsJson, Ids, JsonGroup, Prefix, Target, Wide, Yes, chosen_ids, confirm, grouped, store_for
from dualwrite.cli.output import print_json, versioned
from dualwrite.cli.recover_jobs import job_record, jobs_to_recover, name_skipped
from dualwrite.cli.recovery_output import Entries, lost_records, show_lost, show_plan, show_report
from dualwrite.errors import DualWriteError
from dualwrite.jobs.rules import JobRow
from dualwrite.recovery.recoverer import Recoverer, ids_with_lanes
from dualwrite.recovery.report import IdReport, RecoveryReport
from dualwrite.stores.base import TxnStateStore
from dualwrite.texts import counted, printable
from dualwrite.transactional_id import TransactionalId

NOT_RECOVERED: Final = 1
UNACKNOWLEDGED: Final = 3

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
            skipped = [] if jobs is None else jobs.skipped
            chosen = [name for name in chosen if jobs is None or name not in jobs.attempts]
            if dry_run:
                plans = [] if jobs is None else jobs.plans()
                name_skipped(skipped)
                show_plan(recoverer.plan(chosen), plans, skipped, as_json=as_json, wide=wide)
                return
            report = _recovered(recoverer, store, chosen, yes=yes, quiet=as_json)
            if jobs is not None:
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
        print_json(_to_json(report, removed, left, skipped))
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
            print_json(_to_json(report, [], list(report.unacknowledged), skipped, error))
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
    show_lost(removed)
    if left:
        typer.echo("Recorded in the meantime, not acknowledged:")
        show_lost(left)


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


def _to_json(
    report: RecoveryReport, removed: Entries, left: Entries, skipped: Iterable[JobRow], error: Any = None
) -> dict[str, Any]:
    fields = {
        "ids": [
            {
                "transactional_id": one.transactional_id,
                "outcomes": [
                    {"generation": found.generation, "outcome": found.outcome, "state": found.state} for found in one.outcomes
                ],
                "taken_over_by": one.taken_over_by,
                "error": None if one.error is None else str(one.error),
                "not_published": [{"state": kept.entry.state, "reasons": kept.reasons} for kept in one.not_published],
            }
            for one in report.ids
        ],
        "unacknowledged": lost_records(left),
        "acknowledged": lost_records(removed),
        "skipped_jobs": [job_record(row) for row in skipped],
        "error": error,
    }
    return versioned("recover", fields)
