"""What a cluster supports, and what it knows about topics: by requests that change nothing in it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import closing, nullcontext
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any, Final, Self, TypeVar
from uuid import UUID

from dualwrite.deadline import Deadline
from dualwrite.errors import BrokerAuthorizationError, BrokerError, BrokerUnavailableError
from dualwrite.kafka.base import NewProducerId
from dualwrite.kafka.client.broker_connection import Connection, ConnectionLostError, about_the_cluster
from dualwrite.kafka.client.brokers import CoordinatorUnavailableError, Network
from dualwrite.kafka.client.config import Address, KafkaConfig
from dualwrite.kafka.client.kafka_errors import ErrorCode, error_name
from dualwrite.kafka.client.messages_generated import (
    EndTxnRequest,
    InitProducerIdRequest,
    MetadataRequest,
    MetadataResponse,
    ProduceRequest,
    WriteTxnMarkersRequest,
)
from dualwrite.kafka.client.requests import (
    BROKER_RESOURCE,
    END_BY_EPOCH,
    FOREIGN_PRODUCER_ID,
    INIT_TWO_PHASE,
    TOPIC_RESOURCE,
    init_request,
    settings_in,
    settings_request,
)
from dualwrite.kafka.client.retries import TRANSIENT, CoordinatorMovedError, TryAgainError, check_transient, repeated
from dualwrite.kafka.client.support import check_answer

PROBE_ID: Final = "dualwrite-probe"
DEFAULT_TIMEOUT: Final = 30.0

_TRANSACTION_VERSION: Final = 2
_PRODUCE: Final = 12
_CHECKED_MARKERS: Final = 2
_NATIVE_FROM: Final = 26
_MARKERS_SKIPPED_FROM: Final = 30
_ACCEPTED: Final = (ErrorCode.NONE, ErrorCode.CONCURRENT_TRANSACTIONS, ErrorCode.PRODUCER_FENCED)
TWO_PHASE_SETTING: Final = "transaction.two.phase.commit.enable"
_UNSTABLE_SETTING: Final = "unstable.api.versions.enable"
_MAX_TIMEOUT_SETTING: Final = "transaction.max.timeout.ms"

TRANSACTION_STATE_TOPIC: Final = "__transaction_state"

_UNKNOWN_TOPIC: Final = 3
_EXISTS: Final = (0, 5)  # NONE, LEADER_NOT_AVAILABLE
_WRITE: Final = 1 << 4
_NOT_REPORTED: Final = (0, -(2**31))
_SETTINGS: Final = ("min.insync.replicas", "unclean.leader.election.enable", "max.message.bytes")
_RETENTION: Final = ("cleanup.policy", "retention.ms", "retention.bytes", "min.compaction.lag.ms", "segment.ms")
_UNLIMITED: Final = -1
_AUTO_CREATE: Final = "auto.create.topics.enable"

_PAUSE: Final = 0.02

T = TypeVar("T")


def to_cluster(network: Network, request: Callable[[Network, Deadline], T], deadline: Deadline, what: str = "a broker") -> T:
    """Send read-only requests to the brokers that `request` chooses, which must observe the deadline; it may be called again.

    Raises:
        BrokerUnavailableError: No response within the time limit.
    """
    try:
        return repeated(lambda limit: request(network, limit), TRANSIENT, deadline, pause=_PAUSE)
    except BrokerUnavailableError:
        raise
    except TRANSIENT as error:
        servers = network.config.servers
        raise BrokerUnavailableError(
            f"No answer from {what} at {servers} within {deadline.seconds:.3g} s: {error}.",
            cause="the broker is starting, overloaded, or unreachable at its advertised address",
            next_step="check that the brokers are running and their advertised.listeners are reachable from here; retry",
            servers=servers,
        ) from error


def to_coordinator(
    network: Network, kafka_transactional_id: str, request: Callable[[Connection, Deadline], T], deadline: Deadline
) -> T:
    """Send read-only requests to the coordinator of an id; see `to_cluster`.

    Raises:
        BrokerUnavailableError: No response within the time limit.
        BrokerAuthorizationError: The principal lacks Describe on the id.
    """

    def once(network: Network, limit: Deadline) -> T:
        try:
            return request(network.coordinator(kafka_transactional_id, deadline=limit), limit)
        except CoordinatorUnavailableError as error:
            if error.code == ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED:
                raise forbidden(kafka_transactional_id, "FindCoordinator", error.code) from error
            raise
        except (ConnectionLostError, CoordinatorMovedError, TryAgainError):
            network.forget_coordinator(kafka_transactional_id)
            raise

    return to_cluster(network, once, deadline, f"the transaction coordinator of {kafka_transactional_id!r}")


def forbidden(kafka_transactional_id: str, request: str, code: int) -> BrokerAuthorizationError:
    """The error for a principal that lacks a permission on the id."""
    return BrokerAuthorizationError(
        f"Kafka refuses {request}: {error_name(code)}.",
        transactional_id=kafka_transactional_id,
        next_step="grant the principal Write on this transactional id, preferably by a prefixed ACL, or use an id that it may "
        "use",
        code=code,
        name=error_name(code),
    )


class TwoPhaseObstacle(Enum):
    """Why two-phase commit is not available."""

    BROKER_TOO_OLD = "the broker is older than Apache Kafka 4.1: no InitProducerId v6"
    UNSTABLE_VERSIONS_OFF = "unstable.api.versions.enable is off, and InitProducerId v6 is an unstable version"
    NO_INIT_PRODUCER_ID_V6 = "no InitProducerId v6: the broker is older than 4.1, or unstable.api.versions.enable is off"
    SWITCHED_OFF = "transaction.two.phase.commit.enable is off"
    FORBIDDEN = "the principal lacks TWO_PHASE_COMMIT on the transactional id"
    OFF_OR_FORBIDDEN = "transaction.two.phase.commit.enable is off, or the principal lacks TWO_PHASE_COMMIT on the id"
    UNKNOWN = "the broker gave an unexpected response"


@dataclass(frozen=True, slots=True)
class BrokerCapabilities:
    """What the probe found.

    The request versions are those of one broker, the coordinator of the probe's id; during an upgrade, those of other brokers
    may differ. `transaction_version` applies to the whole cluster.

    Args:
        brokers: The number of live brokers.
        transaction_version: The finalized feature level (KIP-890); 0 if the cluster does not know the feature.
        end_txn_v5: Whether EndTxn v5 is supported.
        init_producer_id_v6: Whether InitProducerId v6 is supported, which has `enable2Pc` and `keepPreparedTxn`.
        produce_v12: Whether Produce v12 is supported, which adds its partitions to the transaction automatically.
        two_phase: Whether `enable2Pc` was accepted for the probed id. Only native producers can use it.
        two_phase_obstacle: Why `enable2Pc` was not accepted; None if it was.
        two_phase_setting: The broker's `transaction.two.phase.commit.enable`; None if it can't be read.
        keep_prepared_txn: Whether `keepPreparedTxn` was accepted.
        transaction_max_timeout_ms: The broker's `transaction.max.timeout.ms`; None if it can't be read.
        metadata_version: The newest `metadata.version` that the broker supports, which identifies its release: 25 is Apache
            Kafka 4.0, 27 is 4.1, 29 is 4.2, 30 is 4.3; 0 if it is not reported.
        metadata_level: The finalized `metadata.version`: no broker of the cluster is older than its release. 0 as above.
        cluster_id: Kafka's `cluster.id`.
        checks_markers: Whether the broker compares a marker with the transaction that it is to end (KIP-1228, in 4.2).
    """

    brokers: int
    transaction_version: int
    end_txn_v5: bool
    init_producer_id_v6: bool
    produce_v12: bool
    two_phase: bool
    two_phase_obstacle: TwoPhaseObstacle | None
    two_phase_setting: bool | None
    keep_prepared_txn: bool
    transaction_max_timeout_ms: int | None
    metadata_version: int
    metadata_level: int
    cluster_id: str = ""
    checks_markers: bool = True

    @property
    def may_skip_markers(self) -> bool:
        """Whether the release is 4.3.0 or newer: up to 4.4.0 a partition without a leader gets no marker (KAFKA-20734)."""
        return self.metadata_version >= _MARKERS_SKIPPED_FROM

    @property
    def has_4_0(self) -> bool:
        """Whether some brokers may be 4.0: 4.0.0 raises an epoch by two if a transaction times out (KAFKA-19367)."""
        return self.end_txn_v5 and self.metadata_level < _NATIVE_FROM

    @property
    def native(self) -> bool:
        """Whether the native producer can be used, which needs a separate epoch for each transaction."""
        return self.transaction_version >= _TRANSACTION_VERSION and self.end_txn_v5 and self.produce_v12

    def native_with(self, *, two_phase: bool) -> bool:
        """Whether the native producer can be used with two-phase commit, or without it.

        Without it, each transaction's epoch must be one higher, also after a timeout; with it, nothing times out.
        """
        return self.native and (two_phase or not self.has_4_0)


def probe(
    config: KafkaConfig | Mapping[str, Any] | str,
    *,
    transactional_id: str = PROBE_ID,
    timeout: float = DEFAULT_TIMEOUT,
    network: Network | None = None,
) -> BrokerCapabilities:
    """Detect what a cluster supports, by requests that leave nothing behind.

    Versions and settings alone don't show whether two-phase commit is allowed, so the probe tries it: InitProducerId v6 with
    `enable2Pc` and `keepPreparedTxn`, for an id that no producer uses. Released brokers (4.1 to 4.4) check the ACLs of the
    id, then the two-phase setting, and then refuse `keepPreparedTxn` with UNSUPPORTED_VERSION before they look at the id:
    that response means that `enable2Pc` alone would be accepted, and nothing is created.

    A future broker that accepts `keepPreparedTxn` will create the id, in state Empty. So always probe with the same id: then at
    most one is left. The request also contains a producer id that no producer has: if the id exists already, perhaps because it
    is in use by mistake, the broker returns PRODUCER_FENCED and does not change it.

    An EndTxn with the same producer id, which matches no transaction, shows whether the principal has Write on the id.

    Args:
        config: The cluster's settings.
        transactional_id: The id as Kafka sees it. With prefixed ACLs, `<your transactional id>#probe`.
        timeout: Seconds, including retries.
        network: Connections to use, which stay open; None opens separate ones.

    Raises:
        BrokerUnavailableError: No broker or no transaction coordinator responded within the time limit.
        BrokerAuthorizationError: The login was refused, or the principal lacks Write on the id.
        UnsupportedBrokerError: The brokers are too old, or have no transactions.
        ConfigurationError: A setting is missing or invalid.
    """
    deadline = Deadline(timeout)
    with closing(Network(KafkaConfig.of(config))) if network is None else nullcontext(network) as used:
        found = to_coordinator(used, transactional_id, partial(_probe_coordinator, transactional_id), deadline)
        settings = to_cluster(used, partial(_settings, found), deadline)
    setting = settings.get(TWO_PHASE_SETTING)
    limit = settings.get(_MAX_TIMEOUT_SETTING)
    accepted = found.two_phase_code in (*_ACCEPTED, ErrorCode.UNSUPPORTED_VERSION)
    return BrokerCapabilities(
        brokers=len(found.nodes),
        transaction_version=found.coordinator.features.get("transaction.version", 0),
        end_txn_v5=found.coordinator.supports(EndTxnRequest, END_BY_EPOCH),
        init_producer_id_v6=found.coordinator.supports(InitProducerIdRequest, INIT_TWO_PHASE),
        produce_v12=found.coordinator.supports(ProduceRequest, _PRODUCE),
        two_phase=accepted,
        two_phase_obstacle=None if accepted else _obstacle(found.two_phase_code, settings),
        two_phase_setting=None if setting is None else setting == "true",
        keep_prepared_txn=found.keep_code in _ACCEPTED,
        transaction_max_timeout_ms=None if limit is None else int(limit),
        metadata_version=found.coordinator.newest_features.get("metadata.version", 0),
        metadata_level=found.coordinator.features.get("metadata.version", 0),
        cluster_id=found.cluster_id,
        checks_markers=found.coordinator.supports(WriteTxnMarkersRequest, _CHECKED_MARKERS),
    )


@dataclass(frozen=True, slots=True)
class _ProbeResult:
    """What the coordinator has answered; error codes are None for requests that it does not support.

    `two_phase_code` is for `enable2Pc` with `keepPreparedTxn`; `keep_code` for `keepPreparedTxn`, sent without `enable2Pc` if
    that was refused, which KIP-939 allows.
    """

    coordinator: Connection
    cluster_id: str
    nodes: Mapping[Address, int]
    two_phase_code: int | None = None
    keep_code: int | None = None


def _probe_coordinator(transactional_id: str, coordinator: Connection, deadline: Deadline) -> _ProbeResult:
    has_two_phase = coordinator.supports(InitProducerIdRequest, INIT_TWO_PHASE)
    write = EndTxnRequest(transactional_id=transactional_id, producer_id=FOREIGN_PRODUCER_ID, producer_epoch=0, committed=False)
    asked = [write, about_the_cluster(), *([_init(transactional_id, two_phase=True)] if has_two_phase else [])]
    may_write, cluster, *tried = coordinator.call_all(asked, deadline)
    check_transient(may_write.error_code, "EndTxn")
    check_answer("EndTxn", may_write.error_code, at=coordinator.address)
    if may_write.error_code == ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED:
        raise forbidden(transactional_id, "EndTxn", may_write.error_code)
    nodes = {Address(each.host, each.port): each.node_id for each in cluster.brokers}
    two_phase = keep = _init_code(tried[0]) if tried else None
    if two_phase == ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED:
        keep = _init_code(coordinator.call(_init(transactional_id, two_phase=False), deadline))
    return _ProbeResult(coordinator, cluster.cluster_id or "", nodes, two_phase, keep)


def _init(transactional_id: str, *, two_phase: bool) -> InitProducerIdRequest:
    # 1 ms is below any maximum; an id in state Empty has no transaction that could time out
    return init_request(NewProducerId(transactional_id, 1, two_phase), keep_prepared=True)


def _init_code(response: Any) -> int:
    code: int = response.error_code
    check_transient(code, "InitProducerId")
    return code


def _settings(found: _ProbeResult, network: Network, deadline: Deadline) -> Mapping[str, str]:
    """The coordinator's settings; empty if they can't be read."""
    node = found.nodes.get(found.coordinator.address)
    if node is None:
        return {}
    keys = (TWO_PHASE_SETTING, _UNSTABLE_SETTING, _MAX_TIMEOUT_SETTING)
    connection = network.connection(found.coordinator.address, deadline)
    return settings_in(connection.call(settings_request(BROKER_RESOURCE, [str(node)], keys), deadline)).get(str(node), {})


def _obstacle(code: int | None, settings: Mapping[str, str]) -> TwoPhaseObstacle:
    setting = settings.get(TWO_PHASE_SETTING)
    if code is None:
        if not settings:
            return TwoPhaseObstacle.NO_INIT_PRODUCER_ID_V6
        return TwoPhaseObstacle.BROKER_TOO_OLD if setting is None else TwoPhaseObstacle.UNSTABLE_VERSIONS_OFF
    if code != ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED:
        return TwoPhaseObstacle.UNKNOWN
    if setting is None:
        return TwoPhaseObstacle.OFF_OR_FORBIDDEN
    return TwoPhaseObstacle.FORBIDDEN if setting == "true" else TwoPhaseObstacle.SWITCHED_OFF


@dataclass(frozen=True, slots=True)
class TopicMetadata:
    """What a broker knows about a topic; the id is empty if the brokers are older than Apache Kafka 2.8."""

    id: str
    partitions: frozenset[int]


def topic_metadata(
    config: KafkaConfig | Mapping[str, Any] | str, names: Iterable[str], *, timeout: float = 30.0
) -> dict[str, TopicMetadata]:
    """The metadata of each topic that exists, from any broker; none is created.

    Raises:
        BrokerUnavailableError: No broker responded within the time limit.
        BrokerAuthorizationError: The login was refused.
    """
    wanted = list(dict.fromkeys(names))
    with closing(Network(KafkaConfig.of(config))) as network:
        return to_cluster(network, partial(_found, wanted), Deadline(timeout)) if wanted else {}


def topic_ids(config: KafkaConfig | Mapping[str, Any] | str, names: Iterable[str], *, timeout: float = 30.0) -> dict[str, str]:
    """The id of each topic that exists; see `topic_metadata`."""
    return {name: found.id for name, found in topic_metadata(config, names, timeout=timeout).items()}


def _found(names: list[str], network: Network, deadline: Deadline) -> dict[str, TopicMetadata]:
    topics = [MetadataRequest.MetadataRequestTopic(name=name) for name in names]
    response = network.any_broker(deadline).call(MetadataRequest(topics=topics, allow_auto_topic_creation=False), deadline)
    return {
        topic.name: TopicMetadata(_text(topic.topic_id), frozenset(one.partition_index for one in topic.partitions))
        for topic in response.topics
        if not topic.error_code
    }


def _text(found: UUID) -> str:
    return str(found) if found.int else ""


@dataclass(frozen=True, slots=True)
class Retention:
    """When Kafka may remove records of a topic.

    Args:
        deletes: Whether `cleanup.policy` has `delete`: whole segments are deleted, the oldest first.
        compacts: Whether it has `compact`: the cleaner then removes every record of an aborted transaction.
        retention_ms: `retention.ms`, counted from the timestamp of a segment's newest record; None: unlimited.
        retention_bytes: `retention.bytes` of a partition, beyond which segments are deleted earlier; None: unlimited.
        min_compaction_lag_ms: `min.compaction.lag.ms`, the age before which the cleaner does not touch a record.
        segment_ms: `segment.ms`, after which the segment that is written to is closed; the cleaner reads closed ones only.
    """

    deletes: bool
    compacts: bool
    retention_ms: int | None
    retention_bytes: int | None
    min_compaction_lag_ms: int
    segment_ms: int

    @classmethod
    def of(cls, settings: Mapping[str, str]) -> Self | None:
        """From the settings of the topic; None if they can't be read."""
        if any(name not in settings for name in _RETENTION):
            return None
        policy, *numbers = map(settings.__getitem__, _RETENTION)
        milliseconds, size, lag, segment = map(int, numbers)
        policies = [each.strip() for each in policy.split(",")]
        return cls("delete" in policies, "compact" in policies, _limit(milliseconds), _limit(size), lag, segment)


def _limit(number: int) -> int | None:
    return None if number == _UNLIMITED else number


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
        retention: How long it keeps its records; None if that can't be read.
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
    retention: Retention | None = None


def describe_topics(
    config: KafkaConfig | Mapping[str, Any] | str, names: Iterable[str], *, timeout: float = 30.0
) -> list[TopicFacts]:
    """Describe topics, without creating any. Raises as `topic_metadata`."""
    wanted = list(dict.fromkeys(names))
    with closing(Network(KafkaConfig.of(config))) as network:
        return to_cluster(network, partial(_described, wanted), Deadline(timeout)) if wanted else []


def _described(names: list[str], network: Network, deadline: Deadline) -> list[TopicFacts]:
    connection = network.any_broker(deadline)
    topics = [MetadataRequest.MetadataRequestTopic(name=name) for name in names]
    request = MetadataRequest(topics, allow_auto_topic_creation=False, include_topic_authorized_operations=True)
    response = connection.call(request, deadline)
    if response.error_code:
        raise BrokerError(f"Metadata returned {error_name(response.error_code)}.", code=response.error_code)
    there = [topic.name for topic in response.topics if topic.error_code in _EXISTS]
    keys = (*_SETTINGS, *_RETENTION)
    settings = settings_in(connection.call(settings_request(TOPIC_RESOURCE, there, keys), deadline)) if there else {}
    auto_create = _creates_topics(network, deadline) if len(there) < len(names) else None
    found = {topic.name: topic for topic in response.topics}
    return [_facts(name, found[name], settings.get(name, {}), auto_create=auto_create) for name in names]


def _creates_topics(network: Network, deadline: Deadline) -> bool | None:
    node, address = next(iter(network.brokers(deadline).items()))
    asked = settings_request(BROKER_RESOURCE, [str(node)], [_AUTO_CREATE])
    value = settings_in(network.connection(address, deadline).call(asked, deadline)).get(str(node), {}).get(_AUTO_CREATE)
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
        retention=Retention.of(settings),
    )


def _writable(operations: int) -> bool | None:
    """Whether the operations, one in each bit, contain Write; None if the broker did not report them."""
    return None if operations in _NOT_REPORTED else bool(operations & _WRITE)
