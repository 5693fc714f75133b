"""What follows the decision: every transaction of the run is brought to its end at Kafka, in parallel, and settled.

The rows of the transactional ids say how each ends, so that this is recovery, and may be broken off and done again by anybody.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Final

from dualwrite.errors import BrokerUnavailableError, DualWriteError, FencedError, StoreUnavailableError
from dualwrite.jobs.base import Prepared
from dualwrite.jobs.context import OpenSite
from dualwrite.jobs.frame.staged_rows import StagedRows
from dualwrite.jobs.job_rows import AttemptRow
from dualwrite.recovery.plan import KafkaLook
from dualwrite.recovery.recoverer import describe_owner
from dualwrite.recovery.report import IdReport, Outcome, RecoveryReport
from dualwrite.recovery.resolve import resolve_id
from dualwrite.stores.base import Claim
from dualwrite.stores.sql.dialect import ErrorClass

log = logging.getLogger(__name__)

_PAUSE: Final = 0.05


def complete(site: OpenSite, winners: Sequence[Prepared]) -> RecoveryReport:
    """Commit the winners of a run that was decided just now, under the claims of their tasks.

    Returns:
        What became of each; one that can't be completed now has its error there, and stays prepared.
    """
    claims = [Claim(winner.transactional_id, winner.fence, winner.owner) for winner in winners]
    return _in_parallel(site, claims, lambda claim: _settled(site, claim))


def resolve_ids(site: OpenSite, ids: Iterable[tuple[str, int]], *, awaited: Collection[str] = ()) -> RecoveryReport:
    """Settle ids by the states in their rows, each only while it has the fence that was read.

    One that was claimed since is left to its claimant.

    Args:
        site: Where.
        ids: Transactional ids, each with its fence.
        awaited: Those whose claimants are waited for, until what was prepared is settled.
    """
    owner = describe_owner("job recovery")
    look = KafkaLook(site.store, site.coordinator)

    def settle(claim: Claim) -> IdReport:
        name = claim.transactional_id
        row = site.store.read(name)
        if row is not None and row.fence == claim.fence:
            look.at(row)
        try:
            claim = site.store.claim(name, owner, timeout=site.site.timeouts.claim, expected_fence=claim.fence)
            return resolve_id(site.store, site.coordinator, claim, timeout=site.site.timeouts.kafka)
        except FencedError as error:
            if name in awaited:
                return _wait_until_resolved(site, claim)
            return IdReport(name, taken_over_by=str(error.facts.get("current_owner")))

    return _in_parallel(site, [Claim(name, fence, owner) for name, fence in ids], settle)


def _settled(site: OpenSite, claim: Claim) -> IdReport:
    """Settle under the task's own claim; where somebody has claimed since, see that it gets done."""
    try:
        return resolve_id(site.store, site.coordinator, claim, timeout=site.site.timeouts.kafka)
    except FencedError:
        return _wait_until_resolved(site, claim)


def _wait_until_resolved(site: OpenSite, claim: Claim) -> IdReport:
    """Wait until whoever claimed after us has settled what we left, as every claimant does first."""
    name, state = claim.transactional_id, None
    deadline = time.monotonic() + site.site.timeouts.kafka
    while time.monotonic() < deadline:
        row = site.store.read(name)
        if row is None or row.prepared_state is None or state not in (None, row.prepared_state):
            return IdReport(name, taken_over_by=row.owner if row else None)
        state = row.prepared_state
        time.sleep(_PAUSE)
    raise BrokerUnavailableError(
        "Somebody else has claimed the id of a committed task, and has not settled it in time.",
        transactional_id=name,
        next_step="it stays prepared; `dualwrite recover` settles it",
    )


def _in_parallel(site: OpenSite, claims: Sequence[Claim], settle: Callable[[Claim], IdReport]) -> RecoveryReport:
    def one(claim: Claim) -> IdReport:
        try:
            return settle(claim)
        except DualWriteError as error:
            log.warning("%s: not settled now: %s", claim.transactional_id, error)
            return IdReport(claim.transactional_id, error=error)

    if not claims:
        return RecoveryReport()
    with ThreadPoolExecutor(min(site.site.parallelism, len(claims)), "dualwrite-settle") as threads:
        return RecoveryReport(tuple(threads.map(one, claims)))


log = logging.getLogger(__name__)

_LOCK_TIMEOUT: Final = 1.0
_DOING: Final = "deleting staged rows"


def cleanup(site: OpenSite, left: Sequence[AttemptRow], staged: StagedRows) -> RecoveryReport:
    """Settle what earlier runs have left open, and delete what they have staged.

    An id that a task of a newer run has claimed meanwhile has another fence: it is left to that task, which settles it before
    it begins.

    Args:
        site: Where.
        left: What was left behind, listed while the job's row was locked.
        staged: Where their rows were staged.
    """
    report = resolve_ids(site, [(row.transactional_id, row.fence) for row in left if not row.is_settled])
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
        if not short.is_caused_by(error, ErrorClass.LOCKED):
            raise
    deleted = 0
    for name, fence in short.query(lambda connection: staged.committed_keys(connection, up_to), _DOING):
        try:
            deleted += short.run(partial(staged.delete_exactly, transactional_id=name, fence=fence), _DOING)
        except StoreUnavailableError as error:
            if not short.is_caused_by(error, ErrorClass.LOCKED):
                raise
            log.info("The staged rows of %s (fence %d) are left to the next sweep: somebody has a lock on them.", name, fence)
    return deleted
