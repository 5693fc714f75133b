"""Kafka's topic ids (KIP-516): a topic that is deleted and created again gets a new one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any
from uuid import UUID

from kafka.protocol.metadata import MetadataRequest

from dualwrite.deadline import Deadline
from dualwrite.kafka.client.cluster import Network
from dualwrite.kafka.client.config import KafkaConfig
from dualwrite.kafka.inspect.client import InspectionClient


def topic_ids(config: KafkaConfig | Mapping[str, Any] | str, names: Iterable[str], *, timeout: float = 30.0) -> dict[str, str]:
    """The id of each topic that exists, as text; empty text if the brokers are older than Apache Kafka 2.8.

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
        return client.to_cluster(lambda network, deadline: _ids(network, wanted, deadline)) if wanted else {}


def _ids(network: Network, names: list[str], deadline: Deadline) -> dict[str, str]:
    topics = [MetadataRequest.MetadataRequestTopic(name=name) for name in names]
    response = network.any_broker(deadline).call(MetadataRequest(topics=topics, allow_auto_topic_creation=False), deadline)
    return {topic.name: _text(getattr(topic, "topic_id", None)) for topic in response.topics if not topic.error_code}


def _text(found: UUID | None) -> str:
    return "" if found is None or found.int == 0 else str(found)
