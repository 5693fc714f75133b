"""The brokers' metadata of topics: id (KIP-516) and partitions. A topic that is deleted and created again gets a new id."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from dualwrite.deadline import Deadline
from dualwrite.kafka.client.cluster import Network
from dualwrite.kafka.client.config import KafkaConfig
from dualwrite.kafka.client.messages_generated import MetadataRequest
from dualwrite.kafka.inspect.client import InspectionClient


@dataclass(frozen=True, slots=True)
class TopicMetadata:
    """What a broker knows about a topic.

    Args:
        id: Kafka's id of the topic, as text; empty if the brokers are older than Apache Kafka 2.8.
        partitions: The numbers of its partitions.
    """

    id: str
    partitions: frozenset[int]


def topic_metadata(
    config: KafkaConfig | Mapping[str, Any] | str, names: Iterable[str], *, timeout: float = 30.0
) -> dict[str, TopicMetadata]:
    """The metadata of each topic that exists, from any broker.

    Args:
        config: The cluster's settings.
        names: The topics; none of them is created.
        timeout: Seconds, including retries.

    Raises:
        BrokerUnavailableError: No broker responded within the time limit.
        BrokerAuthorizationError: The login was refused.
    """
    wanted = list(dict.fromkeys(names))
    with InspectionClient(KafkaConfig.of(config), timeout=timeout) as client:
        return client.to_cluster(lambda network, deadline: _found(network, wanted, deadline)) if wanted else {}


def topic_ids(config: KafkaConfig | Mapping[str, Any] | str, names: Iterable[str], *, timeout: float = 30.0) -> dict[str, str]:
    """The id of each topic that exists; see `topic_metadata`."""
    return {name: found.id for name, found in topic_metadata(config, names, timeout=timeout).items()}


def _found(network: Network, names: list[str], deadline: Deadline) -> dict[str, TopicMetadata]:
    topics = [MetadataRequest.MetadataRequestTopic(name=name) for name in names]
    response = network.any_broker(deadline).call(MetadataRequest(topics=topics, allow_auto_topic_creation=False), deadline)
    return {
        topic.name: TopicMetadata(_text(topic.topic_id), frozenset(one.partition_index for one in topic.partitions))
        for topic in response.topics
        if not topic.error_code
    }


def _text(found: UUID) -> str:
    return str(found) if found.int else ""
