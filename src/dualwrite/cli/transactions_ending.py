"""`dualwrite transactions abort | force-terminate | complete`: end a transaction that hangs, or that its coordinator knows.

Each shows what it will do, asks for confirmation, and does it only if nothing has changed since. What a database has committed
is never aborted: `dualwrite.admin.decisions` has the rules.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Annotated, Final, NamedTuple

import typer

from dualwrite.admin import DescribedTransaction, Examined, TransactionAdmin
from dualwrite.admin.decisions import (
    Decided,
    Decisions,
    is_made_by_dualwrite,
    is_open,
    refusal_of_committed,
    refusal_to_abort,
    refusal_to_complete,
    refusal_to_terminate,
)
from dualwrite.cli.options import (
    AsJson,
    ClusterAndDatabase,
    Partition,
    Topic,
    WithoutDatabase,
    Yes,
    confirm,
    database_url,
    decisions_for,
    grouped,
)
from dualwrite.cli.output import FOUND, print_document, say, show_facts
from dualwrite.cli.recovery_output import COUNTED, LOST, RESOLVED, Entries, Resolved, resolved, show_report
from dualwrite.diagnosis.facts import Fact, Facts, Record
from dualwrite.diagnosis.stuck import DECIDED
from dualwrite.errors import (
    BrokerAuthorizationError,
    DualWriteError,
    RepairRefusedError,
    StateTableMissingError,
    StoreUnavailableError,
    shell_word,
)
from dualwrite.jobs.ledger import open_job_of
from dualwrite.kafka.client.time_budget import NO_TIMEOUT_MS
from dualwrite.recovery.decision import Decision
from dualwrite.settings import Settings
from dualwrite.state import TransactionDescription
from dualwrite.texts import error_text, now_ms, seconds_text, time_text

_GRANT_TOPICS: Final = "grant the principal Describe on its topics"

app = typer.Typer()


# --- what is shown of a transaction -------------------------------------------------------------------------------------------


class DescribedId(NamedTuple):
    """An id as its coordinator describes it, and what the database knows about it; None if it was not asked."""

    described: DescribedTransaction
    decided: Decided | None


def partitions_of(found: TransactionDescription | None) -> list[Record]:
    """The partitions of a transaction, as records."""
    partitions = () if found is None else sorted(found.partitions)
    return [{"topic": topic, "partition": partition} for topic, partition in partitions]


def _partition_words(partitions: Iterable[Record]) -> str:
    return ",".join(f"{one['topic']}-{one['partition']}" for one in partitions)


STATE: Final = Facts(
    Fact("state", "State", "status"),
    Fact("producer_id", "ProducerId"),
    Fact("producer_epoch", "ProducerEpoch", "epoch"),
    Fact("timeout_ms", "TimeoutMs", words=lambda limit: "none" if limit == NO_TIMEOUT_MS else limit),
    Fact("start_time_ms", "StartTime", lambda one: one.start_time_ms if one.start_time_ms >= 0 else None, time_text),
    Fact("age_ms", "Duration(s)", lambda one: now_ms() - one.start_time_ms if one.start_time_ms >= 0 else None, seconds_text),
)
DESCRIBED: Final = Facts(
    Fact("transactional_id", "TransactionalId", "described.transactional_id"),
    Fact("known", value=lambda seen: seen.described.description is not None),
    Fact("coordinator", "Coordinator", "described.coordinator"),
    *STATE.at("described.description"),
    Fact("partitions", "TopicPartitions", lambda seen: partitions_of(seen.described.description), _partition_words),
    Fact("database", value=DECIDED.nested("decided")),
    Fact("error", value="described.problem"),
    columns=(
        *("transactional_id", "producer_id", "producer_epoch", "coordinator", "state"),
        *("timeout_ms", "start_time_ms", "age_ms", "partitions"),
    ),
)
"""The facts about an id of `describe` (`DescribedId`)."""

_IN_DATABASE: Final = Facts(Fact("", "TransactionalId", "described.transactional_id"), *DECIDED.at("decided"))


def show_described(seen: Iterable[DescribedId]) -> None:
    """The tables of `describe`: what Kafka knows, and what the database knows if one was given."""
    shown = list(seen)
    if known := [one for one in shown if one.described.description is not None]:
        show_facts(DESCRIBED, known)
    for one, _ in shown:
        if one.problem is not None:
            typer.echo(error_text(one.problem), err=True)
        elif one.is_unknown:
            where = "" if one.coordinator is None else f" (broker {one.coordinator})"
            say(f"{one.transactional_id}: unknown to its coordinator{where}", err=True)
        elif one.hides_topics:
            say(f"{one.transactional_id}: Kafka leaves out the topics of its transaction; {_GRANT_TOPICS}", err=True)
    if decided := [one for one in shown if one.decided is not None]:
        typer.echo("In the database:")
        show_facts(_IN_DATABASE, decided)
        errors = [one.decided.error for one in decided if one.decided is not None and one.decided.error is not None]
        for message in dict.fromkeys(map(error_text, errors)):
            typer.echo(message, err=True)


def hidden_topics(described: Iterable[DescribedTransaction]) -> list[DualWriteError]:
    """An error for each transaction whose topics Kafka leaves out."""
    return [
        BrokerAuthorizationError(
            f"Kafka leaves out the topics of the transaction of {one.transactional_id!r}.",
            transactional_id=one.transactional_id,
            cause="the principal lacks an ACL",
            next_step=_GRANT_TOPICS,
        )
        for one in described
        if one.hides_topics
    ]


PRODUCER: Final = Facts(
    Fact("producer_id", "ProducerId"),
    Fact("producer_epoch", "ProducerEpoch", "epoch"),
    Fact("last_sequence"),
    Fact("last_timestamp_ms", "LastTimestamp", words=time_text),
    Fact("age_ms", "Duration(s)", lambda one: one.age_ms(now_ms()), seconds_text),
    Fact("coordinator_epoch", "CoordinatorEpoch"),
    Fact("transaction_start_offset", "StartOffset"),
)
PRODUCER_COLUMNS: Final = (
    *("producer_id", "producer_epoch", "transaction_start_offset"),
    *("last_timestamp_ms", "age_ms", "coordinator_epoch"),
)
EXAMINED: Final = Facts(
    Fact("topic", "Topic", "opened.topic"),
    Fact("partition", "Partition", "opened.partition"),
    Fact("broker", value="opened.broker"),
    *PRODUCER.at("opened.producer"),
    Fact("reason", value="verdict.reason.name"),
    Fact("why", "Because", "verdict.reason.value", lambda why: why or "its coordinator will end it"),
    Fact("transactional_id", "TransactionalId", "name_at_kafka"),
    columns=("topic", "partition", *PRODUCER_COLUMNS, "transactional_id", "why"),
)
"""The facts about the transaction of `abort`."""


# --- a hanging transaction in its partition ---------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Which:
    """The open transaction of a partition."""

    topic: Topic
    partition: Partition
    start_offset: Annotated[
        int | None, typer.Option("--start-offset", min=0, help="Where the transaction begins in the partition.")
    ] = None
    producer_id: Annotated[int | None, typer.Option("--producer-id", help="Its producer id.")] = None
    epoch: Annotated[int | None, typer.Option("--producer-epoch", help="Its producer's epoch.")] = None

    def examined(self, admin: TransactionAdmin) -> Examined:
        """The transaction, and whether it hangs."""
        found = admin.examine(
            self.topic, self.partition, start_offset=self.start_offset, producer_id=self.producer_id, epoch=self.epoch
        )
        if found is None:
            raise RepairRefusedError(
                f"{self.topic}-{self.partition} has no such open transaction.",
                next_step=f"list them with `dualwrite transactions describe-producers --topic {shell_word(self.topic)}`",
            )
        return found


@app.command("abort")
@grouped
def abort_command(
    *,
    which: Which,
    coordinator_epoch: Annotated[
        int | None,
        typer.Option(
            "--coordinator-epoch",
            help="The coordinator's epoch for the marker.",
            show_default="the epoch of the producer's last marker there",
        ),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Abort it even if it may not hang, or if its coordinator may have committed it.")
    ] = False,
    without_database: WithoutDatabase = False,
    cluster: ClusterAndDatabase,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Abort a hanging transaction in its partition, so that `read_committed` consumers continue (KIP-664).

    Identify it by its start offset, or by producer id and epoch, as `find-hanging` shows them. A transaction that does not
    hang, or that the database has committed, is not aborted. Give the database with `--url`: without it, a transaction of a
    dualwrite writer is refused. See `force-terminate` and `complete` for transactions that do not hang.
    """
    if which.start_offset is None and (which.producer_id is None or which.epoch is None):
        raise typer.BadParameter("give --start-offset, or --producer-id and --producer-epoch.", param_hint="--start-offset")
    settings = cluster.settings()
    with cluster.admin() as admin:
        found = which.examined(admin)
        record = EXAMINED.record(found)
        if not as_json:
            show_facts(EXAMINED, [found])
        refusal = (
            found.refusal(force=True)
            or _refusal_of_database(settings, found, without_database=without_database)
            or found.refusal(force=force)  # last: what the database knows is certain
        )
        if refusal is not None:
            raise refusal
        confirm(_question(found, has_database=settings.database_url is not None), yes=yes)
        refusal = None if yes else _refusal_of_database(settings, found, without_database=without_database)
        if refusal is not None:  # the database may have committed it in the meantime
            raise refusal
        admin.abort(found, coordinator_epoch=coordinator_epoch, force=force)
    if as_json:
        print_document("transactions abort", {"aborted": record}, complete=True)
    else:
        typer.echo("Aborted.")


def _question(found: Examined, *, has_database: bool) -> str:
    doubts = []
    if found.may_have_been_committed:
        doubts.append("Kafka no longer knows how it ended: it may have been committed.")
    if not has_database and not is_made_by_dualwrite(found.name_at_kafka or ""):
        doubts.append("No dualwrite database was checked (--url): if one has committed it, consumers miss these messages.")
    question = f"Abort the transaction at {found.opened.topic}-{found.opened.partition}?"
    return " ".join((*doubts, question, "No read_committed consumer will ever see its records there."))


def _refusal_of_database(settings: Settings, found: Examined, *, without_database: bool) -> DualWriteError | None:
    if settings.database_url is None:
        return refusal_to_abort(found, None, None, without_database=without_database)
    producer, name = found.opened.producer, found.name_at_kafka
    with decisions_for(settings) as decisions:
        try:
            committed = decisions.committed(producer.producer_id, producer.epoch)
        except (StoreUnavailableError, StateTableMissingError):
            if not without_database:
                raise
            return None
        decided = None if name is None else decisions.of(name)
    return refusal_to_abort(found, decided, committed, without_database=without_database)


# --- the transaction of an id -----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class OneId:
    """The id that a command is about."""

    given: Annotated[
        str | None, typer.Argument(metavar="ID", help="A transactional id, as it is at Kafka or in the database.")
    ] = None
    more: Annotated[
        str | None,
        typer.Option("--transactional-id", "--transactionalId", help="The same, with the option name of Apache's tool."),
    ] = None

    def name(self) -> str:
        """The id, given in one of the two ways."""
        names = [name for name in (self.given, self.more) if name]
        if len(names) != 1:
            raise typer.BadParameter("give exactly one transactional id.", param_hint="ID")
        return names[0]


@app.command("force-terminate")
@app.command("forceTerminateTransaction", hidden=True)  # as Apache's tool calls it
@grouped
def force_terminate_command(
    *,
    one_id: OneId,
    without_database: WithoutDatabase = False,
    cluster: ClusterAndDatabase,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """End an open transaction by aborting it, even a prepared one, and fence its producer (KIP-939).

    Only the transaction that is shown is ended, not a later one of the same id. With a database, an id of that database is
    claimed first, and a transaction that the database has committed is not aborted.
    """
    name, settings = one_id.name(), cluster.settings()
    repair = _Repair("transactions force-terminate", yes, as_json)
    with cluster.admin() as admin, ExitStack() as opened:
        decisions = None if settings.database_url is None else opened.enter_context(decisions_for(settings))
        repair.examine(admin, decisions, name)
        for one in repair.described:
            refusal = refusal_to_terminate(one, repair.decided_about(one), without_database=without_database)
            if refusal is not None:
                raise refusal
        planned = any(map(repair.has_plan, repair.described))
        if decisions is not None and planned:
            repair.carry_out(decisions)
        alone = [one for one in repair.described if repair.is_foreign(one)]
        for one in alone:
            try:
                _terminate(repair, admin, decisions, one)
            except (DualWriteError, typer.Abort) as error:
                if not repair.outcomes:
                    raise
                repair.stop(one, error)
                break
        if not planned and not alone:
            _check_ends(repair.described)
            repair.report_nothing_done()
    repair.end()


@app.command("complete")
@grouped
def complete_command(*, one_id: OneId, cluster: ClusterAndDatabase, yes: Yes = False, as_json: AsJson = False) -> None:
    """Commit or abort the open transactions of an id as the database decided. Shows the evidence first.

    This is `dualwrite recover` for one id, which you name as it is at Kafka or in the database: the id is claimed, so a live
    writer on it is fenced. A logical id includes its lanes.
    """
    name, settings = one_id.name(), cluster.settings()
    database_url(settings)  # or there is nothing that decides
    repair = _Repair("transactions complete", yes, as_json)
    with cluster.admin() as admin, decisions_for(settings) as decisions:
        repair.examine(admin, decisions, name)
        for one in repair.described:
            refusal = refusal_to_complete(one, repair.decided[one.transactional_id])
            if refusal is not None:
                raise refusal
        if any(found.plan is not None for found in repair.decided.values()):
            repair.carry_out(decisions)
        else:
            _check_ends(repair.described)
            repair.report_nothing_done()
    repair.end()


@dataclass
class _Repair:
    """One run of a command: what it has shown, and what it did."""

    command: str
    yes: bool
    as_json: bool
    described: list[DescribedTransaction] = field(default_factory=list)
    decided: dict[str, Decided] = field(default_factory=dict)
    shown: Sequence[Record] = ()
    outcomes: list[Resolved] = field(default_factory=list)
    unacknowledged: Entries = field(default_factory=list)

    def examine(self, admin: TransactionAdmin, decisions: Decisions | None, given: str) -> None:
        """Query Kafka and the database about all affected ids, and show them; refuse ids that an open job uses."""
        self.described = list(admin.describe([given] if decisions is None else decisions.affected(given)))
        if decisions is not None:
            self.decided = decisions.of_each(one.transactional_id for one in self.described)
            self.described = [self.decided[one.transactional_id].seen(one) for one in self.described]
        seen = [DescribedId(one, self.decided_about(one)) for one in self.described]
        self.shown = DESCRIBED.records(seen)
        if not self.as_json:
            show_described(seen)
        rows = [found.row.transactional_id for found in self.decided.values() if found.row is not None]
        if decisions is not None and rows:
            _refuse_open_job(decisions, rows)

    def decided_about(self, one: DescribedTransaction) -> Decided | None:
        """What the database knows about an id; None without a database."""
        return self.decided.get(one.transactional_id)

    def has_plan(self, one: DescribedTransaction) -> bool:
        """Whether recovery would end a transaction of the id; without one, a claim would only fence an idle writer."""
        found = self.decided_about(one)
        if found is None or found.plan is None:
            return False
        return is_open(one) or found.plan.decision not in (Decision.NOTHING, Decision.ALREADY_COMMITTED)

    def is_foreign(self, one: DescribedTransaction) -> bool:
        """Whether the id is ended by compare-and-set on its epoch: no database has planned anything for it."""
        found = self.decided_about(one)
        return found is None or (found.plan is None and (found.row is None or is_open(one)))

    def carry_out(self, decisions: Decisions) -> None:
        """End the open transactions of the rows as the database decided, if nothing has changed since they were shown."""
        planned = {found.plan.transactional_id: found for found in self.decided.values() if found.plan is not None}
        confirm(
            f"Claim {', '.join(planned)}, and end the open transactions as shown? "
            "A live writer on it gets FencedError at its next step.",
            yes=self.yes,
        )
        report = decisions.carry_out(planned.values())
        # as always in this document: first what was resolved, then what was taken over, then what failed
        self.outcomes += sorted(resolved(report), key=lambda one: (bool(one.error), bool(one.taken_over_by)))
        self.unacknowledged += report.unacknowledged
        if not self.as_json:
            show_report(report)

    def stop(self, one: DescribedTransaction, error: DualWriteError | typer.Abort) -> None:
        """Record why an id was not ended after others were; the outcomes of those must be shown, too."""
        why = f"{error}" if isinstance(error, DualWriteError) else "not confirmed"
        self.outcomes.append(Resolved(one.transactional_id, error=why))
        say(f"{one.transactional_id}: {why}", err=True)

    def report_nothing_done(self) -> None:
        """Print that nothing is open, and the transactions that were recorded as lost or unverified earlier."""
        rows = {found.row.transactional_id: found.row for found in self.decided.values() if found.row is not None}
        self.unacknowledged += [(name, entry) for name, row in rows.items() for entry in row.lost]
        if self.as_json:
            return
        typer.echo("It has no open transaction: nothing to do.")
        if self.unacknowledged:
            typer.echo("Lost or unverified, not acknowledged:")
            show_facts(LOST, self.unacknowledged)

    def end(self) -> None:
        """Print the JSON, and exit with code 1 if something is left to do, or could not be seen."""
        hidden = hidden_topics(self.described)
        if self.as_json:
            found = {
                "transactions": self.shown,
                "outcomes": RESOLVED.records(self.outcomes),
                "unacknowledged": COUNTED.records(self.unacknowledged),
            }
            print_document(self.command, found, complete=not hidden, hidden=hidden)
        unfinished = any(one.error is not None or one.taken_over_by is not None for one in self.outcomes)
        if unfinished or self.unacknowledged or hidden:
            raise typer.Exit(FOUND)


def _terminate(repair: _Repair, admin: TransactionAdmin, decisions: Decisions | None, one: DescribedTransaction) -> None:
    """Abort the transaction of an id that no database decides about, by compare-and-set on what is shown."""
    if one.problem is not None:
        raise one.problem
    name, description = one.transactional_id, one.description
    if description is None:
        raise RepairRefusedError(
            "The coordinator does not know this transactional id.",
            transactional_id=name,
            next_step="`dualwrite transactions list` shows the ids that Kafka knows",
        )
    _check_ends([one])
    if not is_open(one):
        repair.report_nothing_done()
        return
    out_of_reach = decisions is None or repair.decided[name].is_out_of_reach
    if decisions is not None and not out_of_reach:
        refusal = refusal_of_committed(decisions.committed(description.producer_id, description.epoch))
        if refusal is not None:
            raise refusal
    doubt = ""
    if out_of_reach and not is_made_by_dualwrite(name):
        doubt = "No dualwrite database was checked (--url): if one has committed it, its messages are missing until its id is "
        doubt += "recovered, which publishes them again. "
    confirm(
        f"{doubt}Abort the transaction of {name} (producer id {description.producer_id}, epoch {description.epoch})? "
        "No read_committed consumer will ever see its messages, and its producer is fenced.",
        yes=repair.yes,
    )
    admin.force_terminate(name, producer_id=description.producer_id, epoch=description.epoch)
    repair.outcomes.append(Resolved(name, outcome="aborted"))
    if not repair.as_json:
        typer.echo("Aborted.")


def _check_ends(described: list[DescribedTransaction]) -> None:
    """Raise if a coordinator has not written all markers yet: then a transaction is still open in some partitions."""
    for one in described:
        if one.description is not None and one.description.status.is_ending:
            raise RepairRefusedError(
                f"Its transaction has been decided, and its coordinator is ending it: {one.description.status.value}.",
                transactional_id=one.transactional_id,
                cause="the markers are being written; if this state persists, a partition that is still listed has no leader",
                next_step=f"look again with `dualwrite transactions describe {shell_word(one.transactional_id)}`, which lists "
                "the partitions without their marker; start the brokers that have them",
            )


def _refuse_open_job(decisions: Decisions, rows: list[str]) -> None:
    found = open_job_of(decisions.store, rows)
    if found is None:
        return
    name, job = found
    raise RepairRefusedError(
        f"A task of batch {job.batch_id} of job {job.job_id!r} uses the id, and the batch is open: it can't be committed "
        "without this transaction.",
        transactional_id=name,
        next_step=f"wait for the job, which commits or aborts all of its transactions; if its driver is gone, run "
        f"`dualwrite recover --prefix {shell_word(job.prefix)}`",
    )
