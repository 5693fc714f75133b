"""Acquiring all lanes of an id: claims, recovery and take-over in an order that leaves it to one writer.

docs/how-it-works/recovery.md, "Lanes", proves the order. A writer with a journal can claim its lanes while Kafka is down.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from dualwrite.deadline import Deadline
from dualwrite.errors import ConfigurationError, DualWriteError, FencedError
from dualwrite.kafka.base import Producers, TransactionCoordinator
from dualwrite.outages import DATABASE, database_at
from dualwrite.recipe.idle import RECOVER_LIMIT
from dualwrite.recipe.lane import Lane
from dualwrite.recipe.ownership import Ownership
from dualwrite.recipe.phases import Event
from dualwrite.recipe.republish import LostMessages, taken_over
from dualwrite.recovery.recoverer import describe_owner
from dualwrite.recovery.report import RecoveryReport, raise_for_lost
from dualwrite.recovery.side_by_side import SideBySide, Steps
from dualwrite.settings import SWITCH_AFTER, Acknowledge, OnLost, Timeouts
from dualwrite.state import ProducerKind
from dualwrite.stores.base import Acquiring, ClaimedLanes, StateRow, TxnStateStore
from dualwrite.stores.rows import new_token, on_cluster


class Acquisition:
    """Acquires the lanes of one logical id for one writer: all of them, or none.

    Each lane is safe by itself: its claim, its row and its Kafka ids follow the recipe for a single id. In addition, if several
    writers use one id, only one of them may continue, however many lanes each has and wherever any of them is paused. The order
    of the steps in `acquire` ensures this:

    1. check that Kafka is the cluster that every lane's row names; claim lane 0
    2. list the id's rows; claim every other lane that has a row, and every other lane of ours
    3. resolve all of them; start ours
    4. once a lane is started, check that its claim is still ours; after all these checks the first transaction may begin

    `claim` claims the same lanes in one database transaction, without Kafka. Then transactions that only write into the journal
    may begin. Before the first one that sends anything to Kafka, `acquire` does all steps (docs/how-it-works/journal.md).

    Attributes:
        are_claimed: Whether the newest claim of all lanes is known to have succeeded.
        are_acquired: Whether `acquire` has finished.
        additional: Lanes of an earlier writer with more lanes, which were resolved as well, and are not used.
    """

    def __init__(
        self,
        store: TxnStateStore,
        coordinator: TransactionCoordinator,
        producers: Producers,
        lanes: Sequence[Lane],
        *,
        timeouts: Timeouts,
        acknowledge: Acknowledge,
        has_journal: bool,
        lost: LostMessages | None,
    ) -> None:
        self._store = store
        self._database = database_at(store.description, is_local=store.is_local)
        self._coordinator = coordinator
        self._producers = producers
        self._lanes = lanes
        self._timeouts = timeouts
        self._acknowledge = acknowledge
        self._has_journal = has_journal
        self._lost = lost
        self._intended: str | None = None  # the token of a claim that is not known to have succeeded yet
        self.are_claimed = False
        self.are_acquired = False
        self.additional: tuple[Ownership, ...] = ()

    @property
    def report(self) -> RecoveryReport:
        """What was found when each lane was last acquired."""
        owned = (*(lane.ownership for lane in self._lanes), *self.additional)
        return RecoveryReport(tuple(each for ownership in owned for each in ownership.report.ids))

    def acquire(self, *, only_if_ours: bool, on_lost: OnLost) -> None:
        """Claim, resolve and start, in the order that the class docstring explains; then a transaction may begin.

        `only_if_ours`: only while lane 0 is still ours (rule F8), since its owner owns the others too, or is about to.
        `on_lost` is "raise" to raise an error for unacknowledged lost or unverified transactions, before any producer is
        started; "republish" to raise one for those that can't be published again, after the others are.

        Raises: as for `DualWriter.open`.
        """
        self.are_acquired = False
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
            self.additional = tuple(owned.values())[len(self._lanes) :]
            with self._limited(owned.values()):
                self._side_by_side(Ownership.resolving, owned.values())
                if on_lost == "raise":
                    raise_for_lost(self.report.unacknowledged)
                self._side_by_side(Ownership.starting, [lane.ownership for lane in self._lanes])
                if self._lost is not None:
                    self._publish_lost(self._lost)
            if self._lost is not None and on_lost == "republish":
                self._raise_for_lost()
            for lane in self._lanes:
                lane.advance(Event.OPENED)
            self.are_acquired = True

    def claim(self, *, only_if_ours: bool) -> None:
        """Claim all lanes in the database, without asking Kafka; then a transaction that writes into the journal may begin.

        What earlier owners have left at Kafka stays there, and in the rows, until the lanes are acquired.

        Raises: as for `TxnStateStore.claim_lanes`.
        """
        self.are_acquired = False
        with self._phases_track_errors():
            rows = {row.transactional_id: row for row in self._store.look_at([lane.id for lane in self._lanes])}
            first = self._lanes[0].ownership
            expected_fence = first.claim.fence if only_if_ours else None
            claimed = self._claim_rows(rows, expected_fence, first.timeouts, cluster_id=None, acquiring=None)
            claims = {row.transactional_id: row.claim for row in claimed.rows}
            for lane in self._lanes:
                lane.claimed_without_kafka(claims[lane.id])
            self.additional = ()

    # --- claims -----------------------------------------------------------------------------------------------------------

    def _claim(self, owned: Mapping[str, Ownership], *, only_if_ours: bool) -> tuple[str, ClaimedLanes]:
        """Claim all lanes; return the id of the Kafka cluster, which was compared with the rows, and the rows as claimed.

        A claim takes the id from a writer that may work. So before it, the database must be the original, and Kafka must be the
        cluster of the rows; and the coordinator of each generation that is needed must answer.
        """
        ids, first = list(owned), self._lanes[0].ownership
        expected_fence, timeouts = first.claim.fence if only_if_ours else None, first.timeouts
        rows = {row.transactional_id: row for row in self._store.look_at(ids)}
        cluster_id = self._coordinator.cluster_id(timeout=self._at_most(SWITCH_AFTER, timeouts.kafka))
        for row in rows.values():
            on_cluster(row, cluster_id)
        deadline = Deadline.after(self._at_most(RECOVER_LIMIT, timeouts.kafka))
        self._producers.choose(timeout=deadline)
        check_acknowledge(self._acknowledge, self._producers.kind)
        described = self._coordinator.describe_all(_needed(ids, rows), timeout=deadline)
        reusable = (  # if nothing changes until they are claimed
            row_id
            for row_id, row in rows.items()
            if row_id in owned and owned[row_id].can_reuse(row, described.get(row.kafka_id(row.generation)), deadline)
        )
        acquiring = Acquiring(self._producers.kind, frozenset(ids), frozenset(reusable), cluster_id)
        return cluster_id, self._claim_rows(rows, expected_fence, timeouts, cluster_id=cluster_id, acquiring=acquiring)

    def _claim_rows(
        self,
        rows: Mapping[str, StateRow],
        expected_fence: int | None,
        timeouts: Timeouts,
        *,
        cluster_id: str | None,
        acquiring: Acquiring | None,
    ) -> ClaimedLanes:
        """Claim our lanes, and those of these rows.

        If it is not known whether the claim has succeeded, the next call repeats it under the same token: it may be in the
        rows, and must not be taken for another process's.
        """
        ids = [lane.id for lane in self._lanes]
        self._intended = self._intended or new_token()
        self.are_claimed = False
        with self._database.call(DATABASE, may_wait=True):  # for the rows' locks
            claimed = self._store.claim_lanes(
                [*ids, *(row_id for row_id in rows if row_id not in ids)],
                describe_owner("writer"),
                timeout=timeouts.claim,
                cluster_id=cluster_id,
                expected_fence=expected_fence,
                token=self._intended,
                acquiring=acquiring,
            )
        self._intended = None
        self.are_claimed = True
        return claimed

    # --- recovery ---------------------------------------------------------------------------------------------------------

    def _publish_lost(self, lost: LostMessages) -> None:
        """Before the first transaction, publish again what was lost (rule RO)."""
        with taken_over(lost, self.additional) as additional:
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

    def _side_by_side(self, steps: Callable[[Ownership, Deadline], Steps[Any]], owned: Iterable[Ownership]) -> None:
        deadline = Deadline.after(self._lanes[0].ownership.timeouts.kafka)
        SideBySide(self._store, self._coordinator, deadline).run([steps(ownership, deadline) for ownership in owned])

    # --- time limits and errors -------------------------------------------------------------------------------------------

    def _at_most(self, seconds: float, limit: float) -> float:
        """A time limit for Kafka: with a journal, a writer that waits for Kafka goes on without it."""
        return min(seconds, limit) if self._has_journal else limit

    @contextmanager
    def _limited(self, owned: Iterable[Ownership]) -> Iterator[None]:
        """In the block, with a journal, no step at Kafka takes longer than RECOVER_LIMIT."""
        with ExitStack() as limits:
            for ownership in owned if self._has_journal else ():
                limits.enter_context(ownership.limited(RECOVER_LIMIT))
            yield

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


def check_acknowledge(acknowledge: Acknowledge, kind: ProducerKind) -> None:
    """Check that blocks may end with the database's commit.

    Raises:
        ConfigurationError: They may not: Kafka may abort a transaction that the database has committed.
    """
    if acknowledge == "decided" and kind is not ProducerKind.NATIVE_TWO_PHASE:
        raise ConfigurationError(
            'acknowledge="decided" requires two-phase commit.',
            cause="without it Kafka may abort a transaction that the database has committed, if it times out before its "
            "commit; so a block, or a call, can end only after Kafka's commit",
            next_step='use acknowledge="visible", or enable two-phase commit on the brokers',
        )


def _needed(ids: Sequence[str], rows: Mapping[str, StateRow]) -> list[str]:
    """The ids at Kafka of the generations that an opening will need: those to recover, or else the newest."""
    needed: list[str] = []
    for row_id in (*ids, *(found for found in rows if found not in ids)):
        row = rows.get(row_id)
        needed += [row_id] if row is None else map(row.kafka_id, row.generations_to_recover or (row.generation,))
    return needed
