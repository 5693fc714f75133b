"""What the driver does when its tasks are done: commit, or abort. Either may be broken off at any point and done again."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from typing import Protocol

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
from dualwrite.jobs.base import JobRun, Prepared, TaskOutcome
from dualwrite.jobs.completing import complete, delete_staged, resolve_ids
from dualwrite.jobs.context import OpenSite
from dualwrite.jobs.decision import Decided, JobDecision, Verdict
from dualwrite.jobs.frame.staged_rows import StagedRows
from dualwrite.jobs.job_rows import Marker
from dualwrite.recovery.clusters import check_cluster
from dualwrite.recovery.recoverer import describe_owner
from dualwrite.recovery.report import RecoveryReport, raise_for_lost
from dualwrite.stores.base import LostTransaction

log = logging.getLogger(__name__)


class Mover(Protocol):
    """Moves staged rows into their table."""

    @property
    def staging_table(self) -> str:
        """The name of the staging table, as `quoted_name` writes it."""

    def move(self, connection: Connection, keys: Sequence[tuple[str, int]], /) -> int:
        """Move the rows staged under these ids and fences; how many there were."""


class JobCommitter:
    """Commits and aborts runs.

    Args:
        site: Where, opened.
        sink: What the tasks have staged, and where it goes.
    """

    def __init__(self, site: OpenSite, sink: Mover) -> None:
        self._site = site
        self._sink = sink
        settings = site.site
        self._judge = JobDecision(
            site.store,
            owner=describe_owner("job commit"),
            patience=settings.timeouts.claim,
            lock_timeout=settings.commit_timeout,
        )

    def commit(self, outcomes: Sequence[TaskOutcome | None]) -> int:
        """Commit what the tasks have prepared: all of it, or nothing.

        Returns without an error only when table and topic both have the batch.

        Args:
            outcomes: One of each task; a None is a task that nobody heard of.

        Returns:
            How many rows and messages the batch has; 0 where it had been committed before.

        Raises:
            BatchRefusedError: Nothing was committed: a task is missing or was replaced, or rows are.
            JobClosedError: Nothing was committed: another run took the job over.
            ClusterMismatchError: Nothing was committed: the tasks have prepared on another Kafka cluster than the driver's.
            TransactionTimeoutError: Nothing was committed: Kafka might have given up a transaction before its commit.
            InDoubtTransactionError: The database did not answer: whether the batch is committed shows when it does. Or it is
                committed there (`database_committed`), and Kafka did not answer. Either way everything stays prepared, and
                the next run or recovery settles it.
            LostTransactionError: The batch is committed in the database, and Kafka gave messages of it up.
        """
        told = _all_told(outcomes)
        if not told:
            return 0
        run = _same_run(told)
        winners = [outcome.prepared for outcome in told if outcome.prepared is not None]
        rows = sum(outcome.rows for outcome in told)
        hit("job_before_commit")
        if winners:
            check_cluster(self._site.store, self._site.coordinator, [winner.transactional_id for winner in winners])
        verdict = self._decided(run, winners, rows) if winners else self._judge.abort(run)  # the latter has nothing to write
        hit("job_after_commit")
        completed = complete(self._site, winners) if verdict.decided is Decided.COMMITTED else RecoveryReport()
        hit("job_after_complete")
        rest = self._settled(verdict, but={one.transactional_id for one in completed.ids})
        self._clear_staging(run, verdict, winners)
        if verdict.marker is None:
            log.info("%s: nothing to write", run.name)
            return 0
        self._raise_for_what_is_left(run, verdict.marker, RecoveryReport(completed.ids + rest.ids))
        log.info("%s: %s rows and messages, %s", run.name, f"{verdict.marker.row_count:,}", verdict.decided.value)
        return rows if verdict.decided is Decided.COMMITTED else 0

    def _decided(self, run: JobRun, winners: Sequence[Prepared], rows: int) -> Verdict:
        keys = [(winner.transactional_id, winner.fence) for winner in winners]

        def move(connection: Connection) -> int:
            hit("job_after_record")
            moved = self._sink.move(connection, keys)
            hit("job_after_move")
            return moved

        try:
            return self._judge.commit(run, winners, rows, move)
        except StoreCommitFailedError:
            raise
        except StoreError as error:
            if not error.retriable:
                raise
            raise InDoubtTransactionError(
                f"The database did not answer while {run.name} was committed. Nothing was guessed: it stays prepared.",
                transactional_id=winners[0].transactional_id,
                cause=str(error),
                next_step="the next run of the job, or `dualwrite recover --prefix "
                f"{shell_word(run.prefix)}`, settles it; don't write the batch again by other means",
                state="",
                database_committed=None,
            ) from error

    def abort(self, outcomes: Sequence[TaskOutcome | None], *, prefix: str, batch_id: int) -> None:
        """Give the run up, unless its batch turns out to be committed: then it is completed. Raises nothing of ours.

        What can't be reached now stays prepared, for the next run or for recovery.

        Args:
            outcomes: One of each task, as far as they are known.
            prefix: The prefix, for where none is.
            batch_id: The batch, likewise.
        """
        told = [outcome for outcome in outcomes if outcome is not None]
        try:
            self._aborted(told, prefix, batch_id)
        except DualWriteError as error:
            log.warning("%s: the end of batch %d is left to recovery: %s", prefix, batch_id, error)

    def _aborted(self, told: Sequence[TaskOutcome], prefix: str, batch_id: int) -> None:
        if told:
            run = told[0].run
            verdict = self._judge.abort(run)
        else:
            closed = self._judge.close(prefix, batch_id=batch_id)
            if closed is None:
                return
            row, verdict = closed
            run = JobRun(prefix, row.job_id, row.batch_id, row.keeps_lease, row.token)
        hit("job_after_abort")
        report = self._settled(verdict)
        self._clear_staging(run, verdict)
        RecoveryReport(report.failed).raise_for_problems()
        log.warning("%s: %s", run.name, verdict.decided.value)

    def _settled(self, verdict: Verdict, *, but: Collection[str] = ()) -> RecoveryReport:
        """Settle what is left open: by attempts that lost, by earlier runs, and the winners of the run that was committed."""
        fences = {row.transactional_id: row.fence for row in verdict.left if not row.is_settled}
        names: set[str] = set()
        if verdict.marker is not None:  # the run that was committed may have had another prefix
            names = {winner.transactional_id for winner in verdict.marker.winners}
            stored = self._site.ledger.attempts(verdict.marker.prefix, names)
            fences.update((row.transactional_id, row.fence) for row in stored if not row.is_settled)
        ids = [(name, fence) for name, fence in fences.items() if name not in but]
        return resolve_ids(self._site, ids, awaited=names)

    def _clear_staging(self, run: JobRun, verdict: Verdict, winners: Sequence[Prepared] = ()) -> None:
        """Delete what was staged. What fails here is done by the next sweep: nobody reads these rows any more."""
        up_to = {row.transactional_id: row.fence for row in verdict.left}
        up_to.update((winner.transactional_id, winner.fence) for winner in winners)
        try:
            deleted = delete_staged(self._site, up_to, StagedRows(self._sink.staging_table))
        except DualWriteError as error:
            log.warning("%s: its tasks' staged rows are left to the next sweep: %s", run.name, error)
        else:
            log.debug("%s: %d staged rows deleted", run.name, deleted)
        hit("job_after_clear")

    def _raise_for_what_is_left(self, run: JobRun, marker: Marker, report: RecoveryReport) -> None:
        """The batch is committed; raise where not all of its messages are visible, whoever found that."""
        names = {winner.transactional_id for winner in marker.winners}
        failed = [one for one in report.failed if one.transactional_id in names]
        if failed:
            raise InDoubtTransactionError(
                f"{run.name} is committed in the database, and {len(failed)} of its transactions could not be completed at "
                "Kafka yet: their messages are prepared, and not visible.",
                transactional_id=failed[0].transactional_id,
                cause=str(failed[0].error),
                next_step="don't write it again: the next run of the job, or "
                f"`dualwrite recover --prefix {shell_word(run.prefix)}`, completes it",
                state="",
                database_committed=True,
            ) from failed[0].error
        raise_for_lost(self._lost(marker))

    def _lost(self, marker: Marker) -> list[tuple[str, LostTransaction]]:
        """What stands in the rows of the batch's transactions as lost or unverified, and nobody has acknowledged."""
        found = []
        for name, generation, state in marker.winners:
            row = self._site.store.read(name)
            entries = () if row is None else row.lost
            found += [(name, lost) for lost in entries if (lost.generation, str(lost.state)) == (generation, state)]
        return found


def _all_told(outcomes: Sequence[TaskOutcome | None]) -> list[TaskOutcome]:
    told = [outcome for outcome in outcomes if outcome is not None]
    if len(told) != len(outcomes):
        raise BatchRefusedError(
            f"{len(outcomes) - len(told)} of {len(outcomes)} tasks did not say what they prepared; nothing was committed.",
            cause="a task failed, or its answer was lost",
            next_step="run the batch again",
        )
    partitions = {outcome.partition for outcome in told}
    if len(partitions) != len(told):
        raise BatchRefusedError(
            f"{len(told)} tasks wrote {len(partitions)} partitions; nothing was committed.",
            cause="two attempts of one task were both counted",
            next_step="run the batch again",
        )
    return told


def _same_run(told: Sequence[TaskOutcome]) -> JobRun:
    runs = {outcome.run for outcome in told}
    if len(runs) != 1:
        raise BatchRefusedError(
            f"The tasks belong to {len(runs)} different runs; nothing was committed.",
            next_step="run the batch again",
            job_id=told[0].run.job_id,
            batch_id=told[0].run.batch_id,
        )
    return told[0].run
