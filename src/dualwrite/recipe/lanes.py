"""All lanes of one writer: acquiring them, rotating over them, closing them.

docs/how-it-works/recovery.md, "Lanes", proves the order in which they are acquired: it leaves them to one writer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Final, Protocol

from dualwrite.deadline import Deadline
from dualwrite.errors import (
    ClusterMismatchError,
    DualWriteError,
    FencedError,
    InDoubtTransactionError,
    WriterClosedError,
)
from dualwrite.observability import observers, tracing
from dualwrite.observability.logs import SubjectLogger
from dualwrite.observability.outages import DATABASE
from dualwrite.recipe.idle import RECOVER_LIMIT
from dualwrite.recipe.journaling import Journal, KafkaOrJournal
from dualwrite.recipe.lane import Lane
from dualwrite.recipe.outcomes import TransactionReport
from dualwrite.recipe.ownership import Ownership, Parties
from dualwrite.recipe.phases import IN_TRANSACTION, MUST_RECOVER, Change, Phase
from dualwrite.recipe.republish import LostMessages, taken_over
from dualwrite.recipe.routes import KafkaRoute
from dualwrite.recovery.clusters import cluster_that_answers
from dualwrite.recovery.recoverer import describe_owner
from dualwrite.recovery.report import RecoveryReport, raise_for_lost
from dualwrite.settings import SWITCH_AFTER, OnLost
from dualwrite.stores.base import Acquiring, ClaimedLanes, LostKind, StateRow
from dualwrite.stores.rows import new_token, on_cluster
from dualwrite.transaction import OpenTransaction
from dualwrite.transactional_id import TransactionalId

log = SubjectLogger(__name__)

CLOSE_LIMIT: Final = 10.0
"""Seconds for resolving what is in doubt when a writer, or a pool's writers, are closed: recovery does it as well."""

_MIN_CLOSE_SECONDS: Final = 1.0

_BLOCKING: Final = (Phase.CLOSED, Phase.FENCED, Phase.OPENING, Phase.IN_DOUBT, Phase.NEEDS_RECOVERY)


class Lanes:
    """The lanes of one logical id that one writer owns: all of them, or none.

    Transactions rotate over the lanes, so that none waits for the markers of the previous one. Each is committed before the
    next begins, whichever lane that one uses, so in each partition the messages are in the order of the transactions.

    Each lane is safe by itself: its claim, its row and its Kafka ids follow the recipe for a single id. In addition, if several
    writers use one id, only one of them may continue, however many lanes each has and wherever any of them is paused. The order
    of the steps in `acquire` ensures this:

    1. check that Kafka is the cluster that every lane's row names; claim lane 0
    2. list the id's rows; claim every other lane that has a row, and every other lane of ours
    3. resolve all of them; start ours
    4. once a lane is started, check that its claim is still ours; after all these checks the first transaction may begin

    `claim` claims the same lanes in one database transaction, without Kafka. Then transactions that only write into the journal
    may begin. Before the first one that sends anything to Kafka, `acquire` does all steps (docs/how-it-works/journal.md).
    """

    def __init__(
        self,
        parties: Parties,
        *,
        transactional_id: str,
        count: int,
        journal: Journal | None = None,
        lost: LostMessages | None = None,
    ) -> None:
        self._id = transactional_id
        self._parties = parties
        self._journal = journal
        self._lost = lost
        self._lanes = tuple(self._made(number) for number in range(count))
        self._additional: tuple[Ownership, ...] = ()  # of an earlier writer with more lanes: resolved as well, and not used
        self._intended: str | None = None  # the token of a claim that is not known to have succeeded yet
        self._are_claimed = False  # the newest claim of all lanes is known to have succeeded
        self._are_acquired = False
        self._on_lost: OnLost = "report"  # for the lanes that are not acquired yet
        self._turn = 0
        self._current: Lane | None = None

    def _made(self, number: int) -> Lane:
        ownership = Ownership(self._parties, TransactionalId(self._id, number).row)
        of = ownership, self._lost
        kafka = KafkaRoute(*of) if self._journal is None else KafkaOrJournal(*of, self._journal)
        lane = Lane(ownership, kafka, logical_id=self._id)
        lane.watch = reported
        return lane

    def __iter__(self) -> Iterator[Lane]:
        return iter(self._lanes)

    @property
    def phase(self) -> Phase:
        """The writer's phase: if one lane can't begin a transaction, the writer can't either."""
        phases = {lane.phase for lane in self._lanes} - {Phase.READY}
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
    def must_claim(self) -> bool:
        """Whether the next transaction begins with a claim in the database, as far as that is known."""
        if self._journal is not None and self._journal.is_open:
            return not (self._are_claimed and self._lanes[self._turn].goes_on_without_kafka)
        return self.phase is not Phase.READY

    @property
    def kafka_transactional_ids(self) -> tuple[str, ...]:
        """The lanes' ids as Kafka sees them, with their current generations."""
        return tuple(lane.ownership.kafka_transactional_id for lane in self._lanes)

    @property
    def are_closed(self) -> bool:
        """Whether every lane is closed."""
        return all(lane.phase is Phase.CLOSED for lane in self._lanes)

    @property
    def report(self) -> RecoveryReport:
        """What was found when each lane was last acquired, including the additional lanes of an earlier writer."""
        owned = (*(lane.ownership for lane in self._lanes), *self._additional)
        return RecoveryReport(tuple(each.report for each in owned))

    def new_owners(self) -> tuple[str, ...]:
        """The owners that have claimed a lane since this writer did, according to the rows."""
        rows = ((lane, self._parties.store.read(lane.id)) for lane in self._lanes)
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
                self.acquire(only_if_ours=False, on_lost=on_lost)
            except DualWriteError as error:
                if journal is None or not journal.lost(error):
                    raise
            else:
                return
        self._on_lost = on_lost
        self.claim(only_if_ours=False)
        log.info("opened without Kafka, which does not answer", transactional_id=self._id)

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
            try:
                cluster_id, claimed, reusable = self._claim(owned, only_if_ours=only_if_ours)
            except ClusterMismatchError:  # the right one may answer at the next attempt
                self._parties.coordinator.forget_cluster()
                raise
            for row in claimed.rows:
                row_id = row.transactional_id
                if row_id not in owned:  # of an earlier writer with more lanes: fenced and resolved, not used
                    owned[row_id] = Ownership(self._parties, row_id)
                has = claimed.have_generations
                is_new = has and row_id not in reusable
                owned[row_id].adopt(row.claim, cluster_id, row=row, has_generation=has, is_new=is_new)
            self._additional = tuple(owned.values())[len(self._lanes) :]
            with nullcontext() if self._journal is None else self._parties.limited(RECOVER_LIMIT):
                self._parties.run(*(each.resolving for each in owned.values()))
                if on_lost == "raise":
                    raise_for_lost(self.report.unacknowledged)
                self._parties.run(*(lane.ownership.starting for lane in self._lanes))
                if self._lost is not None:  # rule RO: before the first transaction
                    with taken_over(self._lost, self._additional) as additional:
                        self._lost.publish(*(lane.ownership for lane in self._lanes), *additional)
            if self._lost is not None and on_lost == "republish":
                self._raise_for_lost()
            for lane in self._lanes:
                lane.advance(Change.OPENED)
            self._are_acquired = True

    def claim(self, *, only_if_ours: bool) -> None:
        """Claim all lanes in the database, without asking Kafka; then a transaction that writes into the journal may begin.

        What earlier owners have left at Kafka stays there, and in the rows, until the lanes are acquired.

        Raises: as for `TxnStateStore.claim_lanes`.
        """
        self._are_acquired = False
        with self._phases_track_errors():
            rows = {row.transactional_id: row for row in self._parties.store.look_at([lane.id for lane in self._lanes])}
            claimed = self._claim_rows(rows, only_if_ours=only_if_ours, cluster_id=None, acquiring=None)
            claims = {row.transactional_id: row.claim for row in claimed.rows}
            for lane in self._lanes:
                lane.claimed_without_kafka(claims[lane.id])
            self._additional = ()

    def _claim(self, owned: Mapping[str, Ownership], *, only_if_ours: bool) -> tuple[str, ClaimedLanes, frozenset[str]]:
        """Claim all lanes; return the id of the Kafka cluster, which was compared with the rows, and the rows as claimed.

        And the lanes whose newest generation is continued, if their rows were not changed in between.

        A claim takes the id from a writer that may work. So before it, the database must be the original, and Kafka must be the
        cluster of the rows; and the coordinator of each generation that is needed must answer.
        """
        ids, timeouts = list(owned), self._parties.timeouts
        rows = {row.transactional_id: row for row in self._parties.store.look_at(ids)}
        cluster_id = cluster_that_answers(self._parties.coordinator, timeout=self._at_most(SWITCH_AFTER, timeouts.kafka))
        for row in rows.values():
            on_cluster(row, cluster_id)
        deadline = Deadline.after(self._at_most(RECOVER_LIMIT, timeouts.kafka))
        self._parties.producers.choose(timeout=deadline)
        described = self._parties.coordinator.describe_all(_needed(ids, rows), timeout=deadline)
        reusable = frozenset(  # if nothing changes until they are claimed
            row_id
            for row_id, row in rows.items()
            if row_id in owned and owned[row_id].can_reuse(row, described.get(row.kafka_id(row.generation)), deadline)
        )
        acquiring = Acquiring(self._parties.producers.kind, frozenset(ids), reusable, cluster_id)
        claimed = self._claim_rows(rows, only_if_ours=only_if_ours, cluster_id=cluster_id, acquiring=acquiring)
        return cluster_id, claimed, reusable

    def _claim_rows(
        self,
        rows: Mapping[str, StateRow],
        *,
        only_if_ours: bool,
        cluster_id: str | None,
        acquiring: Acquiring | None,
    ) -> ClaimedLanes:
        """Claim our lanes, and those of these rows.

        If it is not known whether the claim has succeeded, the next call repeats it under the same token: it may be in the
        rows, and must not be taken for another process's.
        """
        ids = [lane.id for lane in self._lanes]
        for lane in self._lanes:
            lane.ownership.compare(rows.get(lane.id))
        self._intended = self._intended or new_token()
        self._are_claimed = False
        with self._parties.database.call(DATABASE, may_wait=True):  # for the rows' locks
            claimed = self._parties.store.claim_lanes(
                [*ids, *(row_id for row_id in rows if row_id not in ids)],
                describe_owner("writer"),
                timeout=self._parties.timeouts.claim,
                cluster_id=cluster_id,
                expected_fence=self._lanes[0].ownership.claim.fence if only_if_ours else None,
                token=self._intended,
                acquiring=acquiring,
            )
        self._intended = None
        self._are_claimed = True
        return claimed

    def _raise_for_lost(self) -> None:
        """Raise an error for what is lost or unverified, and leave the id as clean as before.

        What the database has forgotten was reported when it was found, and its messages are visible: the service goes on.
        """
        found = (one for one in self.report.unacknowledged if one[1].kind is not LostKind.FORGOTTEN)
        try:
            raise_for_lost(found, self.report.not_published)
        except DualWriteError:
            for lane in self._lanes:
                lane.ownership.drop_producer()
                lane.ownership.clear_row()
            raise

    def _at_most(self, seconds: float, limit: float) -> float:
        """A time limit for Kafka: with a journal, a writer that waits for Kafka goes on without it."""
        return min(seconds, limit) if self._journal is not None else limit

    @contextmanager
    def _phases_track_errors(self) -> Iterator[None]:
        try:
            yield
        except FencedError as fenced:
            of_ours = any(lane.id == fenced.transactional_id for lane in self._lanes)
            for lane in self._lanes:
                lane.advance(Change.BROKEN if of_ours and lane.id != fenced.transactional_id else Change.FENCED)
            raise
        except BaseException:
            for lane in self._lanes:
                lane.advance(Change.BROKEN)
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
        if not self._are_acquired or {lane.phase for lane in self._lanes} != {Phase.READY}:
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
        if not self._are_claimed:  # the answer to the last claim was lost
            self.claim(only_if_ours=True)
        chosen = self._current = self._lanes[self._turn]
        self._turn = (self._turn + 1) % len(self._lanes)
        chosen.make_ready_without_kafka()
        return chosen

    def _next_at_kafka(self) -> Lane:
        is_ready = self._lanes[self._turn].is_ready and not self.must_recover  # as nearly always
        if is_ready or not self._are_acquired:  # acquiring has limits of its own
            return self._next()
        with self._parties.limited(SWITCH_AFTER):
            return self._next()

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
            # they were claimed without Kafka, or an attempt failed: the proof needs all steps again, not lane by lane
            self.acquire(only_if_ours=True, on_lost=self._on_lost)
            self._on_lost = "report"

    def recover(self, limit: float) -> None:
        """Do now what `next` would do before the next transaction.

        The caller ensures that nothing else uses the lanes during the call. A claim, and each step at Kafka, takes at most
        `limit` seconds.

        Raises:
            FencedError: Another writer or recoverer has claimed one of the lanes.
            DualWriteError: A lane could not be recovered.
        """
        with self._parties.limited(limit):
            self._recover()

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
                    limit = Deadline.after(min(CLOSE_LIMIT, self._parties.timeouts.kafka))
                try:
                    lane.close(limit=_MIN_CLOSE_SECONDS if limit is None else max(limit.left, _MIN_CLOSE_SECONDS))
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


class _Reported(Protocol):
    """What runs transactions: `Lane`, `UnclaimedLane`."""

    logical_id: str
    id: str
    transaction: OpenTransaction | None


def reported(lane: _Reported) -> TransactionReport | None:
    """Who reports the transaction that a lane begins; None if nobody wants to know."""
    if lane.transaction is None or not (observers.installed or tracing.tracer is not None):
        return None
    return TransactionReport(lane.logical_id, lane.id, lane.transaction)


def _needed(ids: Sequence[str], rows: Mapping[str, StateRow]) -> list[str]:
    """The ids at Kafka of the generations that an opening will need: those to recover, or else the newest."""
    needed: list[str] = []
    for row_id in (*ids, *(found for found in rows if found not in ids)):
        row = rows.get(row_id)
        needed += [row_id] if row is None else map(row.kafka_id, row.generations_to_recover or (row.generation,))
    return needed
