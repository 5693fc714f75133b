"""`dualwrite recover --dry-run`: what recovery would do about each id and generation, and why."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any, Final

import typer

from dualwrite.cli.jobs import job_json
from dualwrite.cli.json_documents import print_json, versioned
from dualwrite.cli.options import say
from dualwrite.cli.tables import show_table
from dualwrite.cli.times import description_words, state_words
from dualwrite.jobs.rules import JobRow
from dualwrite.recovery.plan import GenerationPlan, IdPlan, RecoveryPlan
from dualwrite.state import state_text
from dualwrite.stores.base import LostTransaction

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
