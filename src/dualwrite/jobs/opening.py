"""Opens a run: the first thing that a task does, and the driver itself if no task has rows."""

from __future__ import annotations

from collections.abc import Iterable

from dualwrite.failpoints import hit
from dualwrite.jobs.base import JobRun
from dualwrite.jobs.completing import cleanup
from dualwrite.jobs.context import OpenSite
from dualwrite.jobs.lease import Opening
from dualwrite.jobs.staged_rows import StagedRows
from dualwrite.recovery.clusters import check_cluster


def open_run(site: OpenSite, run: JobRun, *, owner: str, staging_table: str, ids: Iterable[str] = ()) -> Opening:
    """Open the run, unless it is open, and resolve what earlier runs left.

    Opening the run fences the tasks of earlier runs, so Kafka is checked first.

    Args:
        site: The database and Kafka.
        run: The run.
        owner: The name of the process that opens it, for messages.
        staging_table: Where the run stages its rows.
        ids: Transactional ids that must be on this Kafka cluster.

    Raises:
        JobClosedError: The run was closed or replaced.
        PrefixLeasedError: Another job holds the prefix.
        BatchRefusedError: The job has committed a later batch, but not this one.
        DualWriteError: As `check_cluster`, and StoreError.
    """
    check_cluster(site.store, site.coordinator, ids)
    made = site.ledger.open(run, owner=owner, staging_table=staging_table, lease_timeout=site.site.lease_timeout)
    hit("job_after_open")
    if made.earlier is not None and made.left:
        cleanup(site, made.left, StagedRows(made.earlier.staging_table))
    return made.outcome
