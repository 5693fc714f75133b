"""The result of a recovery, as tables and as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any, Final

import typer

from dualwrite.cli.options import say
from dualwrite.cli.output import print_json, show_table, versioned
from dualwrite.cli.recover_jobs import job_json
from dualwrite.cli.texts import description_words, state_words, time_text
from dualwrite.jobs.rules import JobRow
from dualwrite.recovery.plan import GenerationPlan, IdPlan, RecoveryPlan
from dualwrite.recovery.report import RecoveryReport
from dualwrite.state import state_text
from dualwrite.stores.base import LostTransaction

Entries = list[tuple[str, LostTransaction]]


def show_report(report: RecoveryReport) -> None:
    """The tables of a recovery."""
    rows: list[tuple[Any, ...]] = []
    for one in report.ids:
        rows += [
            (one.transactional_id, found.generation, found.outcome.value, state_words(found.state)) for found in one.outcomes
        ]
        if one.taken_over_by is not None:
            rows.append((one.transactional_id, None, f"taken over by {one.taken_over_by} in the meantime", None))
        if one.error is not None:
            rows.append((one.transactional_id, None, "NOT RECOVERED", None))
    if rows:
        show_table(("transactional id", "generation", "outcome", "state"), rows)
    else:
        typer.echo("Nothing to recover.")
    for one in report.failed:
        say(f"{one.transactional_id}: {one.error}", err=True)
    if report.unacknowledged:
        typer.echo("Lost or unverified, not acknowledged:")
        show_lost(list(report.unacknowledged))


def show_lost(entries: Entries) -> None:
    """The table of lost and unverified transactions."""
    show_table(
        ("transactional id", "generation", "kind", "state", "recorded at", "messages"),
        [
            (
                name,
                entry.generation,
                entry.kind.value,
                state_words(entry.state),
                time_text(entry.recorded_at),
                entry.delivery,
            )
            for name, entry in entries
        ],
    )


def outcomes_json(report: RecoveryReport) -> list[dict[str, Any]]:
    """One entry for each generation that was resolved, for each id that was taken over, and for each that failed."""
    found = [
        outcome_json(one.transactional_id, each.outcome.value, each.generation, None if each.state is None else str(each.state))
        for one in report.ids
        for each in one.outcomes
    ]
    taken = [
        outcome_json(one.transactional_id, None, taken_over_by=one.taken_over_by)
        for one in report.ids
        if one.taken_over_by is not None
    ]
    return found + taken + [outcome_json(one.transactional_id, None, error=str(one.error)) for one in report.failed]


def outcome_json(
    transactional_id: str,
    outcome: str | None,
    generation: int | None = None,
    state: str | None = None,
    *,
    taken_over_by: str | None = None,
    error: str | None = None,
) -> dict[str, Any]:
    """The result for one generation of an id, or for an id that is not in the database."""
    return {
        "transactional_id": transactional_id,
        "generation": generation,
        "outcome": outcome,
        "state": state,
        "taken_over_by": taken_over_by,
        "error": error,
    }


def unacknowledged_json(entries: Iterable[tuple[str, LostTransaction]]) -> list[dict[str, Any]]:
    """The lost and unverified transactions that are not acknowledged."""
    return [
        {
            "transactional_id": name,
            "generation": entry.generation,
            "kind": entry.kind.value,
            "state": str(entry.state),
            "recorded_at": entry.recorded_at.isoformat(),
            "messages": None if entry.delivery is None else entry.delivery.messages,
        }
        for name, entry in entries
    ]


WOULD_FAIL: Final = 1
WOULD_LOSE: Final = 3


def show_plan(
    ids: RecoveryPlan,
    jobs: Sequence[tuple[JobRow, RecoveryPlan]],
    skipped: Iterable[JobRow] = (),
    *,
    as_json: bool,
    wide: bool = False,
) -> None:
    """Print the plan, and exit with the code that recovery would exit with.

    Args:
        ids: The plan for the ids that belong to no job.
        jobs: The jobs that would be recovered, each with its plan.
        skipped: The jobs that would be skipped.
        as_json: Whether to print JSON.
        wide: Whether to show all columns.
    """
    together = RecoveryPlan((*ids.ids, *(plan for _, of_job in jobs for plan in of_job.ids)))
    if as_json:
        found = {
            "ids": [_id_json(plan) for plan in together.ids],
            "jobs": [job_json(row) for row, _ in jobs],
            "unacknowledged": [lost_json(*entry) for entry in together.unacknowledged],
            "skipped_jobs": [job_json(row) for row in skipped],
            "error": None,
        }
        print_json(versioned("recover", found))
    else:
        _show(together, jobs, wide=wide)
    if together.failed:
        raise typer.Exit(WOULD_FAIL)
    if together.would_lose or together.unacknowledged:
        raise typer.Exit(WOULD_LOSE)


def _show(plan: RecoveryPlan, jobs: Sequence[tuple[JobRow, RecoveryPlan]], *, wide: bool) -> None:
    for row, _ in jobs:
        if row.is_open:
            typer.echo(
                f"Would end batch {row.batch_id} of job {row.job_id!r} on the prefix {row.prefix!r}, opened by {row.owner!r}."
            )
    rows = [
        (one.transactional_id, found.decision.value, found.why, one.owner, *(_more(found) if wide else ()))
        for one in plan.ids
        for found in one.generations
    ]
    if rows:
        headings = ("transactional id", "would do", "because", "current owner")
        show_table((*headings, "generation", "state", "Kafka") if wide else headings, rows)
    elif not plan.failed:
        typer.echo("Nothing to recover.")
    for one in plan.failed:
        say(f"{one.transactional_id}: {one.error}", err=True)
    for name, lost in plan.unacknowledged:
        say(f"{name}: {lost.kind.value} {state_words(lost.state)} is not acknowledged.")
    typer.echo("Nothing was changed.")


def _more(found: GenerationPlan) -> tuple[Any, ...]:
    kafka = f"{found.kafka_transactional_id}: {description_words(found.described)}"
    return found.generation, state_words(found.state), kafka


def _id_json(plan: IdPlan) -> dict[str, Any]:
    return {
        "transactional_id": plan.transactional_id,
        "owner": plan.owner,
        "generations": [
            {
                "generation": found.generation,
                "kafka_transactional_id": found.kafka_transactional_id,
                "decision": found.decision.value,
                "why": found.why,
                "state": state_text(found.state) or None,
                "kafka_status": None if found.described is None else found.described.status.value,
            }
            for found in plan.generations
        ],
        "error": None if plan.error is None else str(plan.error),
    }


def lost_json(transactional_id: str, entry: LostTransaction) -> dict[str, Any]:
    """One lost or unverified transaction, as JSON values."""
    return {
        "transactional_id": transactional_id,
        "kind": entry.kind.value,
        "state": str(entry.state),
        "generation": entry.generation,
        "recorded_at": entry.recorded_at.isoformat(),
        "delivery": None if entry.delivery is None else json.loads(entry.delivery.text()),
    }
