"""What follows the decision: every transaction of the run is brought to its end at Kafka, in parallel, and settled.

The rows of the transactional ids say how each ends, so that this is recovery, and may be broken off and done again by anybody.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from dualwrite.errors import BrokerUnavailableError, DualWriteError, FencedError
from dualwrite.jobs.base import Prepared
from dualwrite.jobs.site import OpenSite
from dualwrite.plan import KafkaLook
from dualwrite.recovery import describe_owner
from dualwrite.report import IdReport, RecoveryReport
from dualwrite.settling import settle_id
from dualwrite.stores.base import Claim

log = logging.getLogger(__name__)

_PAUSE: Final = 0.05


def complete(site: OpenSite, winners: Sequence[Prepared]) -> RecoveryReport:
    """Commit the winners of a run that was decided just now, under the claims of their tasks.

    Returns:
        What became of each; one that can't be completed now has its error there, and stays prepared.
    """
    claims = [Claim(winner.transactional_id, winner.fence, winner.owner) for winner in winners]
    return _in_parallel(site, claims, lambda claim: _settled(site, claim))


def settle_ids(site: OpenSite, ids: Iterable[tuple[str, int]], *, awaited: Collection[str] = ()) -> RecoveryReport:
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
            return settle_id(site.store, site.coordinator, claim, timeout=site.site.timeouts.kafka)
        except FencedError as error:
            if name in awaited:
                return _seen_settled(site, claim)
            return IdReport(name, taken_over_by=str(error.facts.get("current_owner")))

    return _in_parallel(site, [Claim(name, fence, owner) for name, fence in ids], settle)


def _settled(site: OpenSite, claim: Claim) -> IdReport:
    """Settle under the task's own claim; where somebody has claimed since, see that it gets done."""
    try:
        return settle_id(site.store, site.coordinator, claim, timeout=site.site.timeouts.kafka)
    except FencedError:
        return _seen_settled(site, claim)


def _seen_settled(site: OpenSite, claim: Claim) -> IdReport:
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
