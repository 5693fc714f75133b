"""Recovery of jobs by hand, and by whoever finds a job without a driver: end its run, settle its ids, delete its rows."""

from __future__ import annotations

from collections.abc import Collection

from dualwrite.errors import StateTableMissingError
from dualwrite.jobs.judge import JobJudge
from dualwrite.jobs.rules import JobRow
from dualwrite.jobs.site import OpenSite
from dualwrite.jobs.staged_rows import StagedRows
from dualwrite.jobs.sweep import sweep
from dualwrite.recovery import describe_owner
from dualwrite.report import RecoveryReport


class JobsByHand:
    """Looks at the jobs of a database, and recovers them.

    Args:
        site: Where, opened.
    """

    def __init__(self, site: OpenSite) -> None:
        self._site = site

    def jobs(self) -> list[JobRow]:
        """The rows of all prefixes; none where the database has no tables for jobs yet."""
        try:
            return self._site.ledger.jobs()
        except StateTableMissingError:
            return []

    def attempts_among(self, ids: Collection[str]) -> dict[str, str]:
        """Those of the ids that are task attempts of jobs, each with its job's prefix."""
        return self._site.ledger.prefix_of(ids) if ids and self.jobs() else {}

    def recover(self, prefix: str, *, release: bool = False) -> RecoveryReport:
        """Close what is open on a prefix, settle all ids that its tasks have used, delete what they have staged.

        A driver that still runs finds its run closed, and commits nothing of it.

        Args:
            prefix: The prefix, exactly.
            release: Let another job have the prefix, also where a streaming query holds it.

        Raises:
            StoreError: The database refuses or can't be reached.
        """
        timeouts = self._site.site.timeouts
        judge = JobJudge(self._site.store, owner=describe_owner("recoverer"), patience=timeouts.claim)
        closed = judge.close(prefix, release=release)
        if closed is None:
            return RecoveryReport()
        row, verdict = closed
        return sweep(self._site, verdict.left, StagedRows(row.staging_table))
