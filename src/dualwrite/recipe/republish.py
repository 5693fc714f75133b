"""Publish the messages of lost transactions again (docs/how-it-works/recovery.md, "Publishing again").

A transaction is lost if the database committed it and Kafka provably aborted it. Its messages are still in the log, as those of
an aborted transaction. They are sent again in a new transaction, whose record replaces the entry of the lost one by the new
state in one database transaction (rules RA and RE). From then on it is a transaction like any other: recovery commits it, or
finds that it is lost as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Final

from dualwrite.errors import (
    BrokerUnavailableError,
    DualWriteError,
    ProducerFencedError,
    TransactionChangedError,
    TransactionTimeoutError,
    shell_word,
)
from dualwrite.failpoints import hit
from dualwrite.kafka.base import GroupMetadata, ProducerFactory, TransactionalProducer, TransactionCoordinator
from dualwrite.observability import observers
from dualwrite.observability.events import MessagesPublishedAgain
from dualwrite.observability.logs import SubjectLogger
from dualwrite.observability.outages import level_of
from dualwrite.recipe.ownership import Ownership, Parties
from dualwrite.recovery.report import GenerationOutcome, IdReport, NotPublished, Outcome
from dualwrite.recovery.resolve import found_in_log
from dualwrite.settings import Timeouts
from dualwrite.state import ConsumedOffset, FoundMessages, GroupOffsets
from dualwrite.stores.base import Claim, LostTransaction, Republished, Resolution, TxnStateStore
from dualwrite.stores.rows import has_entry, original_of, proven_lost

log = SubjectLogger(__name__)

HEADER: Final = "dualwrite-republished"
"""The header of messages that were published again, if it is asked for; its value is the lost transaction's state."""


class LostMessages:
    """Publishes what is lost on the ids that one writer, or one recovery, owns.

    What Kafka refuses, or does not have any more, is tried once: the entry stays in the row, and the writer goes on.

    Args:
        is_marked: Whether the messages get the header `HEADER`.
    """

    def __init__(self, *, is_marked: bool = False) -> None:
        self._is_marked = is_marked
        self._kept: set[tuple[str, str]] = set()
        self._searched: dict[tuple[str, str], FoundMessages] = {}

    def find(self, *owned: Ownership) -> list[tuple[Ownership, LostTransaction, FoundMessages]]:
        """The LOST transactions that can be published again, in the order in which they were prepared (rule RP).

        Why the others can't be is added to the report of their ownership.

        Raises:
            DualWriteError: The log could not be read now.
        """
        found = []
        for ownership in owned:
            for entry in proven_lost(ownership.report.unacknowledged):  # rule RL
                if self._name(ownership, entry) in self._kept:
                    continue
                messages = self._found(ownership, entry)
                if messages.is_complete:
                    found.append((ownership, entry, messages))
                else:
                    self._keep(ownership, entry, messages.missing)
        return sorted(found, key=lambda each: _prepared_at(each[1]))

    def _found(self, ownership: Ownership, entry: LostTransaction) -> FoundMessages:
        """What the log has, searched once for each attempt to publish it."""
        name = self._name(ownership, entry)
        if name not in self._searched:
            try:
                found = found_in_log(
                    ownership.parties.coordinator, entry, ownership.cluster_id, timeout=ownership.parties.timeouts.kafka
                )
            except DualWriteError as error:
                if error.retriable:
                    raise
                found = FoundMessages((), (f"{error}".rstrip("."),))
            self._searched[name] = found
        return self._searched[name]

    def publish(self, *owned: Ownership) -> None:
        """Publish the LOST transactions of ids that were resolved and taken over; their ownerships' reports say the outcomes.

        Raises:
            FencedError: Another writer or recoverer has claimed the id.
            DualWriteError: The database or Kafka did not answer. The id must be recovered, which resolves what was begun.
        """
        for ownership, entry, found in self.find(*owned):
            self._publish_one(ownership, entry, found)
            if ownership.producer_must_be_replaced:  # rule F9; or it could not abort, which nobody else would do now
                ownership.restart()

    def _publish_one(self, ownership: Ownership, entry: LostTransaction, found: FoundMessages) -> None:
        producer, store, name = ownership.producer, ownership.parties.store, ownership.transactional_id
        published = GenerationOutcome(name, entry.generation, Outcome.PUBLISHED_AGAIN, entry.state)
        self._searched.pop(self._name(ownership, entry), None)
        if not has_entry(store.read_claimed(ownership.claim), entry):  # checks the fencing token, too: rule F2
            ownership.note(entry)
            return
        hit("republish_after_check")
        try:
            new = self._prepared(ownership, entry, found)
        except DualWriteError as error:
            store.read_claimed(ownership.claim)  # raises FencedError if a successor is the reason
            self._abort(producer, ownership, error)
            if isinstance(error, TransactionTimeoutError):
                raise _too_slow(ownership, entry, error) from error
            if error.retriable or isinstance(error, ProducerFencedError):  # rule RO: it passes, and nothing overtakes this
                raise
            self._keep(ownership, entry, (f"{error}".rstrip("."),))
            return
        if new is None:
            producer.abort_transaction(timeout=ownership.parties.timeouts.kafka)
            store.record_resolution(ownership.claim, Resolution(resolved_entry=entry))
            ownership.note(entry, published)
            return
        hit("republish_after_prepare")
        try:
            # rule RI: unless it is certain that this was not written, only recovery may end the transaction at Kafka
            store.record_resolution(ownership.claim, Resolution(republished=new))
        except TransactionChangedError as error:  # rule RE
            self._abort(producer, ownership, error)
            ownership.note(entry)
            return
        hit("republish_after_record")
        try:
            producer.commit_transaction(timeout=ownership.parties.timeouts.kafka)
        except DualWriteError:  # rule KU
            store.read_claimed(ownership.claim)
            raise
        ownership.has_committed(new.state)
        hit("republish_after_commit")
        ownership.note(entry, published)
        if observers.installed:
            observers.notify(MessagesPublishedAgain(ownership.transactional_id, found.messages))
        log.warning(
            "transaction %s, which Kafka had aborted after the database's commit, was published again as %s: %d messages",
            entry.state,
            new.state,
            found.messages,
            transactional_id=ownership.transactional_id,
        )

    def _prepared(self, ownership: Ownership, entry: LostTransaction, found: FoundMessages) -> Republished | None:
        """Send the messages in a new transaction, and prepare it; None if there was nothing to send.

        That is so if the transaction had only offsets, and their groups are further by now.
        """
        producer, timeouts = ownership.producer, ownership.parties.timeouts
        producer.begin_transaction()
        mark = [(HEADER, str(entry.state).encode())] if self._is_marked else []
        for message in ownership.parties.coordinator.read_messages(entry.state, found, timeout=timeouts.kafka):
            producer.send_messages((message._replace(headers=[*(message.headers or ()), *mark]),))  # not all: they may be large
        for group in () if entry.delivery is None else entry.delivery.offsets:
            producer.send_offsets_to_transaction(
                self._ahead(group, ownership.parties), GroupMetadata(group.group_id), timeout=timeouts.kafka
            )
        state = producer.prepare_transaction(timeout=timeouts.for_delivery)
        if state is None:
            return None
        producer.check_time_left()
        delivery = producer.delivery
        if delivery is not None:  # rule RP
            delivery = replace(delivery, prepared_at=_prepared_at(entry), copy_of=original_of(entry))
        return Republished(entry, state, ownership.generation, delivery)

    def _ahead(self, group: GroupOffsets, parties: Parties) -> list[ConsumedOffset]:
        """The offsets that are ahead of what the group has committed since: it must not be set back."""
        keys = [(consumed.topic, consumed.partition) for consumed in group.offsets]
        now = parties.coordinator.committed_positions(group.group_id, keys, timeout=parties.timeouts.kafka)
        return [each for each in group.offsets if each.offset > now.get((each.topic, each.partition), -1)]

    def _abort(self, producer: TransactionalProducer, ownership: Ownership, error: DualWriteError) -> None:
        """Abort the new transaction; if that fails, the id must be recovered."""
        log.log(level_of(error), "not published again: %s", error, transactional_id=ownership.transactional_id)
        if not producer.must_be_replaced:
            producer.abort_transaction(timeout=ownership.parties.timeouts.kafka)

    def _keep(self, ownership: Ownership, entry: LostTransaction, reasons: tuple[str, ...]) -> None:
        self._kept.add(self._name(ownership, entry))
        log.error(
            "transaction %s, which Kafka had aborted after the database's commit, can't be published again: %s",
            entry.state,
            "; ".join(reasons),
            transactional_id=ownership.transactional_id,
        )
        ownership.note(entry, NotPublished(ownership.transactional_id, entry, reasons))

    @staticmethod
    def _name(ownership: Ownership, entry: LostTransaction) -> tuple[str, str]:
        return ownership.transactional_id, f"{entry.generation} {entry.state}"


@dataclass(frozen=True, slots=True)
class RecoveryPublisher:
    """Publishes lost transactions again for a Recoverer, with a producer of its own for each id; see `Republisher`.

    Args:
        store: The database.
        coordinator: Kafka's side.
        producers: Returns the factory of the producers for an id; called when there is something to publish.
        timeouts: Time limits.
        is_marked: As for LostMessages.
    """

    store: TxnStateStore
    coordinator: TransactionCoordinator
    producers: Callable[[str], ProducerFactory]
    timeouts: Timeouts
    is_marked: bool = False

    def publish(self, claim: Claim, report: IdReport) -> IdReport:
        """See `Republisher`."""
        lost, name = LostMessages(is_marked=self.is_marked), claim.transactional_id
        ownership = Ownership(Parties(self.store, self.coordinator, self.producers(name), self.timeouts), name)
        ownership.adopt(claim, self.coordinator.cluster_id(timeout=self.timeouts.kafka))
        ownership.report = report
        with taken_over(lost, [ownership]) as owned:
            lost.publish(*owned)
        return ownership.report


@contextmanager
def taken_over(lost: LostMessages, owned: Iterable[Ownership]) -> Iterator[list[Ownership]]:
    """Those of several ids on which there is something to publish, taken over for the block; nobody uses them afterwards.

    Raises: as `LostMessages.publish`.
    """
    found = [ownership for ownership in owned if lost.find(ownership)]
    try:
        for ownership in found:
            ownership.start()
        yield found
    finally:
        for ownership in found:
            ownership.drop_producer()
    for ownership in found:
        ownership.clear_row()


def _prepared_at(entry: LostTransaction) -> datetime:
    """When the transaction was prepared; of a copy that was lost as well, when the original was."""
    return entry.recorded_at if entry.delivery is None else entry.delivery.prepared_at


def _too_slow(ownership: Ownership, entry: LostTransaction, error: TransactionTimeoutError) -> BrokerUnavailableError:
    """The error for a copy that was not prepared in time.

    It is none about the next transaction, which has not begun: its caller must not take its own messages for the cause.
    """
    return BrokerUnavailableError(
        f"The messages of transaction {entry.state}, which Kafka had aborted after the database's commit, could not be "
        f"published again within transaction.timeout.ms: {error.what}",
        transactional_id=ownership.transactional_id,
        cause="Kafka was slow, the process was paused, or the transaction is too large for this time limit",
        next_step="the next transaction, or recovery, tries it again, and nothing of this id overtakes them; if that does not "
        "help, raise transaction.timeout.ms; or "
        f"`dualwrite recover --id {shell_word(ownership.transactional_id)} --acknowledge`, and publish them from your data",
    )
