"""The result of a recovery, as tables and as JSON."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import typer

from dualwrite.cli.options import say
from dualwrite.cli.tables import show_table
from dualwrite.cli.times import state_words, time_text
from dualwrite.recovery.report import RecoveryReport
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
