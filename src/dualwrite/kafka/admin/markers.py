"""The marker that aborts a hanging transaction in one partition (KIP-664, WriteTxnMarkers)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

from kafka.protocol.producer import WriteTxnMarkersRequest

from dualwrite.errors import BrokerError, TransactionChangedError
from dualwrite.kafka.admin.brokers import Brokers
from dualwrite.kafka.admin.leaders import Key, PartitionReply, by_topic, chosen_partitions, request_partitions
from dualwrite.kafka.client.connection import Connection
from dualwrite.kafka.client.error_codes import ErrorCode

_OTHER_EPOCH: Final = (ErrorCode.INVALID_PRODUCER_EPOCH, ErrorCode.INVALID_TXN_STATE)
_FENCED: Final = ErrorCode.TRANSACTION_COORDINATOR_FENCED
_VERSION: Final = 1  # version 2 includes the transaction's version, which only a coordinator knows (KIP-1228)


def write_abort_marker(brokers: Brokers, key: Key, *, producer_id: int, epoch: int, coordinator_epoch: int) -> None:
    """Write an abort marker to the leader of a partition; the only way to end a transaction that no coordinator will end.

    Args:
        brokers: The brokers, for this call.
        key: The partition.
        producer_id: The transaction's producer id.
        epoch: Its epoch, as the partition has it.
        coordinator_epoch: At least the coordinator's epoch in the producer's last marker.

    Raises:
        BrokerAuthorizationError: ClusterAction on the cluster is missing.
        TransactionChangedError: The partition has a newer epoch of the producer, or of its coordinator: nothing was written.
        UnknownTopicError: There is no such partition.
        BrokerUnavailableError: The leader did not respond; the marker may have been written.
    """
    seen = brokers.view([key[0]])
    chosen, refused = chosen_partitions(seen, [key[1]])
    for problem in refused.values():
        raise problem
    request = _AbortMarker(producer_id, epoch, coordinator_epoch)
    _check(request_partitions(brokers, seen, chosen, request)[key], key, producer_id, epoch)


class _AbortMarker:
    """The request to write the marker."""

    request_name = "WriteTxnMarkers"
    failure = "The marker could not be written to {}"

    def __init__(self, producer_id: int, epoch: int, coordinator_epoch: int) -> None:
        self._producer_id = producer_id
        self._epoch = epoch
        self._coordinator_epoch = coordinator_epoch

    def request(self, _: Connection, keys: Sequence[Key]) -> Any:
        marker = WriteTxnMarkersRequest.WritableTxnMarker
        topics = [
            marker.WritableTxnMarkerTopic(name=topic, partition_indexes=indexes) for topic, indexes in by_topic(keys).items()
        ]
        return WriteTxnMarkersRequest(
            version=_VERSION,
            markers=[
                marker(
                    producer_id=self._producer_id,
                    producer_epoch=self._epoch,
                    transaction_result=False,
                    topics=topics,
                    coordinator_epoch=self._coordinator_epoch,
                )
            ],
        )

    @staticmethod
    def responses(response: Any) -> Iterator[tuple[Key, int, Any]]:
        for marker in response.markers:
            for topic in marker.topics:
                for found in topic.partitions:
                    yield (topic.name, found.partition_index), found.error_code, True


def _check(reply: PartitionReply, key: Key, producer_id: int, epoch: int) -> None:
    problem = reply.problem
    if problem is None:
        return
    code = problem.code if isinstance(problem, BrokerError) and "code" in problem.facts else None
    if code == _FENCED or code in _OTHER_EPOCH:
        newer = "coordinator epoch" if code == _FENCED else "producer epoch"
        raise TransactionChangedError(
            f"The transaction of producer {producer_id} with epoch {epoch} on {key[0]}-{key[1]} was not aborted: "
            f"the partition knows a newer {newer}.",
            next_step="look again with `dualwrite transactions describe-producers`",
        ) from problem
    raise problem
