"""Waits until the nodes of a cluster work together, or reports why they don't."""

from __future__ import annotations

import time
from collections.abc import Sequence

from dualwrite.devcluster.errors import DevClusterError
from dualwrite.devcluster.node import ClusterFiles
from dualwrite.devcluster.probe import why_not_ready
from dualwrite.devcluster.properties import COORDINATOR_PARTITIONS
from dualwrite.devcluster.record import PLAINTEXT, ClusterRecord, NodeRecord
from dualwrite.kafka.client.cluster import CoordinatorType

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
