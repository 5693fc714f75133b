"""Facts about topics: whether they can be written to, and whether acknowledged messages are durable."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from dualwrite.deadline import Deadline
from dualwrite.errors import BrokerError
from dualwrite.kafka.client.cluster import Network
from dualwrite.kafka.client.config import KafkaConfig
from dualwrite.kafka.client.error_codes import error_name
from dualwrite.kafka.client.messages_generated import MetadataRequest, MetadataResponse
from dualwrite.kafka.inspect.client import BROKER_RESOURCE, TOPIC_RESOURCE, InspectionClient, described_settings

TRANSACTION_STATE_TOPIC: Final = "__transaction_state"

_UNKNOWN_TOPIC: Final = 3
_EXISTS: Final = (0, 5)  # NONE, LEADER_NOT_AVAILABLE
_WRITE: Final = 1 << 4
_NOT_REPORTED: Final = (0, -(2**31))
_SETTINGS: Final = ("min.insync.replicas", "unclean.leader.election.enable", "max.message.bytes")
_AUTO_CREATE: Final = "auto.create.topics.enable"


@dataclass(frozen=True, slots=True)
class TopicFacts:
    """The facts about one topic.

    Args:
        name: The topic.
        exists: Whether it exists.
        error: Kafka's name for the error if the topic can't be described, such as TOPIC_AUTHORIZATION_FAILED.
        made_at_first_use: Whether the broker creates a missing topic automatically; None if that is unknown.
        partitions: The number of partitions.
        replicas: The replicas of the partition with the fewest.
        in_sync: The in-sync replicas of the partition with the fewest.
        without_leader: The number of partitions without a leader at the moment.
        writable: Whether the principal may write to it; None if the broker does not report it.
        min_insync_replicas: `min.insync.replicas`; None if it can't be read, as for the next two.
        unclean_leader_election: `unclean.leader.election.enable`.
        max_message_bytes: `max.message.bytes`, the limit for one batch of messages.
    """

    name: str
    exists: bool
    error: str | None = None
    made_at_first_use: bool | None = None
    partitions: int = 0
    replicas: int = 0
    in_sync: int = 0
    without_leader: int = 0
    writable: bool | None = None
    min_insync_replicas: int | None = None
    unclean_leader_election: bool | None = None
    max_message_bytes: int | None = None


def describe_topics(
    config: KafkaConfig | Mapping[str, Any] | str, names: Iterable[str], *, timeout: float = 30.0
) -> list[TopicFacts]:
    """Describe topics, without creating any.

    Args:
        config: The cluster's settings.
        names: The topics.
        timeout: Seconds, including retries.

    Raises:
        BrokerUnavailableError: No broker responded within the time limit.
        BrokerAuthorizationError: The login was refused.
    """
    wanted = list(dict.fromkeys(names))
    with InspectionClient(KafkaConfig.of(config), timeout=timeout) as client:
        return client.to_cluster(lambda network, deadline: _described(network, wanted, deadline)) if wanted else []


def _described(network: Network, names: list[str], deadline: Deadline) -> list[TopicFacts]:
    connection = network.any_broker(deadline)
    topics = [MetadataRequest.MetadataRequestTopic(name=name) for name in names]
    request = MetadataRequest(topics, allow_auto_topic_creation=False, include_topic_authorized_operations=True)
    response = connection.call(request, deadline)
    if response.error_code:
        raise BrokerError(f"Metadata returned {error_name(response.error_code)}.", code=response.error_code)
    there = [topic.name for topic in response.topics if topic.error_code in _EXISTS]
    settings = described_settings(connection, TOPIC_RESOURCE, there, _SETTINGS, deadline) if there else {}
    auto_create = _creates_topics(network, deadline) if len(there) < len(names) else None
    found = {topic.name: topic for topic in response.topics}
    return [_facts(name, found[name], settings.get(name, {}), auto_create=auto_create) for name in names]


def _creates_topics(network: Network, deadline: Deadline) -> bool | None:
    node, address = next(iter(network.brokers(deadline).items()))
    found = described_settings(network.connection(address, deadline), BROKER_RESOURCE, [str(node)], [_AUTO_CREATE], deadline)
    value = found.get(str(node), {}).get(_AUTO_CREATE)
    return None if value is None else value == "true"


def _facts(
    name: str, topic: MetadataResponse.MetadataResponseTopic, settings: Mapping[str, str], *, auto_create: bool | None
) -> TopicFacts:
    if topic.error_code == _UNKNOWN_TOPIC:
        return TopicFacts(name, exists=False, made_at_first_use=auto_create)
    if topic.error_code not in _EXISTS:
        return TopicFacts(name, exists=False, error=error_name(topic.error_code))
    min_insync, unclean, limit = map(settings.get, _SETTINGS)
    return TopicFacts(
        name,
        exists=True,
        partitions=len(topic.partitions),
        replicas=min((len(p.replica_nodes) for p in topic.partitions), default=0),
        in_sync=min((len(p.isr_nodes) for p in topic.partitions), default=0),
        without_leader=sum(p.leader_id < 0 for p in topic.partitions),
        writable=_writable(topic.topic_authorized_operations),
        min_insync_replicas=None if min_insync is None else int(min_insync),
        unclean_leader_election=None if unclean is None else unclean == "true",
        max_message_bytes=None if limit is None else int(limit),
    )


def _writable(operations: int) -> bool | None:
    """Whether the operations, one in each bit, contain Write; None if the broker did not report them."""
    return None if operations in _NOT_REPORTED else bool(operations & _WRITE)
