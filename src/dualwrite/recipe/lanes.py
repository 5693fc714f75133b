"""All lanes of one writer: taking them, taking turns, closing them (DESIGN.md §4, "Taking over")."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Final

from dualwrite.errors import FencedError, InDoubtTransactionError
from dualwrite.kafka.base import ProducerFactory, TransactionCoordinator
from dualwrite.recipe.lane import IN_TRANSACTION, MUST_RECOVER, Lane
from dualwrite.recipe.ownership import Ownership
from dualwrite.recipe.phases import Event, Phase
from dualwrite.recovery.plan import KafkaLook
from dualwrite.recovery.recoverer import ids_with_lanes
from dualwrite.recovery.report import RecoveryReport, raise_for_lost
from dualwrite.settings import OnLost, Timeouts
from dualwrite.stores.base import TxnStateStore

log = logging.getLogger(__name__)

_DECISIVE: Final = (Phase.CLOSED, Phase.FENCED, Phase.OPENING, Phase.IN_DOUBT, Phase.NEEDS_RECOVERY)


class Lanes:
    """The lanes of one logical id as one writer holds them: all, or (until `take` has run through) none.

    Transactions take turns on them, one after another, so that none waits for the markers of the one before. It is committed
    before the next begins, whichever lane that is on: what two transactions write to one partition lies there in their order.

    Each lane is safe by itself: its claim, its row and its Kafka ids follow the recipe of a single id. What is left is that of
    several writers of one id only one goes on, however many lanes each has and wherever any of them is paused. `take` sees to
    it by its order:

    1. see that Kafka is the cluster of every lane's row; claim lane 0
    2. list the id's rows; claim every further lane that has one, and every further lane of ours
    3. settle them all; start ours
    4. see that every claim is still ours; only after that the first transaction begins

    Let A and B both have passed step 4, and A have claimed lane 0 before B. Then A looked at lane 0 in step 4 before B claimed
    it, or else A would have found its claim replaced. By then A had claimed all its lanes (step 2) and so made their rows. B
    listed the rows after its claim of lane 0, found all of A's, and claimed each after A had. So A has been fenced on every
    lane that it can use since before B's first transaction. It can't get another: a lane that A recovers later by itself is
    claimed on the condition that its fence is still A's, which makes no row. A row that B did not find because it was
    forgotten has had its fence raised by that. It does not matter which of them has more lanes: the rows count, not the
    number that B is set to. That is also why an opening that broke off must be done again from step 1, and not lane by lane.

    Settling and starting lane 0 look at its fence as well, after all claims. Step 4 does not rely on that, and it keeps a
    writer from opening that has lost another lane meanwhile.

    An A that is paused between its steps and woken after B's fails at its next look at a fence, and takes nothing from B:
    before each further claim it looks at lane 0. Only if it was paused between that look and its claim does it take one lane
    from B: B's next transaction there is rolled back on both sides with FencedError, and B can reopen.

    While somebody keeps a lane's row locked for longer than `timeouts.claim`, opening fails and leaves the lanes before it
    claimed: nothing is lost by it, but the earlier writer is fenced on those and has to reopen.

    Args:
        store: The database.
        coordinator: Kafka's side, for recovery.
        producers: Makes the producer for a Kafka transactional id, and says of which kind it is.
        transactional_id: The logical id.
        count: How many lanes transactions run on.
        timeouts: Time limits; `claim` is for each lane.
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
    ) -> None:
        self._id = transactional_id
        self._store = store
        self._timeouts = timeouts
        self._coordinator = coordinator
        self._lanes = tuple(
            Lane(store, coordinator, producers, transactional_id=transactional_id, number=number, timeouts=timeouts)
            for number in range(count)
        )
        self._new_ownership = partial(Ownership, store, coordinator, producers, timeouts=timeouts)
        self._left_over: tuple[Ownership, ...] = ()
        self._are_held = False
        self._turn = 0

    def __iter__(self) -> Iterator[Lane]:
        return iter(self._lanes)

    @property
    def phase(self) -> Phase:
        """Where the writer stands: what keeps one lane from a transaction keeps all of them."""
        phases = [lane.phase for lane in self._lanes]
        for phase in _DECISIVE:
            if phase in phases:
                return phase
        return next((phase for phase in phases if phase is not Phase.READY), Phase.READY)

    @property
    def in_transaction(self) -> bool:
        """Whether a transaction is under way."""
        return any(lane.phase in IN_TRANSACTION for lane in self._lanes)

    @property
    def are_closed(self) -> bool:
        """Whether every one is closed."""
        return all(lane.phase is Phase.CLOSED for lane in self._lanes)

    @property
    def report(self) -> RecoveryReport:
        """What was found and settled when each lane was last taken, those of an earlier writer with more lanes included."""
        owned = (*(lane.ownership for lane in self._lanes), *self._left_over)
        return RecoveryReport(tuple(chain.from_iterable(ownership.report.ids for ownership in owned)))

    # --- taking -----------------------------------------------------------------------------------------------------------

    def acquire(self, *, only_if_ours: bool, on_lost: OnLost) -> None:
        """Claim, settle and start, in the order that the class explains; a transaction may begin when this returns.

        Args:
            only_if_ours: Only while lane 0 is still ours (rule F8): whoever has it has the others too, or is about to.
            on_lost: "raise" for what stands unacknowledged in a row, before anything is started.

        Raises: as `DualWriter.open`.
        """
        self._are_held = False
        with self._phases_kept_true():
            first, *others = (lane.ownership for lane in self._lanes)
            if not only_if_ours:
                self._look_at_kafka()
            first.make_claim(only_if_ours=only_if_ours)
            self._left_over = self._find_left_over()
            others += self._left_over
            for ownership in others:
                self._store.read_claimed(first.claim)
                ownership.make_claim(only_if_ours=False)
            for ownership in (first, *others):
                ownership.resolve()
            if on_lost == "raise":
                raise_for_lost(self.report.unacknowledged)
            for lane in self._lanes:
                lane.ownership.start()
            for ownership in (first, *others):
                self._store.read_claimed(ownership.claim)
            for lane in self._lanes:
                lane.advance(Event.OPENED)
            self._are_held = True

    def _look_at_kafka(self) -> None:
        """See that Kafka answers for every lane, and is its cluster, before a claim takes the id from a live writer.

        Raises: as `KafkaLook.before_opening`.
        """
        look = KafkaLook(self._store, self._coordinator, timeout=self._timeouts.kafka)
        own = [lane.id for lane in self._lanes]
        for row_id in own:  # first: a store that is away, or lacks its table, says for which id
            look.before_opening(row_id, self._store.read(row_id))
        for row_id in ids_with_lanes(self._store, [self._id]):
            if row_id not in own:
                look.before_opening(row_id, self._store.read(row_id))

    def _find_left_over(self) -> tuple[Ownership, ...]:
        """Lanes beyond ours that have a row: an earlier writer's, who had more. They are fenced and settled, and not used."""
        ours = {lane.id for lane in self._lanes}
        rows = ids_with_lanes(self._store, [self._id])
        return tuple(self._new_ownership(transactional_id=row_id) for row_id in rows if row_id not in ours)

    @contextmanager
    def _phases_kept_true(self) -> Iterator[None]:
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

    # --- taking turns -----------------------------------------------------------------------------------------------------

    def next(self) -> Lane:
        """The lane for the next transaction. What the last one left on any lane is settled first.

        Raises:
            FencedError: Somebody else has claimed one of the lanes.
            DualWriteError: A lane could not be recovered.
        """
        for lane in self._lanes:
            if lane.phase is Phase.FENCED:
                raise FencedError(
                    "Somebody else has claimed the id.",
                    transactional_id=lane.id,
                    next_step="stop this process, or reopen() to take the id back",
                )
        if self._are_held:
            for lane in self._lanes:
                if lane.phase in MUST_RECOVER:
                    lane.recover()
        else:
            self.acquire(
                only_if_ours=True, on_lost="report"
            )  # a reopening broke off: see the class for why all of it is needed
        chosen = self._lanes[self._turn]
        self._turn = (self._turn + 1) % len(self._lanes)
        if chosen.ownership.producer_must_be_replaced:
            chosen.recover()
        chosen.renew()
        return chosen

    # --- the end ----------------------------------------------------------------------------------------------------------

    def forget_transactions(self) -> None:
        """See `Lane.forget_transaction`; one lane at most has one."""
        for lane in self._lanes:
            lane.forget_transaction()

    def close(self) -> None:
        """Close every lane, also where one fails.

        Raises:
            InDoubtTransactionError: What was left on a lane could not be settled; what failed on further ones is in its notes.
        """
        failed: list[Exception] = []
        try:
            for lane in self._lanes:
                try:
                    lane.close()
                except Exception as error:  # noqa: BLE001  (the other lanes are closed all the same)
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
