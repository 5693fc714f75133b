"""How a transaction ended, by the log: one Fetch of a message that it is known to have written (KIP-98, "Consumer").

A `read_committed` Fetch carries the last stable offset, below which every transaction has ended, and the aborted transactions
that overlap what it returns. The header of the batch at the offset carries the producer id and epoch that wrote it. Together
they say how that transaction ended, for as long as retention leaves the batch there, whatever the coordinator has forgotten.
"""

from __future__ import annotations

import struct
from enum import Enum
from typing import Any, Final

from kafka.protocol.consumer import FetchRequest
from kafka.protocol.metadata import MetadataRequest

from dualwrite.delivery import Place
from dualwrite.errors import BrokerError
from dualwrite.kafka.config import Address
from dualwrite.kafka.network import Network
from dualwrite.kafka.wire import kafka_error_name
from dualwrite.state import PreparedTxnState

_NEWEST_BY_NAME: Final = 12  # Fetch v13 names topics by id
_READ_COMMITTED: Final = 1
_OFFSET_OUT_OF_RANGE: Final = 1
_UNKNOWN_TOPIC_OR_PARTITION: Final = 3
_TOPIC_AUTHORIZATION_FAILED: Final = 29
_GONE: Final = (_OFFSET_OUT_OF_RANGE, _UNKNOWN_TOPIC_OR_PARTITION, _TOPIC_AUTHORIZATION_FAILED)
_TOPIC_GONE: Final = (_UNKNOWN_TOPIC_OR_PARTITION, _TOPIC_AUTHORIZATION_FAILED)
# base offset, length, partition leader epoch, magic, checksum, attributes, last offset delta, first and greatest timestamp,
# producer id and epoch (record batch version 2)
_BATCH_HEADER: Final = struct.Struct(">qiibIhiqqqh")
_MAGIC: Final = 2
_TRANSACTIONAL: Final = 0x10
_CONTROL: Final = 0x20


class Fate(Enum):
    """How a transaction ended."""

    COMMITTED = "committed"
    ABORTED = "aborted"

    OPEN = "open"
    """Its partition's last stable offset is before it: some transaction there has not ended."""

    GONE = "gone"
    """The log does not have the message any more, or the principal may not read it."""


class LogNotReadableError(Exception):
    """The partition can't be read at the moment: ask again."""


def fate_in_log(network: Network, state: PreparedTxnState, place: Place) -> Fate:
    """How the transaction that wrote the first message at a place ended.

    Args:
        network: Connections to the cluster.
        state: The transaction's name: its producer id and epoch must be those of the batch.
        place: Where it wrote; with a first offset.

    Raises:
        LogNotReadableError: No leader, or it has just moved.
        ConnectionLostError, BrokerUnavailableError: As `Network`.
        BrokerError: The leader refused the Fetch for another reason.
    """
    assert place.first_offset is not None
    leader = _leader(network, place)
    if leader is None:
        return Fate.GONE
    connection = network.connection(leader)
    wanted = FetchRequest.FetchTopic.FetchPartition(
        partition=place.partition, fetch_offset=place.first_offset, partition_max_bytes=1
    )
    answer: Any = connection.call(
        FetchRequest(
            version=min(_NEWEST_BY_NAME, connection.version_of(FetchRequest)),
            max_wait_ms=0,
            min_bytes=0,
            max_bytes=1,  # a broker gives the first batch whole, however large it is (KIP-74)
            isolation_level=_READ_COMMITTED,
            topics=[FetchRequest.FetchTopic(topic=place.topic, partitions=[wanted])],
        )
    )
    if getattr(answer, "error_code", 0):
        raise LogNotReadableError(f"Fetch answered {kafka_error_name(answer.error_code)}")
    (found,) = answer.responses[0].partitions
    if found.error_code in _GONE:
        return Fate.GONE
    if found.error_code:
        raise LogNotReadableError(f"Fetch of {place.topic}-{place.partition} answered {kafka_error_name(found.error_code)}")
    if found.last_stable_offset <= place.first_offset:
        return Fate.OPEN if found.high_watermark > place.first_offset else Fate.GONE
    if not _wrote(state, place.first_offset, found.records):
        return Fate.GONE
    aborted = found.aborted_transactions or ()
    if any(a.producer_id == state.producer_id and a.first_offset <= place.first_offset for a in aborted):
        return Fate.ABORTED
    return Fate.COMMITTED


def _leader(network: Network, place: Place) -> Address | None:
    """The leader of the place's partition, or None where there is no such partition."""
    request = MetadataRequest(topics=[MetadataRequest.MetadataRequestTopic(name=place.topic)], allow_auto_topic_creation=False)
    answer = network.any_broker().call(request)
    (topic,) = answer.topics
    if topic.error_code in _TOPIC_GONE:
        return None
    if topic.error_code and not topic.partitions:
        raise BrokerError(
            f"Metadata of topic {place.topic!r} answered {kafka_error_name(topic.error_code)}.",
            code=topic.error_code,
            name=kafka_error_name(topic.error_code),
        )
    leaders = [p.leader_id for p in topic.partitions if p.partition_index == place.partition]
    if not leaders:
        return None
    for broker in answer.brokers:
        if broker.node_id == leaders[0]:
            return Address(broker.host, broker.port)
    raise LogNotReadableError(f"{place.topic}-{place.partition} has no leader")


def _wrote(state: PreparedTxnState, offset: int, records: bytes | None) -> bool:
    """Whether the first batch of a Fetch's answer covers the offset, and is of the transaction's producer and epoch."""
    if records is None or len(records) < _BATCH_HEADER.size:
        return False
    base, _, _, magic, _, attributes, last_delta, _, _, producer_id, epoch = _BATCH_HEADER.unpack_from(records)
    return (
        magic == _MAGIC
        and attributes & (_TRANSACTIONAL | _CONTROL) == _TRANSACTIONAL
        and base <= offset <= base + last_delta
        and (producer_id, epoch) == (state.producer_id, state.epoch)
    )
