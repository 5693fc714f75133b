"""What zombies and crashes of earlier runs have left under a prefix: transactions are settled, staged rows deleted."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Final

from dualwrite.errors import StoreUnavailableError
from dualwrite.jobs.completing import settle_ids
from dualwrite.jobs.job_rows import AttemptRow
from dualwrite.jobs.site import OpenSite
from dualwrite.jobs.staged_rows import StagedRows
from dualwrite.report import Outcome, RecoveryReport
from dualwrite.stores.sql.dialect import Trouble

log = logging.getLogger(__name__)

_LOCK_TIMEOUT: Final = 1.0
_DOING: Final = "deleting staged rows"


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
    """Delete what was staged under ids, up to a fence each; a claim that came later has another. How many rows there were.

    MariaDB and MySQL lock the rows that a task is about to load, a paused one perhaps. They are passed over: its fence was
    raised, so that it can but roll them back. What somebody else is about to delete is left to them, or to the next sweep.
    """
    if not up_to:
        return 0
    short = replace(site.store.short_transactions, lock_timeout=_LOCK_TIMEOUT, work_time=site.site.commit_timeout)
    try:
        return short.run(lambda connection: staged.delete(connection, up_to), _DOING)
    except StoreUnavailableError as error:
        if not short.came_of(error, Trouble.LOCKED):
            raise
    deleted = 0
    for name, fence in short.query(lambda connection: staged.committed_keys(connection, up_to), _DOING):
        try:
            deleted += short.run(partial(staged.delete_exactly, transactional_id=name, fence=fence), _DOING)
        except StoreUnavailableError as error:
            if not short.came_of(error, Trouble.LOCKED):
                raise
            log.info("The staged rows of %s (fence %d) are left to the next sweep: somebody has a lock on them.", name, fence)
    return deleted
