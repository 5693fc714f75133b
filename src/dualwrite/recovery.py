"""Recoverer: settle what a crash left behind, for one id, for a prefix, or for all."""

from __future__ import annotations

import logging
import os
import socket
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final, Self

from dualwrite.errors import ConfigurationError, DualWriteError, FencedError, StoreError
from dualwrite.failpoints import hit
from dualwrite.kafka.base import TransactionCoordinator
from dualwrite.report import IdReport, RecoveryReport
from dualwrite.settling import settle_generations
from dualwrite.stores.base import LostTransaction, TxnStateStore
from dualwrite.timeouts import Timeouts

log = logging.getLogger(__name__)

MAX_OWNER_LENGTH: Final = 200


def describe_owner(role: str) -> str:
    """Who claims, for people: role, host, process id and program."""
    program = Path(sys.argv[0]).name if sys.argv and sys.argv[0] else "python"
    return f"{role} {socket.gethostname()}:{os.getpid()} {program}"[:MAX_OWNER_LENGTH]


class Recoverer:
    """Settles ids whose writer is gone (KIP-939, "Recovery recipe").

    It may run at any time, several at once, and beside live writers; doing it twice changes nothing. It takes an id from
    its holder: a live writer gets FencedError at its next step and can `reopen()`. Ids on which nothing is unsettled are
    not touched.

    Args:
        store: The database.
        coordinator: Kafka's side.
        timeouts: Time limits.
    """

    def __init__(self, store: TxnStateStore, coordinator: TransactionCoordinator, *, timeouts: Timeouts | None = None) -> None:
        self._store = store
        self._coordinator = coordinator
        self._timeouts = timeouts or Timeouts()

    def pending(self, ids: Iterable[str] | None = None, *, prefix: str = "") -> tuple[str, ...]:
        """The ids among the asked ones that recovery would take: something on them is unsettled. Reads only."""
        found = []
        for transactional_id in self._chosen(ids, prefix):
            row = self._store.read(transactional_id)
            if row is not None and not row.forgotten and row.unsettled_generations:
                found.append(transactional_id)
        return tuple(found)

    def recover(
        self,
        ids: Iterable[str] | None = None,
        *,
        prefix: str = "",
        progress: Callable[[IdReport], None] | None = None,
    ) -> RecoveryReport:
        """Settle the given ids, or those that begin with `prefix`, or all.

        An id that can't be recovered does not keep the others from it: its error stands in the report.

        Args:
            ids: Logical transactional ids; None for all that begin with `prefix`.
            prefix: Only ids that begin with it.
            progress: Called with each id's report when it is done.

        Raises:
            StoreError: The ids could not be listed.
            ConfigurationError: Both ids and a prefix were given.
        """
        reports = []
        for transactional_id in self._chosen(ids, prefix):
            report = self._recover_one(transactional_id)
            reports.append(report)
            if progress is not None:
                progress(report)
        return RecoveryReport(tuple(reports))

    def acknowledge(self, ids: Iterable[str] | None = None, *, prefix: str = "") -> dict[str, tuple[LostTransaction, ...]]:
        """Take the lost and unverified transactions off the rows, because somebody has dealt with them; return them by id."""
        removed = {}
        for transactional_id in self._chosen(ids, prefix):
            entries = self._store.acknowledge(transactional_id)
            if entries:
                removed[transactional_id] = entries
        return removed

    def close(self) -> None:
        """Close store and coordinator."""
        self._coordinator.close()
        self._store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _chosen(self, ids: Iterable[str] | None, prefix: str) -> list[str]:
        if ids is None:
            return self._store.list(prefix)
        if prefix:
            raise ConfigurationError("Both ids and a prefix were given.", next_step="give one of them")
        return [ids] if isinstance(ids, str) else list(ids)

    def _recover_one(self, transactional_id: str) -> IdReport:
        try:
            return self._settled(transactional_id)
        except FencedError as error:
            row = self._store.read(transactional_id)
            owner = "somebody else" if row is None else row.owner
            log.info("%s: taken over by %s while it was recovered: %s", transactional_id, owner, error)
            return IdReport(transactional_id, taken_over_by=owner, unacknowledged=() if row is None else row.lost)
        except DualWriteError as error:
            log.exception("%s: recovery did not finish", transactional_id)
            return IdReport(transactional_id, error=error)

    def _settled(self, transactional_id: str) -> IdReport:
        row = self._store.read(transactional_id)
        if row is None:
            raise StoreError(
                "There is no such transactional id in this database.",
                transactional_id=transactional_id,
                next_step=f"`dualwrite status` lists the ids of {self._store.description}",
            )
        if not row.unsettled_generations:
            return IdReport(transactional_id, unacknowledged=row.lost)
        claim = self._store.claim(transactional_id, describe_owner("recoverer"), timeout=self._timeouts.claim)
        hit("recover_after_claim")
        outcomes = settle_generations(self._store, self._coordinator, claim, timeout=self._timeouts.kafka)
        return IdReport(transactional_id, outcomes, self._store.read_claimed(claim).lost)
