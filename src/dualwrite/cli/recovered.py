"""What a recovery did, as tables and as JSON."""

from __future__ import annotations

from typing import Any

import typer

from dualwrite.cli.options import show_table
from dualwrite.recovery.report import RecoveryReport
from dualwrite.stores.base import LostTransaction

Entries = list[tuple[str, LostTransaction]]


def show_report(report: RecoveryReport) -> None:
    """The tables of a recovery."""
    rows: list[tuple[Any, ...]] = []
    for one in report.ids:
        rows += [(one.transactional_id, found.generation, found.outcome.value, found.state) for found in one.outcomes]
        if one.taken_over_by is not None:
            rows.append((one.transactional_id, None, f"taken over by {one.taken_over_by} meanwhile", None))
        if one.error is not None:
            rows.append((one.transactional_id, None, "NOT RECOVERED", None))
    if rows:
        show_table(("transactional id", "generation", "outcome", "state"), rows)
    else:
        typer.echo("Nothing to recover.")
    for one in report.failed:
        typer.echo(f"{one.transactional_id}: {one.error}", err=True)
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
                entry.state,
                f"{entry.recorded_at:%Y-%m-%d %H:%M:%S%z}",
                entry.delivery,
            )
            for name, entry in entries
        ],
    )


def outcomes_json(report: RecoveryReport) -> list[dict[str, Any]]:
    """One entry for each generation that was resolved, and for each id that could not be."""
    found = [
        outcome_json(one.transactional_id, each.outcome.value, each.generation, None if each.state is None else str(each.state))
        for one in report.ids
        for each in one.outcomes
    ]
    return found + [outcome_json(one.transactional_id, None, error=str(one.error)) for one in report.failed]


def outcome_json(
    transactional_id: str,
    outcome: str | None,
    generation: int | None = None,
    state: str | None = None,
    error: str | None = None,
) -> dict[str, Any]:
    """What was done with one generation of an id, or with an id that is none of the database's."""
    return {
        "transactional_id": transactional_id,
        "generation": generation,
        "outcome": outcome,
        "state": state,
        "error": error,
    }
