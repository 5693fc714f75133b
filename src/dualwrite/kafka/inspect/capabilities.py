"""Detect what a cluster supports, before anything is written; the requests change nothing in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

from dualwrite.deadline import Deadline
from dualwrite.kafka.client.cluster import Network
from dualwrite.kafka.client.config import Address, KafkaConfig
from dualwrite.kafka.client.connection import Connection
from dualwrite.kafka.client.error_codes import ErrorCode
from dualwrite.kafka.client.ids_together import FOREIGN_PRODUCER_ID
from dualwrite.kafka.client.messages_generated import EndTxnRequest, InitProducerIdRequest, ProduceRequest
from dualwrite.kafka.client.opening import about_the_cluster
from dualwrite.kafka.inspect.client import BROKER_RESOURCE, InspectionClient, described_settings, forbidden, raise_if_transient

PROBE_ID: Final = "dualwrite-probe"
DEFAULT_TIMEOUT: Final = 30.0

_TRANSACTION_VERSION: Final = 2
_END_TXN: Final = 5
INIT_PRODUCER_ID: Final = 6
_PRODUCE: Final = 12
_NATIVE_FROM: Final = 26
_MARKERS_SKIPPED_FROM: Final = 30
_ACCEPTED: Final = (ErrorCode.NONE, ErrorCode.CONCURRENT_TRANSACTIONS, ErrorCode.PRODUCER_FENCED)
TWO_PHASE_SETTING: Final = "transaction.two.phase.commit.enable"
_UNSTABLE_SETTING: Final = "unstable.api.versions.enable"
_MAX_TIMEOUT_SETTING: Final = "transaction.max.timeout.ms"


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
        ConfigurationError: A setting is missing or invalid.
    """
    with InspectionClient(KafkaConfig.of(config), timeout=timeout, network=network) as client:
        found = client.to_coordinator(transactional_id, lambda c, deadline: _probe_coordinator(c, transactional_id, deadline))
        settings = client.to_cluster(lambda n, deadline: _settings(n, found, deadline))
    setting = settings.get(TWO_PHASE_SETTING)
    limit = settings.get(_MAX_TIMEOUT_SETTING)
    accepted = found.two_phase_code in (*_ACCEPTED, ErrorCode.UNSUPPORTED_VERSION)
    return BrokerCapabilities(
        brokers=len(found.nodes),
        transaction_version=found.coordinator.features.get("transaction.version", 0),
        end_txn_v5=found.coordinator.supports(EndTxnRequest, _END_TXN),
        init_producer_id_v6=found.coordinator.supports(InitProducerIdRequest, INIT_PRODUCER_ID),
        produce_v12=found.coordinator.supports(ProduceRequest, _PRODUCE),
        two_phase=accepted,
        two_phase_obstacle=None if accepted else _obstacle(found.two_phase_code, settings),
        two_phase_setting=None if setting is None else setting == "true",
        keep_prepared_txn=found.keep_code in _ACCEPTED,
        transaction_max_timeout_ms=None if limit is None else int(limit),
        metadata_version=found.coordinator.newest_features.get("metadata.version", 0),
        metadata_level=found.coordinator.features.get("metadata.version", 0),
        cluster_id=found.cluster_id,
    )


@dataclass(frozen=True, slots=True)
class _ProbeResult:
    """What the coordinator has answered; error codes are None for requests that it does not support.

    Args:
        coordinator: The connection to it, for its versions.
        cluster_id: Kafka's `cluster.id`.
        nodes: The live brokers by their addresses.
        two_phase_code: For `enable2Pc` with `keepPreparedTxn`.
        keep_code: For `keepPreparedTxn`; sent without `enable2Pc` if that was refused, which KIP-939 allows.
    """

    coordinator: Connection
    cluster_id: str
    nodes: Mapping[Address, int]
    two_phase_code: int | None = None
    keep_code: int | None = None


def _probe_coordinator(coordinator: Connection, transactional_id: str, deadline: Deadline) -> _ProbeResult:
    has_two_phase = coordinator.supports(InitProducerIdRequest, INIT_PRODUCER_ID)
    write = EndTxnRequest(transactional_id=transactional_id, producer_id=FOREIGN_PRODUCER_ID, producer_epoch=0, committed=False)
    asked = [write, about_the_cluster(), *([_init(transactional_id, two_phase=True)] if has_two_phase else [])]
    may_write, cluster, *tried = coordinator.call_all(asked, deadline)
    raise_if_transient(may_write.error_code, "EndTxn")
    if may_write.error_code == ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED:
        raise forbidden(transactional_id, "EndTxn", may_write.error_code)
    nodes = {Address(each.host, each.port): each.node_id for each in cluster.brokers}
    two_phase = keep = _init_code(tried[0]) if tried else None
    if two_phase == ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED:
        keep = _init_code(coordinator.call(_init(transactional_id, two_phase=False), deadline))
    return _ProbeResult(coordinator, cluster.cluster_id or "", nodes, two_phase, keep)


def _init(transactional_id: str, *, two_phase: bool) -> InitProducerIdRequest:
    return InitProducerIdRequest(
        version=INIT_PRODUCER_ID,
        transactional_id=transactional_id,
        transaction_timeout_ms=1,  # below any maximum; an id in state Empty has no transaction that could time out
        producer_id=FOREIGN_PRODUCER_ID,
        producer_epoch=0,
        enable2_pc=two_phase,
        keep_prepared_txn=True,
    )


def _init_code(response: Any) -> int:
    code: int = response.error_code
    raise_if_transient(code, "InitProducerId")
    return code


def _settings(network: Network, found: _ProbeResult, deadline: Deadline) -> Mapping[str, str]:
    """The coordinator's settings; empty if they can't be read."""
    node = found.nodes.get(found.coordinator.address)
    if node is None:
        return {}
    keys = (TWO_PHASE_SETTING, _UNSTABLE_SETTING, _MAX_TIMEOUT_SETTING)
    connection = network.connection(found.coordinator.address, deadline)
    settings = described_settings(connection, BROKER_RESOURCE, [str(node)], keys, deadline)
    return settings.get(str(node), {})


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
