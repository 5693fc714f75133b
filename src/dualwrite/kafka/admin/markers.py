"""The marker that aborts a hanging transaction in one partition (KIP-664, WriteTxnMarkers)."""

from __future__ import annotations

from typing import Final, NoReturn

from dualwrite.errors import TransactionChangedError
from dualwrite.kafka.admin.brokers import TRANSIENT, Brokers
from dualwrite.kafka.admin.leaders import Key, chosen_partitions, refused_partition
from dualwrite.kafka.client.error_codes import ErrorCode, error_name
from dualwrite.kafka.client.messages_generated import WriteTxnMarkersRequest
from dualwrite.kafka.client.sockets import ConnectionLostError

_NAME: Final = "WriteTxnMarkers"
_OTHER_EPOCH: Final = (ErrorCode.INVALID_PRODUCER_EPOCH, ErrorCode.INVALID_TXN_STATE)
_FENCED: Final = ErrorCode.TRANSACTION_COORDINATOR_FENCED


def write_abort_marker(brokers: Brokers, key: Key, *, producer_id: int, epoch: int, coordinator_epoch: int) -> str | None:
    """Write an abort marker to the leader of a partition; the only way to end a transaction that no coordinator will end.

    The request is sent once: it names only the producer, so if it were repeated blindly, it could abort the next transaction of
    a producer that keeps its epoch.

    Args:
        brokers: The brokers, for this call.
        key: The partition.
        producer_id: The transaction's producer id.
        epoch: Its epoch, as the partition has it.
        coordinator_epoch: At least the coordinator's epoch in the producer's last marker.

    Returns:
        None if the marker was written; or why this is not known: look at the partition before you call this again.

    Raises:
        BrokerAuthorizationError: ClusterAction on the cluster is missing.
        TransactionChangedError: The partition has a newer epoch of the producer, or of its coordinator: nothing was written.
        UnknownTopicError: There is no such partition.
        BrokerUnavailableError: No broker responded: nothing was written.
    """
    seen = brokers.view([key[0]])
    chosen, refused = chosen_partitions(seen, [key[1]])
    for problem in refused.values():
        raise problem
    leader = chosen[0].leader
    address = None if leader is None else seen.brokers.get(leader)
    if address is None:
        return "it has no leader"
    turn = brokers.turn()
    try:
        connection = brokers.network.connection(address, turn)
        response = connection.call(_request(key, producer_id, epoch, coordinator_epoch), turn)
    except ConnectionLostError as error:
        return str(error)
    (code,) = (found.error_code for marker in response.markers for topic in marker.topics for found in topic.partitions)
    if code in TRANSIENT:
        return f"{_NAME} returned {error_name(code)}"
    if code:
        _refuse(key, code, producer_id, epoch)
    return None


def _request(key: Key, producer_id: int, epoch: int, coordinator_epoch: int) -> WriteTxnMarkersRequest:
    marker = WriteTxnMarkersRequest.WritableTxnMarker
    return WriteTxnMarkersRequest(
        markers=[
            marker(
                producer_id=producer_id,
                producer_epoch=epoch,
                transaction_result=False,
                topics=[marker.WritableTxnMarkerTopic(name=key[0], partition_indexes=[key[1]])],
                coordinator_epoch=coordinator_epoch,
            )
        ],
    )


def _refuse(key: Key, code: int, producer_id: int, epoch: int) -> NoReturn:
    problem = refused_partition(_NAME, key, code)
    if code != _FENCED and code not in _OTHER_EPOCH:
        raise problem
    newer = "coordinator epoch" if code == _FENCED else "producer epoch"
    raise TransactionChangedError(
        f"The transaction of producer {producer_id} with epoch {epoch} on {key[0]}-{key[1]} was not aborted: "
        f"the partition knows a newer {newer}.",
        next_step="look again with `dualwrite transactions describe-producers`",
    ) from problem
