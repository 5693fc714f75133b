"""What commands print about the ids in a database: outcomes of a recovery, plans, lost and unverified transactions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, Final

import typer

from dualwrite.cli.output import print_json, say, show_facts
from dualwrite.diagnosis.facts import Fact, Facts
from dualwrite.diagnosis.jobs import JOBS
from dualwrite.jobs.rules import JobRow
from dualwrite.recovery.plan import GenerationPlan, RecoveryPlan
from dualwrite.recovery.report import RecoveryReport
from dualwrite.state import PreparedTxnState
from dualwrite.stores.base import LostTransaction
from dualwrite.texts import description_words, state_words

Entries = list[tuple[str, LostTransaction]]

NOT_RECOVERED: Final = 1
UNACKNOWLEDGED: Final = 3


@dataclass(frozen=True)
class Resolved:
    """The result for one generation of an id, or for an id that was taken over, has failed, or is not in the database."""

    transactional_id: str
    generation: int | None = None
    outcome: Any = None
    state: PreparedTxnState | None = None
    taken_over_by: str | None = None
    error: str | None = None


def resolved(report: RecoveryReport) -> list[Resolved]:
    """One for each generation that was resolved, for an id that was taken over, and for one that failed; id by id."""
    found = []
    for one in report.ids:
        name = one.transactional_id
        found += [Resolved(name, each.generation, each.outcome, each.state) for each in one.outcomes]
        if one.taken_over_by is not None:
            found.append(Resolved(name, taken_over_by=one.taken_over_by))
        if one.error is not None:
            found.append(Resolved(name, error=str(one.error)))
    return found


def _outcome(one: Resolved) -> Any:
    if one.taken_over_by is not None:
        return f"taken over by {one.taken_over_by} in the meantime"
    return one.outcome if one.error is None else "NOT RECOVERED"


RESOLVED: Final = Facts(
    Fact("transactional_id", "transactional id"),
    Fact("generation", "generation"),
    Fact("outcome", "outcome", shown=_outcome),
    Fact("state", "state"),
    Fact("taken_over_by"),
    Fact("error"),
)


def show_report(report: RecoveryReport) -> None:
    """The tables of a recovery."""
    show_facts(RESOLVED, resolved(report), empty="Nothing to recover.")
    for one in report.failed:
        say(f"{one.transactional_id}: {one.error}", err=True)
    for kept in report.not_published:
        say(f"{kept.transactional_id}: {kept.entry.state} can't be published again: {'; '.join(kept.reasons)}.", err=True)
    if report.unacknowledged:
        typer.echo("Lost, unverified or forgotten, not acknowledged:")
        show_facts(LOST, report.unacknowledged)


# --- lost and unverified transactions ---------------------------------------------------------------------------------


_ENTRY: Final = (
    Fact("transactional_id", "transactional id", itemgetter(0)),
    *Facts(
        Fact("kind", "kind"), Fact("state", "state"), Fact("generation", "generation"), Fact("recorded_at", "recorded at")
    ).at(itemgetter(1)),
)
LOST: Final = Facts(
    *_ENTRY,
    *Facts(Fact("delivery", "messages"), Fact("transactions")).at(itemgetter(1)),
    columns=("transactional_id", "generation", "kind", "state", "recorded_at", "delivery"),
)
"""The facts about a lost or unverified transaction, with the id of its row."""

COUNTED: Final = Facts(*_ENTRY, *Facts(Fact("transactions"), Fact("messages", value="delivery.messages")).at(itemgetter(1)))
"""The same with only the number of messages."""


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
            "ids": _PLAN.records(together.ids),
            "jobs": JOBS.records(row for row, _ in jobs),
            "unacknowledged": LOST.records(together.unacknowledged),
            "skipped_jobs": JOBS.records(skipped),
            "error": None,
        }
        print_json("recover", found)
    else:
        _show(together, jobs, wide=wide)
    if together.failed:
        raise typer.Exit(NOT_RECOVERED)
    published = {(plan.transactional_id, entry.state) for plan, entry, found in together.lost_messages if found.is_complete}
    lost = {(plan.transactional_id, plan.state) for plan in together.would_lose}
    lost |= {(name, entry.state) for name, entry in together.unacknowledged}
    if lost - published:
        raise typer.Exit(UNACKNOWLEDGED)


def _words_of_kafka(plan: GenerationPlan) -> str:
    return f"{plan.kafka_transactional_id}: {description_words(plan.described)}"


_GENERATION: Final = Facts(
    Fact("generation", "generation"),
    Fact("kafka_transactional_id"),
    Fact("decision", "would do"),
    Fact("why", "because"),
    Fact("state", "state"),
    Fact("kafka_status", "Kafka", "described.status", shown=_words_of_kafka),
)
_PLANNED: Final = Facts(
    *Facts(Fact("transactional_id", "transactional id"), Fact("owner", "current owner")).at(itemgetter(0)),
    *_GENERATION.at(itemgetter(1)),
)
_FEW: Final = ("transactional_id", "decision", "why", "owner")
_ALL: Final = (*_FEW, "generation", "state", "kafka_status")
_PLACE: Final = Facts(Fact("topic"), Fact("partition"), Fact("first_offset"), Fact("messages"))
_FOUND: Final = Facts(
    Fact("state", value=lambda pair: pair[0].state),
    Fact("places", value=lambda pair: _PLACE.records(pair[1].places)),
    Fact("missing", value=lambda pair: pair[1].missing),
)
"""What would be published again of a lost transaction; nothing if something is missing."""

_PLAN: Final = Facts(
    Fact("transactional_id"),
    Fact("owner"),
    Fact("generations", value=lambda plan: _GENERATION.records(plan.generations)),
    Fact("error", value=lambda plan: None if plan.error is None else str(plan.error)),
    Fact("would_publish", value=lambda plan: _FOUND.records(plan.found)),
)


def _show(plan: RecoveryPlan, jobs: Sequence[tuple[JobRow, RecoveryPlan]], *, wide: bool) -> None:
    for row, _ in jobs:
        if row.is_open:
            typer.echo(
                f"Would end batch {row.batch_id} of job {row.job_id!r} on the prefix {row.prefix!r}, opened by {row.owner!r}."
            )
    if rows := [(one, found) for one in plan.ids for found in one.generations]:
        show_facts(_PLANNED, rows, _ALL if wide else _FEW)
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
