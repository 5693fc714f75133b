"""What zombies and crashes of earlier runs have left under a prefix: transactions are settled, staged rows deleted."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from sqlalchemy import Connection

from dualwrite.jobs.completing import settle_ids
from dualwrite.jobs.job_rows import AttemptRow
from dualwrite.jobs.site import OpenSite
from dualwrite.jobs.staged_rows import StagedRows
from dualwrite.report import Outcome, RecoveryReport

log = logging.getLogger(__name__)


def sweep(site: OpenSite, left: Sequence[AttemptRow], staged: StagedRows) -> RecoveryReport:
    """Settle what earlier runs have left open, and delete what they have staged.

    An id that a task of a newer run has claimed meanwhile has another fence: it is left to that task, which settles it before
    it begins.

    Args:
        site: Where.
        left: What was left behind, listed while the job's row was locked.
        staged: Where their rows were staged.
    """
    report = settle_ids(site, [(row.transactional_id, row.fence) for row in left if not row.is_settled])
    for found in report:
        if found.outcome is not Outcome.NOTHING:
            log.info("%s: swept generation %d: %s", found.transactional_id, found.generation, found.outcome.value)
    delete_staged(site, {row.transactional_id: row.fence for row in left}, staged)
    return report


def delete_staged(site: OpenSite, up_to: Mapping[str, int], staged: StagedRows) -> int:
    """Delete what was staged under ids, up to a fence each; a claim that came later has another. How many rows there were."""

    def work(connection: Connection) -> int:
        return staged.delete(connection, up_to) if up_to else 0

    return site.store.short_transactions.run(work, "deleting staged rows")
