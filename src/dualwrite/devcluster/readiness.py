"""Whether the nodes of a cluster work together, and waiting until they do."""

from __future__ import annotations

import socket
import time
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Self, TypeVar

from dualwrite.devcluster.cluster_files import COORDINATOR_PARTITIONS, ClusterFiles
from dualwrite.devcluster.locations import DevClusterError
from dualwrite.devcluster.ports import LOOPBACK
from dualwrite.devcluster.registry import PLAINTEXT, ClusterRecord, NodeRecord
from dualwrite.kafka.client.broker_connection import Framing
from dualwrite.kafka.client.brokers import CoordinatorType
from dualwrite.kafka.client.fields import KafkaProtocolError, Request
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
_READY = _DENIED | {ErrorCode.NONE, ErrorCode.TRANSACTIONAL_ID_NOT_FOUND}

_MAX_KEYS = 64
_POLL = 0.05
_REQUEST_TIMEOUT = 2.0
"""Seconds for one request to a broker."""

_PARTITIONS = {
    CoordinatorType.TRANSACTION: "transaction.state.log.num.partitions",
    CoordinatorType.GROUP: "offsets.topic.num.partitions",
}

_Response = TypeVar("_Response")


class _NotReadyError(Exception):
    """The cluster is not ready; the message is the reason."""


def obstacle(record: ClusterRecord, nodes: Sequence[NodeRecord], *, producers: bool = False) -> str | None:
    """Check once whether these nodes of the cluster work together: None if they do, else the first reason why they don't.

    With `producers`, each node must give out a producer id too, which uses up an id. A new broker returns
    COORDINATOR_LOAD_IN_PROGRESS for the first such request: only then does it request a block of ids from the controller.
    """
    plain = {node.node_id: node.ports[PLAINTEXT] for node in nodes}
    try:
        with _Nodes(plain, _REQUEST_TIMEOUT) as connections:
            for node_id in plain:
                _check_metadata(connections, node_id, record.cluster_id, plain.keys())
            for kind, name in _PARTITIONS.items():
                count = int(record.settings.config.get(name, COORDINATOR_PARTITIONS))
                _check_coordinators(connections, kind, count, plain.keys())
            for node_id in plain if producers else ():
                _check_producer_ids(connections, node_id)
    except _NotReadyError as reason:
        return str(reason)
    except (OSError, KafkaProtocolError) as error:
        return f"{type(error).__name__}: {error}"
    return None


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


def _check_metadata(nodes: _Nodes, node_id: int, cluster_id: str, expected: Collection[int]) -> None:
    metadata = nodes.send(node_id, MetadataRequest(topics=None, allow_auto_topic_creation=False))
    if metadata.cluster_id != cluster_id:
        raise _NotReadyError(f"port {nodes.ports[node_id]} is answered by another cluster, {metadata.cluster_id}")
    missing = set(expected) - {broker.node_id for broker in metadata.brokers}
    if missing:
        raise _NotReadyError(f"node {node_id} does not know node {min(missing)} yet")
    for topic in metadata.topics:
        for partition in topic.partitions:
            name = f"{topic.name}-{partition.partition_index}"
            if partition.leader_id not in expected:
                raise _NotReadyError(f"partition {name} has no leader among the running nodes")
            if behind := set(partition.replica_nodes) & set(expected) - set(partition.isr_nodes):
                raise _NotReadyError(f"node {min(behind)} is not in sync on partition {name}")


def _check_coordinators(nodes: _Nodes, kind: CoordinatorType, partitions: int, expected: Collection[int]) -> None:
    # keys whose last characters are consecutive hash to consecutive numbers, so they cover all partitions
    keys = ["dualwrite-ready-" + chr(ord("0") + number) for number in range(min(partitions, _MAX_KEYS))]
    request = FindCoordinatorRequest(key_type=kind, coordinator_keys=keys)
    by_node: dict[int, list[str]] = defaultdict(list)
    for found in nodes.send(next(iter(nodes.ports)), request).coordinators:
        if found.error_code in _DENIED:
            return
        if found.error_code != ErrorCode.NONE:
            raise _NotReadyError(f"no {kind.name.lower()} coordinator yet: {error_name(found.error_code)}")
        if found.node_id not in expected:
            raise _NotReadyError(f"the {kind.name.lower()} coordinator is still on node {found.node_id}, which is not running")
        by_node[found.node_id].append(found.key)
    for node_id, its_keys in by_node.items():
        if kind is CoordinatorType.TRANSACTION:
            states = nodes.send(node_id, DescribeTransactionsRequest(transactional_ids=its_keys)).transaction_states
            codes = [state.error_code for state in states]
        else:
            groups = nodes.send(node_id, DescribeGroupsRequest(groups=its_keys)).groups
            codes = [group.error_code for group in groups]
        for code in codes:
            if code not in _READY:
                raise _NotReadyError(f"the {kind.name.lower()} coordinator on node {node_id} returns {error_name(code)}")


def _check_producer_ids(nodes: _Nodes, node_id: int) -> None:
    request = InitProducerIdRequest(transactional_id=None, transaction_timeout_ms=60_000)
    code = nodes.send(node_id, request).error_code
    if code not in _READY:
        raise _NotReadyError(f"node {node_id} has no producer ids yet: {error_name(code)}")


class _Nodes:
    """One blocking connection to each node, opened on first use."""

    def __init__(self, ports: Mapping[int, int], timeout: float) -> None:
        self.ports = ports
        self._timeout = timeout
        self._open: dict[int, tuple[socket.socket, Framing]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for connection, _framing in self._open.values():
            connection.close()

    def send(self, node_id: int, request: Request[_Response]) -> _Response:
        """Send one request to a node, in a version that all brokers have, and return its response."""
        if node_id not in self._open:
            connection = socket.create_connection((LOOPBACK, self.ports[node_id]), timeout=self._timeout)
            self._open[node_id] = connection, Framing("dualwrite-devcluster")
        connection, framing = self._open[node_id]
        connection.sendall(framing.request(request, request.OLDEST if request.version is None else request.version)[1])
        while True:
            data = connection.recv(65536)
            if not data:
                raise ConnectionResetError(f"node {node_id} closed the connection")
            for _, response in framing.responses(data):
                found: _Response = response
                return found
