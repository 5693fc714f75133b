"""Resolve the generations of one id under a claim: describe, read again, decide, act, record, fence.

Both the Recoverer and a writer that opens run this (docs/how-it-works/recovery.md). The models in tests/model check the order
of the steps, which the rules in docs/how-it-works/rules.md require:

F1  describe first, then read the row again on condition that the fencing token is still ours
F3  after any answer to EndTxn other than NONE, describe and decide again
F7  record the outcome in the database before raising the epoch, which destroys the evidence at the broker
FA  on a broker without EndTxn v5, abort by InitProducerId, never by EndTxn v4
FB  end a transaction only while each of its partitions has a leader (the coordinator client waits for it)
SA  clear the stored state of an earlier transaction before aborting a later one
CL  only on the cluster that the row names
UC  look again for a transaction recorded as UNVERIFIED: if it is found ongoing under exactly that name, commit it; if the
    coordinator does not know it, ask the log again
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple, NoReturn

from dualwrite.deadline import Deadline, Limit, Pauses
from dualwrite.errors import BrokerError, BrokerUnavailableError
from dualwrite.failpoints import hit
from dualwrite.kafka.base import EndingTransaction, EndTxnResult, TransactionCoordinator
from dualwrite.kafka.client.kafka_errors import ErrorCode
from dualwrite.observability import observers
from dualwrite.observability.events import TransactionRecovered, TransactionsForgotten
from dualwrite.observability.logs import SubjectLogger
from dualwrite.recovery.decision import Decision, decide, decide_by_log, last_committed
from dualwrite.recovery.report import GenerationOutcome, IdReport, Outcome
from dualwrite.recovery.side_by_side import SideBySide, Steps, call, describe, end, pause, read, record
from dualwrite.state import (
    LAST_EPOCH,
    Delivery,
    FoundMessages,
    Place,
    PreparedTxnState,
    ProducerKind,
    TransactionDescription,
    TransactionStatus,
)
from dualwrite.stores.base import Claim, LostKind, LostTransaction, Resolution, StateRow, TxnStateStore
from dualwrite.stores.rows import found_again, has_entry, on_cluster

log = SubjectLogger(__name__)

_MAX_LOG_SECONDS: Final = 2.0
"""The maximum seconds for reading the log again for UNVERIFIED entries: nothing is open, so recovery should not wait for it."""

_MIN_LOG_SECONDS: Final = 0.5
"""The least seconds for one entry, however many there are: more than a new connection takes."""

_PAUSES: Final = 0.01, 0.5  # seconds


def decided(
    row: StateRow, generation: int, described: TransactionDescription | None
) -> tuple[PreparedTxnState | None, LostTransaction | None, Decision]:
    """The state of a generation that is to be resolved, and the decision on it.

    That is S, or the state of an UNVERIFIED entry that was found again, which is returned as well (rule UC).
    """
    stored = row.prepared_state if row.prepared_generation == generation else None
    entry = found_again(row, generation, described)
    if entry is None or entry.state == stored:
        return stored, None, decide(stored, described)
    return entry.state, entry, decide(entry.state, described)


def decision_by_log(
    coordinator: TransactionCoordinator, stored: PreparedTxnState, delivery: Delivery | None, limit: Limit | None = None
) -> Decision:
    """Decide by the log, for a state that its coordinator has forgotten; UNVERIFIED if the log has no evidence either.

    The places are read one after another, until one proves how the transaction ended: retention, deletion and permissions
    differ from topic to topic. A place that can't be read matters only if no other one proves it.

    Raises: as for `TransactionCoordinator.fate`.
    """
    places = () if delivery is None else delivery.proofs
    shares = ((None, place) for place in places) if limit is None else Deadline.of(limit).shared(places)
    unreadable: BrokerError | None = None
    for share, place in shares:
        try:
            fate = coordinator.fate(stored, place, timeout=share)
        except BrokerError as error:
            log.info("the log of %s, for transaction %s, can't be read: %s", place, stored, error, **_fields(place))
            unreadable = unreadable or error
            continue
        log.info(
            "the log of %s: transaction %s, unknown to its coordinator, is %s", place, stored, fate.value, **_fields(place)
        )
        decision = decide_by_log(fate)
        if decision is not Decision.UNVERIFIED:
            return decision
    if unreadable is not None:
        raise unreadable
    return Decision.UNVERIFIED


def _fields(place: Place) -> dict[str, Any]:
    return {"topic": place.topic, "partition": place.partition, "offset": place.first_offset}


def found_in_log(
    coordinator: TransactionCoordinator, entry: LostTransaction, cluster_id: str, *, timeout: Limit | None = None
) -> FoundMessages:
    """The messages of a LOST transaction that can still be read on a cluster, whose `cluster.id` is given.

    Raises: as for `TransactionCoordinator.find_messages`.
    """
    if entry.delivery is None:
        return FoundMessages((), ("the row does not say where its messages are",))
    if not entry.cluster_id or entry.cluster_id != cluster_id:  # rule RC: the same offsets may be those of other messages
        return FoundMessages((), (f"its messages are on another Kafka cluster, {entry.cluster_id or 'which is not known'}",))
    return coordinator.find_messages(entry.state, entry.delivery, timeout=timeout)


def proven_by_log(
    coordinator: TransactionCoordinator, row: StateRow, entries: Iterable[LostTransaction], limit: Limit | None
) -> Iterator[tuple[LostTransaction, Decision]]:
    """The UNVERIFIED entries of the row that the log proves now, for example because Read was granted (rule UC).

    An entry is skipped if it was recorded for another cluster than the row's: here, the same offset may have another
    transaction with the same producer id and epoch. If the log can't be read now, the entry stays UNVERIFIED.
    """
    deadline = Deadline.after(_MAX_LOG_SECONDS) if limit is None else Deadline.of(limit).within(_MAX_LOG_SECONDS)
    comparable = [entry for entry in entries if entry.cluster_id and entry.cluster_id == row.cluster_id]
    for share, entry in deadline.shared(comparable, least=_MIN_LOG_SECONDS):
        try:
            decision = decision_by_log(coordinator, entry.state, entry.delivery, share)
        except BrokerError:  # logged above
            continue
        if decision is not Decision.UNVERIFIED:
            yield entry, decision


def resolve_id(store: TxnStateStore, coordinator: TransactionCoordinator, claim: Claim, *, timeout: float) -> IdReport:
    """Resolve every unresolved generation of the claim's id, so that nothing is open on any of them.

    Args:
        store: The database.
        coordinator: Kafka's side.
        claim: Our claim, which must be the newest.
        timeout: Seconds for Kafka, for all generations together.

    Returns:
        What was found, and the unacknowledged lost and unverified transactions in the row, including earlier ones.

    Raises:
        FencedError: Another writer or recoverer has claimed the id since; it resolves the id.
        ClusterMismatchError: The row names another cluster; nothing was changed.
        BrokerUnavailableError: Kafka did not answer within the time limit; prepared transactions stay prepared.
        StoreError: The database could not be read or written.
    """
    deadline = Deadline.after(timeout)
    row = on_cluster(store.read_claimed(claim), coordinator.cluster_id(timeout=deadline))
    (report,) = SideBySide(store, coordinator, deadline).run([resolving(coordinator, claim, row, deadline)])
    return report


def resolving(coordinator: TransactionCoordinator, claim: Claim, row: StateRow, deadline: Deadline) -> Steps[IdReport]:
    """The steps of `resolve_id`; nobody else can have changed the generations in `row` since our claim."""
    if not row.generations_to_recover:
        return IdReport(claim.transactional_id, unacknowledged=row.lost)
    outcomes: list[GenerationOutcome] = []
    for generation in row.generations_to_recover:
        resolver = GenerationResolver(coordinator, claim, generation, row.kafka_id(generation), deadline)
        outcomes += yield from resolver.resolving()
    if row.unresolved_generations:
        yield from record(claim, Resolution(resolved_generation=row.generation))
    found = yield from _found_in_log(coordinator, claim, row.unverified)
    proven = {one.generation for one in found}
    kept = (one for one in outcomes if one.outcome is not Outcome.NOTHING or one.generation not in proven)
    now = yield from read(claim)
    return IdReport(claim.transactional_id, (*kept, *found), now.lost)


def _found_in_log(
    coordinator: TransactionCoordinator, claim: Claim, earlier: Collection[LostTransaction]
) -> Steps[tuple[GenerationOutcome, ...]]:
    """The outcomes of earlier UNVERIFIED entries that the coordinator no longer knows, but the log proves (rule UC).

    This is the last step: nothing is open any more, so neither these outcomes nor the log can change.
    """
    if not earlier:
        return ()
    row = yield from read(claim)
    left = [entry for entry in row.unverified if entry in earlier]
    proven = yield from call(lambda deadline: list(proven_by_log(coordinator, row, left, deadline)))
    found = []
    for entry, decision in proven:
        outcome = Outcome[decision.name]
        lost = yield from _record_found_again(claim, entry, outcome)
        found.append(GenerationOutcome(claim.transactional_id, entry.generation, outcome, entry.state, lost))
        _report(found[-1])
    return tuple(found)


def _record_found_again(claim: Claim, entry: LostTransaction, outcome: Outcome) -> Steps[LostTransaction | None]:
    """Replace the UNVERIFIED entry by what is known now: nothing if it is committed, or the returned LOST entry."""
    log.info(
        "%s, recorded as UNVERIFIED, was found again: %s",
        entry.state,
        outcome.in_words,
        transactional_id=claim.transactional_id,
    )
    kind = outcome.lost_kind
    lost = None if kind is None else replace(entry, kind=kind, recorded_at=datetime.now(UTC))
    yield from record(claim, Resolution(resolved_entry=entry, lost=lost))
    hit("recover_after_resolution")
    return lost


def _report(found: GenerationOutcome) -> None:
    log.info("generation %d: %s", found.generation, found.outcome.in_words, transactional_id=found.transactional_id)
    if observers.installed:
        observers.notify(TransactionRecovered(found.transactional_id, found.generation, found.outcome.value))
    if found.outcome is Outcome.FORGOTTEN and found.lost is not None:
        report_forgotten(found.transactional_id, found.lost)


def report_forgotten(transactional_id: str, entry: LostTransaction) -> None:
    """Tell observers what the database has forgotten."""
    if observers.installed:
        messages = 0 if entry.delivery is None else entry.delivery.messages
        observers.notify(TransactionsForgotten(transactional_id, entry.transactions, messages))


class Described(NamedTuple):
    """A description, and when it was asked for, on the clock of `time.monotonic`."""

    transaction: TransactionDescription | None
    at: float


def described_now(kafka_id: str) -> Steps[Described]:
    """Describe a transaction."""
    at = time.monotonic()
    return Described((yield from describe(kafka_id)), at)


class GenerationResolver:
    """Resolves one generation of one id, which Kafka knows as `kafka_id`, before the deadline; see `resolve_id`.

    Attributes:
        raised: The answer of the EndTxn v5 that raised the epoch at the end, with the producer id and epoch to continue with
            (rule F5); None if the coordinator does not know the id, and on brokers without EndTxn v5.
    """

    def __init__(
        self,
        coordinator: TransactionCoordinator,
        claim: Claim,
        generation: int,
        kafka_id: str,
        deadline: Deadline,
    ) -> None:
        self._coordinator = coordinator
        self._claim = claim
        self._generation = generation
        self._kafka_id = kafka_id
        self._deadline = deadline
        self._delivery: Delivery | None = None
        self._producer: ProducerKind | None = None
        self._cluster_id = ""
        self._forgotten: LostTransaction | None = None  # what Kafka has committed after S
        self._found: list[GenerationOutcome] = []
        self._described_at = 0.0
        self.raised: EndTxnResult | None = None

    def resolving(self, described: Described | None = None) -> Steps[tuple[GenerationOutcome, ...]]:
        """Repeat rounds until the generation is resolved and its epoch raised; see `resolve_id` for errors.

        Args:
            described: How the coordinator has described the generation since our claim, for the first round.

        Returns:
            The outcomes in order, or a single NOTHING. There can be two: that of the stored state, and the abort of another
            transaction that was open.
        """
        pauses = Pauses(*_PAUSES)
        while not (yield from self._round(described)):
            described = None
            yield from pause(next(pauses))
            if self._deadline.expired:
                self._give_up()
        return tuple(self._found) or (self._outcome(Outcome.NOTHING, None),)

    def _round(self, found: Described | None) -> Steps[bool]:
        """Run one round; return whether the generation is finished."""
        # rule F1
        described, self._described_at = found or (yield from described_now(self._kafka_id))
        hit("recover_after_describe")
        row = yield from read(self._claim)
        stored, entry, decision = decided(row, self._generation, described)
        self._delivery, self._producer, self._cluster_id = row.delivery, row.kind_of(self._generation), row.cluster_id
        if entry is not None and described is not None:
            return (yield from self._resolve(entry, described, decision))
        log.debug("stored %s, described %s: %s", stored, described, decision.value, kafka_transactional_id=self._kafka_id)
        hit("recover_after_decision")
        match decision:
            case Decision.WAIT:
                return False
            case Decision.COMMIT | Decision.ABORT:
                assert described is not None
                return (yield from self._end(stored, described, commit=decision is Decision.COMMIT))
            case Decision.PROVE:
                assert stored is not None
                outcome = yield from self._prove(stored)
                if outcome is Outcome.UNVERIFIED:
                    outcome = yield from self._read_in_log(stored)
            case Decision.UNVERIFIED:
                assert stored is not None
                outcome = yield from self._read_in_log(stored)
            case Decision.FORGOTTEN:
                assert stored is not None
                assert described is not None
                self._forgotten = yield from self._committed_since(stored, described)
                outcome = Outcome.NOTHING if has_entry(row, self._forgotten) else Outcome.FORGOTTEN
            case _:
                outcome = Outcome[decision.name]
        if described is not None and described.status is TransactionStatus.ONGOING:
            yield from self._record_resolution(outcome, stored)
            return False  # the open transaction is not the one that S names: the next round aborts and reports it
        return (yield from self._record_and_fence(outcome, stored, described))

    def _resolve(self, entry: LostTransaction, described: TransactionDescription, decision: Decision) -> Steps[bool]:
        """End an unverified transaction that was found again, which the database had committed (rule UC)."""
        if decision is Decision.WAIT:
            return False
        outcome = Outcome.COMMITTED if decision is Decision.COMMIT else Outcome[decision.name]
        if decision is Decision.COMMIT and (yield from self._end_by_epoch(described, commit=True)) is None:
            return False
        self._remember(outcome, entry.state, (yield from _record_found_again(self._claim, entry, outcome)))
        return False  # another round for the rest of the generation

    def _ends_by_epoch(self) -> bool:
        return self._coordinator.knows_end_by_epoch(timeout=self._deadline)

    def _end(self, stored: PreparedTxnState | None, described: TransactionDescription, *, commit: bool) -> Steps[bool]:
        """End the ongoing transaction with the described epoch, as compare-and-set: it fails if another client was faster."""
        if not commit and stored is not None:
            # rule SA: S does not name the ongoing transaction; the transaction of S was committed before this one began.
            yield from self._clear_state(stored, lost=None)
            stored = None
        if not commit and not self._ends_by_epoch():
            # rule FA: the next round checks the abort that this begins
            yield from call(lambda deadline: self._coordinator.init_producer_id(self._kafka_id, timeout=deadline))
            self._remember(Outcome.ABORTED, None)
            return False
        answer = yield from self._end_by_epoch(described, commit=commit)
        if answer is None:
            return False
        outcome = Outcome.COMMITTED if commit else Outcome.ABORTED
        if self._ends_by_epoch():  # EndTxn v5 has raised the epoch: earlier owners are fenced
            self.raised = answer
            yield from self._record_resolution(outcome, stored)
            return True
        return (yield from self._record_and_fence(outcome, stored, described))

    def _end_by_epoch(self, described: TransactionDescription, *, commit: bool) -> Steps[EndTxnResult | None]:
        """EndTxn of the described epoch; None if the answer proves nothing: the next round describes again (rule F3)."""
        answer = yield from self._end_txn(described, commit=commit)
        hit("recover_after_end_txn")
        if answer.proven:
            return answer
        log.debug("EndTxn answered %s; describing again", answer.name, kafka_transactional_id=self._kafka_id)
        return None

    def _end_txn(self, described: TransactionDescription, *, commit: bool) -> Steps[EndTxnResult]:
        partitions = described.partitions if described.status is TransactionStatus.ONGOING else frozenset()
        ending = EndingTransaction(
            self._kafka_id, described.producer_id, described.epoch, commit, partitions, self._described_at
        )
        return (yield from end(ending))

    def _prove(self, stored: PreparedTxnState) -> Steps[Outcome]:
        """Find out by EndTxn v5 of the stored (producerId, epoch) how it ended, after the producer id has changed (KIP-890).

        The coordinator remembers the last epoch of the previous producer id, and how its transaction ended, until the next
        transaction begins. If S has an earlier epoch, an answer about that last transaction proves that S came before it.
        """
        answer = yield from self._ask_for_proof(stored.producer_id, stored.epoch)
        if answer.proven:
            return Outcome.ALREADY_COMMITTED
        if answer.code == ErrorCode.INVALID_TXN_STATE:
            return Outcome.LOST
        if stored.epoch < LAST_EPOCH:
            last = yield from self._ask_for_proof(stored.producer_id, LAST_EPOCH)
            if last.proven or last.code == ErrorCode.INVALID_TXN_STATE:
                return Outcome.ALREADY_COMMITTED
        return Outcome.UNVERIFIED

    def _read_in_log(self, stored: PreparedTxnState) -> Steps[Outcome]:
        """How the transaction ended according to the log, if the coordinator forgot it (`transactional.id.expiration.ms`)."""
        found = yield from call(lambda deadline: decision_by_log(self._coordinator, stored, self._delivery, deadline))
        return Outcome[found.name]

    def _committed_since(self, stored: PreparedTxnState, described: TransactionDescription) -> Steps[LostTransaction]:
        """What Kafka has committed after S, as far as the log shows it soon: nothing is open, so nobody should wait for it."""
        count, found = 1, None
        if (earlier := self._delivery) is not None:
            count, found = yield from call(
                lambda limit: self._coordinator.find_later(stored, earlier, timeout=limit.within(_MAX_LOG_SECONDS))
            )
        return self._entry(LostKind.FORGOTTEN, last_committed(stored, described), found, max(count, 1))

    def _entry(
        self, kind: LostKind, state: PreparedTxnState, delivery: Delivery | None, transactions: int = 1
    ) -> LostTransaction:
        """An entry for the row, found now."""
        known = delivery, self._producer, self._cluster_id
        return LostTransaction(kind, state, self._generation, datetime.now(UTC), *known, transactions)

    def _ask_for_proof(self, producer_id: int, epoch: int) -> Steps[EndTxnResult]:
        """Send EndTxn(commit) with a producer id that the id no longer has: this changes nothing, but the answer is proof."""
        answer = yield from call(
            lambda deadline: self._coordinator.end_transaction(
                self._kafka_id, producer_id=producer_id, epoch=epoch, commit=True, timeout=deadline
            )
        )
        hit("recover_after_end_txn")
        return answer

    def _record_and_fence(
        self, outcome: Outcome, stored: PreparedTxnState | None, described: TransactionDescription | None
    ) -> Steps[bool]:
        """Resolve, then raise the epoch of a generation on which nothing was open when it was described.

        A process that has the described epoch may begin a transaction in between. This aborts it, and can't report it: EndTxn
        v5 answers the same with and without an open transaction, and DescribeTransactions shows a new start time after both.
        Nothing is lost: that process can't record the transaction any more, because of our claim, and gets an error.
        """
        yield from self._record_resolution(outcome, stored)  # rule F7: before the epoch is raised
        if described is None:
            return True
        if self._ends_by_epoch():
            answer = yield from self._end_txn(described, commit=False)
            self.raised = answer if answer.proven else None
            return answer.proven
        answer = yield from call(lambda deadline: self._coordinator.init_producer_id(self._kafka_id, timeout=deadline))
        if not answer.proven and answer.code != ErrorCode.CONCURRENT_TRANSACTIONS:
            raise BrokerError(
                f"Kafka did not raise the epoch of {self._kafka_id!r}: InitProducerId answered {answer.name}.",
                transactional_id=self._claim.transactional_id,
                code=answer.code,
                name=answer.name,
            )
        return answer.proven

    def _record_resolution(self, outcome: Outcome, stored: PreparedTxnState | None) -> Steps[None]:
        lost = None
        if stored is not None:
            kind = outcome.lost_kind
            if kind is not None:
                lost = self._forgotten if kind is LostKind.FORGOTTEN else None
                lost = lost or self._entry(kind, stored, self._delivery)
                level = logging.WARNING if kind is LostKind.LOST else logging.ERROR  # lost ones may be published again
                log.log(
                    level, "transaction %s: %s", lost.state, outcome.in_words, transactional_id=self._claim.transactional_id
                )
            yield from self._clear_state(stored, lost=lost)
        self._remember(outcome, stored if lost is None else lost.state, lost)

    def _clear_state(self, stored: PreparedTxnState, *, lost: LostTransaction | None) -> Steps[None]:
        log.debug("clearing state %s", stored, kafka_transactional_id=self._kafka_id)
        yield from record(self._claim, Resolution(clear_state=True, lost=lost))
        hit("recover_after_resolution")

    def _remember(self, outcome: Outcome, stored: PreparedTxnState | None, lost: LostTransaction | None = None) -> None:
        """Add an outcome to those found, once, unless it is NOTHING: a later round may find the same transaction again."""
        found = self._outcome(outcome, stored, lost)
        if outcome is not Outcome.NOTHING and found not in self._found:
            self._found.append(found)
            _report(found)

    def _outcome(
        self, outcome: Outcome, stored: PreparedTxnState | None, lost: LostTransaction | None = None
    ) -> GenerationOutcome:
        return GenerationOutcome(self._claim.transactional_id, self._generation, outcome, stored, lost)

    def _give_up(self) -> NoReturn:
        raise BrokerUnavailableError(
            f"Kafka did not end the transaction of {self._kafka_id!r} within {self._deadline.seconds:g} s.",
            transactional_id=self._claim.transactional_id,
            cause="its markers can't be written (possibly a partition without a leader), or another process keeps using the id",
            next_step="recover again; prepared transactions stay prepared",
        )
