"""What zombies and crashes of earlier runs have left under a prefix: transactions are settled, staged rows deleted."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from sqlalchemy import Connection

from dualwrite.jobs.base import JobRun
from dualwrite.jobs.completing import settle_ids
from dualwrite.jobs.ledger import AttemptRow
from dualwrite.jobs.site import OpenSite
from dualwrite.jobs.staged_rows import StagedRows
from dualwrite.report import Outcome, RecoveryReport

log = logging.getLogger(__name__)


def sweep(site: OpenSite, prefix: str, *, current: JobRun | None, staged: StagedRows | None) -> RecoveryReport:
    """Settle every attempt of the prefix that is not of the current run, and delete what it staged.

    An id that a task of the current run claims meanwhile is left to that task, which settles it before it begins.

    Args:
        site: Where.
        prefix: The prefix; ids of longer prefixes are not touched.
        current: The open run, whose attempts are left alone; None where every run is closed.
        staged: Where their rows were staged, or None where nobody knows any more.
    """
    left = [row for row in site.ledger.attempts(prefix) if current is None or row.token != current.token]
    report = settle_ids(site, [(row.transactional_id, row.fence) for row in left if not row.is_settled])
    for found in report:
        if found.outcome is not Outcome.NOTHING:
            log.info("%s: swept generation %d: %s", found.transactional_id, found.generation, found.outcome.value)
    if staged is not None:
        delete_staged(site, left, staged)
    return report


def delete_staged(site: OpenSite, attempts: Iterable[AttemptRow], staged: StagedRows) -> int:
    """Delete what attempts have staged, by their keys; a claim that came later has another. How many rows there were."""
    up_to = {row.transactional_id: row.fence for row in attempts}

    def work(connection: Connection) -> int:
        return staged.delete(connection, up_to) if up_to else 0

    return site.store.short_transactions.run(work, "deleting staged rows")
