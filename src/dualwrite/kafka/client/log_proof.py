"""Find out from the log how a transaction ended, by one Fetch of a message that it is known to have written (KIP-98).

A `read_committed` Fetch returns the last stable offset, below which every transaction has ended, and the aborted transactions
that overlap the returned range. The header of the batch at the offset contains the producer id and epoch that wrote it.
Together they show how that transaction ended, for as long as retention keeps the batch, even if the coordinator has forgotten
the transaction.
"""

from __future__ import annotations

from typing import Final

from dualwrite.deadline import Deadline
from dualwrite.kafka.client.broker_connection import Connection
from dualwrite.kafka.client.brokers import Network
from dualwrite.kafka.client.log_reader import (
    READ_COMMITTED,
    READ_UNCOMMITTED,
    OffsetGoneError,
    fetched,
    leader,
)
from dualwrite.kafka.client.record_batches import batches
from dualwrite.state import Fate, Place, PreparedTxnState

_READ_SIZE: Final = 2**20
_MAX_READS: Final = 64


def fate_in_log(network: Network, state: PreparedTxnState, place: Place, deadline: Deadline) -> Fate:
    """How the transaction that wrote the first message at a place ended; its producer id and epoch must be those of the batch.

    Raises:
        LogNotReadableError: The partition has no leader, or the leader has just moved.
        PartitionGoneError: The broker that was asked knows no such partition; others may.
        ConnectionLostError, BrokerUnavailableError: As for `Network`.
        BrokerError: The leader refused the Fetch for another reason.
    """
    try:
        return _fate(network, state, place, deadline)
    except OffsetGoneError:
        return Fate.GONE


def _fate(network: Network, state: PreparedTxnState, place: Place, deadline: Deadline) -> Fate:
    offset = place.first_offset
    assert offset is not None
    connection = network.connection(leader(network, place.topic, place.partition, deadline), deadline)
    # a broker returns the first batch whole, however large it is
    found = fetched(connection, place.topic, place.partition, offset, deadline, size=1, isolation=READ_COMMITTED)
    if found.high_watermark <= offset:
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
    first = place.first_offset
    assert first is not None
    offset = first
    where = (place.topic, place.partition)
    for _ in range(_MAX_READS):
        found = fetched(connection, *where, offset, deadline, size=_READ_SIZE, isolation=READ_UNCOMMITTED)
        if offset == first and not _wrote(state, offset, found.records):
            return Fate.GONE
        following = offset
        for batch in batches(found.records):
            if batch.is_truncated:
                break
            following = batch.last_offset + 1
            if batch.is_control and batch.producer_id == state.producer_id and batch.base_offset > first:
                return Fate.COMMITTED if batch.commits else Fate.ABORTED
        if following == offset:
            break
        offset = following
    return Fate.OPEN


def _wrote(state: PreparedTxnState, offset: int, records: bytes | None) -> bool:
    """Whether the first batch of a Fetch response contains the offset and has the transaction's producer id and epoch."""
    first = next(batches(records), None)
    return (
        first is not None
        and not first.is_control
        and first.base_offset <= offset <= first.last_offset
        and (first.producer_id, first.epoch) == (state.producer_id, state.epoch)
    )
