"""Checks whether brokers are ready. An open port proves nothing; a response from the right coordinator does.

A new broker returns COORDINATOR_NOT_AVAILABLE and COORDINATOR_LOAD_IN_PROGRESS for a while, and NOT_COORDINATOR forever until
the first FindCoordinator has created `__transaction_state`. So a probe requests the metadata from every node, finds the
coordinator of each partition of `__transaction_state` and `__consumer_offsets` (which creates these topics), and requests the
description of an unused id from each coordinator: it can return "unknown" only after it has loaded its partition.
"""

from __future__ import annotations

import socket
from collections import defaultdict
from collections.abc import Collection, Mapping
from typing import Any, Self

from kafka.errors import KafkaError, for_code
from kafka.protocol.admin import DescribeGroupsRequest, DescribeTransactionsRequest
from kafka.protocol.metadata import CoordinatorType, FindCoordinatorRequest, MetadataRequest
from kafka.protocol.parser import KafkaProtocol
from kafka.protocol.producer.transaction import InitProducerIdRequest

from dualwrite.devcluster.ports import LOOPBACK

_NONE = 0
_TRANSACTIONAL_ID_NOT_FOUND = 105
_DENIED = frozenset({29, 30, 31, 53})  # an authorizer rejects the unknown client: the broker is up
_READY = _DENIED | {_NONE, _TRANSACTIONAL_ID_NOT_FOUND}

_MAX_KEYS = 64


class _NotReadyError(Exception):
    """The cluster is not ready; the message is the reason."""


def why_not_ready(
    ports: Mapping[int, int], *, cluster_id: str, partitions: Mapping[CoordinatorType, int], producers: bool, timeout: float
) -> str | None:
    """Check once whether these nodes work together: None if they do, else the first reason why they don't.

    Args:
        ports: Plain port by node id, of the nodes that are expected to work.
        cluster_id: The id of their cluster: brokers of another cluster, with the same node ids, may have taken the ports.
        partitions: How many partitions the topic of each kind of coordinator has.
        producers: Whether to request a producer id from each node too. A new broker returns COORDINATOR_LOAD_IN_PROGRESS for
            the first such request, since only then does it request a block of ids from the controller. Each check uses up an
            id.
        timeout: Seconds for each response.
    """
    try:
        with _Nodes(ports, timeout) as nodes:
            for node_id in ports:
                _check_metadata(nodes, node_id, cluster_id, ports.keys())
            for kind, count in partitions.items():
                _check_coordinators(nodes, kind, count, ports.keys())
            for node_id in ports if producers else ():
                _check_producer_ids(nodes, node_id)
    except _NotReadyError as reason:
        return str(reason)
    except (OSError, KafkaError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def _check_metadata(nodes: _Nodes, node_id: int, cluster_id: str, expected: Collection[int]) -> None:
    metadata = nodes.send(node_id, MetadataRequest(version=9, topics=None, allow_auto_topic_creation=False))
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
    request = FindCoordinatorRequest(version=4, key_type=int(kind), coordinator_keys=keys)
    by_node: dict[int, list[str]] = defaultdict(list)
    for found in nodes.send(next(iter(nodes.ports)), request).coordinators:
        if found.error_code in _DENIED:
            return
        if found.error_code != _NONE:
            raise _NotReadyError(f"no {kind.name.lower()} coordinator yet: {_name(found.error_code)}")
        if found.node_id not in expected:
            raise _NotReadyError(f"the {kind.name.lower()} coordinator is still on node {found.node_id}, which is not running")
        by_node[found.node_id].append(found.key)
    for node_id, its_keys in by_node.items():
        if kind is CoordinatorType.TRANSACTION:
            described = nodes.send(node_id, DescribeTransactionsRequest(version=0, transactional_ids=its_keys))
            codes = [state.error_code for state in described.transaction_states]
        else:
            described = nodes.send(node_id, DescribeGroupsRequest(version=5, groups=its_keys))
            codes = [group.error_code for group in described.groups]
        for code in codes:
            if code not in _READY:
                raise _NotReadyError(f"the {kind.name.lower()} coordinator on node {node_id} returns {_name(code)}")


def _check_producer_ids(nodes: _Nodes, node_id: int) -> None:
    request = InitProducerIdRequest(
        version=4, transactional_id=None, transaction_timeout_ms=60_000, producer_id=-1, producer_epoch=-1
    )
    code = nodes.send(node_id, request).error_code
    if code not in _READY:
        raise _NotReadyError(f"node {node_id} has no producer ids yet: {_name(code)}")


def _name(code: int) -> str:
    return str(getattr(for_code(code), "message", code))


class _Nodes:
    """One blocking connection to each node, opened on first use."""

    def __init__(self, ports: Mapping[int, int], timeout: float) -> None:
        self.ports = ports
        self._timeout = timeout
        self._open: dict[int, tuple[socket.socket, KafkaProtocol]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for connection, _protocol in self._open.values():
            connection.close()

    def send(self, node_id: int, request: Any) -> Any:
        """Send one request to a node and return its response."""
        if node_id not in self._open:
            connection = socket.create_connection((LOOPBACK, self.ports[node_id]), timeout=self._timeout)
            self._open[node_id] = connection, KafkaProtocol(client_id="dualwrite-devcluster")
        connection, protocol = self._open[node_id]
        protocol.send_request(request)
        connection.sendall(protocol.send_bytes())
        while True:
            data = connection.recv(65536)
            if not data:
                raise ConnectionResetError(f"node {node_id} closed the connection")
            if responses := protocol.receive_bytes(data):
                return responses[0][1]
