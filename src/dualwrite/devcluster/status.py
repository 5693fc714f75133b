"""The state of a cluster at one moment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


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
    """One cluster. `ready` means that all of its nodes run and answer, coordinators included."""

    name: str
    kafka_version: str
    data_dir: Path
    bootstrap_servers: str
    """The plain listeners, in the form of `bootstrap.servers`."""
    listeners: Mapping[str, str]
    """Bootstrap servers by listener: `PLAINTEXT`, and `SASL_PLAINTEXT`, `SSL`, `SASL_SSL` if they exist."""
    nodes: tuple[NodeStatus, ...]
    ready: bool

    @property
    def running(self) -> bool:
        """Whether any node runs."""
        return any(node.alive for node in self.nodes)

    def to_json(self) -> dict[str, Any]:
        """As JSON values, for `status --json`."""
        data = asdict(self) | {"data_dir": str(self.data_dir), "running": self.running}
        data["nodes"] = [asdict(node) | {"log_file": str(node.log_file)} for node in self.nodes]
        return data
