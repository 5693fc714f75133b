"""The transaction of a record: who wrote it, and how it ended, as the log of its partition shows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Final

from dualwrite.admin.facts import ActiveProducer, BrokerProblem, DescribedTransaction, OpenTransaction
from dualwrite.admin.hanging import HangingTransaction, coordinator_side, hanging
from dualwrite.admin.partitions import PartitionBatch, one_partition, producers_of
from dualwrite.admin.requests import PAUSE, Brokers, ClusterView, Key, PartitionView
from dualwrite.errors import BrokerError, BrokerUnavailableError, DualWriteError
from dualwrite.kafka.client.broker_connection import ConnectionLostError
from dualwrite.kafka.client.kafka_errors import ErrorCode
from dualwrite.kafka.client.log_fetch import LogNotReadableError
from dualwrite.kafka.client.log_proof import fate_in_log
from dualwrite.kafka.client.messages_generated import FetchRequest, FetchResponse
from dualwrite.kafka.client.record_batches import Batch, batches
from dualwrite.kafka.client.retries import rounds
from dualwrite.state import Fate, Place, PreparedTxnState

_ONE_BATCH: Final = 1  # a broker returns the first batch whole, however small the limit is (KIP-74)
_READ_UNCOMMITTED: Final = 0


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
    one = opened or OpenTransaction(*key, None, ActiveProducer(batch.producer_id, batch.epoch, -1, None, None, offset))
    side = coordinator_side(brokers, [one])
    verdict = next(iter(hanging(brokers, [opened], side)), None) if opened is not None else None
    return replace(
        found,
        ending=ending,
        opened=opened,
        described=side.description(one),
        hanging=verdict,
        is_searched=side.all_listed,
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
    seen, view = one_partition(brokers, key)
    reply = _Fetch(brokers, seen, [view], offset).replies()[key]
    if reply.problem is not None:
        if isinstance(reply.problem, BrokerError) and reply.problem.facts.get("code") == ErrorCode.OFFSET_OUT_OF_RANGE:
            raise _no_record(key, offset, "retention has deleted it, or it was not written yet") from reply.problem
        raise reply.problem
    found = next(batches(reply.response.records), None)
    if found is None:
        raise _no_record(key, offset, f"the partition ends at {reply.response.high_watermark}")
    if not found.base_offset <= offset <= found.last_offset:
        raise _no_record(key, offset, f"compaction has removed it; the next one is at {found.base_offset}")
    return found


class _Fetch(PartitionBatch):
    """The batch at an offset."""

    request_name = "Fetch"
    failure = "The record of {} could not be read"

    def __init__(self, brokers: Brokers, seen: ClusterView, partitions: list[PartitionView], offset: int) -> None:
        super().__init__(brokers, seen, partitions)
        self._offset = offset

    def request(self, keys: list[Key]) -> FetchRequest:
        topic_request = FetchRequest.FetchTopic
        asked = topic_request.FetchPartition
        return FetchRequest(
            max_wait_ms=0,
            min_bytes=0,
            max_bytes=_ONE_BATCH,
            isolation_level=_READ_UNCOMMITTED,
            topics=[
                topic_request(
                    topic=topic, partitions=[asked(partition=index, fetch_offset=self._offset, partition_max_bytes=_ONE_BATCH)]
                )
                for topic, index in keys
            ],
        )

    def responses(self, response: FetchResponse) -> Iterator[tuple[Key, int, Any]]:
        for topic in response.responses:
            for found in topic.partitions:
                yield (topic.topic, found.partition_index), found.error_code, found


def _no_record(key: Key, offset: int, cause: str) -> BrokerError:
    code = ErrorCode.OFFSET_OUT_OF_RANGE
    return BrokerError(f"There is no record {key[0]}-{key[1]} at {offset}.", cause=cause, code=int(code), name=code.name)


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
    """Raise the error of `_batch_at` if the record was deleted after it was read; or an error if it is a different one."""
    again = _batch_at(brokers, key, offset)
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
        for opened in described.opened:
            start = opened.producer.transaction_start_offset
            if opened.producer.producer_id == batch.producer_id and start is not None and start <= offset:
                return opened
    return None


def _fate(brokers: Brokers, key: Key, offset: int, batch: Batch) -> Fate:
    state = PreparedTxnState(batch.producer_id, batch.epoch)
    return fate_in_log(brokers.network, state, Place(*key, first_offset=offset, messages=1), brokers.turn())
