"""Recoverer: settle what a crash left behind, for one id with its lanes, for a prefix, or for all; and forgetting an id.

What holds for a whole id, once `recover` has returned without an error for one of its lanes: nothing is open on any of them,
and no transaction that was open can commit. A writer that still runs is fenced on *every* lane on which it can begin one:
from its start on, a lane's generation stays unsettled until the writer closes, so that recovery claims it. While
recovery goes from lane to lane, such a writer may still complete transactions on those that are not claimed yet, on both
sides; its first use of a claimed one fences all of it. A writer that was paused while it opened has begun nothing; where
recovery finds nothing to claim on its lanes, it may go on to open, as if it had come after the recovery.

`forget` raises the fence of every lane, whether settled long ago or not.
"""

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
from dualwrite.recovery.plan import IdPlan, KafkaLook, RecoveryPlan
from dualwrite.recovery.report import IdReport, RecoveryReport
from dualwrite.recovery.resolve import resolve_id
from dualwrite.settings import Timeouts
from dualwrite.state import LANE_MARK, is_lane_of, lanes_of, split_lane_id
from dualwrite.stores.base import LostTransaction, StateRow, TxnStateStore

log = logging.getLogger(__name__)

MAX_OWNER_LENGTH: Final = 200


def describe_owner(role: str) -> str:
    """Who claims, for people: role, host, process id and program."""
    program = Path(sys.argv[0]).name if sys.argv and sys.argv[0] else "python"
    return f"{role} {socket.gethostname()}:{os.getpid()} {program}"[:MAX_OWNER_LENGTH]


def ids_with_lanes(store: TxnStateStore, ids: Iterable[str] | str | None = None, *, prefix: str = "") -> list[str]:
    """The ids of the rows that were asked for, each once: a logical id stands for all of its lanes, a lane's for itself.

    Args:
        store: The database.
        ids: Logical ids or ids of lanes; None for all that begin with `prefix`.
        prefix: Only ids that begin with it.

    Returns:
        Given ids in the order given, there or not; listed ones sorted; each followed by its lanes.

    Raises:
        StoreError: The ids could not be listed.
        ConfigurationError: Both ids and a prefix were given.
    """
    if ids is None:
        return sorted(store.list(prefix), key=split_lane_id)
    if prefix:
        raise ConfigurationError("Both ids and a prefix were given.", next_step="give one of them")
    found: dict[str, None] = {}
    for given in [ids] if isinstance(ids, str) else ids:
        found[given] = None
        found.update(dict.fromkeys(_further_lanes(store, given)))
    return list(found)


def _further_lanes(store: TxnStateStore, transactional_id: str) -> list[str]:
    """The lanes beyond lane 0 that have a row; none for an id that is a lane's itself."""
    if split_lane_id(transactional_id)[1]:
        return []
    return lanes_of(store.list(transactional_id + LANE_MARK), transactional_id)


def forget(store: TxnStateStore, transactional_id: str) -> tuple[str, ...]:
    """Drop an id that is no longer used, with all its lanes; or one lane alone, by its own id. The fences stay.

    Lane 0 goes last: broken off in between, the id is still listed and can be forgotten again. That is harmless: a lane that
    was forgotten comes back, with its fence, when a writer claims it.

    Returns:
        The ids that were dropped.

    Raises:
        NotSettledError: Something of a lane is still to be recovered or acknowledged; nothing was changed.
        StoreError: There is no such id.
    """
    ids = [name for name in ids_with_lanes(store, [transactional_id]) if store.read(name) is not None]
    if not ids:
        raise _unknown_id(store, transactional_id)
    try:
        for row in map(store.read, ids):
            if row is not None and _is_open(row):
                store.forget(row.transactional_id)  # refuses, and says why, before anything was changed
        for name in reversed(ids):
            store.forget(name)
    except DualWriteError as error:
        name_lane(error, transactional_id)
        raise
    return tuple(ids)


def _unknown_id(store: TxnStateStore, transactional_id: str) -> StoreError:
    return StoreError(
        "There is no such transactional id in this database.",
        transactional_id=transactional_id,
        next_step=f"`dualwrite status` lists the ids of {store.description}",
    )


def _is_open(row: StateRow) -> bool:
    return row.prepared_state is not None or bool(row.unsettled_generations) or bool(row.lost)


def name_lane(error: DualWriteError, transactional_id: str) -> None:
    """Make an error about a lane name the logical id, which is what the user knows, with the lane in its text.

    The lane's id becomes the attribute `lane`.
    """
    lane = error.transactional_id
    if lane is not None and lane != transactional_id and is_lane_of(lane, transactional_id):
        error.transactional_id = transactional_id
        error.what = f"{error.what.removesuffix('.')} (lane {lane!r})."
        error.facts["lane"] = lane


class Recoverer:
    """Settles ids whose writer is gone (KIP-939, "Recovery recipe").

    It may run at any time, several at once, and beside live writers; doing it twice changes nothing. It takes an id from
    its holder: a live writer gets FencedError at its next step and can `reopen()`. Ids on which nothing is unsettled are
    not touched.

    An id stands for all of its lanes (`orders` also for `orders~1`, `orders~2`, …, as far as they have rows); the id of a
    lane, given by itself, stands for that lane alone. Reports name each lane by its own id.

    Args:
        store: The database.
        coordinator: Kafka's side.
        timeouts: Time limits.
        owns_store: Whether `close` closes the store.
        owns_coordinator: Whether `close` closes the coordinator.
    """

    def __init__(
        self,
        store: TxnStateStore,
        coordinator: TransactionCoordinator,
        *,
        timeouts: Timeouts | None = None,
        owns_store: bool = False,
        owns_coordinator: bool = False,
    ) -> None:
        self._store = store
        self._coordinator = coordinator
        self._timeouts = timeouts or Timeouts()
        self._owns_store = owns_store
        self._owns_coordinator = owns_coordinator

    def pending(self, ids: Iterable[str] | None = None, *, prefix: str = "") -> tuple[str, ...]:
        """The logical ids among the asked ones on which something is unsettled: recovery would take them. Reads only."""
        return tuple(dict.fromkeys(split_lane_id(lane)[0] for lane in self.pending_lanes(ids, prefix=prefix)))

    def pending_lanes(self, ids: Iterable[str] | None = None, *, prefix: str = "") -> tuple[str, ...]:
        """As `pending`, lane by lane, by the lanes' own ids."""
        found = []
        for transactional_id in ids_with_lanes(self._store, ids, prefix=prefix):
            row = self._store.read(transactional_id)
            if row is not None and not row.forgotten and row.generations_to_look_at:
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

        An id or a lane that can't be recovered does not keep the others from it: its error stands in the report. Where Kafka,
        or an id's coordinator, does not answer, the id is not claimed, and its holder keeps it.

        Args:
            ids: Logical transactional ids, each with all its lanes, or ids of lanes; None for all that begin with `prefix`.
            prefix: Only ids that begin with it.
            progress: Called with the report of each id and each lane when it is done.

        Raises:
            StoreError: The ids could not be listed.
            ConfigurationError: Both ids and a prefix were given.
        """
        reports = []
        look = KafkaLook(self._store, self._coordinator, timeout=self._timeouts.kafka)
        for transactional_id in ids_with_lanes(self._store, ids, prefix=prefix):
            report = self._recover_one(transactional_id, look)
            reports.append(report)
            if progress is not None:
                progress(report)
        return RecoveryReport(tuple(reports))

    def plan(self, ids: Iterable[str] | None = None, *, prefix: str = "") -> RecoveryPlan:
        """What `recover` would do now, and why, for each id and generation. Claims nothing, and sends Kafka questions only.

        Raises: as `recover`.
        """
        look = KafkaLook(self._store, self._coordinator, timeout=self._timeouts.kafka)
        return RecoveryPlan(tuple(self._planned(name, look) for name in ids_with_lanes(self._store, ids, prefix=prefix)))

    def acknowledge(self, ids: Iterable[str] | None = None, *, prefix: str = "") -> dict[str, tuple[LostTransaction, ...]]:
        """Take the lost and unverified transactions off the rows, because somebody has dealt with them.

        Returns:
            What was taken off, by the id of the row: the logical id, or a lane's.
        """
        removed = {}
        for transactional_id in ids_with_lanes(self._store, ids, prefix=prefix):
            entries = self._store.acknowledge(transactional_id)
            if entries:
                removed[transactional_id] = entries
        return removed

    @property
    def store(self) -> TxnStateStore:
        """The database."""
        return self._store

    def close(self) -> None:
        """Close what it owns of store and coordinator."""
        if self._owns_coordinator:
            self._coordinator.close()
        if self._owns_store:
            self._store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _planned(self, transactional_id: str, look: KafkaLook) -> IdPlan:
        try:
            row = self._read(transactional_id)
            if not row.generations_to_look_at:
                return IdPlan(transactional_id, unacknowledged=row.lost)
            return IdPlan(transactional_id, row.owner, look.at(row), row.lost)
        except DualWriteError as error:
            return IdPlan(transactional_id, error=error)

    def _recover_one(self, transactional_id: str, look: KafkaLook) -> IdReport:
        try:
            return self._settled(transactional_id, look)
        except FencedError as error:
            row = self._store.read(transactional_id)
            owner = "somebody else" if row is None else row.owner
            log.info("%s: taken over by %s while it was recovered: %s", transactional_id, owner, error)
            return IdReport(transactional_id, taken_over_by=owner, unacknowledged=() if row is None else row.lost)
        except DualWriteError as error:
            log.info("%s: recovery did not finish: %s", transactional_id, error)  # the report says so, too
            return IdReport(transactional_id, error=error)

    def _settled(self, transactional_id: str, look: KafkaLook) -> IdReport:
        row = self._read(transactional_id)
        if not row.generations_to_look_at:
            return IdReport(transactional_id, unacknowledged=row.lost)
        look.at(row)  # a claim takes the id from a writer that may be alive: not where nothing could be settled
        claim = self._store.claim(transactional_id, describe_owner("recoverer"), timeout=self._timeouts.claim)
        hit("recover_after_claim")
        return resolve_id(self._store, self._coordinator, claim, timeout=self._timeouts.kafka)

    def _read(self, transactional_id: str) -> StateRow:
        row = self._store.read(transactional_id)
        if row is None:
            raise _unknown_id(self._store, transactional_id)
        return row
