"""The producers that the replicas of partitions remember (KIP-664, DescribeProducers), in batches for each broker."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, NoReturn

from dualwrite.admin.facts import ActiveProducer, PartitionProducers
from dualwrite.admin.requests import (
    TRANSIENT,
    Brokers,
    ClusterView,
    Key,
    PartitionReply,
    PartitionView,
    batches,
    by_topic,
    chosen_partitions,
    refused_partition,
    request_partitions,
)
from dualwrite.errors import BrokerError, ConfigurationError, DualWriteError, TransactionChangedError
from dualwrite.kafka.client.broker_connection import Connection, ConnectionLostError
from dualwrite.kafka.client.kafka_errors import ErrorCode, error_name
from dualwrite.kafka.client.messages_generated import (
    DescribeProducersRequest,
    DescribeProducersResponse,
    ListOffsetsRequest,
    ListOffsetsResponse,
    WriteTxnMarkersRequest,
)


def describe_producers(
    brokers: Brokers, topics: Sequence[str] | None, partitions: Collection[int] = (), broker: int | None = None
) -> Iterator[PartitionProducers]:
    """Describe the producers of each partition, from its leader or from one given broker; yields one partition at a time.

    Args:
        brokers: The brokers, for this call.
        topics: The topics; None for all.
        partitions: Their partitions; empty for all.
        broker: The node to send the requests to, for the partitions of which it has a replica; None for the leaders.

    Raises:
        ConfigurationError: There is no such broker, or it has no replica of the topics.
        BrokerUnavailableError, BrokerAuthorizationError: As for `Brokers.view`.
    """
    seen = brokers.view(topics)
    chosen, refused = chosen_partitions(seen, partitions)
    yield from (PartitionProducers(*key, None, problem=problem) for key, problem in refused.items())
    if broker is not None and partitions:
        yield from (_no_replica(found, broker) for found in chosen if broker not in found.replicas)
    kept = [found for found in chosen if broker is None or broker in found.replicas]
    if broker is not None and not (kept or refused or partitions):
        raise _nothing_there(seen, topics, broker)
    yield from _described(brokers, seen, kept, broker)


def producers_of(brokers: Brokers, keys: Collection[Key], broker: int | None = None) -> Iterator[PartitionProducers]:
    """As `describe_producers`, for partitions of several topics; one that does not exist any more is left out."""
    seen = brokers.view(sorted({topic for topic, _ in keys})) if keys else ClusterView({}, (), {})
    yield from _described(brokers, seen, [found for found in seen.partitions if (found.topic, found.partition) in keys], broker)


def _described(
    brokers: Brokers, seen: ClusterView, partitions: Sequence[PartitionView], broker: int | None
) -> Iterator[PartitionProducers]:
    for batch in batches(partitions):
        for key, reply in request_partitions(brokers, seen, batch, _Producers(), broker).items():
            yield PartitionProducers(*key, reply.broker, reply.response or (), reply.problem)


class _Producers:
    """Requests the producers of partitions."""

    request_name = "DescribeProducers"
    failure = "The producers of {} could not be described"

    @staticmethod
    def request(_: Connection, keys: Sequence[Key]) -> DescribeProducersRequest:
        topic_request = DescribeProducersRequest.TopicRequest
        topics = [topic_request(name=topic, partition_indexes=indexes) for topic, indexes in by_topic(keys).items()]
        return DescribeProducersRequest(topics=topics)

    @staticmethod
    def responses(response: DescribeProducersResponse) -> Iterator[tuple[Key, int, Any]]:
        for topic in response.topics:
            for found in topic.partitions:
                producers = () if found.error_code else tuple(sorted(map(_producer, found.active_producers)))
                yield (topic.name, found.partition_index), found.error_code, producers


def _producer(found: DescribeProducersResponse.TopicResponse.PartitionResponse.ProducerState) -> ActiveProducer:
    return ActiveProducer(
        producer_id=found.producer_id,
        epoch=found.producer_epoch,
        last_sequence=found.last_sequence,
        last_timestamp_ms=_known(found.last_timestamp),
        coordinator_epoch=_known(found.coordinator_epoch),
        transaction_start_offset=_known(found.current_txn_start_offset),
    )


def _known(number: int) -> int | None:
    """Kafka sends -1 for what it does not know."""
    return None if number < 0 else number


def _nothing_there(seen: ClusterView, topics: Sequence[str] | None, broker: int) -> ConfigurationError:
    if broker in seen.brokers:
        what = "any topic that the principal may describe" if topics is None else f"topic {', '.join(map(repr, topics))}"
        having = sorted({node for found in seen.partitions for node in found.replicas})
        return ConfigurationError(f"Broker {broker} has no replica of {what}.", next_step=_one_of(having))
    return ConfigurationError(
        f"There is no broker {broker}.",
        cause="its id is wrong, or it is down and has no replica of the requested partitions",
        next_step=_one_of(sorted(seen.brokers)),
    )


def _one_of(brokers: Sequence[int]) -> str:
    return f"choose one of the brokers {', '.join(map(str, brokers))}, or leave the broker out to use the leaders"


def _no_replica(found: PartitionView, broker: int) -> PartitionProducers:
    replicas = ", ".join(map(str, found.replicas))
    problem = BrokerError(
        f"Broker {broker} has no replica of {found.topic}-{found.partition}.", next_step=f"choose one of the brokers {replicas}"
    )
    return PartitionProducers(found.topic, found.partition, None, problem=problem)


_LATEST: Final = -1
_EARLIEST: Final = -2
_CLIENT: Final = -1
_READ_UNCOMMITTED: Final = 0
_READ_COMMITTED: Final = 1


@dataclass(frozen=True, slots=True)
class PartitionEnd:
    """The end of a partition.

    Args:
        topic: The topic.
        partition: The partition; -1 if the topic itself can't be described.
        broker: The leader; None if there is none.
        last_stable_offset: Where `read_committed` consumers stop; None if there is a problem.
        high_watermark: Where all others stop; None if there is a problem.
        problem: Why the leader did not respond, if so.
    """

    topic: str
    partition: int
    broker: int | None
    last_stable_offset: int | None = None
    high_watermark: int | None = None
    problem: DualWriteError | None = None

    @property
    def records_behind(self) -> int:
        """How many offsets `read_committed` consumers can't read yet."""
        if self.last_stable_offset is None or self.high_watermark is None:
            return 0
        return max(self.high_watermark - self.last_stable_offset, 0)


def partition_ends(brokers: Brokers, topics: Sequence[str] | None, partitions: Collection[int] = ()) -> Iterator[PartitionEnd]:
    """Both ends of each partition, from its leader; the high watermark first, so that new records make no difference.

    Args:
        brokers: The brokers, for this call.
        topics: The topics; None for all.
        partitions: Their partitions; empty for all.

    Raises:
        BrokerUnavailableError, BrokerAuthorizationError: As for `Brokers.view`.
    """
    seen = brokers.view(topics)
    chosen, refused = chosen_partitions(seen, partitions)
    yield from (PartitionEnd(*key, None, problem=problem) for key, problem in refused.items())
    for batch in batches(chosen):
        written = request_partitions(brokers, seen, batch, _Offset(_READ_UNCOMMITTED))
        stable = request_partitions(brokers, seen, batch, _Offset(_READ_COMMITTED))
        for key, reply in stable.items():
            problem = written[key].problem or reply.problem
            if problem is None:
                yield PartitionEnd(*key, reply.broker, reply.response, written[key].response)
            else:
                yield PartitionEnd(*key, reply.broker, problem=problem)


def first_offsets(brokers: Brokers, topics: Sequence[str], partitions: Collection[int] = ()) -> dict[Key, PartitionReply]:
    """The first offset that retention has left in each partition.

    Raises:
        BrokerUnavailableError, BrokerAuthorizationError: As for `Brokers.view`.
        UnknownTopicError: There is no such topic or partition.
    """
    seen = brokers.view(topics)
    chosen, refused = chosen_partitions(seen, partitions)
    for problem in refused.values():
        raise problem
    found: dict[Key, PartitionReply] = {}
    for batch in batches(chosen):
        found |= request_partitions(brokers, seen, batch, _Offset(_READ_UNCOMMITTED, _EARLIEST))
    return found


class _Offset:
    """Requests the offset after the last record that can be read, or the first offset."""

    request_name = "ListOffsets"
    failure = "The offsets of {} could not be read"

    def __init__(self, isolation: int, timestamp: int = _LATEST) -> None:
        self._isolation = isolation
        self._timestamp = timestamp

    def request(self, _: Connection, keys: Sequence[Key]) -> ListOffsetsRequest:
        topic_request = ListOffsetsRequest.ListOffsetsTopic
        partition_request = topic_request.ListOffsetsPartition
        return ListOffsetsRequest(
            replica_id=_CLIENT,
            isolation_level=self._isolation,
            topics=[
                topic_request(
                    name=topic,
                    partitions=[partition_request(partition_index=each, timestamp=self._timestamp) for each in indexes],
                )
                for topic, indexes in by_topic(keys).items()
            ],
        )

    @staticmethod
    def responses(response: ListOffsetsResponse) -> Iterator[tuple[Key, int, Any]]:
        for topic in response.topics:
            for found in topic.partitions:
                yield (topic.name, found.partition_index), found.error_code, found.offset


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
