"""All lanes of one writer: opening them, rotating over them, closing them (docs/how-it-works/recovery.md, "Lanes")."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Final

from dualwrite.deadline import Deadline
from dualwrite.errors import DualWriteError, FencedError, InDoubtTransactionError, WriterClosedError
from dualwrite.kafka.base import Producers, TransactionCoordinator
from dualwrite.logs import SubjectLogger
from dualwrite.recipe.acquiring import Acquisition
from dualwrite.recipe.journaling import Journal
from dualwrite.recipe.lane import IN_TRANSACTION, MUST_RECOVER, Lane
from dualwrite.recipe.ownership import CHECK_LIMIT
from dualwrite.recipe.phases import Phase
from dualwrite.recipe.republish import LostMessages
from dualwrite.recovery.report import RecoveryReport
from dualwrite.settings import SWITCH_AFTER, Acknowledge, OnLost, Timeouts
from dualwrite.stores.base import TxnStateStore

log = SubjectLogger(__name__)

CLOSE_LIMIT: Final = 10.0
"""Seconds for resolving what is in doubt when a writer, or a pool's writers, are closed: recovery does it as well."""

_LEAST_TO_CLOSE: Final = 1.0

_BETWEEN_TRANSACTIONS: Final = frozenset({Phase.READY, Phase.CONFIRMING})
_BLOCKING: Final = (Phase.CLOSED, Phase.FENCED, Phase.OPENING, Phase.IN_DOUBT, Phase.NEEDS_RECOVERY)


class Lanes:
    """The lanes of one logical id that one writer owns: all of them, or none (`Acquisition`).

    Transactions rotate over the lanes, so that none waits for the markers of the previous one. Each is committed before the
    next begins, whichever lane that one uses, so in each partition the messages are in the order of the transactions.
    """

    def __init__(
        self,
        store: TxnStateStore,
        coordinator: TransactionCoordinator,
        producers: Producers,
        *,
        transactional_id: str,
        count: int,
        timeouts: Timeouts,
        acknowledge: Acknowledge = "visible",
        journal: Journal | None = None,
        lost: LostMessages | None = None,
    ) -> None:
        self._id = transactional_id
        self._journal = journal
        self._store = store
        self._timeouts = timeouts
        self._lanes = tuple(
            Lane(
                store,
                coordinator,
                producers,
                transactional_id=transactional_id,
                number=number,
                timeouts=timeouts,
                acknowledge=acknowledge,
                journal=journal,
                lost=lost,
            )
            for number in range(count)
        )
        self._acquisition = Acquisition(
            store,
            coordinator,
            producers,
            self._lanes,
            timeouts=timeouts,
            acknowledge=acknowledge,
            has_journal=journal is not None,
            lost=lost,
        )
        self._on_lost: OnLost = "report"  # for the lanes that are not acquired yet
        self._turn = 0
        self._current: Lane | None = None

    def __iter__(self) -> Iterator[Lane]:
        return iter(self._lanes)

    @property
    def phase(self) -> Phase:
        """The writer's phase: if one lane can't begin a transaction, the writer can't either."""
        phases = {lane.phase for lane in self._lanes} - _BETWEEN_TRANSACTIONS
        if not phases:
            return Phase.READY
        return next((phase for phase in _BLOCKING if phase in phases), None) or phases.pop()

    @property
    def in_transaction(self) -> bool:
        """Whether a transaction is in progress."""
        return self._current is not None and self._current.phase in IN_TRANSACTION

    @property
    def must_recover(self) -> bool:
        """Whether a lane must be recovered before the next transaction, and none is known to be claimed by another process."""
        phases = {lane.phase for lane in self._lanes}
        return not phases.isdisjoint(MUST_RECOVER) and Phase.FENCED not in phases

    @property
    def are_closed(self) -> bool:
        """Whether every lane is closed."""
        return all(lane.phase is Phase.CLOSED for lane in self._lanes)

    @property
    def report(self) -> RecoveryReport:
        """What was found when each lane was last acquired, including the additional lanes of an earlier writer."""
        return self._acquisition.report

    def new_owners(self) -> tuple[str, ...]:
        """The owners that have claimed a lane since this writer did, according to the rows."""
        rows = ((lane, self._store.read(lane.id)) for lane in self._lanes)
        return tuple(row.owner for lane, row in rows if row is not None and row.fence != lane.ownership.claim.fence)

    # --- opening ----------------------------------------------------------------------------------------------------------

    def open(self, *, on_lost: OnLost) -> None:
        """Acquire the lanes, also from another writer. With a journal, only claim them if Kafka does not answer.

        In the latter case they are acquired before the first transaction that sends anything to Kafka; `on_lost` holds then.

        Raises: as for `DualWriter.open`.
        """
        journal, self._on_lost = self._journal, "report"
        if journal is None or not journal.is_lost:
            try:
                self._acquisition.acquire(only_if_ours=False, on_lost=on_lost)
            except DualWriteError as error:
                if journal is None or not journal.lost(error):
                    raise
            else:
                return
        self._on_lost = on_lost
        self._acquisition.claim(only_if_ours=False)
        log.info("opened without Kafka, which does not answer", transactional_id=self._id)

    # --- rotating ---------------------------------------------------------------------------------------------------------

    def next(self) -> Lane:
        """The lane for the next transaction. Anything left in doubt on any lane is resolved first.

        Raises:
            WriterClosedError: The lanes were never opened, or are closed.
            FencedError: Another writer or recoverer has claimed one of the lanes.
            DualWriteError: A lane could not be recovered.
        """
        if self._journal is not None:
            return self._next_with_journal(self._journal)
        return self._next()

    def _next(self) -> Lane:
        if not self._acquisition.are_acquired or not {lane.phase for lane in self._lanes} <= _BETWEEN_TRANSACTIONS:
            self._check_usable()
            self._recover()
        chosen = self._current = self._lanes[self._turn]
        self._turn = (self._turn + 1) % len(self._lanes)
        chosen.make_ready()
        return chosen

    def _next_with_journal(self, journal: Journal) -> Lane:
        """While the gate is open, or if Kafka does not answer now: a lane that does not need Kafka."""
        if not journal.is_open:
            try:
                return self._next_at_kafka()
            except DualWriteError as error:
                if not journal.lost(error):
                    raise
        self._check_usable()
        if not self._acquisition.are_claimed:  # the answer to the last claim was lost
            self._acquisition.claim(only_if_ours=True)
        chosen = self._current = self._lanes[self._turn]
        self._turn = (self._turn + 1) % len(self._lanes)
        chosen.make_ready_for_journal()
        return chosen

    def _next_at_kafka(self) -> Lane:
        is_ready = self._lanes[self._turn].is_ready and not self.must_recover  # as nearly always
        if is_ready or not self._acquisition.are_acquired:  # acquiring has limits of its own
            return self._next()
        with self.limited(SWITCH_AFTER):
            return self._next()

    @contextmanager
    def limited(self, seconds: float) -> Iterator[None]:
        """In the block, no claim and no step at Kafka of any lane takes longer than this."""
        with ExitStack() as limits:
            for lane in self._lanes:
                limits.enter_context(lane.ownership.limited(seconds))
            yield

    def _check_usable(self) -> None:
        phase = self.phase
        if phase in (Phase.OPENING, Phase.CLOSED):
            raise WriterClosedError(f"The writer {phase.value}.", transactional_id=self._id)
        for lane in self._lanes:
            if lane.phase is Phase.FENCED:
                raise FencedError(
                    "Another writer or recoverer has claimed the id.",
                    transactional_id=lane.id,
                    next_step="stop this process, or call reopen() to take the id back",
                )

    def _recover(self) -> None:
        if self._acquisition.are_acquired:
            for lane in self._lanes:
                if lane.phase in MUST_RECOVER:
                    lane.recover()
        else:
            # they were claimed without Kafka, or an attempt failed: the proof needs all steps again, not lane by lane
            self._acquisition.acquire(only_if_ours=True, on_lost=self._on_lost)
            self._on_lost = "report"

    def recover_if_idle(self, limit: float) -> None:
        """If the lanes must be recovered, do now what `next` would do before the next transaction.

        The caller ensures that nothing else uses the lanes during the call. A claim, and each step at Kafka, takes at most
        `limit` seconds.

        Raises:
            FencedError: Another writer or recoverer has claimed one of the lanes.
            DualWriteError: A lane could not be recovered.
        """
        if not self.must_recover:
            return
        with self.limited(limit):
            self._recover()

    def confirm(self) -> None:
        """Read the responses to the last commits, or request them again; a lane without a response does not delay the others.

        The caller ensures that nothing else uses the lanes during the call.
        """
        for share, lane in Deadline.after(CHECK_LIMIT).shared(self._lanes):
            try:
                lane.confirm(timeout=share.seconds)
            except DualWriteError as error:
                log.info("Kafka has not confirmed the last commit yet: %s", error, transactional_id=lane.id)

    def clear_if_idle(self, after: float) -> float:
        """Clear the stored states of lanes that were idle for `after` seconds; see `Ownership.clear_if_idle`.

        The caller ensures that nothing else uses the lanes during the call.
        """
        if any(lane.phase is not Phase.READY for lane in self._lanes):
            return after
        return min(lane.ownership.clear_if_idle(after) for lane in self._lanes)

    # --- closing ----------------------------------------------------------------------------------------------------------

    def forget_transaction(self) -> None:
        """Release what the last transaction has left, even if an interrupt ended it."""
        if self._current is not None:
            self._current.forget_transaction()
            self._current = None

    def close(self, limit: Deadline | None = None) -> None:
        """Close every lane, even if closing one fails.

        Each has at least a second of `limit`, which is `CLOSE_LIMIT` by default.

        Raises:
            InDoubtTransactionError: A lane's last transaction could not be resolved; errors of other lanes are added as notes.
        """
        failed: list[Exception] = []
        try:
            for lane in self._lanes:
                if limit is None and lane.phase is not Phase.OPENING:
                    limit = Deadline.after(min(CLOSE_LIMIT, self._timeouts.kafka))
                try:
                    lane.close(limit=_LEAST_TO_CLOSE if limit is None else max(limit.left, _LEAST_TO_CLOSE))
                except Exception as error:  # noqa: BLE001  (the other lanes must still be closed)
                    failed.append(error)
        finally:
            for lane in self._lanes:
                lane.release()
        if failed:
            first = next((found for found in failed if isinstance(found, InDoubtTransactionError)), failed[0])
            for other in failed:
                if other is not first:
                    first.add_note(f"dualwrite, closing the writer: {other}")
            raise first
