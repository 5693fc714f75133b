"""Starts the brokers of a cluster, and records their processes."""

from __future__ import annotations

import socket
import time
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Self, TypeVar

from dualwrite.devcluster import broker_process, ports
from dualwrite.devcluster.broker_process import Launcher
from dualwrite.devcluster.locations import DevClusterError
from dualwrite.devcluster.node import COORDINATOR_PARTITIONS, ClusterFiles, JavaCommand
from dualwrite.devcluster.ports import LOOPBACK
from dualwrite.devcluster.progress import Progress
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

_Response = TypeVar("_Response")


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
    except (OSError, KafkaProtocolError) as error:
        return f"{type(error).__name__}: {error}"
    return None


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


_POLL = 0.05
_REQUEST_TIMEOUT = 2.0
"""Seconds for one request to a broker."""

_PARTITIONS = {
    CoordinatorType.TRANSACTION: "transaction.state.log.num.partitions",
    CoordinatorType.GROUP: "offsets.topic.num.partitions",
}


def obstacle(record: ClusterRecord, nodes: Sequence[NodeRecord], *, producers: bool = False) -> str | None:
    """Check once: None if these nodes work together, else the first reason why they don't.

    Args:
        record: The cluster.
        nodes: The nodes of it that should work.
        producers: Whether to request a producer id from each node too, which uses up an id.
    """
    partitions = {kind: int(record.settings.config.get(name, COORDINATOR_PARTITIONS)) for kind, name in _PARTITIONS.items()}
    plain = {node.node_id: node.ports[PLAINTEXT] for node in nodes}
    return why_not_ready(
        plain, cluster_id=record.cluster_id, partitions=partitions, producers=producers, timeout=_REQUEST_TIMEOUT
    )


def wait(record: ClusterRecord, nodes: Sequence[NodeRecord], files: ClusterFiles, *, timeout: float) -> None:
    """Wait until these nodes work together.

    Args:
        record: The cluster.
        nodes: The nodes of it that should work, all of them started.
        files: The cluster's files, for the logs.
        timeout: Seconds to wait.

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


def require_ports(record: ClusterRecord, nodes: Sequence[NodeRecord]) -> None:
    """Check that the nodes can listen on their ports.

    Raises:
        DevClusterError: A port is in use.
    """
    for node in nodes:
        for port in node.ports.values():
            ports.require_free(port, cluster=record.name, node_id=node.node_id)


class Starter:
    """Starts brokers of one cluster.

    Args:
        files: The cluster's files.
        launcher: Starts the processes.
        progress: Receives the steps.
    """

    def __init__(self, files: ClusterFiles, launcher: Launcher, progress: Progress) -> None:
        self._files = files
        self._launcher = launcher
        self._progress = progress

    def start_together(
        self,
        record: ClusterRecord,
        missing: Sequence[NodeRecord],
        java: JavaCommand,
        *,
        before: ClusterRecord | None,
        timeout: float,
    ) -> None:
        """Start the missing nodes, and wait until all running nodes work together; format the storage first if necessary.

        If this fails, the nodes are stopped, and the old settings are restored, so that the next start does not use the new
        ones.

        Args:
            record: The cluster.
            missing: Its nodes that are not running.
            java: The command that runs a broker.
            before: The cluster's record with its old settings, if there is one.
            timeout: Seconds for the brokers to become ready.

        Raises:
            BrokerExitedError: A broker exited instead of becoming ready, or the storage could not be formatted.
            DevClusterError: The timeout has passed.
        """
        try:
            self._start(record, missing, java, timeout)
            if java.archive is not None:
                for node in missing:
                    java.archive.make(self._files.class_list(node.node_id), self._progress)
        except BaseException:
            broker_process.stop([node.process for node in missing if node.process], grace=0)
            self._restore(record, before)
            raise

    def launch(self, record: ClusterRecord, node: NodeRecord, java: JavaCommand) -> None:
        """Start the broker of one node, without waiting for it."""
        with broker_process.delayed():
            node.process = self._files.start(self._launcher, java, node)
            record.save(self._files.data_dir)

    def _start(self, record: ClusterRecord, missing: Sequence[NodeRecord], java: JavaCommand, timeout: float) -> None:
        if len(missing) == len(record.nodes):
            self._files.write(record)
        if not record.formatted:
            self._progress.step(f"Formatting the storage of {record.name}")
            self._files.format(record, java)
            record.formatted = True
        self._progress.step(f"Starting Kafka {record.settings.kafka_version}")
        for node in missing:
            self.launch(record, node, java)
        wait(record, [node for node in record.nodes if node in missing or node.working], self._files, timeout=timeout)

    def _restore(self, record: ClusterRecord, before: ClusterRecord | None) -> None:
        if before is not None and before.formatted:
            before.save(self._files.data_dir)
        else:
            record.formatted = False
            record.save(self._files.data_dir)
