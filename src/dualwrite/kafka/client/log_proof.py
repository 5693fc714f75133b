"""Find out from the log how a transaction ended, by one Fetch of a message that it is known to have written (KIP-98).

A `read_committed` Fetch returns the last stable offset, below which every transaction has ended, and the aborted transactions
that overlap the returned range. The header of the batch at the offset contains the producer id and epoch that wrote it.
Together they show how that transaction ended, for as long as retention keeps the batch, even if the coordinator has forgotten
the transaction.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from dualwrite.deadline import Deadline
from dualwrite.errors import BrokerError
from dualwrite.kafka.client.broker_connection import Connection
from dualwrite.kafka.client.brokers import Network
from dualwrite.kafka.client.config import Address
from dualwrite.kafka.client.kafka_errors import ErrorCode, error_name
from dualwrite.kafka.client.messages_generated import FetchRequest, FetchResponse, MetadataRequest
from dualwrite.state import Fate, Place, PreparedTxnState

# base offset, length, partition leader epoch, magic, checksum, attributes, last offset delta, first and greatest timestamp,
# producer id and epoch (record batch version 2)
_BATCH_HEADER: Final = struct.Struct(">qiibIhiqqqh")
_RECORDS_AT: Final = 61  # after the base sequence and the number of records
_LENGTH_AT: Final = 12  # the first byte that the length counts
_MAGIC: Final = 2
_TRANSACTIONAL: Final = 0x10
_CONTROL: Final = 0x20
_COMMIT: Final = 1
_MARKER_BYTES: Final = 64

_READ_UNCOMMITTED: Final = 0
_READ_COMMITTED: Final = 1
_TOPIC_GONE: Final = (ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, ErrorCode.TOPIC_AUTHORIZATION_FAILED)
_GONE: Final = (ErrorCode.OFFSET_OUT_OF_RANGE, *_TOPIC_GONE)
_READ_SIZE: Final = 2**20
_MOST_READS: Final = 64


@dataclass(frozen=True, slots=True)
class Batch:
    """The header of a record batch, and the first bytes of its content; a marker is control, a producer without an id -1."""

    base_offset: int
    last_offset: int
    first_timestamp_ms: int
    producer_id: int
    epoch: int
    is_transactional: bool
    is_control: bool
    content: bytes

    @property
    def commits(self) -> bool:
        """Whether it is a COMMIT marker. A control record's key: version and type, 16 bits each; type 0 is ABORT, 1 COMMIT."""
        at = _after_varint(self.content, 0) + 1  # the record's length, its attributes
        for _ in range(3):  # the deltas of time and offset, the length of the key
            at = _after_varint(self.content, at)
        return bool(struct.unpack_from(">hh", self.content, at)[1] == _COMMIT)


def batches(records: bytes | None) -> Iterator[Batch]:
    """The batches of a Fetch response that have a complete header; the last one may be truncated."""
    data = records or b""
    at = 0
    while len(data) - at >= _RECORDS_AT:
        base, length, _, magic, _, attributes, last_delta, first_ms, _, producer_id, epoch = _BATCH_HEADER.unpack_from(data, at)
        if magic != _MAGIC:
            return
        content = bytes(data[at + _RECORDS_AT : at + _RECORDS_AT + _MARKER_BYTES])
        kinds = bool(attributes & _TRANSACTIONAL), bool(attributes & _CONTROL)
        yield Batch(base, base + last_delta, first_ms, producer_id, epoch, *kinds, content)
        at += _LENGTH_AT + length


def _after_varint(content: bytes, at: int) -> int:
    while content[at] & 0x80:
        at += 1
    return at + 1


class LogNotReadableError(Exception):
    """The partition can't be read at the moment: retry."""


def fate_in_log(network: Network, state: PreparedTxnState, place: Place, deadline: Deadline) -> Fate:
    """How the transaction that wrote the first message at a place ended; its producer id and epoch must be those of the batch.

    Raises:
        LogNotReadableError: The partition has no leader, or the leader has just moved.
        ConnectionLostError, BrokerUnavailableError: As for `Network`.
        BrokerError: The leader refused the Fetch for another reason.
    """
    offset = place.first_offset
    assert offset is not None
    leader = _leader(network, place, deadline)
    if leader is None:
        return Fate.GONE
    connection = network.connection(leader, deadline)
    # A broker returns the first batch whole, however large it is (KIP-74).
    found = _fetched(connection, place, offset, deadline, size=1, isolation=_READ_COMMITTED)
    if found is None or found.high_watermark <= offset:
        return Fate.GONE
    if found.last_stable_offset <= offset:  # this transaction or an earlier one is still open
        return _fate_by_marker(connection, state, place, deadline)
    if not _wrote(state, offset, found.records):
        return Fate.GONE
    aborted = found.aborted_transactions or ()
    if any(a.producer_id == state.producer_id and a.first_offset <= offset for a in aborted):
        return Fate.ABORTED
    return Fate.COMMITTED


def _fate_by_marker(connection: Connection, state: PreparedTxnState, place: Place, deadline: Deadline) -> Fate:
    """Read from the message to its producer's next marker, which is the marker of the same transaction."""
    offset = first = place.first_offset
    assert offset is not None
    assert first is not None
    for _ in range(_MOST_READS):
        found = _fetched(connection, place, offset, deadline, size=_READ_SIZE, isolation=_READ_UNCOMMITTED)
        if found is None:
            return Fate.GONE
        if offset == first and not _wrote(state, offset, found.records):
            return Fate.GONE
        following = offset
        for batch in batches(found.records):
            following = batch.last_offset + 1
            if batch.is_control and batch.producer_id == state.producer_id and batch.base_offset > first:
                return Fate.COMMITTED if batch.commits else Fate.ABORTED
        if following == offset:
            break
        offset = following
    return Fate.OPEN


def _fetched(
    connection: Connection, place: Place, offset: int, deadline: Deadline, *, size: int, isolation: int
) -> FetchResponse.FetchableTopicResponse.PartitionData | None:
    """The leader's response for the partition; None if the offset is gone, or the principal may not read the topic."""
    wanted = FetchRequest.FetchTopic.FetchPartition(partition=place.partition, fetch_offset=offset, partition_max_bytes=size)
    response = connection.call(
        FetchRequest(
            max_wait_ms=0,
            min_bytes=0,
            max_bytes=size,
            isolation_level=isolation,
            topics=[FetchRequest.FetchTopic(topic=place.topic, partitions=[wanted])],
        ),
        deadline,
    )
    if response.error_code:
        raise LogNotReadableError(f"Fetch returned {error_name(response.error_code)}")
    (found,) = response.responses[0].partitions
    if found.error_code in _GONE:
        return None
    if found.error_code:
        raise LogNotReadableError(f"Fetch of {place.topic}-{place.partition} returned {error_name(found.error_code)}")
    return found


def _leader(network: Network, place: Place, deadline: Deadline) -> Address | None:
    """The leader of the partition, or None if the partition does not exist."""
    request = MetadataRequest(topics=[MetadataRequest.MetadataRequestTopic(name=place.topic)], allow_auto_topic_creation=False)
    response = network.any_broker(deadline).call(request, deadline)
    (topic,) = response.topics
    if topic.error_code in _TOPIC_GONE:
        return None
    if topic.error_code and not topic.partitions:
        raise BrokerError(
            f"Metadata of topic {place.topic!r} returned {error_name(topic.error_code)}.",
            code=topic.error_code,
            name=error_name(topic.error_code),
        )
    leaders = [p.leader_id for p in topic.partitions if p.partition_index == place.partition]
    if not leaders:
        return None
    for broker in response.brokers:
        if broker.node_id == leaders[0]:
            return Address(broker.host, broker.port)
    raise LogNotReadableError(f"{place.topic}-{place.partition} has no leader")


def _wrote(state: PreparedTxnState, offset: int, records: bytes | None) -> bool:
    """Whether the first batch of a Fetch response contains the offset and has the transaction's producer id and epoch."""
    first = next(batches(records), None)
    return (
        first is not None
        and not first.is_control
        and first.base_offset <= offset <= first.last_offset
        and (first.producer_id, first.epoch) == (state.producer_id, state.epoch)
    )
