"""Single requests about a partition's log, to its leader: Metadata, Fetch by offset, ListOffsets."""

from __future__ import annotations

from typing import Final

from dualwrite.deadline import Deadline
from dualwrite.errors import BrokerError
from dualwrite.kafka.client.broker_connection import Connection
from dualwrite.kafka.client.brokers import Network
from dualwrite.kafka.client.config import Address
from dualwrite.kafka.client.kafka_errors import ErrorCode, error_name
from dualwrite.kafka.client.messages_generated import (
    FetchRequest,
    FetchResponse,
    ListOffsetsRequest,
    ListOffsetsResponse,
    MetadataRequest,
)

PartitionData = FetchResponse.FetchableTopicResponse.PartitionData

READ_UNCOMMITTED: Final = 0
READ_COMMITTED: Final = 1

EARLIEST: Final = -2
LATEST: Final = -1
"""In place of a timestamp: the first offset that the log still has, and the one after the last."""

_CLIENT: Final = -1
_GONE: Final = (ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, ErrorCode.TOPIC_AUTHORIZATION_FAILED)


class LogNotReadableError(Exception):
    """The partition can't be read at the moment: retry."""


class PartitionGoneError(Exception):
    """The broker knows no such partition, or the principal may not read its topic. Attribute: `code`."""

    def __init__(self, code: ErrorCode) -> None:
        super().__init__(code.name)
        self.code = code


class OffsetGoneError(Exception):
    """The log does not have the offset: no longer, or not yet."""


def leader(network: Network, topic: str, partition: int, deadline: Deadline) -> Address:
    """The address of a partition's leader.

    Raises:
        PartitionGoneError: There is no such partition, or the principal may not describe the topic.
        LogNotReadableError: It has no leader now.
        BrokerError: Kafka does not describe the topic, for another reason.
        ConnectionLostError, BrokerUnavailableError: As for `Network`.
    """
    request = MetadataRequest(topics=[MetadataRequest.MetadataRequestTopic(name=topic)], allow_auto_topic_creation=False)
    response = network.any_broker(deadline).call(request, deadline)
    (found,) = response.topics
    if found.error_code in _GONE:
        raise PartitionGoneError(ErrorCode(found.error_code))
    if found.error_code and not found.partitions:
        raise BrokerError(
            f"Metadata of topic {topic!r} returned {error_name(found.error_code)}.",
            code=found.error_code,
            name=error_name(found.error_code),
        )
    known = [each.leader_id for each in found.partitions if each.partition_index == partition]
    if not known:
        raise PartitionGoneError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
    for broker in response.brokers:
        if broker.node_id == known[0]:
            return Address(broker.host, broker.port)
    raise LogNotReadableError(f"{topic}-{partition} has no leader")


def fetched(
    connection: Connection,
    topic: str,
    partition: int,
    offset: int,
    deadline: Deadline,
    *,
    size: int,
    isolation: int,
    max_wait_ms: int = 0,
) -> PartitionData:
    """The leader's response for the partition, with at least one batch, however large it is (KIP-74), if there is one.

    Raises:
        OffsetGoneError: The log does not have the offset.
        PartitionGoneError: The principal may not read the topic.
        LogNotReadableError: For example, the leader has just moved.
        ConnectionLostError: The connection broke.
    """
    wanted = FetchRequest.FetchTopic.FetchPartition(partition=partition, fetch_offset=offset, partition_max_bytes=size)
    response = connection.call(
        FetchRequest(
            max_wait_ms=max_wait_ms,
            min_bytes=1 if max_wait_ms else 0,
            max_bytes=size,
            isolation_level=isolation,
            topics=[FetchRequest.FetchTopic(topic=topic, partitions=[wanted])],
        ),
        deadline,
    )
    if response.error_code:
        raise LogNotReadableError(f"Fetch returned {error_name(response.error_code)}")
    (found,) = response.responses[0].partitions
    _check(found.error_code, "Fetch", topic, partition)
    return found


def offset_at(connection: Connection, topic: str, partition: int, timestamp_ms: int, deadline: Deadline) -> int | None:
    """The offset of the first record with this timestamp or a later one; None if there is none. Or EARLIEST, or LATEST.

    Raises: as `fetched`.
    """
    asked = ListOffsetsRequest.ListOffsetsTopic
    response: ListOffsetsResponse = connection.call(
        ListOffsetsRequest(
            replica_id=_CLIENT,
            isolation_level=READ_UNCOMMITTED,
            topics=[asked(name=topic, partitions=[asked.ListOffsetsPartition(partition, timestamp=timestamp_ms)])],
            timeout_ms=int(1000 * deadline.left),
        ),
        deadline,
    )
    (found,) = response.topics[0].partitions
    _check(found.error_code, "ListOffsets", topic, partition)
    return found.offset if found.offset >= 0 else None


def _check(code: int, request: str, topic: str, partition: int) -> None:
    """Check a leader's answer. A leader that does not know the partition is a new one, or an old one: only Metadata decides."""
    if code == ErrorCode.OFFSET_OUT_OF_RANGE:
        raise OffsetGoneError
    if code == ErrorCode.TOPIC_AUTHORIZATION_FAILED:
        raise PartitionGoneError(ErrorCode.TOPIC_AUTHORIZATION_FAILED)
    if code:
        raise LogNotReadableError(f"{request} of {topic}-{partition} returned {error_name(code)}")
