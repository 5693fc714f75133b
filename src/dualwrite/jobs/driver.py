"""What the driver does after its tasks: commit or abort. Both can be interrupted at any point and repeated."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from sqlalchemy import Connection

from dualwrite.errors import (
    BatchRefusedError,
    DualWriteError,
    InDoubtTransactionError,
    StoreCommitFailedError,
    StoreError,
    shell_word,
)
from dualwrite.failpoints import hit
from dualwrite.jobs.decision import EndedRun, JobDecision, RunOutcome
from dualwrite.jobs.job_context import OpenSite
from dualwrite.jobs.job_recovery import complete, delete_staged, open_run, resolve_ids
from dualwrite.jobs.job_tables import Marker, StagedRows
from dualwrite.jobs.rules import JobRun, Prepared, TaskOutcome
from dualwrite.jobs.task import Sink
from dualwrite.observability import observers, tracing
from dualwrite.observability.events import JobAborted, JobCommitted
from dualwrite.observability.logs import SubjectLogger
from dualwrite.recovery.clusters import check_cluster
from dualwrite.recovery.recoverer import describe_owner
from dualwrite.recovery.report import RecoveryReport, raise_for_lost
from dualwrite.stores.base import LostTransaction
from dualwrite.stores.rows import original_of, proven_lost

log = SubjectLogger(__name__)


class JobCommitter:
    """Commits and aborts runs.

    Args:
        site: The database and Kafka.
        sink: Moves what the tasks have staged.
    """

    def __init__(self, site: OpenSite, sink: Sink[Any]) -> None:
        self._site = site
        self._sink = sink
        settings = site.site
        self._decision = JobDecision(
            site.store,
            owner=describe_owner("job commit"),
            patience=settings.timeouts.claim,
            lock_timeout=settings.commit_timeout,
        )

    def commit(self, outcomes: Sequence[TaskOutcome | None]) -> int:
        """Commit what the tasks have prepared: all of it, or nothing.

        A batch without rows is committed as well: it replaces an earlier run of the batch, and no later run writes the batch.

        Returns without an error only if the table and the topic both have the batch.

        Args:
            outcomes: One outcome per task; None for a task that did not report.

        Returns:
            How many rows and messages the batch has; 0 if it had been committed before.

        Raises:
            BatchRefusedError: Nothing was committed: a task is missing or was replaced, or rows are missing.
            JobClosedError: Nothing was committed: another run replaced this one.
            PrefixLeasedError: The batch has no rows, and another job holds the prefix.
            ClusterMismatchError: Nothing was committed: the tasks prepared on another Kafka cluster than the driver's.
            TransactionTimeoutError: Nothing was committed: Kafka might have aborted a transaction before its commit.
            InDoubtTransactionError: The database did not respond, so it is unknown whether the batch is committed; or it is
                committed in the database (`database_committed`), and Kafka did not respond. The next run or recovery
                resolves it: what is prepared stays prepared, and what Kafka has aborted is published again.
            LostTransactionError: The batch is committed in the database, and Kafka has aborted some of its messages, which
                could not be published again.
        """
        reported = _all_reported(outcomes)
        if not reported:
            return 0
        run = _same_run(reported)
        winners = [outcome.prepared for outcome in reported if outcome.prepared is not None]
        rows = sum(outcome.rows for outcome in reported)
        began = time.monotonic()
        hit("job_before_commit")
        if winners:
            check_cluster(self._site.store, self._site.coordinator, [winner.transactional_id for winner in winners])
        else:  # a task without rows does not open the run
            open_run(self._site, run, owner=describe_owner("job commit"), staging_table=self._sink.staging_table)
        with tracing.job_step("commit database"):
            verdict = self._decide(run, winners, rows)
        hit("job_after_commit")
        completed = RecoveryReport()
        if verdict.decided is RunOutcome.COMMITTED:
            with tracing.job_step("commit kafka"):
                completed = complete(self._site, winners)
        hit("job_after_complete")
        rest = self._resolve_rest(verdict, completed={one.transactional_id for one in completed.ids})
        self._clear_staging(run, verdict, winners)
        marker = verdict.marker
        assert marker is not None  # otherwise the decision has raised
        self._raise_for_incomplete(run, marker, RecoveryReport(completed.ids + rest.ids))
        log.info("%s rows and messages, %s", f"{marker.row_count:,}", verdict.decided.value, job=run.name)
        if verdict.decided is RunOutcome.COMMITTED and observers.installed:
            observers.notify(JobCommitted(run.name, len(winners), time.monotonic() - began))
        return rows if verdict.decided is RunOutcome.COMMITTED else 0

    def _decide(self, run: JobRun, winners: Sequence[Prepared], rows: int) -> EndedRun:
        keys = [(winner.transactional_id, winner.fence) for winner in winners]

        def move(connection: Connection) -> int:
            hit("job_after_record")
            moved = self._sink.move(connection, keys)
            hit("job_after_move")
            return moved

        try:
            return self._decision.commit(run, winners, rows, move)
        except StoreCommitFailedError:
            raise
        except StoreError as error:
            if not error.retriable or not winners:
                raise
            raise InDoubtTransactionError(
                f"The database did not respond to the commit of {run.name}: its outcome is unknown, and it stays prepared.",
                transactional_id=winners[0].transactional_id,
                cause=f"{error}",
                next_step="the next run of the job, or `dualwrite recover --prefix "
                f"{shell_word(run.prefix)}`, resolves it; don't write the batch again by other means",
                state="",
                database_committed=None,
            ) from error

    def abort(self, run: JobRun) -> None:
        """Abort the run; if its batch turns out to be committed, complete it instead. Raises no DualWriteError.

        If the database or Kafka can't be reached, everything stays prepared for the next run or for recovery.
        """
        with _left_to_recovery(run.prefix, run.batch_id):
            self._clean_up(run, self._decision.abort(run))

    def abort_unknown(self, prefix: str, batch_id: int) -> None:
        """Like `abort`, for a caller that knows neither the job nor the token of its run, because no task has reported.

        The open run of this batch may belong to another driver that is alive. So it is aborted only if none of its tasks sends
        a heartbeat for two intervals; otherwise it is left to the next run of the job, or to recovery. A run that does not
        keep its lease belongs to a batch write, never to such a caller.
        """
        with _left_to_recovery(prefix, batch_id):
            ledger = self._site.ledger
            row = ledger.job(prefix)
            if row is None or row.batch_id != batch_id or not row.keeps_lease:
                return
            if row.is_open and not ledger.seems_dead(row, 2 * self._site.site.heartbeat_interval):
                log.info("batch %d is not aborted: tasks of its open run are still working", batch_id, prefix=prefix)
                return
            closed = self._decision.close(prefix, expected=row)
            if closed is not None:
                self._clean_up(JobRun(prefix, row.job_id, row.batch_id, row.keeps_lease, row.token), closed[1])

    def _clean_up(self, run: JobRun, verdict: EndedRun) -> None:
        hit("job_after_abort")
        report = self._resolve_rest(verdict)
        self._clear_staging(run, verdict)
        RecoveryReport(report.failed).raise_for_problems()
        log.warning("its run ended: %s", verdict.decided.value, job=run.name)
        if verdict.decided is RunOutcome.ABORTED and observers.installed:
            observers.notify(JobAborted(run.prefix, run.name))

    def _resolve_rest(self, verdict: EndedRun, *, completed: Collection[str] = ()) -> RecoveryReport:
        """Resolve what is still open: transactions of lost attempts, of earlier runs, and of the committed run's winners."""
        fences = {row.transactional_id: row.fence for row in verdict.left if not row.is_resolved}
        names: set[str] = set()
        if verdict.marker is not None:  # the committed run may have had another prefix
            names = {winner.transactional_id for winner in verdict.marker.winners}
            stored = self._site.ledger.attempts(verdict.marker.prefix, names)
            fences.update((row.transactional_id, row.fence) for row in stored if not row.is_resolved)
        ids = [(name, fence) for name, fence in fences.items() if name not in completed]
        return resolve_ids(self._site, ids, awaited=names)

    def _clear_staging(self, run: JobRun, verdict: EndedRun, winners: Sequence[Prepared] = ()) -> None:
        """Delete the staged rows. If this fails, the next cleanup does it: nothing reads these rows any more."""
        up_to = {row.transactional_id: row.fence for row in verdict.left}
        up_to.update((winner.transactional_id, winner.fence) for winner in winners)
        try:
            deleted = delete_staged(self._site, up_to, StagedRows(self._sink.staging_table))
        except DualWriteError as error:
            log.warning("its tasks' staged rows are left to the next cleanup: %s", error, job=run.name)
        else:
            log.debug("%d staged rows deleted", deleted, job=run.name)
        hit("job_after_clear")

    def _raise_for_incomplete(self, run: JobRun, marker: Marker, report: RecoveryReport) -> None:
        """Raise if the batch is committed in the database but not all of its messages are visible."""
        self._raise_for_failed(run, marker, report)
        rows = [row for row in (self._site.store.read(winner.transactional_id) for winner in marker.winners) if row is not None]
        if self._site.republisher is not None:
            tried = {(one.transactional_id, one.entry) for one in report.not_published}
            untried = {  # found lost by an earlier process
                (row.transactional_id, row.fence)
                for row in rows
                for entry in proven_lost(row.lost)
                if _is_of(marker, row.transactional_id, entry) and (row.transactional_id, entry) not in tried
            }
            published = resolve_ids(self._site, untried)
            self._raise_for_failed(run, marker, published)
            report = RecoveryReport(report.ids + published.ids)
        found = [(one.transactional_id, one.lost) for one in report if one.lost is not None]  # rule RW: also if it is gone now
        found += [(row.transactional_id, entry) for row in rows for entry in row.without_messages]
        again = report.published_again
        left = {
            (name, entry.generation, entry.state): (name, entry)
            for name, entry in found
            if _is_of(marker, name, entry) and (name, entry.generation, entry.state) not in again
        }
        raise_for_lost(left.values(), report.not_published)

    def _raise_for_failed(self, run: JobRun, marker: Marker, report: RecoveryReport) -> None:
        names = {winner.transactional_id for winner in marker.winners}
        failed = [one for one in report.failed if one.transactional_id in names]
        if failed:
            raise InDoubtTransactionError(
                f"{run.name} is committed in the database, but {len(failed)} of its transactions could not be completed at "
                "Kafka yet: their messages are not visible.",
                transactional_id=failed[0].transactional_id,
                cause=str(failed[0].error),
                next_step="don't write it again: the next run of the job, or "
                f"`dualwrite recover --prefix {shell_word(run.prefix)}`, completes it",
                state="",
                database_committed=True,
            ) from failed[0].error


def _is_of(marker: Marker, transactional_id: str, entry: LostTransaction) -> bool:
    """Whether a lost transaction has the messages of a winner of the batch."""
    original = original_of(entry)
    return any(
        (winner.transactional_id, f"{winner.generation} {winner.state}") == (transactional_id, original)
        for winner in marker.winners
    )


@contextmanager
def _left_to_recovery(prefix: str, batch_id: int) -> Iterator[None]:
    """Log a DualWriteError instead of raising it."""
    try:
        yield
    except DualWriteError as error:
        log.warning("batch %d could not be aborted completely and is left to recovery: %s", batch_id, error, prefix=prefix)


def _all_reported(outcomes: Sequence[TaskOutcome | None]) -> list[TaskOutcome]:
    reported = [outcome for outcome in outcomes if outcome is not None]
    if len(reported) != len(outcomes):
        raise BatchRefusedError(
            f"{len(outcomes) - len(reported)} of {len(outcomes)} tasks did not report their result; nothing was committed.",
            cause="a task failed, or its report was lost",
            next_step="run the batch again",
        )
    partitions = {outcome.partition for outcome in reported}
    if len(partitions) != len(reported):
        raise BatchRefusedError(
            f"{len(reported)} tasks wrote {len(partitions)} partitions; nothing was committed.",
            cause="two attempts of the same task were both counted",
            next_step="run the batch again",
        )
    return reported


def _same_run(reported: Sequence[TaskOutcome]) -> JobRun:
    runs = {outcome.run for outcome in reported}
    if len(runs) != 1:
        raise BatchRefusedError(
            f"The tasks belong to {len(runs)} different runs; nothing was committed.",
            next_step="run the batch again",
            job_id=reported[0].run.job_id,
            batch_id=reported[0].run.batch_id,
        )
    return reported[0].run
