"""`dualwrite.recover` and `plan_recovery`: settle what crashes left behind, or see what that would do, beside jobs at work."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from dualwrite.assembly import Database, Kafka, open_recoverer
from dualwrite.plan import RecoveryPlan
from dualwrite.recovery import Recoverer, ids_with_lanes
from dualwrite.report import RecoveryReport
from dualwrite.settings import Settings
from dualwrite.stores.base import TxnStateStore
from dualwrite.stores.sql import SqlStateStore
from dualwrite.timeouts import Timeouts

log = logging.getLogger(__name__)


def recover(
    database: Database | None = None,
    *,
    kafka: Kafka | None = None,
    ids: Iterable[str] | None = None,
    prefix: str = "",
    timeouts: Timeouts | None = None,
    schema: str | None = None,
    settings: Settings | None = None,
) -> RecoveryReport:
    """Settle what crashes left behind, in one call: a start-up hook of a service. See `Recoverer.recover`.

    It takes the ids from live writers. Opening a writer recovers its own id by itself; this is for the ids of others. The
    tasks of a job (Spark) that has a run open keep theirs, unless they are named by `ids`; what such a job leaves is settled
    by its next run, or by `dualwrite recover --prefix`. Where Kafka does not answer, no id is taken: each one's error stands in
    the report.
    """
    with open_recoverer(database, kafka=kafka, timeouts=timeouts, schema=schema, settings=settings) as recoverer:
        return recoverer.recover(_chosen(recoverer, ids, prefix))


def plan_recovery(
    database: Database | None = None,
    *,
    kafka: Kafka | None = None,
    ids: Iterable[str] | None = None,
    prefix: str = "",
    timeouts: Timeouts | None = None,
    schema: str | None = None,
    settings: Settings | None = None,
) -> RecoveryPlan:
    """What `recover` would do with the same arguments now, and why, for each id and generation. Changes nothing."""
    with open_recoverer(database, kafka=kafka, timeouts=timeouts, schema=schema, settings=settings) as recoverer:
        return recoverer.plan(_chosen(recoverer, ids, prefix))


def _chosen(recoverer: Recoverer, ids: Iterable[str] | None, prefix: str) -> list[str]:
    """The ids that were asked for, with their lanes; without those of jobs at work where none was named."""
    ids = None if ids is None else list(ids)
    spared = _ids_at_work(recoverer.store) if ids is None else frozenset()
    chosen = ids_with_lanes(recoverer.store, ids, prefix=prefix)
    for name in spared.intersection(chosen):
        log.info("%s: left alone: a job that is at work has it", name)
    return [name for name in chosen if name not in spared]


def _ids_at_work(store: TxnStateStore) -> frozenset[str]:
    if not isinstance(store, SqlStateStore):
        return frozenset()
    from dualwrite.jobs.ledger import JobLedger  # noqa: PLC0415  (`import dualwrite` needs none of it)

    return JobLedger(store).attempts_at_work()
