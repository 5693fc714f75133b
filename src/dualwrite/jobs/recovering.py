"""`dualwrite.recover`: settle what crashes left behind, in one call, beside jobs that are at work."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from dualwrite.assembly import Database, Kafka, open_recoverer
from dualwrite.recovery import ids_with_lanes
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
    settings: Settings | None = None,
) -> RecoveryReport:
    """Settle what crashes left behind, in one call: a start-up hook of a service. See `Recoverer.recover`.

    It takes the ids from live writers. Opening a writer recovers its own id by itself; this is for the ids of others. The
    tasks of a job (Spark) that has a run open keep theirs, unless they are named by `ids`; what such a job leaves is settled
    by its next run, or by `dualwrite recover --prefix`.
    """
    with open_recoverer(database, kafka=kafka, timeouts=timeouts, settings=settings) as recoverer:
        spared = _ids_at_work(recoverer.store) if ids is None else frozenset()
        if not spared:
            return recoverer.recover(ids, prefix=prefix)
        chosen = ids_with_lanes(recoverer.store, prefix=prefix)
        for name in spared.intersection(chosen):
            log.info("%s: left alone: a job that is at work has it", name)
        return recoverer.recover([name for name in chosen if name not in spared])


def _ids_at_work(store: TxnStateStore) -> frozenset[str]:
    if not isinstance(store, SqlStateStore):
        return frozenset()
    from dualwrite.jobs.ledger import JobLedger  # noqa: PLC0415  (`import dualwrite` needs none of it)

    return JobLedger(store).attempts_at_work()
