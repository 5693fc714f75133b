"""`dualwrite status`: whether all is well or what to run next, the transactional ids, and their state at Kafka. Read-only.

Exit codes: 0 nothing is to be done, 1 a `DualWriteError`, or ids on another Kafka cluster, 2 usage error, 3 something is to be
done: a transaction waits for recovery, a lost one to be published again, or an unverified one for acknowledgement; or nobody
publishes a journal.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Final

import typer

from dualwrite.cli.journal_output import next_command, waiting_lines, waiting_record
from dualwrite.cli.needs import need_record, verdict_lines
from dualwrite.cli.offsets import GROUPS, Shown, group_records, shown_of, with_kafka
from dualwrite.cli.options import (
    LONGER,
    AsJson,
    Given,
    JsonGroup,
    Longer,
    Prefix,
    Target,
    Wide,
    coordinator_for,
    grouped,
    say,
    store_for,
)
from dualwrite.cli.output import Columns, Record, print_json, show_records, show_table, versioned
from dualwrite.cli.recover_jobs import JOBS, job_record
from dualwrite.cli.recovery_output import lost_record
from dualwrite.diagnosis.ids import FoundIds, logical, open_in_other_databases, read_ids
from dualwrite.diagnosis.needs import Seen, needed
from dualwrite.errors import BrokerError
from dualwrite.jobs.ledger import jobs_of
from dualwrite.jobs.rules import JobRow
from dualwrite.settings import Settings
from dualwrite.state import TransactionDescription, TransactionStatus
from dualwrite.stores.base import StateRow, TxnStateStore
from dualwrite.stores.leases import Lease
from dualwrite.texts import counted, description_words, in_natural_order, now_ms, time_text
from dualwrite.transactional_id import LANE_MARK, TransactionalId

TO_DO: Final = 3

app = typer.Typer(cls=JsonGroup)


@app.callback(invoke_without_command=True)
@grouped
def status(
    *,
    target: Target,
    prefix: Prefix = "",
    problems: Annotated[bool, typer.Option("--problems", help="Show only ids for which something is to be done.")] = False,
    everything: Annotated[bool, typer.Option("--all", help="Also show resolved ids that nobody uses.")] = False,
    longer: Longer = LONGER,
    wide: Wide = False,
    as_json: AsJson = False,
) -> None:
    """Show whether all is well or what to run next, and the transactional ids with their owners. Changes nothing.

    The lanes of an id are shown below it. With Kafka's address it also shows what the coordinator reports for each generation
    that is not resolved, or else for the newest. Leases show which ids pools use now. Jobs (Spark) are listed by their prefix,
    consumer groups with positions in the database by their id; `dualwrite offsets list` shows each position.

    The exit code is 3 if something is to be done: for a transaction that has been open for longer than `--longer-than` on an id
    that no pool has leased, for an id whose pool is gone, for a lost or unverified transaction, or for a
    journal that nobody publishes.
    """
    settings = target.settings()
    found = in_database(settings, prefix)
    failure = read_from_kafka(found, settings) if "bootstrap.servers" in settings.kafka else None
    to_do = needed(found.rows, found.leases, found.seen, now_ms(), longer_than=longer, gone=found.gone)
    shown = found.only({each.transactional_id for each in to_do}) if problems else found
    if as_json:
        needs = [need_record(each, target) for each in to_do]
        print_json(versioned("status", {"to_do": needs, **shown.fields(target), "error": failure}))
    else:
        for line in verdict_lines(to_do, target) or [_all_is_well(found, prefix)]:
            say(line)
        for journal in found.journals:
            for line in waiting_lines(journal, target, kafka_answers=found.kafka_answers):
                say(line)
        show_status(shown, wide=wide, everything=everything or problems)
    if failure is not None:
        typer.echo(f"Could not be read from Kafka: {', '.join(found.unread or ())}.", err=True)
        raise failure
    if found.elsewhere:
        names = ", ".join(row.transactional_id for row in found.elsewhere)
        say(f"Not on this Kafka cluster ({found.cluster_id}): {names}. Give the address of their cluster.", err=True)
        raise typer.Exit(1)
    if to_do or any(next_command(each, target, kafka_answers=found.kafka_answers) for each in found.journals):
        raise typer.Exit(TO_DO)


def _all_is_well(found: StatusData, prefix: str) -> str:
    """The first line if nothing is to be done, as far as that could be seen."""
    if not found.rows and not found.leases:
        begins = f" that begins with {prefix!r}" if prefix else ""
        others = f", but {counted(found.other_ids, 'other id')}" if found.other_ids else ""
        return f"There is no transactional id{begins} in {found.description}{others}."
    used = f"{counted(len(found.used), 'id')} in use"
    if found.unread is None:
        return f"{used}, nothing known to recover. Kafka was not asked for open transactions: use --kafka."
    if found.unread or found.elsewhere:
        return f"{used}. Whether there is something to recover could not be read completely."
    return f"{used}, nothing to recover."


# --- what was read ----------------------------------------------------------------------------------------------------


@dataclass
class StatusData(FoundIds):
    """What was read: the ids, and beside them jobs and the positions of consumer groups."""

    jobs: list[JobRow] = field(default_factory=list)
    positions: list[Shown] = field(default_factory=list)

    @property
    def kafka_answers(self) -> bool | None:
        """Whether Kafka answers; None if it was not asked."""
        if self.unread is None or not (self.rows or self.positions):
            return None
        return not self.unread

    def only(self, ids: set[str]) -> StatusData:
        """The same with these ids, and nothing but ids."""
        rows = [row for row in self.rows if logical(row) in ids]
        leases = {name: each for name, each in self.leases.items() if name in ids}
        return replace(self, rows=rows, leases=leases, jobs=[], positions=[])

    def fields(self, given: Given) -> Record:
        """The fields of the document."""
        return {
            "ids": [_id_record(lanes, self.seen) for lanes in self.by_id.values()],
            "leases": list(map(lease_record, self.leases.values())),
            "jobs": list(map(job_record, self.jobs)),
            "journals": [waiting_record(each, given, kafka_answers=self.kafka_answers) for each in self.journals],
            "groups": group_records(self.positions),
            "of_other_databases": self.of_other_databases,
        }


def in_database(settings: Settings, prefix: str) -> StatusData:
    """What the database contains of the ids, leases, jobs and groups that begin with the prefix."""
    with store_for(settings) as store:
        return in_store(store, prefix)


def in_store(store: TxnStateStore, prefix: str = "") -> StatusData:
    """The same, of a store that is open."""
    jobs = sorted(jobs_of(store, prefix), key=lambda job: in_natural_order(job.prefix))
    return StatusData(**vars(read_ids(store, prefix)), jobs=jobs, positions=shown_of(store, prefix))


def read_from_kafka(found: StatusData, settings: Settings) -> BrokerError | None:
    """Add what Kafka reports. The first error ends this, since each further step would wait for its whole time limit."""
    found.unread = ["states of ids", "ends of partitions", "transactions of other databases"]
    try:
        with coordinator_for(settings) as coordinator:
            found.ask(coordinator)
            del found.unread[0]
            found.positions = with_kafka(found.positions, settings) if found.positions else []
            del found.unread[0]
            found.of_other_databases = open_in_other_databases(found.rows, coordinator) if found.rows else []
    except BrokerError as error:
        return error
    found.unread.clear()
    return None


def _id_record(lanes: list[StateRow], seen: Seen) -> dict[str, Any]:
    first, *others = (_row_record(row, seen.get(row.transactional_id)) for row in lanes)
    return {**first, "lanes": others}


def _row_record(row: StateRow, seen: Mapping[int, TransactionDescription | None] | None) -> dict[str, Any]:
    return {
        "transactional_id": row.transactional_id,
        "fence": row.fence,
        "cluster_id": row.cluster_id or None,
        "kafka_transactional_id": row.kafka_id(row.generation),
        "generation": row.generation,
        "resolved_generation": row.resolved_generation,
        "prepared_state": row.prepared_state,
        "prepared_generation": row.prepared_generation,
        "lost": [lost_record(row.transactional_id, entry) for entry in row.lost],
        "owner": row.owner,
        "updated_at": row.updated_at,
        "kafka": None if seen is None else [_seen_record(row.kafka_id(at), found) for at, found in seen.items()],
    }


def _seen_record(kafka_id: str, found: TransactionDescription | None) -> dict[str, Any]:
    return {
        "kafka_transactional_id": kafka_id,
        "status": None if found is None else found.status,
        "producer_id": None if found is None else found.producer_id,
        "epoch": None if found is None else found.epoch,
        "start_time_ms": None if found is None else found.start_time_ms,
    }


# --- the tables -------------------------------------------------------------------------------------------------------


def lease_record(lease: Lease) -> Record:
    """A lease."""
    seconds = lease.seconds_left
    return {
        "transactional_id": lease.transactional_id,
        "owner": lease.owner,
        "seconds_left": None if seconds is None else round(seconds, 3),
        "is_expired": lease.has_ended,
    }


def time_left(lease: Record) -> str:
    """How long the lease lasts."""
    seconds = lease["seconds_left"]
    if seconds is None:
        return "until its session ends"
    return f"expired {-seconds:.0f} s ago" if lease["is_expired"] else f"{seconds:.0f} s left"


_LEASES: Final[Columns] = {"leased id": "transactional_id", "by": "owner", "lease": time_left}
_FEW: Final = ("transactional id", "transaction", "used by")
_ALL: Final = (*_FEW, "fencing token", "generation", "resolved", "state", "updated", "Kafka")
_WORDS: Final = {
    TransactionStatus.PREPARE_COMMIT: "being committed",
    TransactionStatus.PREPARE_ABORT: "being aborted",
    TransactionStatus.PREPARE_EPOCH_FENCE: "being aborted",
}


def show_status(found: StatusData, *, wide: bool, everything: bool) -> None:
    """Print the tables, `wide` with all columns and lanes, and `everything` with the ids that are resolved and unused."""
    ids = found.by_id
    shown = {name: rows for name, rows in ids.items() if everything or not _is_idle(found, name, rows)}
    rows = [_row(found, row, is_first=row is lanes[0], wide=wide) for lanes in shown.values() for row in lanes]
    if rows := [row for row in rows if row is not None]:
        show_table(_ALL if wide else _FEW, rows)
    if hidden := len(ids) - len(shown):
        say(f"{counted(hidden, 'resolved id')} that nobody uses: see --all.")
    if found.of_other_databases:
        say(f"Open at Kafka with the same ids, from other databases: {', '.join(found.of_other_databases)}.")
    if leases := [lease for name, lease in found.leases.items() if wide or (name not in shown and not lease.has_ended)]:
        show_records(_LEASES, map(lease_record, leases))
    if found.jobs:
        show_records(JOBS, map(job_record, found.jobs))
    if found.positions:
        show_records(GROUPS, group_records(found.positions))


def _is_idle(found: StatusData, name: str, rows: list[StateRow]) -> bool:
    unresolved = any(row.unresolved_generations or row.lost or row in found.elsewhere for row in rows)
    return not unresolved and found.live_lease(name) is None


def _row(found: StatusData, row: StateRow, *, is_first: bool, wide: bool) -> tuple[Any, ...] | None:
    """The cells; None for a lane on which nothing is open, unless all lanes are shown."""
    transactions = _transactions(found, row)
    if not (is_first or wide or transactions):
        return None
    name = row.transactional_id if is_first else f"  {LANE_MARK}{TransactionalId.of_row(row.transactional_id).lane}"
    few = (name, transactions or ("none open" if row.transactional_id in found.seen else None), _user(found, row, is_first))
    if not wide:
        return few
    seen = found.seen.get(row.transactional_id, {})
    kafka = tuple(f"{row.kafka_id(at)}: {description_words(one)}" for at, one in seen.items())
    return (*few, row.fence, row.generation, row.resolved_generation, row.prepared_state, row.updated_at, kafka or None)


def _transactions(found: StatusData, row: StateRow) -> tuple[str, ...]:
    """What is open or lost on a lane."""
    lines = [f"{len(row.lost)} lost or unverified"] if row.lost else []
    if row in found.elsewhere:
        lines.append(f"on Kafka cluster {row.cluster_id}")
    for one in found.seen.get(row.transactional_id, {}).values():
        if one is not None and one.status is TransactionStatus.ONGOING:
            lines.append(f"open since {time_text(one.start_time_ms)}")
        elif one is not None and one.status.is_ending:
            lines.append(_WORDS[one.status])
    return tuple(lines)


def _user(found: StatusData, row: StateRow, is_first: bool) -> str | None:
    lease = found.leases.get(logical(row))
    if lease is not None and is_first:
        return f"{lease.owner} ({time_left(lease_record(lease))})"
    return row.owner if lease is None and row.unresolved_generations else None
