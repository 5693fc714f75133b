"""Manual recovery of a job: close its run, resolve its transactions, delete its staged rows."""

from __future__ import annotations

from dualwrite.jobs.completing import cleanup
from dualwrite.jobs.context import OpenSite
from dualwrite.jobs.decision import JobDecision
from dualwrite.jobs.lease import JobRow
from dualwrite.jobs.staged_rows import StagedRows
from dualwrite.recovery.plan import IdPlan, KafkaCheck, RecoveryPlan
from dualwrite.recovery.recoverer import describe_owner
from dualwrite.recovery.report import IdReport, RecoveryReport


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
    rows = (site.store.read(attempt.transactional_id) for attempt in verdict.left if attempt.is_resolved)
    lost_before = (IdReport(found.transactional_id, unacknowledged=found.lost) for found in rows if found and found.lost)
    return RecoveryReport((*resolved.ids, *lost_before))


def plan_job(site: OpenSite, prefix: str) -> RecoveryPlan:
    """What `recover_job` would do at Kafka now, and why. Changes nothing.

    Raises: as `recover_job`.
    """
    kafka = KafkaCheck(site.store, site.coordinator)
    kafka.check()
    rows = (site.store.read(attempt.transactional_id) for attempt in site.ledger.attempts(prefix))
    return RecoveryPlan(
        tuple(
            IdPlan(row.transactional_id, row.owner if row.generations_to_recover else None, kafka.at(row), row.lost)
            for row in rows
            if row is not None
        )
    )
