"""All lanes of one writer: acquiring them, rotating over them, closing them (docs/how-it-works/recovery.md, "Lanes")."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, Final

from dualwrite.deadline import Deadline
from dualwrite.errors import DualWriteError, FencedError, InDoubtTransactionError
from dualwrite.kafka.base import ProducerFactory, TransactionCoordinator
from dualwrite.logs import SubjectLogger
from dualwrite.outages import DATABASE, database_at
from dualwrite.recipe.lane import IN_TRANSACTION, MUST_RECOVER, Lane
from dualwrite.recipe.ownership import CHECK_LIMIT, Ownership
from dualwrite.recipe.phases import Event, Phase
from dualwrite.recovery.recoverer import describe_owner
from dualwrite.recovery.report import RecoveryReport, raise_for_lost
from dualwrite.recovery.side_by_side import SideBySide, Steps
from dualwrite.settings import Acknowledge, OnLost, Timeouts
from dualwrite.state import TransactionDescription
from dualwrite.stores.base import Acquiring, ClaimedLanes, StateRow, TxnStateStore
from dualwrite.stores.row import new_token, on_cluster


@dataclass(frozen=True, slots=True)
class CheckedClaim:
    """A claim of all lanes.

    Args:
        cluster_id: The Kafka cluster that was compared with the rows.
        claimed: The rows.
    """

    cluster_id: str
    claimed: ClaimedLanes


class LaneClaims:
    """Claims the lanes of one writer; see `Lanes` for why in this order.

    Args:
        store: The database.
        coordinator: Kafka's side.
        producers: Of the writer.
    """

    def __init__(self, store: TxnStateStore, coordinator: TransactionCoordinator, producers: ProducerFactory) -> None:
        self._store = store
        self._database = database_at(store.description, is_local=store.is_local)
        self._coordinator = coordinator
        self._kind = producers.kind
        self._intended: str | None = None  # the token of a claim that is not known to have succeeded yet

    def make(self, owned: Mapping[str, Ownership], *, expected_fence: int | None) -> CheckedClaim:
        """Check and claim.

        A claim takes the id from a writer that may work. So before it, the database must be the original, and Kafka must be the
        cluster of the rows; and the coordinator of each generation that is needed must answer.

        If it is not known whether the claim has succeeded, the next call repeats it under the same token: it may be in the
        rows, and must not be taken for another process's.

        Args:
            owned: The writer's lanes by their ids, lane 0 first.
            expected_fence: See `TxnStateStore.claim_lanes`.

        Raises:
            StoreCopiedError: The database is a copy, or has moved.
            ClusterMismatchError: A row names another cluster. Nothing was claimed.
            BrokerUnavailableError: A coordinator does not answer. Nothing was claimed.
            DualWriteError: As for `TxnStateStore.claim_lanes`.
        """
        ids, timeouts = list(owned), owned[next(iter(owned))].timeouts
        rows = {row.transactional_id: row for row in self._store.look_at(ids)}
        cluster_id = self._coordinator.cluster_id(timeout=timeouts.kafka)
        for row in rows.values():
            on_cluster(row, cluster_id)
        deadline = Deadline.after(timeouts.kafka)
        described = self._coordinator.describe_all(_needed(ids, rows), timeout=deadline)
        acquiring = Acquiring(self._kind, frozenset(ids), self._reusable(owned, rows, described, deadline), cluster_id)
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
        return CheckedClaim(cluster_id, claimed)

    def _reusable(
        self,
        owned: Mapping[str, Ownership],
        rows: Mapping[str, StateRow],
        described: Mapping[str, TransactionDescription | None],
        deadline: Deadline,
    ) -> frozenset[str]:
        """The lanes that can continue with their newest generation, if nothing changes until they are claimed."""

        def can_reuse(row: StateRow) -> bool:
            newest = described.get(row.kafka_id(row.generation))
            return owned[row.transactional_id].can_reuse(row, newest, deadline)

        return frozenset(row_id for row_id, row in rows.items() if row_id in owned and can_reuse(row))


def _needed(ids: Sequence[str], rows: Mapping[str, StateRow]) -> list[str]:
    """The ids at Kafka of the generations that an opening will need: those to recover, or else the newest."""

    def needed() -> Iterator[str]:
        for row_id in (*ids, *(found for found in rows if found not in ids)):
            row = rows.get(row_id)
            if row is None:
                yield row_id
            else:
                yield from map(row.kafka_id, row.generations_to_recover or (row.generation,))

    return list(needed())


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
    of the steps in `acquire` ensures this:

    1. check that Kafka is the cluster that every lane's row names; claim lane 0
    2. list the id's rows; claim every other lane that has a row, and every other lane of ours
    3. resolve all of them; start ours
    4. once a lane is started, check that its claim is still ours; after all these checks the first transaction may begin

    Steps 1 and 2 are one transaction in a SQL database (`TxnStateStore.claim_lanes`). In step 3 the lanes go side by side
    (`recovery.side_by_side`); each lane's own steps keep their order.

    Suppose that A and B have both passed step 4, and that A claimed lane 0 before B. Then A checked lane 0 in step 4 before B
    claimed it; otherwise A would have found its claim replaced. By then A had claimed all its lanes (step 2) and thereby
    created their rows. B listed the rows after claiming lane 0, found all of A's, and claimed each after A had. So A was fenced
    on every lane that it can use before B's first transaction. A can't get another lane: when A later recovers a single lane,
    it claims it on condition that the fencing token is still its own, which never creates a row. If B did not find a row
    because it was forgotten, forgetting it has raised its fencing token. It does not matter which of them has more lanes: the
    rows count, not the number that B is configured with. That is also why an interrupted opening must be repeated from step 1,
    not lane by lane. The model in tests/model/lanes_model.py explores all of this.

    If A is paused between its steps and continues after B's, it fails at its next check of a fencing token and claims no lane
    of B. In a store that claims lane by lane, A checks lane 0 before each further claim. Only if it was paused between that
    check and the claim does it claim one lane of B: B's next transaction there is rolled back on both sides with FencedError,
    and B can reopen.

    If a lane's row stays locked for longer than `timeouts.claim`, opening fails. In such a store the lanes before it stay
    claimed: nothing is lost, but the earlier writer is fenced on those and has to reopen.

    Args:
        store: The database.
        coordinator: Kafka's side, for recovery.
        producers: Makes the producer for a Kafka transactional id; its `kind` says which producer that is.
        transactional_id: The logical id.
        count: The number of lanes that transactions use.
        timeouts: Time limits; `claim` applies to each lane.
        acknowledge: See Lane.
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
    ) -> None:
        self._id = transactional_id
        self._store = store
        self._timeouts = timeouts
        self._coordinator = coordinator
        self._lanes = tuple(
            Lane(
                store,
                coordinator,
                producers,
                transactional_id=transactional_id,
                number=number,
                timeouts=timeouts,
                acknowledge=acknowledge,
            )
            for number in range(count)
        )
        self._new_ownership = partial(Ownership, store, coordinator, producers, timeouts=timeouts)
        self._claims = LaneClaims(store, coordinator, producers)
        self._additional: tuple[Ownership, ...] = ()
        self._are_acquired = False
        self._turn = 0

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
        return any(lane.phase in IN_TRANSACTION for lane in self._lanes)

    @property
    def must_recover(self) -> bool:
        """Whether a lane must be recovered before the next transaction, and none is known to be claimed by another process."""
        if not any(lane.phase in MUST_RECOVER for lane in self._lanes):
            return False
        return not any(lane.phase is Phase.FENCED for lane in self._lanes)

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

        Args:
            only_if_ours: Only while lane 0 is still ours (rule F8): its owner owns the others too, or is about to.
            on_lost: "raise" if a row has unacknowledged lost or unverified transactions, before any producer is started.

        Raises: as for `DualWriter.open`.
        """
        self._are_acquired = False
        with self._phases_track_errors():
            first = self._lanes[0].ownership
            owned = {lane.id: lane.ownership for lane in self._lanes}
            made = self._claims.make(owned, expected_fence=first.claim.fence if only_if_ours else None)
            for row in made.claimed.rows:
                if row.transactional_id not in owned:  # of an earlier writer with more lanes: fenced and resolved, not used
                    owned[row.transactional_id] = self._new_ownership(transactional_id=row.transactional_id)
                owned[row.transactional_id].adopt_row(row, made.cluster_id, has_generation=made.claimed.have_generations)
            self._additional = tuple(owned.values())[len(self._lanes) :]
            self._side_by_side(Ownership.resolving, owned.values())
            if on_lost == "raise":
                raise_for_lost(self.report.unacknowledged)
            self._side_by_side(Ownership.starting, [lane.ownership for lane in self._lanes])
            for lane in self._lanes:
                lane.advance(Event.OPENED)
            self._are_acquired = True

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
            FencedError: Another writer or recoverer has claimed one of the lanes.
            DualWriteError: A lane could not be recovered.
        """
        for lane in self._lanes:
            if lane.phase is Phase.FENCED:
                raise FencedError(
                    "Another writer or recoverer has claimed the id.",
                    transactional_id=lane.id,
                    next_step="stop this process, or call reopen() to take the id back",
                )
        self._recover()
        chosen = self._lanes[self._turn]
        self._turn = (self._turn + 1) % len(self._lanes)
        chosen.confirm_or_recover()
        if chosen.ownership.producer_must_be_replaced:  # rule F9
            chosen.recover()
        chosen.renew()
        return chosen

    def _recover(self) -> None:
        if self._are_acquired:
            for lane in self._lanes:
                if lane.phase in MUST_RECOVER:
                    lane.recover()
        else:
            # an earlier attempt to acquire them failed: see the class for why all steps must be repeated
            self.acquire(only_if_ours=True, on_lost="report")

    def recover_if_idle(self, limit: float) -> None:
        """If the lanes must be recovered, do now what `next` would do before the next transaction.

        The caller ensures that nothing else uses the lanes during the call.

        Args:
            limit: The maximum seconds for a claim and for each step at Kafka, if that is less than the writer's own limits.

        Raises:
            FencedError: Another writer or recoverer has claimed one of the lanes.
            DualWriteError: A lane could not be recovered.
        """
        if not self.must_recover:
            return
        with ExitStack() as limits:
            for lane in self._lanes:
                limits.enter_context(lane.ownership.limited(limit))
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

    def forget_transactions(self) -> None:
        """At most one lane has a transaction."""
        for lane in self._lanes:
            lane.forget_transaction()

    def close(self, limit: Deadline | None = None) -> None:
        """Close every lane, even if closing one fails.

        Args:
            limit: For resolving what is in doubt, `CLOSE_LIMIT` by default; each lane has at least a second.

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
