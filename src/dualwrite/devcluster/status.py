"""The state of a cluster at one moment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dualwrite.devcluster.node import ClusterFiles
from dualwrite.devcluster.record import PLAINTEXT, ClusterRecord


@dataclass(frozen=True)
class NodeStatus:
    """One node."""

    node_id: int
    port: int
    """Port of its plain listener."""
    pid: int | None
    """Process id of its latest process; None if it was never started."""
    alive: bool
    paused: bool
    log_file: Path


@dataclass(frozen=True)
class ClusterStatus:
    """One cluster. `ready` means that all of its nodes, including the coordinators, are running and respond."""

    name: str
    kafka_version: str
    data_dir: Path
    bootstrap_servers: str
    """The plain listeners, in the form of `bootstrap.servers`."""
    listeners: Mapping[str, str]
    """Bootstrap servers by listener: `PLAINTEXT`, and `SASL_PLAINTEXT`, `SSL`, `SASL_SSL`, `PROXIED` if they exist."""
    nodes: tuple[NodeStatus, ...]
    ready: bool

    @property
    def running(self) -> bool:
        """Whether any node is running."""
        return any(node.alive for node in self.nodes)

    def to_json(self) -> dict[str, Any]:
        """As JSON values, for `status --json`."""
        data = asdict(self) | {"data_dir": str(self.data_dir), "running": self.running}
        data["nodes"] = [asdict(node) | {"log_file": str(node.log_file)} for node in self.nodes]
        return data


def status_of(record: ClusterRecord, files: ClusterFiles, *, ready: bool) -> ClusterStatus:
    """The current state of a cluster, from its record and its processes.

    Args:
        record: The cluster.
        files: Its files.
        ready: Whether its nodes were found to work together.
    """
    return ClusterStatus(
        name=record.name,
        kafka_version=record.settings.kafka_version,
        data_dir=files.data_dir,
        bootstrap_servers=record.bootstrap_servers(PLAINTEXT),
        listeners=record.listeners,
        nodes=tuple(
            NodeStatus(
                node_id=node.node_id,
                port=node.ports[PLAINTEXT],
                pid=node.process.pid if node.process else None,
                alive=node.alive,
                paused=node.process.paused if node.process else False,
                log_file=files.log_file(node.node_id),
            )
            for node in record.nodes
        ),
        ready=ready,
    )
