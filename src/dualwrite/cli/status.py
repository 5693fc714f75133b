"""`dualwrite status`: whether all is well or what to run next, the transactional ids, and their state at Kafka. Read-only.

Exit codes: 0 nothing is to be done, 1 a `DualWriteError`, or ids on another Kafka cluster, 2 usage error, 3 something is to be
done: a transaction waits for recovery, a lost one to be published again, or an unverified one for acknowledgement; or nobody
publishes a journal.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import Annotated, Final

import typer

from dualwrite.cli.journal import next_command, say_what_waits, waiting_record
from dualwrite.cli.options import AsJson, Given, JsonGroup, Longer, Prefix, Target, Wide, coordinator_for, grouped, store_for
from dualwrite.cli.output import print_json, say, show_facts
from dualwrite.cli.recovery_output import LOST
from dualwrite.diagnosis.facts import Fact, Facts, Record
from dualwrite.diagnosis.ids import FoundIds, logical, open_in_other_databases, read_ids
from dualwrite.diagnosis.jobs import JOBS
from dualwrite.diagnosis.needs import LONGER_SECONDS, next_words, to_do
from dualwrite.diagnosis.positions import GROUPS, ShownPosition, groups_of, shown_of, with_kafka
from dualwrite.errors import BrokerError
from dualwrite.jobs.ledger import jobs_of
from dualwrite.jobs.rules import JobRow
from dualwrite.settings import Settings
from dualwrite.state import TransactionDescription, TransactionStatus
from dualwrite.stores.base import StateRow, TxnStateStore
from dualwrite.stores.leases import Lease
from dualwrite.texts import counted, description_words, in_natural_order, time_text
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
    longer: Longer = LONGER_SECONDS,
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
    with store_for(settings) as store:
        found = in_store(store, prefix)
    failure = read_from_kafka(found, settings) if "bootstrap.servers" in settings.kafka else None
    needs = found.needs(longer_than=longer)
    shown = found.only({each.transactional_id for each in needs}) if problems else found
    if as_json:
        records = [_NEED.record(each) | {"next_command": target.command(*next_words(each.need, [each]))} for each in needs]
        print_json("status", {"to_do": records, **shown.fields(target), "error": failure})
    else:
        for each in to_do(needs):
            say(f"{each.text}: {target.command(*each.next_words)}")
        if not needs:
            say(_all_is_well(found, prefix))
        say_what_waits(found.journals, target, kafka_answers=found.kafka_answers)
        show_status(shown, wide=wide, everything=everything or problems)
    if failure is not None:
        typer.echo(f"Could not be read from Kafka: {', '.join(found.unread or ())}.", err=True)
        raise failure
    if found.elsewhere:
        names = ", ".join(row.transactional_id for row in found.elsewhere)
        say(f"Not on this Kafka cluster ({found.cluster_id}): {names}. Give the address of their cluster.", err=True)
        raise typer.Exit(1)
    if needs or any(next_command(each, target, kafka_answers=found.kafka_answers) for each in found.journals):
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
    positions: list[ShownPosition] = field(default_factory=list)

    @property
    def lanes(self) -> dict[str, list[ShownLane]]:
        """The lanes by logical id."""
        return {name: [ShownLane(self, row, row is rows[0]) for row in rows] for name, rows in self.by_id.items()}

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
            "ids": [{**first, "lanes": others} for first, *others in map(LANE.records, self.lanes.values())],
            "leases": LEASE.records(self.leases.values()),
            "jobs": JOBS.records(self.jobs),
            "journals": [waiting_record(each, given, kafka_answers=self.kafka_answers) for each in self.journals],
            "groups": GROUPS.records(groups_of(self.positions)),
            "of_other_databases": self.of_other_databases,
        }


def in_store(store: TxnStateStore, prefix: str = "") -> StatusData:
    """What a database contains of the ids, leases, jobs and groups that begin with the prefix."""
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


# --- the facts --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ShownLane:
    """A row, with what else was read of it; the first one of an id stands for the id."""

    found: StatusData
    row: StateRow
    is_first: bool

    @property
    def seen(self) -> list[tuple[str, TransactionDescription | None]]:
        """What the coordinators report, by the id that Kafka sees."""
        return [(self.row.kafka_id(at), one) for at, one in self.found.seen.get(self.row.transactional_id, {}).items()]

    @property
    def name(self) -> str:
        """The id; of another lane, its number."""
        name = self.row.transactional_id
        return name if self.is_first else f"  {LANE_MARK}{TransactionalId.of_row(name).lane}"

    @property
    def transactions(self) -> tuple[str, ...]:
        """What is open or lost on it, in words."""
        row = self.row
        lines = [f"{len(row.lost)} lost, unverified or forgotten"] if row.lost else []
        if self.found.is_elsewhere(row):
            lines.append(f"on Kafka cluster {row.cluster_id}")
        for _, one in self.seen:
            if one is not None and one.status is TransactionStatus.ONGOING:
                lines.append(f"open since {time_text(one.start_time_ms)}")
            elif one is not None and one.status.is_ending:
                lines.append(f"being {'committed' if one.status is TransactionStatus.PREPARE_COMMIT else 'aborted'}")
        return tuple(lines)

    @property
    def user(self) -> str | None:
        """Who uses it."""
        lease = self.found.leases.get(logical(self.row))
        if lease is not None and self.is_first:
            return f"{lease.owner} ({time_left(lease)})"
        return self.row.owner if lease is None and self.row.unresolved_generations else None


def time_left(lease: Lease) -> str:
    """How long the lease lasts."""
    seconds = lease.seconds_left
    if seconds is None:
        return "until its session ends"
    if lease.is_impossible:
        return f"{seconds:.0f} s left, more than was leased: the database's clock went back"
    return f"expired {-seconds:.0f} s ago" if lease.has_ended else f"{seconds:.0f} s left"


_NEED: Final = Facts(Fact("need"), Fact("transactional_id"), Fact("kafka_transactional_id", value="kafka_id"))
_SEEN: Final = Facts(
    Fact("kafka_transactional_id", value=itemgetter(0)),
    *Facts(Fact("status"), Fact("producer_id"), Fact("epoch"), Fact("start_time_ms")).at(itemgetter(1)),
)
LANE: Final = Facts(
    Fact("transactional_id", "transactional id", "row.transactional_id", shown=lambda lane: lane.name),
    Fact("fence", "fencing token", "row.fence"),
    Fact("cluster_id", value=lambda lane: lane.row.cluster_id or None),
    Fact("kafka_transactional_id", value=lambda lane: lane.row.kafka_id(lane.row.generation)),
    Fact("generation", "generation", "row.generation"),
    Fact("resolved_generation", "resolved", "row.resolved_generation"),
    Fact("prepared_state", "state", "row.prepared_state"),
    Fact("prepared_generation", value="row.prepared_generation"),
    Fact(
        "lost",
        "transaction",
        lambda lane: LOST.records((lane.row.transactional_id, entry) for entry in lane.row.lost),
        shown=lambda lane: lane.transactions or ("none open" if lane.row.transactional_id in lane.found.seen else None),
    ),
    Fact("owner", "used by", "row.owner", shown=lambda lane: lane.user),
    Fact("updated_at", "updated", "row.updated_at"),
    Fact(
        "kafka",
        "Kafka",
        lambda lane: _SEEN.records(lane.seen) if lane.row.transactional_id in lane.found.seen else None,
        shown=lambda lane: tuple(f"{name}: {description_words(one)}" for name, one in lane.seen) or None,
    ),
)
LEASE: Final = Facts(
    Fact("transactional_id", "leased id"),
    Fact("owner", "by"),
    Fact(
        "seconds_left", "lease", lambda one: None if one.seconds_left is None else round(one.seconds_left, 3), shown=time_left
    ),
    Fact("is_expired", value="has_ended"),
    Fact("is_impossible"),
)
_FEW: Final = ("transactional_id", "lost", "owner")
_ALL: Final = (*_FEW, "fence", "generation", "resolved_generation", "prepared_state", "updated_at", "kafka")


# --- the tables -------------------------------------------------------------------------------------------------------


def show_status(found: StatusData, *, wide: bool, everything: bool) -> None:
    """Print the tables, `wide` with all columns and lanes, and `everything` with the ids that are resolved and unused."""
    idle = set() if everything else found.idle
    shown = {name: lanes for name, lanes in found.lanes.items() if name not in idle}
    lanes = [each for lanes in shown.values() for each in lanes if each.is_first or wide or each.transactions]
    if lanes:
        show_facts(LANE, lanes, _ALL if wide else _FEW)
    if hidden := len(found.by_id) - len(shown):
        say(f"{counted(hidden, 'resolved id')} that nobody uses: see --all.")
    if found.of_other_databases:
        say(f"Open at Kafka with the same ids, from other databases: {', '.join(found.of_other_databases)}.")
    if leases := [
        lease
        for name, lease in found.leases.items()
        if wide or lease.is_impossible or (name not in shown and not lease.has_ended)
    ]:
        show_facts(LEASE, leases)
    if found.jobs:
        show_facts(JOBS, found.jobs)
    if found.positions:
        show_facts(GROUPS, groups_of(found.positions))
