"""The producers that the replicas of partitions remember (KIP-664, DescribeProducers), in batches for each broker."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

from dualwrite.errors import BrokerError, ConfigurationError
from dualwrite.kafka.admin.brokers import Brokers, ClusterView, PartitionView, batches
from dualwrite.kafka.admin.facts import ActiveProducer, PartitionProducers
from dualwrite.kafka.admin.leaders import Key, by_topic, chosen_partitions, request_partitions
from dualwrite.kafka.client.connection import Connection
from dualwrite.kafka.client.messages_generated import DescribeProducersRequest, DescribeProducersResponse


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
