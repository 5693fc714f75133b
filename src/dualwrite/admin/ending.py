"""Ends a transaction: one that hangs, in its partition (KIP-664); an open one of an id, at its coordinator (KIP-939)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from dualwrite.admin.facts import Key, OpenTransaction
from dualwrite.admin.hanging import HangingTransaction, Reason, holders_of
from dualwrite.admin.partitions import describe_producers, write_abort_marker
from dualwrite.admin.requests import PAUSE_SECONDS, Brokers
from dualwrite.deadline import Deadline, Pauses
from dualwrite.errors import BrokerUnavailableError, RepairRefusedError, TransactionChangedError
from dualwrite.kafka.client.coordinator import WireTransactionCoordinator
from dualwrite.kafka.client.kafka_errors import ErrorCode
from dualwrite.kafka.inspect import TRANSACTION_STATE_TOPIC
from dualwrite.state import TransactionDescription, TransactionStatus

_COMMITS: Final = (TransactionStatus.PREPARE_COMMIT, TransactionStatus.COMPLETE_COMMIT)
_ABORTS: Final = (TransactionStatus.PREPARE_ABORT, TransactionStatus.COMPLETE_ABORT)
_READ_FIRST: Final = (
    "read its records first (isolation.level=read_uncommitted); then abort it with --force, and send those records again "
    "that belong in the topic"
)
_LEFT_OUT: Final = "Kafka 4.3.0 to 4.4.0 leave markers out of partitions without a leader (KAFKA-20734)"
_RETRY: Final = "retry once every broker responds and you may describe all transactional ids"
_OUT_OF_DATE: Final = (
    f"retry once all brokers are connected to each other; if the topic {TRANSACTION_STATE_TOPIC!r} has lost data, {_READ_FIRST}"
)
_RAISED: Final = (ErrorCode.PRODUCER_FENCED, ErrorCode.INVALID_PRODUCER_EPOCH)  # another client has raised the epoch
_FENCING_PAUSE_SECONDS: Final = 0.01


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
        """Whether the last transaction of this producer, which may be this one, was committed by its coordinator.

        Then this partition lacks a commit marker (KAFKA-20734), and aborting loses its messages.
        """
        description, own = None if self.verdict is None else self.verdict.description, self.opened.producer
        if description is None or description.status not in _COMMITS or description.producer_id != own.producer_id:
            return False
        return description.epoch in (own.epoch, own.epoch + 1)  # whose end may have raised it by one

    @property
    def may_have_been_committed(self) -> bool:
        """Whether it can't be excluded that it was committed: its coordinator has a later transaction, or has forgotten it.

        The coordinator has a later transaction if its epoch is later, or if its transaction with the same epoch is a later one:
        some producers keep their epoch (EndTxn before version 5).
        """
        verdict = self.verdict
        if verdict is None or not self.hangs:
            return False
        if verdict.description is None:  # no coordinator knows the producer id, or the transactional id
            return True
        return self.was_committed or self._has_successor(verdict.description)

    def _has_successor(self, description: TransactionDescription) -> bool:
        """Whether the coordinator has a later transaction than this one, or might have."""
        own = self.opened.producer
        if description.producer_id != own.producer_id:
            return True
        if description.status is TransactionStatus.EMPTY:  # no transaction since the epoch was raised to this one
            return description.epoch > own.epoch
        if description.status in _ABORTS and description.epoch == own.epoch + 1:
            # It is the last transaction, or an earlier one of a producer that keeps its epoch.
            return own.last_timestamp_ms is not None and description.start_time_ms > own.last_timestamp_ms
        return description.epoch >= own.epoch

    def refusal(self, *, force: bool = False) -> RepairRefusedError | None:
        """The error if it must not be aborted; None if it may be aborted.

        Args:
            force: Whether to abort it even if it is not certain that it hangs, or if its coordinator may have committed it.
        """
        what, verdict = f"The transaction at {self.opened.topic}-{self.opened.partition}", self.verdict
        if verdict is None:
            return RepairRefusedError(
                f"{what} does not hang: its coordinator will end it.",
                transactional_id=self.transactional_id,
                cause="a marker in one partition would contradict the outcome in the others",
                next_step="end the whole transaction with `dualwrite transactions complete` or `force-terminate`",
            )
        if force or (self.hangs and not self.may_have_been_committed):
            return None
        cause: str | None = _LEFT_OUT
        step = _READ_FIRST
        if not self.hangs:
            why = f"may hang, but this is not certain: {verdict.reason.value}"
            cause, step = None, _OUT_OF_DATE if verdict.reason is Reason.OLDER_EPOCH else _RETRY
        elif self.was_committed:
            why = "may have been committed by its coordinator without writing the marker here"
        elif verdict.description is None:
            why = f"may have been committed, or its coordinator may still have it open: {verdict.reason.value}"
            cause = "its coordinator has forgotten it; or an ACL that denies Describe hides its transactional id"
            step = f"if no ACL denies you Describe on a transactional id (`kafka-acls.sh --list`), {_READ_FIRST}"
        else:
            why = "may have been committed: its coordinator has a later transaction, or one of the same epoch"
        return RepairRefusedError(f"{what} {why}.", transactional_id=verdict.transactional_id, cause=cause, next_step=step)


def examine(brokers: Brokers, key: Key, wanted: tuple[int | None, int | None, int | None]) -> Examined | None:
    """The first open transaction of a partition with this start offset, producer id and epoch, or any where one is None.

    Raises:
        UnknownTopicError: There is no such partition.
        BrokerAuthorizationError, BrokerUnavailableError, BrokerError: The partition could not be described.
    """
    for opened in _open_in(brokers, key):
        actual = (opened.producer.transaction_start_offset, opened.producer.producer_id, opened.producer.epoch)
        if all(given in (None, found) for given, found in zip(wanted, actual, strict=True)):
            return _examined(brokers, opened)
    return None


def _examined(brokers: Brokers, opened: OpenTransaction) -> Examined | None:
    for found in holders_of(brokers, [opened]):
        return Examined(opened, found.as_hanging, found.transactional_id)
    return None


def abort(brokers: Brokers, found: Examined, *, coordinator_epoch: int | None, force: bool) -> None:
    """As `TransactionAdmin.abort`."""
    refusal = found.refusal(force=force)
    if refusal is not None:
        raise refusal
    opened = next((one for one in _open_in(brokers, found.opened.key) if one.name == found.opened.name), None)
    again = None if opened is None else _examined(brokers, opened)
    if again is None:
        producer, place = found.opened.producer, f"{found.opened.topic}-{found.opened.partition}"
        raise TransactionChangedError(
            f"The transaction of producer {producer.producer_id} at {place} "
            f"offset {producer.transaction_start_offset} has ended in the meantime.",
            next_step="nothing was done",
        )
    refusal = again.refusal(force=force)
    if refusal is not None:
        raise refusal
    if coordinator_epoch is None:
        coordinator_epoch = again.opened.producer.coordinator_epoch or 0
    _write_marker(brokers, again.opened, coordinator_epoch)


def _write_marker(brokers: Brokers, opened: OpenTransaction, coordinator_epoch: int) -> None:
    """Write the marker; again only if its outcome is not known, and the partition still has the same transaction open."""
    reason: str | None = None
    for _ in brokers.turn().attempts(Pauses(PAUSE_SECONDS)):
        reason = write_abort_marker(brokers, opened, coordinator_epoch)
        try:
            still_open = opened.name in {one.name for one in _open_in(brokers, opened.key)}
        except BrokerUnavailableError as error:
            raise BrokerUnavailableError(
                f"Whether the transaction at {opened.topic}-{opened.partition} was aborted is not known: "
                f"{reason or 'the marker was written'}.",
                cause=f"{error}",
                next_step="run the command again once the partition's leader responds: it looks first",
                servers=brokers.network.config.servers,
            ) from error
        if not still_open:
            return
        if reason is None:
            break
    what = f"could not be written: {reason}" if reason else "was written, but the transaction is still open"
    raise BrokerUnavailableError(
        f"The marker for {opened.topic}-{opened.partition} {what}.",
        next_step="check again with `dualwrite transactions describe-producers`",
        servers=brokers.network.config.servers,
    )


def _open_in(brokers: Brokers, key: Key) -> list[OpenTransaction]:
    (described,) = describe_producers(brokers, [key[0]], [key[1]])
    if described.problem is not None:
        raise described.problem
    return described.opened


# --- the transaction of an id -----------------------------------------------------------------------------------------


def force_terminate(
    coordinator: WireTransactionCoordinator, transactional_id: str, producer_id: int, epoch: int, deadline: Deadline
) -> None:
    """As `TransactionAdmin.force_terminate`."""
    described = coordinator.describe(transactional_id, timeout=deadline)
    _check_open(transactional_id, described, producer_id, epoch)
    result = coordinator.end_transaction(transactional_id, producer_id=producer_id, epoch=epoch, commit=False, timeout=deadline)
    if not result.proven:
        raise _changed(transactional_id, f"Kafka returned {result.name}")
    if not coordinator.knows_end_by_epoch(timeout=deadline):  # the epoch was not raised: its producer could continue
        _fence(coordinator, transactional_id, producer_id, epoch, deadline)


def _fence(
    coordinator: WireTransactionCoordinator, transactional_id: str, producer_id: int, epoch: int, deadline: Deadline
) -> None:
    """Raise the epoch, if it is still that of the transaction that was ended.

    The id is described before each request, because the request would abort the transaction of a successor.
    """
    name = ErrorCode.CONCURRENT_TRANSACTIONS.name
    for _ in deadline.attempts(Pauses(_FENCING_PAUSE_SECONDS)):
        described = coordinator.describe(transactional_id, timeout=deadline)
        if described is None or (described.producer_id, described.epoch) != (producer_id, epoch):
            return
        if described.status.is_ending:
            continue
        result = coordinator.init_producer_id(transactional_id, producer_id=producer_id, epoch=epoch, timeout=deadline)
        if result.proven or result.code in _RAISED:
            return
        name = result.name
        if result.code != ErrorCode.CONCURRENT_TRANSACTIONS:
            break
    raise TransactionChangedError(
        f"The transaction was aborted, but its producer was not fenced: Kafka returned {name}.",
        transactional_id=transactional_id,
        next_step="if its producer continues, terminate its next transaction too",
    )


def _check_open(transactional_id: str, described: TransactionDescription | None, producer_id: int, epoch: int) -> None:
    if described is None:
        raise _changed(transactional_id, "the coordinator does not know the id")
    if described.status is not TransactionStatus.ONGOING:
        raise _changed(transactional_id, f"it is in state {described.status.value}")
    if (described.producer_id, described.epoch) != (producer_id, epoch):
        raise _changed(
            transactional_id, f"the open transaction has producer id {described.producer_id} and epoch {described.epoch}"
        )


def _changed(transactional_id: str, how: str) -> TransactionChangedError:
    return TransactionChangedError(
        f"The transaction to terminate is no longer open: {how}.",
        transactional_id=transactional_id,
        next_step="nothing was done; check its state with `dualwrite transactions describe`",
    )
