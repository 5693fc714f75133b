"""The transaction of a record: who wrote it, and how it ended, as the log of its partition shows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import Final

from dualwrite.admin.facts import ActiveProducer, DescribedTransaction, Key, OpenTransaction, Search
from dualwrite.admin.hanging import HangingTransaction, coordinator_reports, holders_of
from dualwrite.admin.partitions import one_partition, producers_of, refused_partition, unanswered_partition
from dualwrite.admin.requests import PAUSE_SECONDS, Brokers
from dualwrite.deadline import Deadline, Pauses
from dualwrite.errors import BrokerError, BrokerUnavailableError
from dualwrite.kafka.client.broker_connection import ConnectionLostError
from dualwrite.kafka.client.kafka_errors import ErrorCode
from dualwrite.kafka.client.log_proof import fate_in_log
from dualwrite.kafka.client.log_reader import (
    READ_UNCOMMITTED,
    LogNotReadableError,
    OffsetGoneError,
    PartitionData,
    PartitionGoneError,
    fetched,
    leader,
)
from dualwrite.kafka.client.record_batches import Batch, batches
from dualwrite.kafka.client.retries import repeated
from dualwrite.state import Fate, Place, PreparedTxnState

_ONE_BATCH: Final = 1  # a broker returns the first batch whole, however small the limit is (KIP-74)


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
class RecordTransaction(Search):
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

    @property
    def complete(self) -> bool:
        """Whether everything about it is known."""
        return (
            (self.is_searched if self.described is None else self.described.problem is None)
            and (self.hanging is None or self.hanging.reason.is_conclusive)
            and all(problem.covered for problem in self.problems)
        )

    @property
    def transactional_id(self) -> str | None:
        """The id, as Kafka sees it; None if no coordinator lists an id with this producer id."""
        return None if self.described is None else self.described.transactional_id


def transaction_of(brokers: Brokers, key: Key, offset: int) -> RecordTransaction:
    """As `TransactionAdmin.transaction_of`."""
    batch = _batch_at(brokers, key, offset)
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
    writer = opened or OpenTransaction(*key, None, ActiveProducer(batch.producer_id, batch.epoch, -1, None, None, offset))
    reports = coordinator_reports(brokers, [writer])
    holders = [] if opened is None else holders_of(brokers, [opened], reports)
    return replace(
        found,
        ending=ending,
        opened=opened,
        described=reports.description(writer),
        hanging=holders[0].as_hanging if holders else None,
        is_searched=reports.all_listed,
        problems=brokers.problems,
        hidden=brokers.hidden,
    )


def _batch_at(brokers: Brokers, key: Key, offset: int) -> Batch:
    """The header of the batch that contains a record, committed or not.

    Raises:
        UnknownTopicError: There is no such partition.
        BrokerAuthorizationError: Read on the topic is missing.
        BrokerUnavailableError: The leader did not respond.
        BrokerError: There is no record with this offset: not yet, or not any more.
    """
    one_partition(brokers, key)  # or there is no such partition

    def once(deadline: Deadline) -> PartitionData:
        connection = brokers.network.connection(leader(brokers.network, *key, deadline), deadline)
        return fetched(connection, *key, offset, deadline, size=_ONE_BATCH, isolation=READ_UNCOMMITTED)

    try:
        response = repeated(once, (LogNotReadableError, ConnectionLostError), brokers.turn(), pause=PAUSE_SECONDS)
    except OffsetGoneError as error:
        raise _no_record(key, offset, "retention has deleted it, or it was not written yet") from error
    except PartitionGoneError as error:
        raise refused_partition("Fetch", key, error.code) from error
    except (LogNotReadableError, ConnectionLostError) as error:
        raise unanswered_partition(brokers, "The record of {} could not be read", key, f"{error}") from error
    found = next(batches(response.records), None)
    if found is None:
        raise _no_record(key, offset, f"the partition ends at {response.high_watermark}")
    if not found.base_offset <= offset <= found.last_offset:
        raise _no_record(key, offset, f"compaction has removed it; the next one is at {found.base_offset}")
    return found


def _no_record(key: Key, offset: int, cause: str) -> BrokerError:
    code = ErrorCode.OFFSET_OUT_OF_RANGE
    return BrokerError(f"There is no record {key[0]}-{key[1]} at {offset}.", cause=cause, code=int(code), name=code.name)


def _ended(brokers: Brokers, key: Key, offset: int, batch: Batch) -> tuple[Ending, OpenTransaction | None]:
    if batch.is_control:
        return Ending.COMMITTED if batch.commits else Ending.ABORTED, None
    state = PreparedTxnState(batch.producer_id, batch.epoch)
    reason: Exception | None = None
    for _ in brokers.deadline.attempts(Pauses(PAUSE_SECONDS)):
        try:
            opened = _open_at(brokers, key, offset, batch)
        except BrokerUnavailableError as error:
            if reason is None:
                raise
            raise _unknown_ending(brokers, key, offset, reason) from error  # the deadline passed in the meantime
        if opened is not None:
            return Ending.OPEN, opened
        try:
            fate = fate_in_log(brokers.network, state, Place(*key, first_offset=offset, messages=1), brokers.turn())
        except PartitionGoneError:
            fate = Fate.GONE
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
    """Raise the error of `_batch_at` if the record was deleted after it was read; or an error if it is a different one."""
    again = _batch_at(brokers, key, offset)
    if (again.producer_id, again.epoch) != (batch.producer_id, batch.epoch):
        raise BrokerError(
            f"The record {key[0]}-{key[1]} at {offset} changed while its transaction was examined.",
            cause="the topic was deleted and created again, or a leader was elected uncleanly",
            next_step="run the command again",
        )


def _unknown_ending(brokers: Brokers, key: Key, offset: int, reason: Exception | None) -> BrokerUnavailableError:
    cause, next_step = f"the log could not be read: {reason}", "retry once the partition's leader responds"
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
        for opened in described.opened:
            start = opened.producer.transaction_start_offset
            if opened.producer.producer_id == batch.producer_id and start is not None and start <= offset:
                return opened
    return None
