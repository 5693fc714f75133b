"""Recoverer: resolves what a crash left in doubt, for one id with its lanes, a prefix, or all ids; and forgets ids.

When `recover` has returned without an error for any lane of an id, nothing is open on any of its lanes, and no transaction that
was open can commit. A writer that is still running is fenced on *every* lane on which it can begin a transaction: from the
writer's start until it closes, each lane's generation is unresolved, so recovery claims it. While recovery processes lane after
lane, such a writer may still complete transactions, on both sides, on lanes that are not claimed yet; its first use of a
claimed lane fences the whole writer. A writer that was paused while opening has not begun a transaction; if recovery finds
nothing to claim on its lanes, the writer may finish opening, as if it had started after the recovery.

`forget` raises the fencing token of every lane, even of a lane that is resolved.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Protocol, Self

from dualwrite.errors import ConfigurationError, DualWriteError, FencedError, StoreError, TransactionChangedError
from dualwrite.failpoints import hit
from dualwrite.kafka.base import TransactionCoordinator
from dualwrite.observability.logs import SubjectLogger
from dualwrite.recovery.plan import GenerationPlan, IdPlan, KafkaCheck, RecoveryPlan
from dualwrite.recovery.report import IdReport, RecoveryReport
from dualwrite.recovery.resolve import resolve_id
from dualwrite.settings import Timeouts
from dualwrite.stores.base import Claim, LostTransaction, StateRow, TxnStateStore
from dualwrite.stores.rows import proven_lost
from dualwrite.transactional_id import LANE_MARK, TransactionalId, lanes_of, name_lane

log = SubjectLogger(__name__)


def describe_owner(role: str) -> str:
    """A readable name of the claimant: role, host, process id and program."""
    program = Path(sys.argv[0]).name if sys.argv and sys.argv[0] else "python"
    return f"{role} {socket.gethostname()}:{os.getpid()} {program}"


def ids_with_lanes(store: TxnStateStore, ids: Iterable[str] | str | None = None, *, prefix: str = "") -> list[str]:
    """The ids of the requested rows, without duplicates: a logical id means all of its lanes, the id of a lane only that lane.

    Args:
        store: The database.
        ids: Logical ids or ids of lanes; None for all that begin with `prefix`.
        prefix: Only ids that begin with it.

    Returns:
        With `ids`: these in the given order, even if they have no row, each followed by its further lanes. Otherwise the ids
        from the database, sorted.

    Raises:
        StoreError: The ids could not be listed.
        ConfigurationError: Both ids and a prefix were given.
    """
    if ids is None:
        return sorted(store.list(prefix), key=TransactionalId.of_row)
    if prefix:
        raise ConfigurationError("Both ids and a prefix were given.", next_step="give only one of them")
    found: dict[str, None] = {}
    for given in [ids] if isinstance(ids, str) else ids:
        found[given] = None
        if not TransactionalId.of_row(given).lane:
            found.update(dict.fromkeys(lanes_of(store.list(given + LANE_MARK), given)))
    return list(found)


def forget(store: TxnStateStore, transactional_id: str) -> tuple[str, ...]:
    """Forget an id that is no longer used, with all its lanes; or a single lane, by its own id. The fencing tokens are kept.

    Lane 0 is last: if this fails halfway, the id is still listed and can be forgotten again. Forgetting is harmless: when a
    writer claims a forgotten lane, its row comes back with its fencing token.

    Returns:
        The ids that were forgotten.

    Raises:
        NotResolvedError: A lane still has something to recover or acknowledge; nothing was changed.
        StoreError: There is no such id.
    """
    ids = [name for name in ids_with_lanes(store, [transactional_id]) if store.read(name) is not None]
    if not ids:
        raise _unknown_id(store, transactional_id)
    try:
        for row in map(store.read, ids):
            if row is not None and (row.prepared_state is not None or row.unresolved_generations or row.lost):
                store.forget(row.transactional_id)  # raises NotResolvedError before anything is changed
        for name in reversed(ids):
            store.forget(name)
    except DualWriteError as error:
        name_lane(error, transactional_id)
        raise
    return tuple(ids)


def existing_row(store: TxnStateStore, transactional_id: str) -> StateRow:
    """The row of an id or a lane; StoreError if there is none."""
    row = store.read(transactional_id)
    if row is None:
        raise _unknown_id(store, transactional_id)
    return row


def _unknown_id(store: TxnStateStore, transactional_id: str) -> StoreError:
    return StoreError(
        "There is no such transactional id in this database.",
        transactional_id=transactional_id,
        next_step=f"`dualwrite status` lists the ids of {store.description}",
    )


class Republisher(Protocol):
    """Publishes the lost transactions of an id again, for a Recoverer."""

    def publish(self, claim: Claim, report: IdReport) -> IdReport:
        """Publish the LOST transactions of an id that was resolved under a claim; what became of them is added to the report.

        Raises:
            FencedError: Another writer or recoverer has claimed the id since.
            DualWriteError: The database or Kafka did not answer; recovering again resolves what was begun.
        """
        ...


class Recoverer:
    """Resolves in-doubt transactions of ids whose writer is gone (KIP-939, "Recovery recipe").

    It may run at any time, several times at once, and while writers are running; recovering twice changes nothing. It claims an
    id from its owner: a live writer gets FencedError at its next step and can `reopen()`. Ids with nothing unresolved and
    nothing to publish again are not touched.

    A logical id means all of its lanes (`orders` also means `orders~1`, `orders~2`, …, if they have rows); the id of a lane
    means only that lane. Reports name each lane by its own id.

    Args:
        store: The database.
        coordinator: Kafka's side.
        timeouts: Time limits.
        republisher: Publishes what is lost again, on ids that were recovered; None: it stays in the rows.
        owns_store: Whether `close` closes the store.
        owns_coordinator: Whether `close` closes the coordinator.
    """

    def __init__(
        self,
        store: TxnStateStore,
        coordinator: TransactionCoordinator,
        *,
        timeouts: Timeouts | None = None,
        republisher: Republisher | None = None,
        owns_store: bool = False,
        owns_coordinator: bool = False,
    ) -> None:
        self._store = store
        self._coordinator = coordinator
        self._timeouts = timeouts or Timeouts()
        self._republisher = republisher
        self._owns_store = owns_store
        self._owns_coordinator = owns_coordinator

    def pending(self, ids: Iterable[str] | None = None, *, prefix: str = "") -> tuple[str, ...]:
        """The requested logical ids with something unresolved or to publish again, which recovery would claim. Read-only."""
        return tuple(dict.fromkeys(TransactionalId.of_row(lane).logical for lane in self.pending_lanes(ids, prefix=prefix)))

    def pending_lanes(self, ids: Iterable[str] | None = None, *, prefix: str = "") -> tuple[str, ...]:
        """Like `pending`, but lists each lane by its own id."""
        found = []
        for transactional_id in ids_with_lanes(self._store, ids, prefix=prefix):
            row = self._store.read(transactional_id)
            if row is not None and not row.forgotten and self._has_work(row):
                found.append(transactional_id)
        return tuple(found)

    def recover(
        self,
        ids: Iterable[str] | None = None,
        *,
        prefix: str = "",
        fences: Mapping[str, int] | None = None,
        progress: Callable[[IdReport], None] | None = None,
    ) -> RecoveryReport:
        """Recover the given ids, or those that begin with `prefix`, or all.

        If an id or a lane can't be recovered, its error is in the report, and recovery continues with the others. If Kafka or
        an id's coordinator does not answer, the id is not claimed, and its owner keeps it.

        Args:
            ids: Logical transactional ids, each with all its lanes, or ids of lanes; None for all that begin with `prefix`.
            prefix: Only ids that begin with it.
            fences: Fencing tokens by the id of the row. A row that has another one by now is left to the process that has
                claimed it, as its report says (`taken_over_by`).
            progress: Called with the report of each id and each lane when it is finished.

        Raises:
            StoreError: The ids could not be listed.
            ConfigurationError: Both ids and a prefix were given.
        """
        reports = []
        check = KafkaCheck(self._store, self._coordinator, timeout=self._timeouts.kafka)
        for transactional_id in ids_with_lanes(self._store, ids, prefix=prefix):
            report = self.recover_row(transactional_id, check, expected_fence=(fences or {}).get(transactional_id))
            reports.append(report)
            if progress is not None:
                progress(report)
        return RecoveryReport(tuple(reports))

    def plan(self, ids: Iterable[str] | None = None, *, prefix: str = "") -> RecoveryPlan:
        """What `recover` would do now, and why, for each id and generation. Claims nothing, and only queries Kafka.

        Raises: as for `recover`.
        """
        check = KafkaCheck(self._store, self._coordinator, timeout=self._timeouts.kafka)
        return RecoveryPlan(tuple(self._planned(name, check) for name in ids_with_lanes(self._store, ids, prefix=prefix)))

    def plan_lanes(self, row_ids: Iterable[str]) -> RecoveryPlan:
        """Like `plan`, but for exactly these rows: lane 0 by the logical id, other lanes by their own ids."""
        check = KafkaCheck(self._store, self._coordinator, timeout=self._timeouts.kafka)
        return RecoveryPlan(tuple(self._planned(name, check) for name in row_ids))

    def carry_out(self, plans: Iterable[IdPlan]) -> RecoveryReport:
        """Recover exactly the lanes that were planned, each as compare-and-set on what its plan has shown.

        A lane is skipped if its row has a different fencing token by now, or if another transaction is open on it: its report
        has a TransactionChangedError. So a writer that has opened the id in the meantime is not fenced, and only transactions
        that the plan has shown are ended.

        Args:
            plans: From `plan` or `plan_lanes`. Those without generations, or with an error, are skipped.
        """
        check = KafkaCheck(self._store, self._coordinator, timeout=self._timeouts.kafka)
        return RecoveryReport(tuple(self.recover_row(plan.transactional_id, check, plan) for plan in plans if plan.generations))

    def acknowledge(
        self,
        ids: Iterable[str] | None = None,
        *,
        prefix: str = "",
        only: Collection[tuple[str, LostTransaction]] | None = None,
    ) -> dict[str, tuple[LostTransaction, ...]]:
        """Remove the lost and unverified transactions from the rows: they are not published again from then on.

        Whoever wants to publish their messages from other data removes them first, and then publishes those that this returns.

        Args:
            ids: As for `recover`.
            prefix: As for `recover`.
            only: Remove only these, each with the id of its row, as in `RecoveryReport.unacknowledged`: entries that were
                recorded since, which nobody has seen yet, stay. None: all.

        Returns:
            The removed transactions, by the id of the row: the logical id, or the id of a lane.
        """
        removed = {}
        for transactional_id in ids_with_lanes(self._store, ids, prefix=prefix):
            if only is None:
                entries = self._store.acknowledge(transactional_id)
            else:
                seen = [entry for name, entry in only if name == transactional_id]
                entries = self._store.acknowledge(transactional_id, only=seen)
            if entries:
                removed[transactional_id] = entries
        return removed

    @property
    def store(self) -> TxnStateStore:
        """The database."""
        return self._store

    def close(self) -> None:
        """Close the store and the coordinator if they are owned (`owns_store`, `owns_coordinator`)."""
        if self._owns_coordinator:
            self._coordinator.close()
        if self._owns_store:
            self._store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _planned(self, transactional_id: str, check: KafkaCheck) -> IdPlan:
        try:
            row = existing_row(self._store, transactional_id)
            if not self._has_work(row):
                return IdPlan(transactional_id, unacknowledged=row.lost, row=row)
            return self.plan_row(row, check)
        except DualWriteError as error:
            return IdPlan(transactional_id, error=error)

    def plan_row(self, row: StateRow, check: KafkaCheck) -> IdPlan:
        """What `recover` would do with one id, or one lane. Raises: as `KafkaCheck.at`."""
        plans = check.at(row)
        found = () if self._republisher is None else check.lost_messages(row, plans)
        owner = row.owner if self._has_work(row) else None
        return IdPlan(row.transactional_id, owner, plans, row.lost, row=row, found=found)

    def recover_row(
        self,
        transactional_id: str,
        check: KafkaCheck,
        planned: IdPlan | None = None,
        *,
        expected_fence: int | None = None,
    ) -> IdReport:
        """Recover one id, or one lane; see `recover` and `carry_out`. Threads may share the recoverer."""
        try:
            return self._recovered(transactional_id, check, planned, expected_fence)
        except FencedError as error:
            row = self._store.read(transactional_id)
            owner = "another process" if row is None else row.owner
            log.info("claimed by %s during the recovery: %s", owner, error, transactional_id=transactional_id)
            return IdReport(transactional_id, taken_over_by=owner, unacknowledged=() if row is None else row.lost)
        except DualWriteError as error:
            log.info("recovery did not finish: %s", error, transactional_id=transactional_id)  # also in the report
            return IdReport(transactional_id, error=error)

    def resolve(self, claim: Claim) -> IdReport:
        """Resolve an id under a claim, and publish what is lost on it again, if that is wanted.

        Raises: as `resolve_id`, and as `Republisher.publish`.
        """
        report = resolve_id(self._store, self._coordinator, claim, timeout=self._timeouts.kafka)
        if self._republisher is None or not proven_lost(report.unacknowledged):
            return report
        return self._republisher.publish(claim, report)

    def _recovered(
        self, transactional_id: str, check: KafkaCheck, planned: IdPlan | None, expected_fence: int | None
    ) -> IdReport:
        row = existing_row(self._store, transactional_id)
        if not self._has_work(row):
            return IdReport(transactional_id, unacknowledged=row.lost)
        found = check.at(row)  # a claim takes the id from a writer that may be alive, so first check that Kafka answers
        if planned is None:
            claim = self._claim(transactional_id, expected_fence)
        else:
            claim = self._claim_as_planned(planned, row, found)
        hit("recover_after_claim")
        return self.resolve(claim)

    def _has_work(self, row: StateRow) -> bool:
        """Whether there is something to resolve on an id, or to publish again."""
        return bool(row.generations_to_recover) or (self._republisher is not None and bool(proven_lost(row.lost)))

    def _claim(self, transactional_id: str, expected_fence: int | None = None) -> Claim:
        owner = describe_owner("recoverer")
        return self._store.claim(transactional_id, owner, timeout=self._timeouts.claim, expected_fence=expected_fence)

    def _claim_as_planned(self, planned: IdPlan, row: StateRow, found: tuple[GenerationPlan, ...]) -> Claim:
        seen = planned.row
        if seen is None or seen.fence != row.fence:
            raise _changed(planned, f"{row.owner!r} has claimed the id since")
        shown = {one.generation: one for one in planned.generations}
        for now in found:
            was = shown.get(now.generation)
            if was is None or not was.covers(now):
                raise _changed(planned, f"{now.kafka_transactional_id!r} has another transaction open, or another decision")
        try:
            return self._claim(planned.transactional_id, seen.fence)
        except FencedError as error:
            raise _changed(
                planned, f"{error.facts.get('current_owner') or 'another process'!r} has claimed it since"
            ) from error


def _changed(planned: IdPlan, how: str) -> TransactionChangedError:
    return TransactionChangedError(
        f"The id is not as it was shown: {how}.",
        transactional_id=planned.transactional_id,
        next_step="nothing was changed; check again what recovery would do",
    )
