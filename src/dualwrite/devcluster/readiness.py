"""Whether the nodes of a cluster work together, and waiting until they do."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing

from dualwrite.devcluster.cluster_files import COORDINATOR_PARTITIONS, ClusterFiles
from dualwrite.devcluster.locations import LOOPBACK, DevClusterError
from dualwrite.devcluster.registry import PLAINTEXT, ClusterRecord, NodeRecord
from dualwrite.errors import DualWriteError
from dualwrite.kafka.client.broker_connection import Connection, ConnectionLostError
from dualwrite.kafka.client.brokers import CoordinatorType
from dualwrite.kafka.client.config import Address, KafkaConfig
from dualwrite.kafka.client.kafka_errors import ErrorCode, error_name
from dualwrite.kafka.client.messages_generated import (
    DescribeGroupsRequest,
    DescribeTransactionsRequest,
    FindCoordinatorRequest,
    InitProducerIdRequest,
    MetadataRequest,
)

_DENIED = {  # an authorizer rejects the unknown client: the broker is up
    ErrorCode.TOPIC_AUTHORIZATION_FAILED,
    ErrorCode.GROUP_AUTHORIZATION_FAILED,
    ErrorCode.CLUSTER_AUTHORIZATION_FAILED,
    ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
}
_READY = _DENIED | {ErrorCode.NONE, ErrorCode.TRANSACTIONAL_ID_NOT_FOUND, ErrorCode.GROUP_ID_NOT_FOUND}

_MAX_KEYS = 64
_POLL = 0.05
_LIMITS = {"client.id": "dualwrite-devcluster", "socket.timeout.ms": 2000, "socket.connection.setup.timeout.ms": 2000}

_PARTITIONS = {
    CoordinatorType.TRANSACTION: "transaction.state.log.num.partitions",
    CoordinatorType.GROUP: "offsets.topic.num.partitions",
}

_Nodes = Mapping[int, Connection]
"""The connections to the running nodes, by node id."""


class _NotReadyError(Exception):
    """The cluster is not ready; the message is the reason."""


def obstacle(record: ClusterRecord, nodes: Sequence[NodeRecord], *, producers: bool = False) -> str | None:
    """Check once whether these nodes of the cluster work together: None if they do, else the first reason why they don't.

    With `producers`, each node must give out a producer id too, which uses up an id. A new broker returns
    COORDINATOR_LOAD_IN_PROGRESS for the first such request: only then does it request a block of ids from the controller.
    """
    try:
        with ExitStack() as opened:
            connections = {node.node_id: opened.enter_context(closing(_connected(node))) for node in nodes}
            for node_id in connections:
                _check_metadata(connections, node_id, record.cluster_id)
            for kind, name in _PARTITIONS.items():
                count = int(record.settings.config.get(name, COORDINATOR_PARTITIONS))
                _check_coordinators(connections, kind, count)
            for node_id in connections if producers else ():
                _check_producer_ids(connections, node_id)
    except _NotReadyError as reason:
        return str(reason)
    except (ConnectionLostError, DualWriteError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def _connected(node: NodeRecord) -> Connection:
    address = Address(LOOPBACK, node.ports[PLAINTEXT])
    return Connection(address, KafkaConfig.of({"bootstrap.servers": str(address), **_LIMITS}))


def wait(record: ClusterRecord, nodes: Sequence[NodeRecord], files: ClusterFiles, *, timeout: float) -> None:
    """Wait until these nodes of the cluster, which have been started, work together.

    Raises:
        BrokerExitedError: One of the brokers exited.
        DevClusterError: The timeout has passed, or all nodes are paused.
    """
    if not nodes:
        raise DevClusterError(
            f"All nodes of the cluster {record.name!r} are paused.",
            next_step="resume them, with `DevCluster.resume` or SIGCONT, or stop the cluster",
            cluster=record.name,
        )
    deadline = time.monotonic() + timeout
    while True:
        for node in nodes:
            if not node.alive:
                raise files.exit_error(record.name, node.node_id)
        missing = obstacle(record, nodes, producers=True)
        if missing is None:
            return
        if time.monotonic() >= deadline:
            raise DevClusterError(
                f"The cluster {record.name!r} did not become ready within {timeout:g} s.",
                cause=f"the last check found: {missing}",
                next_step=f"see the log {files.log_file(nodes[0].node_id)}",
                cluster=record.name,
            )
        time.sleep(_POLL)


def _check_metadata(nodes: _Nodes, node_id: int, cluster_id: str) -> None:
    metadata = nodes[node_id].call(MetadataRequest(topics=None, allow_auto_topic_creation=False))
    if metadata.cluster_id != cluster_id:
        raise _NotReadyError(f"port {nodes[node_id].address.port} is answered by another cluster, {metadata.cluster_id}")
    missing = nodes.keys() - {broker.node_id for broker in metadata.brokers}
    if missing:
        raise _NotReadyError(f"node {node_id} does not know node {min(missing)} yet")
    for topic in metadata.topics:
        for partition in topic.partitions:
            name = f"{topic.name}-{partition.partition_index}"
            if partition.leader_id not in nodes:
                raise _NotReadyError(f"partition {name} has no leader among the running nodes")
            if behind := set(partition.replica_nodes) & nodes.keys() - set(partition.isr_nodes):
                raise _NotReadyError(f"node {min(behind)} is not in sync on partition {name}")


def _check_coordinators(nodes: _Nodes, kind: CoordinatorType, partitions: int) -> None:
    # keys whose last characters are consecutive hash to consecutive numbers, so they cover all partitions
    keys = ["dualwrite-ready-" + chr(ord("0") + number) for number in range(min(partitions, _MAX_KEYS))]
    request = FindCoordinatorRequest(key_type=kind, coordinator_keys=keys)
    by_node: dict[int, list[str]] = defaultdict(list)
    for found in next(iter(nodes.values())).call(request).coordinators:
        if found.error_code in _DENIED:
            return
        if found.error_code != ErrorCode.NONE:
            raise _NotReadyError(f"no {kind.name.lower()} coordinator yet: {error_name(found.error_code)}")
        if found.node_id not in nodes:
            raise _NotReadyError(f"the {kind.name.lower()} coordinator is still on node {found.node_id}, which is not running")
        by_node[found.node_id].append(found.key)
    for node_id, its_keys in by_node.items():
        if kind is CoordinatorType.TRANSACTION:
            states = nodes[node_id].call(DescribeTransactionsRequest(transactional_ids=its_keys)).transaction_states
            codes = [state.error_code for state in states]
        else:
            groups = nodes[node_id].call(DescribeGroupsRequest(groups=its_keys)).groups
            codes = [group.error_code for group in groups]
        for code in codes:
            if code not in _READY:
                raise _NotReadyError(f"the {kind.name.lower()} coordinator on node {node_id} returns {error_name(code)}")


def _check_producer_ids(nodes: _Nodes, node_id: int) -> None:
    request = InitProducerIdRequest(transactional_id=None, transaction_timeout_ms=60_000)
    code = nodes[node_id].call(request).error_code
    if code not in _READY:
        raise _NotReadyError(f"node {node_id} has no producer ids yet: {error_name(code)}")
