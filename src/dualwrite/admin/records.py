"""Finds the transaction that a record belongs to, its owner, and its outcome."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import Final

from dualwrite.admin.examiner import Examiner
from dualwrite.admin.hanging import HangingTransaction, OpenTransaction, open_transactions
from dualwrite.delivery import Fate, Place
from dualwrite.errors import BrokerError, BrokerUnavailableError, DualWriteError
from dualwrite.kafka.admin.brokers import PAUSE, Brokers
from dualwrite.kafka.admin.facts import ActiveProducer, BrokerProblem, DescribedTransaction
from dualwrite.kafka.admin.leaders import Key
from dualwrite.kafka.admin.producers import producers_of
from dualwrite.kafka.admin.records import stored_record
from dualwrite.kafka.client.log_batches import Batch
from dualwrite.kafka.client.log_proof import LogNotReadableError, fate_in_log
from dualwrite.kafka.client.retry import rounds
from dualwrite.kafka.client.sockets import ConnectionLostError
from dualwrite.state import PreparedTxnState


class Ending(Enum):
    """How the transaction of a record ended."""

    COMMITTED = "committed"
    ABORTED = "aborted"

    OPEN = "open"
    """It has not ended: `read_committed` consumers wait for it."""

    NONE = "not part of a transaction"
    """The record was visible as soon as it was written."""


_ENDINGS: Final = {Fate.COMMITTED: Ending.COMMITTED, Fate.ABORTED: Ending.ABORTED}


@dataclass(frozen=True, slots=True)
class RecordTransaction:
    """The transaction of a record.

    Args:
        topic: The topic.
        partition: The partition.
        offset: The record's offset.
        timestamp_ms: The timestamp of the first record in its batch.
        producer_id: The producer that wrote it; None for a producer without an id.
        epoch: The producer's epoch; None without a producer id.
        is_marker: Whether the offset has no record, but the marker that ended a transaction.
        ending: How the transaction ended.
        opened: The transaction in its partition, if it is open.
        described: The transactional id that has this producer id now, as its coordinator describes it; None if none is listed.
        hanging: Why it hangs, or might, if it is open and its coordinator will not end it.
        is_searched: Whether every coordinator responded, for every id. If not, an id that is not listed may still exist.
        problems: The brokers that did not respond.
        hidden: The missing ACLs because of which the id may not be listed, as errors that name them.
    """

    topic: str
    partition: int
    offset: int
    timestamp_ms: int
    producer_id: int | None
    epoch: int | None
    is_marker: bool
    ending: Ending
    opened: OpenTransaction | None = None
    described: DescribedTransaction | None = None
    hanging: HangingTransaction | None = None
    is_searched: bool = True
    problems: tuple[BrokerProblem, ...] = ()
    hidden: tuple[DualWriteError, ...] = ()

    @property
    def complete(self) -> bool:
        """Whether everything about it is known."""
        described = self.described
        verdict = self.hanging
        return (
            (self.is_searched if described is None else described.problem is None)
            and (verdict is None or verdict.reason.is_conclusive)
            and all(problem.covered for problem in self.problems)
        )

    @property
    def transactional_id(self) -> str | None:
        """The id, as Kafka sees it; None if no coordinator lists an id with this producer id."""
        return None if self.described is None else self.described.transactional_id


def transaction_of(brokers: Brokers, key: Key, offset: int) -> RecordTransaction:
    """See `TransactionAdmin.transaction_of`."""
    batch = stored_record(brokers, key, offset).batch
    known = batch.producer_id >= 0
    found = RecordTransaction(
        *key,
        offset,
        timestamp_ms=batch.first_timestamp_ms,
        producer_id=batch.producer_id if known else None,
        epoch=batch.epoch if known else None,
        is_marker=batch.is_control,
        ending=Ending.NONE,
    )
    if not batch.is_transactional:
        return found
    ending, opened = _ended(brokers, key, offset, batch)
    examiner = Examiner(brokers)
    one = opened or OpenTransaction(*key, None, ActiveProducer(batch.producer_id, batch.epoch, -1, None, None, offset))
    side = examiner.describe([one])
    hanging = next(iter(examiner.hanging([opened], side)), None) if opened is not None else None
    return replace(
        found,
        ending=ending,
        opened=opened,
        described=side.description(one),
        hanging=hanging,
        is_searched=side.all_listed,
        problems=brokers.problems,
        hidden=brokers.hidden,
    )


def _ended(brokers: Brokers, key: Key, offset: int, batch: Batch) -> tuple[Ending, OpenTransaction | None]:
    if batch.is_control:
        return Ending.COMMITTED if batch.commits else Ending.ABORTED, None
    reason: Exception | None = None
    for _ in rounds(brokers.deadline, pause=PAUSE):
        try:
            opened = _open_at(brokers, key, offset, batch)
        except BrokerUnavailableError as error:
            if reason is None:
                raise
            raise _unknown_ending(brokers, key, offset, reason) from error  # the deadline passed in the meantime
        if opened is not None:
            return Ending.OPEN, opened
        try:
            fate = _fate(brokers, key, offset, batch)
        except (LogNotReadableError, ConnectionLostError) as error:
            reason = error
            continue
        if fate in _ENDINGS:
            return _ENDINGS[fate], None
        if fate is Fate.GONE:
            _check_still_there(brokers, key, offset, batch)
        reason = None
    raise _unknown_ending(brokers, key, offset, reason)


def _check_still_there(brokers: Brokers, key: Key, offset: int, batch: Batch) -> None:
    """Raise the error of `stored_record` if the record was deleted after it was read; or an error if it is a different one."""
    again = stored_record(brokers, key, offset).batch
    if (again.producer_id, again.epoch) != (batch.producer_id, batch.epoch):
        raise BrokerError(
            f"The record {key[0]}-{key[1]} at {offset} changed while its transaction was examined.",
            cause="the topic was deleted and created again, or a leader was elected uncleanly",
            next_step="run the command again",
        )


def _unknown_ending(brokers: Brokers, key: Key, offset: int, reason: Exception | None) -> BrokerUnavailableError:
    cause, next_step = "the log could not be read: " + str(reason), "retry once the partition's leader responds"
    if reason is None:
        cause = "its marker is more than 64 MiB after the record, and another transaction in between is still open"
        next_step = "retry once `dualwrite stuck` no longer shows the partition"
    return BrokerUnavailableError(
        f"The outcome of the transaction of the record {key[0]}-{key[1]} at {offset} could not be read.",
        cause=cause,
        next_step=next_step,
        servers=brokers.network.config.servers,
    )


def _open_at(brokers: Brokers, key: Key, offset: int, batch: Batch) -> OpenTransaction | None:
    for described in producers_of(brokers, [key]):
        if described.problem is not None:
            raise described.problem
        for opened in open_transactions(described):
            start = opened.producer.transaction_start_offset
            if opened.producer.producer_id == batch.producer_id and start is not None and start <= offset:
                return opened
    return None


def _fate(brokers: Brokers, key: Key, offset: int, batch: Batch) -> Fate:
    state = PreparedTxnState(batch.producer_id, batch.epoch)
    return fate_in_log(brokers.network, state, Place(*key, first_offset=offset, messages=1), brokers.turn())
