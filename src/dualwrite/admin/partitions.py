"""What replicas of partitions know, their producers and their ends; and the marker that ends a transaction (KIP-664)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from dualwrite.admin.facts import ActiveProducer, Key, OfPartition, OpenTransaction, PartitionProducers
from dualwrite.admin.requests import (
    DENIED,
    TRANSIENT,
    Brokers,
    ClusterView,
    KeyedRequest,
    PartitionView,
    Reply,
    batches,
    denied,
)
from dualwrite.errors import (
    BrokerError,
    BrokerUnavailableError,
    ConfigurationError,
    DualWriteError,
    TransactionChangedError,
    UnknownTopicError,
)
from dualwrite.kafka.client.broker_connection import ConnectionLostError
from dualwrite.kafka.client.config import Address
from dualwrite.kafka.client.fields import Request
from dualwrite.kafka.client.kafka_errors import ErrorCode, error_name
from dualwrite.kafka.client.log_reader import EARLIEST, LATEST, READ_COMMITTED, READ_UNCOMMITTED
from dualwrite.kafka.client.messages_generated import (
    DescribeProducersRequest,
    DescribeProducersResponse,
    ListOffsetsRequest,
    WriteTxnMarkersRequest,
)

_CLIENT: Final = -1  # the replica id of clients

_MARKERS: Final = "WriteTxnMarkers"
_OTHER_EPOCH: Final = (ErrorCode.INVALID_PRODUCER_EPOCH, ErrorCode.INVALID_TXN_STATE)
_FENCED: Final = ErrorCode.TRANSACTION_COORDINATOR_FENCED


def chosen_partitions(seen: ClusterView, partitions: Collection[int]) -> tuple[list[PartitionView], dict[Key, DualWriteError]]:
    """The chosen partitions of the topics, or all; and an error for each that does not exist or can't be described.

    The error for a whole topic has partition -1.
    """
    refused = {(topic, -1): _refused("Metadata", "topic", topic, code, topic) for topic, code in seen.refused.items()}
    chosen = [found for found in seen.partitions if not partitions or found.partition in partitions]
    for topic in dict.fromkeys(found.topic for found in seen.partitions):
        missing = {*partitions} - {found.partition for found in chosen if found.topic == topic}
        for key in ((topic, index) for index in sorted(missing)):
            refused[key] = refused_partition("Metadata", key, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
    return chosen, refused


def one_partition(brokers: Brokers, key: Key) -> tuple[ClusterView, PartitionView]:
    """A partition, as Metadata shows it; raises an error if it does not exist or can't be described."""
    seen = brokers.view([key[0]])
    chosen, refused = chosen_partitions(seen, [key[1]])
    for problem in refused.values():
        raise problem
    return seen, chosen[0]


def refused_partition(request_name: str, key: Key, code: int) -> DualWriteError:
    """The error for a partition about which a broker refuses a request, for a reason that will not pass."""
    return _refused(request_name, "partition", f"{key[0]}-{key[1]}", code, key[0])


def unanswered_partition(brokers: Brokers, failure: str, key: Key, reason: str) -> BrokerUnavailableError:
    """The error for a partition without a response; `failure` is how it begins, `{}` being the partition."""
    return BrokerUnavailableError(
        f"{failure.format(f'{key[0]}-{key[1]}')}: {reason}.",
        cause="the broker is down, overloaded, or unreachable from here",
        next_step="retry once it is back",
        servers=brokers.network.config.servers,
    )


def _refused(request_name: str, kind: str, what: str, code: int, topic: str) -> DualWriteError:
    if code in DENIED:
        return denied(request_name, code, topic)
    if code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION:
        return UnknownTopicError(
            f"There is no {kind} {what!r}.",
            next_step="check its name and the cluster's address",
            code=int(code),
            name=error_name(code),
        )
    return BrokerError(f"Kafka refuses {what}: {error_name(code)}.", code=code, name=error_name(code))


def by_topic(keys: Iterable[Key]) -> dict[str, list[int]]:
    """The partitions of each topic."""
    found: dict[str, list[int]] = defaultdict(list)
    for topic, partition in keys:
        found[topic].append(partition)
    return found


def replies_about(
    brokers: Brokers,
    seen: ClusterView,
    partitions: Sequence[PartitionView],
    name: str,
    make: Callable[[dict[str, list[int]]], Request[Any]],
    failure: str,
    broker: int | None = None,
) -> Iterator[tuple[Key, Reply]]:
    """What the leaders of partitions respond about each, or one broker about its replicas; in batches.

    Args:
        brokers: The brokers, for this call.
        seen: The cluster, as Metadata has shown it just now.
        partitions: The partitions.
        name: The request's name, a key of PERMISSIONS.
        make: Makes the request about the partitions of each topic.
        failure: How the error for a partition without a response begins, `{}` being the partition.
        broker: The node to ask; None for the leaders.
    """
    views = {found.key: found for found in partitions}
    known: list[ClusterView] = []

    def located(keys: list[Key]) -> dict[Key, tuple[int | None, Address | str]]:
        if known:
            cluster = known.pop()
        else:  # not the first time for these partitions: leaders may have moved
            cluster = brokers.view(sorted({topic for topic, _ in keys}))
            views.update((found.key, found) for found in cluster.partitions)
        nodes = {key: views[key].leader if broker is None else broker for key in keys}
        return {key: (node, _address(cluster, node)) for key, node in nodes.items()}

    def responses(response: Any) -> Iterator[tuple[Key, int, Any]]:
        for topic in response.topics:
            for found in topic.partitions:
                yield (topic.name, found.partition_index), found.error_code, found

    refused, unanswered = partial(refused_partition, name), partial(unanswered_partition, brokers, failure)
    request = KeyedRequest(name, located, lambda keys: make(by_topic(keys)), responses, refused, unanswered)
    for batch in batches([found.key for found in partitions]):
        known[:] = [seen]
        yield from request.replies(brokers, batch).items()


def _address(seen: ClusterView, node: int | None) -> Address | str:
    return "it has no leader" if node is None else seen.brokers.get(node, f"broker {node} is down")


# --- producers --------------------------------------------------------------------------------------------------------


def describe_producers(
    brokers: Brokers, topics: Sequence[str] | None, partitions: Collection[int] = (), broker: int | None = None
) -> Iterator[PartitionProducers]:
    """Describe the producers of each partition of these topics, or of all, from its leader; only `partitions`, if given.

    With a broker, it is asked instead about the partitions of which it has a replica.

    Raises:
        ConfigurationError: There is no such broker, or it has no replica of the topics.
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
    if keys:
        seen = brokers.view(sorted({topic for topic, _ in keys}))
        yield from _described(brokers, seen, [found for found in seen.partitions if found.key in keys], broker)


def _described(
    brokers: Brokers, seen: ClusterView, partitions: Sequence[PartitionView], broker: int | None
) -> Iterator[PartitionProducers]:
    def make(wanted: dict[str, list[int]]) -> DescribeProducersRequest:
        return DescribeProducersRequest(topics=[DescribeProducersRequest.TopicRequest(*each) for each in wanted.items()])

    failure = "The producers of {} could not be described"
    for key, reply in replies_about(brokers, seen, partitions, "DescribeProducers", make, failure, broker):
        found = () if reply.response is None else tuple(sorted(map(_producer, reply.response.active_producers)))
        yield PartitionProducers(*key, reply.broker, found, reply.problem)


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


# --- offsets ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PartitionEnd(OfPartition):
    """The end of a partition.

    Args:
        topic: The topic.
        partition: The partition; -1 if the topic itself can't be described.
        broker: The leader; None if there is none.
        last_stable_offset: Where `read_committed` consumers stop; None if there is a problem.
        high_watermark: Where all others stop; None if there is a problem.
        problem: Why the leader did not respond, if so.
    """

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
    """Both ends of each partition, from its leader; the high watermark first, so that new records make no difference."""
    seen = brokers.view(topics)
    chosen, refused = chosen_partitions(seen, partitions)
    yield from (PartitionEnd(*key, None, problem=problem) for key, problem in refused.items())
    written = dict(_offsets(brokers, seen, chosen))
    for key, reply in _offsets(brokers, seen, chosen, isolation=READ_COMMITTED):
        problem = written[key].problem or reply.problem
        if problem is None:
            yield PartitionEnd(*key, reply.broker, reply.response.offset, written[key].response.offset)
        else:
            yield PartitionEnd(*key, reply.broker, problem=problem)


def first_offsets(brokers: Brokers, topic: str, partitions: Collection[int] = ()) -> dict[Key, int]:
    """The first offset that retention has left in each partition; raises the first error about one."""
    seen = brokers.view([topic])
    chosen, refused = chosen_partitions(seen, partitions)
    for problem in refused.values():
        raise problem
    found: dict[Key, int] = {}
    for key, reply in _offsets(brokers, seen, chosen, timestamp=EARLIEST):
        if reply.problem is not None:
            raise reply.problem
        found[key] = reply.response.offset
    return found


def _offsets(
    brokers: Brokers,
    seen: ClusterView,
    partitions: Sequence[PartitionView],
    *,
    isolation: int = READ_UNCOMMITTED,
    timestamp: int = LATEST,
) -> Iterator[tuple[Key, Reply]]:
    """The offset after the last record that can be read, or the first offset."""
    topic_request = ListOffsetsRequest.ListOffsetsTopic

    def make(wanted: dict[str, list[int]]) -> ListOffsetsRequest:
        topics = [
            topic_request(topic, [topic_request.ListOffsetsPartition(each, timestamp=timestamp) for each in indexes])
            for topic, indexes in wanted.items()
        ]
        return ListOffsetsRequest(replica_id=_CLIENT, isolation_level=isolation, topics=topics)

    return replies_about(brokers, seen, partitions, "ListOffsets", make, "The offsets of {} could not be read")


# --- the marker of a transaction --------------------------------------------------------------------------------------


def write_abort_marker(brokers: Brokers, opened: OpenTransaction, coordinator_epoch: int) -> str | None:
    """Write an abort marker to the leader of a partition; the only way to end a transaction that no coordinator will end.

    The request is sent once: it names only the producer, so if it were repeated blindly, it could abort the next transaction of
    a producer that keeps its epoch. `coordinator_epoch` is at least the one in the producer's last marker.

    Returns:
        None if the marker was written; or why this is not known: look at the partition before you call this again.

    Raises:
        BrokerAuthorizationError: ClusterAction on the cluster is missing.
        TransactionChangedError: The partition has a newer epoch of the producer, or of its coordinator: nothing was written.
        UnknownTopicError: There is no such partition.
        BrokerUnavailableError: No broker responded: nothing was written.
    """
    key, producer = opened.key, opened.producer
    seen, view = one_partition(brokers, key)
    address = None if view.leader is None else seen.brokers.get(view.leader)
    if address is None:
        return "it has no leader"
    marker = WriteTxnMarkersRequest.WritableTxnMarker(
        producer_id=producer.producer_id,
        producer_epoch=producer.epoch,
        transaction_result=False,
        topics=[WriteTxnMarkersRequest.WritableTxnMarker.WritableTxnMarkerTopic(name=key[0], partition_indexes=[key[1]])],
        coordinator_epoch=coordinator_epoch,
    )
    turn = brokers.turn()
    try:
        response = brokers.network.connection(address, turn).call(WriteTxnMarkersRequest(markers=[marker]), turn)
    except ConnectionLostError as error:
        return f"{error}"
    (code,) = (found.error_code for marker in response.markers for topic in marker.topics for found in topic.partitions)
    if not code:
        return None
    if code in TRANSIENT:
        return f"{_MARKERS} returned {error_name(code)}"
    problem = refused_partition(_MARKERS, key, code)
    if code != _FENCED and code not in _OTHER_EPOCH:
        raise problem
    newer = "coordinator epoch" if code == _FENCED else "producer epoch"
    raise TransactionChangedError(
        f"The transaction of producer {producer.producer_id} with epoch {producer.epoch} on {key[0]}-{key[1]} was not "
        f"aborted: the partition knows a newer {newer}.",
        next_step="look again with `dualwrite transactions describe-producers`",
    ) from problem
