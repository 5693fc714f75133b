"""Abort one hanging transaction in its partition (KIP-664): what it is, and why one that does not hang is not aborted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from dualwrite.admin.examiner import Examiner
from dualwrite.admin.hanging import HangingTransaction, OpenTransaction, open_transactions
from dualwrite.errors import BrokerUnavailableError, RepairRefusedError, TransactionChangedError
from dualwrite.kafka.admin.brokers import Brokers
from dualwrite.kafka.admin.leaders import Key
from dualwrite.kafka.admin.markers import write_abort_marker
from dualwrite.kafka.admin.producers import describe_producers
from dualwrite.state import TransactionDescription, TransactionStatus

_COMMITS: Final = (TransactionStatus.PREPARE_COMMIT, TransactionStatus.COMPLETE_COMMIT)
_ABORTS: Final = (TransactionStatus.PREPARE_ABORT, TransactionStatus.COMPLETE_ABORT)
_READ_FIRST: Final = (
    "read its records before you abort them (isolation.level=read_uncommitted); then add --force, and send those again "
    "that belong in the topic"
)


@dataclass(frozen=True, slots=True)
class Examined:
    """An open transaction of a partition, and whether it hangs.

    Args:
        opened: The transaction in its partition.
        verdict: Why it hangs, or might; None if its coordinator will end it.
        transactional_id: The id that its coordinator knows it by, if it does not hang.
    """

    opened: OpenTransaction
    verdict: HangingTransaction | None
    transactional_id: str | None

    @property
    def hangs(self) -> bool:
        """Whether it is proven that no coordinator will end it."""
        return self.verdict is not None and self.verdict.reason.is_conclusive

    @property
    def name_at_kafka(self) -> str | None:
        """The transactional id that has its producer id, if a coordinator lists one."""
        return self.transactional_id if self.verdict is None else self.verdict.transactional_id

    @property
    def was_committed(self) -> bool:
        """Whether its coordinator has committed a transaction of this producer last, which may be this one.

        Then this partition lacks a commit marker (KAFKA-20734), and aborting loses its messages.
        """
        description = None if self.verdict is None else self.verdict.description
        return description is not None and description.status in _COMMITS and self._is_last(description)

    @property
    def may_have_been_committed(self) -> bool:
        """Whether nothing shows that it was not: its coordinator has passed it, or has forgotten how it ended.

        Its coordinator has passed it if it has a later epoch, or a later transaction of the same epoch, as producers have that
        keep theirs (EndTxn before version 5).
        """
        verdict = self.verdict
        if verdict is None or not self.hangs:
            return False
        if verdict.description is None:  # no coordinator knows the producer id, or the transactional id
            return True
        return self.was_committed or self._was_passed(verdict.description)

    def _was_passed(self, description: TransactionDescription) -> bool:
        own = self.opened.producer
        if description.producer_id != own.producer_id:
            return True
        if description.status is TransactionStatus.EMPTY:  # no transaction since the epoch was raised to this one
            return description.epoch > own.epoch
        if description.status in _ABORTS and description.epoch == own.epoch + 1:
            # It is the last one, or, of a producer that keeps its epoch, an earlier one.
            return own.last_timestamp_ms is not None and description.start_time_ms > own.last_timestamp_ms
        return description.epoch >= own.epoch

    def _is_last(self, description: TransactionDescription) -> bool:
        """Whether the coordinator's last transaction has this producer id and epoch, which its end may have raised by one."""
        own = self.opened.producer
        return description.producer_id == own.producer_id and description.epoch in (own.epoch, own.epoch + 1)

    def refusal(self, *, force: bool = False) -> RepairRefusedError | None:
        """Why it is not aborted; None if it may be.

        Args:
            force: Whether one is aborted too that may not hang, or whose messages its coordinator may have committed.
        """
        what = f"The transaction at {self.opened.topic}-{self.opened.partition}"
        if self.verdict is None:
            return RepairRefusedError(
                f"{what} does not hang: its coordinator will end it.",
                transactional_id=self.transactional_id,
                cause="a marker in one partition would contradict the outcome in the others",
                next_step="end the whole transaction with `dualwrite transactions complete` or `force-terminate`",
            )
        if force:
            return None
        if not self.hangs:
            return RepairRefusedError(
                f"{what} may hang, which could not be decided: {self.verdict.reason.value}.",
                transactional_id=self.verdict.transactional_id,
                next_step="retry once every broker answers and you may describe all transactional ids",
            )
        if self.was_committed:
            return RepairRefusedError(
                f"{what} may be one that its coordinator has committed without writing the marker here.",
                transactional_id=self.verdict.transactional_id,
                cause="Kafka 4.3.0 to 4.4.0 leave markers out of partitions without a leader (KAFKA-20734)",
                next_step=_READ_FIRST,
            )
        if self.verdict.description is not None and self.may_have_been_committed:
            return RepairRefusedError(
                f"{what} may have been committed: its coordinator has a later transaction, or one of the same epoch.",
                transactional_id=self.verdict.transactional_id,
                cause="Kafka 4.3.0 to 4.4.0 leave markers out of partitions without a leader (KAFKA-20734)",
                next_step=_READ_FIRST,
            )
        return None


def examine(brokers: Brokers, key: Key, wanted: Callable[[OpenTransaction], bool]) -> Examined | None:
    """The open transaction of a partition that is wanted, if there is one.

    Raises:
        UnknownTopicError: There is no such partition.
        BrokerAuthorizationError, BrokerUnavailableError, BrokerError: The partition could not be described.
    """
    opened = next(filter(wanted, _open_in(brokers, key)), None)
    if opened is None:
        return None
    examiner = Examiner(brokers)
    side = examiner.look([opened])
    verdict = next(iter(examiner.hanging([opened], side)), None)
    listing = side.listing(opened)
    return Examined(opened, verdict, None if listing is None else listing.transactional_id)


def abort(brokers: Brokers, found: Examined, *, coordinator_epoch: int | None = None, force: bool = False) -> None:
    """See `TransactionAdmin.abort`."""
    key = (found.opened.topic, found.opened.partition)
    refusal = found.refusal(force=force)
    if refusal is not None:
        raise refusal
    opened, producer = found.opened, found.opened.producer
    now = examine(brokers, key, lambda one: one.name == opened.name)
    if now is None:
        raise TransactionChangedError(
            f"The transaction of producer {producer.producer_id} at {opened.topic}-{opened.partition} "
            f"offset {producer.transaction_start_offset} has ended meanwhile.",
            next_step="nothing was done",
        )
    refusal = now.refusal(force=force)
    if refusal is not None:
        raise refusal
    if coordinator_epoch is None:
        coordinator_epoch = now.opened.producer.coordinator_epoch or 0
    write_abort_marker(
        brokers, key, producer_id=producer.producer_id, epoch=producer.epoch, coordinator_epoch=coordinator_epoch
    )
    if opened.name in {one.name for one in _open_in(brokers, key)}:
        raise BrokerUnavailableError(
            f"The marker was written to {opened.topic}-{opened.partition}, and the transaction is still open there.",
            next_step="look again with `dualwrite transactions describe-producers`",
            servers=brokers.network.config.servers,
        )


def _open_in(brokers: Brokers, key: Key) -> list[OpenTransaction]:
    (described,) = describe_producers(brokers, [key[0]], [key[1]])
    if described.problem is not None:
        raise described.problem
    return open_transactions(described)
