"""Resolves what a job's runs leave: after a commit, when a run is given up or the next one opened, or by hand (`recover_job`).

Kafka transactions are committed or aborted in parallel, and staged rows are deleted. The rows of the transactional ids show how
each transaction ends, so all of this can be interrupted at any point, and any process can repeat it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import replace
from functools import partial
from typing import Final

from dualwrite.deadline import Deadline, Pauses
from dualwrite.errors import BrokerUnavailableError, DualWriteError, FencedError, StoreUnavailableError
from dualwrite.failpoints import hit
from dualwrite.jobs.decision import JobDecision
from dualwrite.jobs.job_context import OpenSite
from dualwrite.jobs.job_tables import AttemptRow, StagedRows
from dualwrite.jobs.rules import JobRow, JobRun, OpeningResult, Prepared
from dualwrite.observability.logs import SubjectLogger
from dualwrite.recovery.clusters import check_cluster
from dualwrite.recovery.plan import KafkaCheck, RecoveryPlan
from dualwrite.recovery.recoverer import describe_owner
from dualwrite.recovery.report import IdReport, RecoveryReport
from dualwrite.stores.base import Claim
from dualwrite.stores.rows import proven_lost
from dualwrite.stores.sql.dialect import ErrorClass

log = SubjectLogger(__name__)

_POLL_INTERVAL: Final = 0.05  # seconds
_LOCK_TIMEOUT: Final = 1.0  # seconds
_DELETING: Final = "deleting staged rows"


def complete(site: OpenSite, winners: Sequence[Prepared]) -> RecoveryReport:
    """Commit the winners of a run that has just been committed in the database, under the claims of their tasks.

    If one can't be completed now, its report has the error, and it stays prepared. If another process has claimed an id since,
    we wait until it has resolved the id.
    """

    def resolve(winner: Prepared) -> IdReport:
        try:
            return site.recoverer.resolve(Claim(winner.transactional_id, winner.fence, winner.owner))
        except FencedError:
            return _wait_until_resolved(site, winner.transactional_id)

    return _in_parallel(site, {winner.transactional_id: partial(resolve, winner) for winner in winners})


def resolve_ids(site: OpenSite, ids: Iterable[tuple[str, int]], *, awaited: Collection[str] = ()) -> RecoveryReport:
    """Resolve the transactions of ids by the states in their rows, each only while it still has the given fencing token.

    An id that was claimed in the meantime is left to its claimant; if the id is in `awaited`, we wait until the claimant has
    resolved what was prepared.
    """
    check = KafkaCheck(site.store, site.coordinator)

    def resolve(name: str, fence: int) -> IdReport:
        report = site.recoverer.recover_row(name, check, expected_fence=fence)
        is_awaited = report.taken_over_by is not None and name in awaited
        return _wait_until_resolved(site, name) if is_awaited else report

    return _in_parallel(site, {name: partial(resolve, name, fence) for name, fence in ids})


def _wait_until_resolved(site: OpenSite, name: str) -> IdReport:
    """Wait until the process that claimed after us has resolved what we left; every claimant does this first."""
    state = None
    for _ in Deadline(site.site.timeouts.kafka).attempts(Pauses(_POLL_INTERVAL, _POLL_INTERVAL, spread=0.0)):
        row = site.store.read(name)
        if row is None or row.prepared_state is None or state not in (None, row.prepared_state):
            return IdReport(name, taken_over_by=row.owner if row else None)
        state = row.prepared_state
    raise BrokerUnavailableError(
        "Another process has claimed the id of a committed task and has not resolved its transaction within "
        f"{site.site.timeouts.kafka:g} s.",
        transactional_id=name,
        next_step="the transaction stays prepared; `dualwrite recover` resolves it",
    )


def _in_parallel(site: OpenSite, several: Mapping[str, Callable[[], IdReport]]) -> RecoveryReport:
    """Resolve ids in threads; the error of one is in its report."""

    def one(name: str, resolve: Callable[[], IdReport]) -> IdReport:
        try:
            report = resolve()
        except DualWriteError as error:
            report = IdReport(name, error=error)
        if report.error is not None:  # nobody looks at the report of what a new run finds
            log.warning("could not be resolved now: %s", report.error, transactional_id=name)
        return report

    if not several:
        return RecoveryReport()
    with ThreadPoolExecutor(min(site.site.parallelism, len(several)), "dualwrite-resolve") as threads:
        # a copy of the context for each: what is traced belongs to the step of the job
        jobs = [threads.submit(copy_context().run, one, name, resolve) for name, resolve in several.items()]
        return RecoveryReport(tuple(job.result() for job in jobs))


def cleanup(site: OpenSite, left: Sequence[AttemptRow], staged: StagedRows) -> RecoveryReport:
    """Resolve the transactions that earlier runs left open, and delete the rows that they staged.

    `left` was listed while the job's row was locked. If a task of a newer run has claimed an id in the meantime, the id has
    another fencing token and is left to that task, which resolves it before it starts.
    """
    report = resolve_ids(site, [(row.transactional_id, row.fence) for row in left if not row.is_resolved])
    delete_staged(site, {row.transactional_id: row.fence for row in left}, staged)
    return report


def delete_staged(site: OpenSite, up_to: Mapping[str, int], staged: StagedRows) -> int:
    """Delete the rows staged under each id by claims up to a given fencing token; return how many there were.

    On MariaDB and MySQL a task that is loading rows, perhaps a paused one, holds locks on them. Such rows are skipped: the
    task is fenced, so it can only roll them back. Rows that another process is deleting are left to it, or to the next
    cleanup.
    """
    if not up_to:
        return 0
    short = replace(site.store.short_transactions, lock_timeout=_LOCK_TIMEOUT, work_time=site.site.commit_timeout)
    try:
        return short.run(lambda connection: staged.delete(connection, up_to), _DELETING)
    except StoreUnavailableError as error:
        if not short.is_caused_by(error, ErrorClass.LOCKED):
            raise
    deleted = 0
    for name, fence in short.query(lambda connection: staged.committed_keys(connection, up_to), _DELETING):
        try:
            deleted += short.run(partial(staged.delete_exactly, transactional_id=name, fence=fence), _DELETING)
        except StoreUnavailableError as error:
            if not short.is_caused_by(error, ErrorClass.LOCKED):
                raise
            log.info(
                "the staged rows of token %d are locked by another process and left to the next cleanup",
                fence,
                transactional_id=name,
            )
    return deleted


def open_run(site: OpenSite, run: JobRun, *, owner: str, staging_table: str, ids: Iterable[str] = ()) -> OpeningResult:
    """Open the run, unless it is open, and resolve what earlier runs left.

    Opening the run fences the tasks of earlier runs, so Kafka is checked first: `ids` must be on this cluster.

    Raises:
        JobClosedError: The run was closed or replaced.
        PrefixLeasedError: Another job holds the prefix.
        BatchRefusedError: The job has committed a later batch, but not this one.
        DualWriteError: As for `check_cluster`; StoreError in any step.
    """
    check_cluster(site.store, site.coordinator, ids)
    made = site.ledger.open(run, owner=owner, staging_table=staging_table, lease_timeout=site.site.lease_timeout)
    hit("job_after_open")
    if made.earlier is not None and made.left:
        cleanup(site, made.left, StagedRows(made.earlier.staging_table))
    return made.outcome


def recover_job(site: OpenSite, prefix: str, *, expected: JobRow | None = None, release: bool = False) -> RecoveryReport | None:
    """Close the open run on a prefix, resolve all ids that its tasks have used, and delete the rows that they have staged.

    A driver that is still running finds its run closed and commits nothing of it. Kafka is queried first: if it does not
    respond, nothing is changed.

    Args:
        site: The database and Kafka.
        prefix: The exact prefix.
        expected: The job's row as the caller has seen it; if another run has been opened or this one was closed since, nothing
            is changed.
        release: Whether to release the prefix for another job, even if a streaming query holds it.

    Returns:
        The outcome for each id; None if there is no such job, or it is not as expected.

    Raises:
        StoreError: The database rejects a statement or can't be reached.
        BrokerError: Kafka does not respond.
    """
    plan_job(site, prefix)
    decision = JobDecision(site.store, owner=describe_owner("recoverer"), patience=site.site.timeouts.claim)
    closed = decision.close(prefix, expected=expected, release=release)
    if closed is None:
        return None
    row, verdict = closed
    resolved = cleanup(site, verdict.left, StagedRows(row.staging_table))
    lost_before, to_publish = [], []
    for attempt in verdict.left:
        found = site.store.read(attempt.transactional_id) if attempt.is_resolved else None
        if found is None or not found.lost:
            continue
        if site.republisher is not None and proven_lost(found.lost):
            to_publish.append((attempt.transactional_id, attempt.fence))
        else:
            lost_before.append(IdReport(found.transactional_id, unacknowledged=found.lost))
    return RecoveryReport((*resolved.ids, *resolve_ids(site, to_publish).ids, *lost_before))


def plan_job(site: OpenSite, prefix: str) -> RecoveryPlan:
    """What `recover_job` would do at Kafka now, and why. Changes nothing.

    Errors as for `recover_job`.
    """
    kafka = KafkaCheck(site.store, site.coordinator)
    kafka.check()
    rows = (site.store.read(attempt.transactional_id) for attempt in site.ledger.attempts(prefix))
    return RecoveryPlan(tuple(site.recoverer.plan_row(row, kafka) for row in rows if row is not None))
