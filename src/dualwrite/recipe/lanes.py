"""All lanes of one writer: acquiring them, rotating over them, closing them (docs/how-it-works/recovery.md, "Lanes")."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain
from typing import Any, Final

from dualwrite.deadline import Deadline
from dualwrite.errors import DualWriteError, FencedError, InDoubtTransactionError, WriterClosedError
from dualwrite.kafka.base import ProducerFactory, TransactionCoordinator
from dualwrite.logs import SubjectLogger
from dualwrite.outages import DATABASE, database_at
from dualwrite.recipe.journaling import Journal
from dualwrite.recipe.lane import IN_TRANSACTION, MUST_RECOVER, Lane
from dualwrite.recipe.ownership import CHECK_LIMIT, Ownership
from dualwrite.recipe.phases import Event, Phase
from dualwrite.recipe.republish import LostMessages, taken_over
from dualwrite.recovery.recoverer import describe_owner
from dualwrite.recovery.report import RecoveryReport, raise_for_lost
from dualwrite.recovery.side_by_side import SideBySide, Steps
from dualwrite.settings import SWITCH_AFTER, Acknowledge, OnLost, Timeouts
from dualwrite.stores.base import Acquiring, ClaimedLanes, StateRow, TxnStateStore
from dualwrite.stores.rows import new_token, on_cluster

log = SubjectLogger(__name__)

CLOSE_LIMIT: Final = 10.0
"""Seconds for resolving what is in doubt when a writer, or a pool's writers, are closed: recovery does it as well."""

_LEAST_TO_CLOSE: Final = 1.0

_BETWEEN_TRANSACTIONS: Final = frozenset({Phase.READY, Phase.CONFIRMING})
_BLOCKING: Final = (Phase.CLOSED, Phase.FENCED, Phase.OPENING, Phase.IN_DOUBT, Phase.NEEDS_RECOVERY)


class Lanes:
    """The lanes of one logical id that one writer owns: all of them, or none until `acquire` has finished.

    Transactions rotate over the lanes, so that none waits for the markers of the previous one. Each is committed before the
    next begins, whichever lane that one uses, so in each partition the messages are in the order of the transactions.

    Each lane is safe by itself: its claim, its row and its Kafka ids follow the recipe for a single id. In addition, if several
    writers use one id, only one of them may continue, however many lanes each has and wherever any of them is paused. The order
    of the steps in `acquire` ensures this; docs/how-it-works/recovery.md proves it:

    1. check that Kafka is the cluster that every lane's row names; claim lane 0
    2. list the id's rows; claim every other lane that has a row, and every other lane of ours
    3. resolve all of them; start ours
    4. once a lane is started, check that its claim is still ours; after all these checks the first transaction may begin
    """

    def __init__(
        self,
        store: TxnStateStore,
        coordinator: TransactionCoordinator,
        producers: ProducerFactory,
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
        self._lost = lost
        self._store = store
        self._database = database_at(store.description, is_local=store.is_local)
        self._coordinator = coordinator
        self._producers = producers
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
        self._intended: str | None = None  # the token of a claim that is not known to have succeeded yet
        self._additional: tuple[Ownership, ...] = ()
        self._are_acquired = False
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
        owned = (*(lane.ownership for lane in self._lanes), *self._additional)
        return RecoveryReport(tuple(chain.from_iterable(ownership.report.ids for ownership in owned)))

    def new_owners(self) -> tuple[str, ...]:
        """The owners that have claimed a lane since this writer did, according to the rows."""
        rows = ((lane, self._store.read(lane.id)) for lane in self._lanes)
        return tuple(row.owner for lane, row in rows if row is not None and row.fence != lane.ownership.claim.fence)

    # --- acquiring --------------------------------------------------------------------------------------------------------

    def acquire(self, *, only_if_ours: bool, on_lost: OnLost) -> None:
        """Claim, resolve and start, in the order that the class docstring explains; then a transaction may begin.

        `only_if_ours`: only while lane 0 is still ours (rule F8), since its owner owns the others too, or is about to.
        `on_lost` is "raise" to raise an error for unacknowledged lost or unverified transactions, before any producer is
        started; "republish" to raise one for those that can't be published again, after the others are.

        Raises: as for `DualWriter.open`.
        """
        self._are_acquired = False
        with self._phases_track_errors():
            owned = {lane.id: lane.ownership for lane in self._lanes}
            cluster_id, claimed = self._claim(owned, only_if_ours=only_if_ours)
            for row in claimed.rows:
                row_id = row.transactional_id
                if row_id not in owned:  # of an earlier writer with more lanes: fenced and resolved, not used
                    owned[row_id] = Ownership(
                        self._store, self._coordinator, self._producers, transactional_id=row_id, timeouts=self._timeouts
                    )
                owned[row_id].adopt_row(row, cluster_id, has_generation=claimed.have_generations)
            self._additional = tuple(owned.values())[len(self._lanes) :]
            self._side_by_side(Ownership.resolving, owned.values())
            if on_lost == "raise":
                raise_for_lost(self.report.unacknowledged)
            self._side_by_side(Ownership.starting, [lane.ownership for lane in self._lanes])
            if self._lost is not None:
                self._publish_lost(self._lost)
                if on_lost == "republish":
                    self._raise_for_lost()
            for lane in self._lanes:
                lane.advance(Event.OPENED)
            self._are_acquired = True

    def _publish_lost(self, lost: LostMessages) -> None:
        """Before the first transaction, publish again what was lost (rule RO)."""
        with taken_over(lost, self._additional) as additional:
            lost.publish(*(lane.ownership for lane in self._lanes), *additional)

    def _raise_for_lost(self) -> None:
        """Raise an error for what is lost or unverified, and leave the id as clean as before."""
        try:
            raise_for_lost(self.report.unacknowledged, self.report.not_published)
        except DualWriteError:
            for lane in self._lanes:
                lane.ownership.drop_producer()
                lane.ownership.clear_row()
            raise

    def _claim(self, owned: Mapping[str, Ownership], *, only_if_ours: bool) -> tuple[str, ClaimedLanes]:
        """Claim all lanes; return the id of the Kafka cluster, which was compared with the rows, and the rows as claimed.

        A claim takes the id from a writer that may work. So before it, the database must be the original, and Kafka must be the
        cluster of the rows; and the coordinator of each generation that is needed must answer.

        If it is not known whether the claim has succeeded, the next call repeats it under the same token: it may be in the
        rows, and must not be taken for another process's.
        """
        ids, first = list(owned), self._lanes[0].ownership
        expected_fence, timeouts = first.claim.fence if only_if_ours else None, first.timeouts
        rows = {row.transactional_id: row for row in self._store.look_at(ids)}
        cluster_id = self._coordinator.cluster_id(timeout=timeouts.kafka)
        for row in rows.values():
            on_cluster(row, cluster_id)
        deadline = Deadline.after(timeouts.kafka)
        described = self._coordinator.describe_all(_needed(ids, rows), timeout=deadline)
        reusable = (  # if nothing changes until they are claimed
            row_id
            for row_id, row in rows.items()
            if row_id in owned and owned[row_id].can_reuse(row, described.get(row.kafka_id(row.generation)), deadline)
        )
        acquiring = Acquiring(self._producers.kind, frozenset(ids), frozenset(reusable), cluster_id)
        self._intended = self._intended or new_token()
        with self._database.call(DATABASE, may_wait=True):  # for the rows' locks
            claimed = self._store.claim_lanes(
                [*ids, *(row_id for row_id in rows if row_id not in owned)],
                describe_owner("writer"),
                timeout=timeouts.claim,
                cluster_id=cluster_id,
                expected_fence=expected_fence,
                token=self._intended,
                acquiring=acquiring,
            )
        self._intended = None
        return cluster_id, claimed

    def _side_by_side(self, steps: Callable[[Ownership, Deadline], Steps[Any]], owned: Iterable[Ownership]) -> None:
        deadline = Deadline.after(self._lanes[0].ownership.timeouts.kafka)
        SideBySide(self._store, self._coordinator, deadline).run([steps(ownership, deadline) for ownership in owned])

    @contextmanager
    def _phases_track_errors(self) -> Iterator[None]:
        try:
            yield
        except FencedError as fenced:
            of_ours = any(lane.id == fenced.transactional_id for lane in self._lanes)
            for lane in self._lanes:
                lane.advance(Event.BROKEN if of_ours and lane.id != fenced.transactional_id else Event.FENCED)
            raise
        except BaseException:
            for lane in self._lanes:
                lane.advance(Event.BROKEN)
            raise

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
        if not self._are_acquired or not {lane.phase for lane in self._lanes} <= _BETWEEN_TRANSACTIONS:
            self._check_usable()
            self._recover()
        chosen = self._current = self._lanes[self._turn]
        self._turn = (self._turn + 1) % len(self._lanes)
        chosen.make_ready()
        return chosen

    def _next_with_journal(self, journal: Journal) -> Lane:
        """While the gate is open, or if Kafka does not answer now: a lane that does not need Kafka."""
        if not journal.is_open or not self._are_acquired:
            try:
                if self._are_acquired and self._lanes[self._turn].is_ready and not self.must_recover:  # as nearly always
                    return self._next()
                with self.limited(SWITCH_AFTER):
                    return self._next()
            except DualWriteError as error:
                if not self._are_acquired or not journal.lost(error):
                    raise
        self._check_usable()
        chosen = self._current = self._lanes[self._turn]
        self._turn = (self._turn + 1) % len(self._lanes)
        chosen.make_ready_for_journal()
        return chosen

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
        if self._are_acquired:
            for lane in self._lanes:
                if lane.phase in MUST_RECOVER:
                    lane.recover()
        else:
            # an earlier attempt to acquire them failed: the proof needs all steps again, not lane by lane
            self.acquire(only_if_ours=True, on_lost="report")

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


def _needed(ids: Sequence[str], rows: Mapping[str, StateRow]) -> list[str]:
    """The ids at Kafka of the generations that an opening will need: those to recover, or else the newest."""
    needed: list[str] = []
    for row_id in (*ids, *(found for found in rows if found not in ids)):
        row = rows.get(row_id)
        needed += [row_id] if row is None else map(row.kafka_id, row.generations_to_recover or (row.generation,))
    return needed
