"""What commands print about the ids in a database: outcomes of a recovery, plans, lost and unverified transactions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

import typer

from dualwrite.cli.options import say
from dualwrite.cli.output import Columns, Record, print_json, show_records, versioned
from dualwrite.cli.recover_jobs import job_record
from dualwrite.jobs.rules import JobRow
from dualwrite.recovery.plan import GenerationPlan, IdPlan, RecoveryPlan
from dualwrite.recovery.report import RecoveryReport
from dualwrite.state import FoundMessages
from dualwrite.stores.base import LostTransaction
from dualwrite.texts import description_words, state_words

Entries = list[tuple[str, LostTransaction]]

WOULD_FAIL: Final = 1
WOULD_LOSE: Final = 3


def outcome_record(transactional_id: str, **known: Any) -> Record:
    """The result for one generation of an id, or for an id that is not in the database."""
    unknown = dict.fromkeys(("generation", "outcome", "state", "taken_over_by", "error"))
    return {"transactional_id": transactional_id, **unknown, **known}


def outcome_records(report: RecoveryReport) -> list[Record]:
    """A record for each generation that was resolved, for an id that was taken over, and for one that failed; id by id."""
    found = []
    for one in report.ids:
        name = one.transactional_id
        found += [outcome_record(name, generation=e.generation, outcome=e.outcome, state=e.state) for e in one.outcomes]
        if one.taken_over_by is not None:
            found.append(outcome_record(name, taken_over_by=one.taken_over_by))
        if one.error is not None:
            found.append(outcome_record(name, error=str(one.error)))
    return found


def _outcome(record: Record) -> Any:
    if record["taken_over_by"] is not None:
        return f"taken over by {record['taken_over_by']} in the meantime"
    return record["outcome"] if record["error"] is None else "NOT RECOVERED"


_OUTCOMES: Final[Columns] = {
    "transactional id": "transactional_id",
    "generation": "generation",
    "outcome": _outcome,
    "state": "state",
}


def show_report(report: RecoveryReport) -> None:
    """The tables of a recovery."""
    if records := outcome_records(report):
        show_records(_OUTCOMES, records)
    else:
        typer.echo("Nothing to recover.")
    for one in report.failed:
        say(f"{one.transactional_id}: {one.error}", err=True)
    for kept in report.not_published:
        say(f"{kept.transactional_id}: {kept.entry.state} can't be published again: {'; '.join(kept.reasons)}.", err=True)
    if report.unacknowledged:
        typer.echo("Lost or unverified, not acknowledged:")
        show_lost(list(report.unacknowledged))


# --- lost and unverified transactions ---------------------------------------------------------------------------------


def lost_record(transactional_id: str, entry: LostTransaction) -> Record:
    """One lost or unverified transaction."""
    return {
        "transactional_id": transactional_id,
        "kind": entry.kind,
        "state": entry.state,
        "generation": entry.generation,
        "recorded_at": entry.recorded_at,
        "delivery": entry.delivery,
    }


def lost_records(entries: Iterable[tuple[str, LostTransaction]]) -> list[Record]:
    """The same for several, each with its id."""
    return [lost_record(*entry) for entry in entries]


def counted_lost(entries: Entries) -> list[Record]:
    """The same with only the number of messages."""
    found: list[Record] = []
    for name, entry in entries:
        record = {**lost_record(name, entry), "messages": None if entry.delivery is None else entry.delivery.messages}
        del record["delivery"]
        found.append(record)
    return found


_LOST: Final[Columns] = {
    "transactional id": "transactional_id",
    "generation": "generation",
    "kind": "kind",
    "state": "state",
    "recorded at": "recorded_at",
    "messages": "delivery",
}


def show_lost(entries: Entries) -> None:
    """The table of lost and unverified transactions."""
    show_records(_LOST, lost_records(entries))


# --- what recovery would do -------------------------------------------------------------------------------------------


def show_plan(
    ids: RecoveryPlan,
    jobs: Sequence[tuple[JobRow, RecoveryPlan]],
    skipped: Iterable[JobRow] = (),
    *,
    as_json: bool,
    wide: bool = False,
) -> None:
    """Print the plan for the ids that belong to no job and for each job, and exit with recovery's code."""
    together = RecoveryPlan((*ids.ids, *(plan for _, of_job in jobs for plan in of_job.ids)))
    if as_json:
        found = {
            "ids": [_plan_record(plan) for plan in together.ids],
            "jobs": [job_record(row) for row, _ in jobs],
            "unacknowledged": lost_records(together.unacknowledged),
            "skipped_jobs": [job_record(row) for row in skipped],
            "error": None,
        }
        print_json(versioned("recover", found))
    else:
        _show(together, jobs, wide=wide)
    if together.failed:
        raise typer.Exit(WOULD_FAIL)
    published = {(plan.transactional_id, entry.state) for plan, entry, found in together.lost_messages if found.is_complete}
    lost = {(plan.transactional_id, plan.state) for plan in together.would_lose}
    lost |= {(name, entry.state) for name, entry in together.unacknowledged}
    if lost - published:
        raise typer.Exit(WOULD_LOSE)


def _plan_record(plan: IdPlan) -> Record:
    return {
        "transactional_id": plan.transactional_id,
        "owner": plan.owner,
        "generations": [_generation_record(found) for found in plan.generations],
        "error": None if plan.error is None else str(plan.error),
        "would_publish": [_found_record(entry, found) for entry, found in plan.found],
    }


def _found_record(entry: LostTransaction, found: FoundMessages) -> Record:
    """What would be published again of a lost transaction; nothing if something is missing."""
    return {
        "state": entry.state,
        "places": [
            {
                "topic": place.topic,
                "partition": place.partition,
                "first_offset": place.first_offset,
                "messages": place.messages,
            }
            for place in found.places
        ],
        "missing": found.missing,
    }


def _generation_record(found: GenerationPlan) -> Record:
    return {
        "generation": found.generation,
        "kafka_transactional_id": found.kafka_transactional_id,
        "decision": found.decision,
        "why": found.why,
        "state": found.state,
        "kafka_status": None if found.described is None else found.described.status,
    }


_PLANNED: Final[Columns] = {
    "transactional id": "transactional_id",
    "would do": "decision",
    "because": "why",
    "current owner": "owner",
}
_WIDE: Final[Columns] = {**_PLANNED, "generation": "generation", "state": "state", "Kafka": "kafka"}


def _show(plan: RecoveryPlan, jobs: Sequence[tuple[JobRow, RecoveryPlan]], *, wide: bool) -> None:
    for row, _ in jobs:
        if row.is_open:
            typer.echo(
                f"Would end batch {row.batch_id} of job {row.job_id!r} on the prefix {row.prefix!r}, opened by {row.owner!r}."
            )
    rows = [
        {
            **_generation_record(found),
            "transactional_id": one.transactional_id,
            "owner": one.owner,
            "kafka": f"{found.kafka_transactional_id}: {description_words(found.described)}",
        }
        for one in plan.ids
        for found in one.generations
    ]
    if rows:
        show_records(_WIDE if wide else _PLANNED, rows)
    elif not plan.failed and not plan.lost_messages:
        typer.echo("Nothing to recover.")
    for one in plan.failed:
        say(f"{one.transactional_id}: {one.error}", err=True)
    for of_id, entry, found in plan.lost_messages:
        name = of_id.transactional_id
        if found.is_complete:
            places = ", ".join(f"{p.messages} to {p.topic}-{p.partition} (from offset {p.first_offset})" for p in found.places)
            say(f"{name}: would publish the messages of {state_words(entry.state)} again: {places}.")
        else:
            say(f"{name}: {state_words(entry.state)} can't be published again: {'; '.join(found.missing)}.")
    for name, lost in plan.unacknowledged:
        say(f"{name}: {lost.kind.value} {state_words(lost.state)} is not acknowledged.")
    typer.echo("Nothing was changed.")
