"""Find the batch that contains a record: who wrote it, and whether it is part of a transaction (one Fetch)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from dualwrite.errors import BrokerError
from dualwrite.kafka.admin.brokers import Brokers
from dualwrite.kafka.admin.leaders import Key, by_topic, chosen_partitions, request_partitions
from dualwrite.kafka.client.connection import Connection
from dualwrite.kafka.client.error_codes import ErrorCode
from dualwrite.kafka.client.log_batches import Batch, batches
from dualwrite.kafka.client.messages_generated import FetchRequest, FetchResponse

_ONE_BATCH: Final = 1  # a broker returns the first batch whole, however small the limit is (KIP-74)
_READ_UNCOMMITTED: Final = 0


@dataclass(frozen=True, slots=True)
class StoredRecord:
    """The batch of a record, as its partition's leader has it.

    Args:
        broker: The partition's leader.
        batch: The header of the batch that contains the record.
    """

    broker: int | None
    batch: Batch


def stored_record(brokers: Brokers, key: Key, offset: int) -> StoredRecord:
    """The batch that contains a record, committed or not.

    Args:
        brokers: The brokers, for this call.
        key: The partition.
        offset: The record's offset.

    Raises:
        UnknownTopicError: There is no such partition.
        BrokerAuthorizationError: Read on the topic is missing.
        BrokerUnavailableError: The leader did not respond.
        BrokerError: There is no record with this offset: not yet, or not any more.
    """
    seen = brokers.view([key[0]])
    chosen, refused = chosen_partitions(seen, [key[1]])
    for problem in refused.values():
        raise problem
    reply = request_partitions(brokers, seen, chosen, _BatchAt(offset))[key]
    if reply.problem is not None:
        if isinstance(reply.problem, BrokerError) and reply.problem.facts.get("code") == ErrorCode.OFFSET_OUT_OF_RANGE:
            raise _no_record(key, offset, "retention has deleted it, or it was not written yet") from reply.problem
        raise reply.problem
    found = next(batches(reply.response.records), None)
    if found is None:
        raise _no_record(key, offset, f"the partition ends at {reply.response.high_watermark}")
    if not found.base_offset <= offset <= found.last_offset:
        raise _no_record(key, offset, f"compaction has removed it; the next one is at {found.base_offset}")
    return StoredRecord(reply.broker, found)


class _BatchAt:
    """Requests the batch at an offset."""

    request_name = "Fetch"
    failure = "The record of {} could not be read"

    def __init__(self, offset: int) -> None:
        self._offset = offset

    def request(self, _: Connection, keys: Sequence[Key]) -> FetchRequest:
        topic_request = FetchRequest.FetchTopic
        partition_request = topic_request.FetchPartition
        return FetchRequest(
            max_wait_ms=0,
            min_bytes=0,
            max_bytes=_ONE_BATCH,
            isolation_level=_READ_UNCOMMITTED,
            topics=[
                topic_request(
                    topic=topic,
                    partitions=[
                        partition_request(partition=each, fetch_offset=self._offset, partition_max_bytes=_ONE_BATCH)
                        for each in indexes
                    ],
                )
                for topic, indexes in by_topic(keys).items()
            ],
        )

    @staticmethod
    def responses(response: FetchResponse) -> Iterator[tuple[Key, int, Any]]:
        for topic in response.responses:
            for found in topic.partitions:
                yield (topic.topic, found.partition_index), found.error_code, found


def _no_record(key: Key, offset: int, cause: str) -> BrokerError:
    code = ErrorCode.OFFSET_OUT_OF_RANGE
    return BrokerError(f"There is no record {key[0]}-{key[1]} at {offset}.", cause=cause, code=int(code), name=code.name)
