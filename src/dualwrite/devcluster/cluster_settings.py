"""The settings of a cluster, apart from its name and directory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from dualwrite.devcluster.locations import DevClusterError
from dualwrite.devcluster.ports import HIGHEST
from dualwrite.devcluster.programs import DEFAULT_KAFKA_VERSION, check_version
from dualwrite.devcluster.security import Security

SIZES = (1, 3)

PROXIED = "PROXIED"
"""Name of the listener of every node for clients that connect through a proxy."""

_OURS = frozenset(
    {
        "process.roles",
        "node.id",
        "broker.id",
        "controller.quorum.voters",
        "controller.quorum.bootstrap.servers",
        "controller.listener.names",
        "listeners",
        "advertised.listeners",
        "listener.security.protocol.map",
        "inter.broker.listener.name",
        "log.dir",
        "log.dirs",
        "metadata.log.dir",
    }
)
"""Properties that dualwrite sets itself; with other values the cluster would not work."""


@dataclass(frozen=True, kw_only=True)
class ClusterSettings:
    """Settings of a cluster; see `DevCluster` for what each means."""

    nodes: int = 1
    kafka_version: str = DEFAULT_KAFKA_VERSION
    config: Mapping[str, str] = field(default_factory=dict)
    features: Mapping[str, str] = field(default_factory=dict)
    security: Security | None = None
    java_options: tuple[str, ...] | None = None
    proxy_port: int | None = None

    def __post_init__(self) -> None:
        if self.nodes not in SIZES:
            raise DevClusterError(f"A cluster has 1 or 3 nodes, not {self.nodes}.")
        check_version(self.kafka_version)
        if self.proxy_port is not None:
            self.check_port(self.proxy_port, what="first proxy's port")
        if refused := sorted(_OURS & set(self.config)):
            raise DevClusterError(
                f"The property {refused[0]} can't be set.",
                cause="dualwrite sets it itself, so that the nodes find each other and their files",
                next_step="omit it",
            )
        if any(not key or "\n" in f"{key}{value}" for key, value in self.config.items()):
            raise DevClusterError("A broker property has no name, or contains a line break.", next_step="correct it")

    @property
    def listeners(self) -> tuple[str, ...]:
        """Names of the listeners that every node has in addition to the plain one and the controllers'."""
        return (*(self.security.listeners if self.security else ()), *((PROXIED,) if self.proxy_port is not None else ()))

    def check_port(self, port: int, *, what: str = "first node's port") -> None:
        """Raise DevClusterError if this port and those after it, one for each node, don't all exist."""
        highest = HIGHEST - self.nodes + 1
        if not 1 <= port <= highest:
            raise DevClusterError(
                f"The {what} can't be {port}.", next_step=f"choose one from 1 to {highest}, or none", port=port
            )

    def differences(self, other: Self) -> list[str]:
        """The differences, as text such as `nodes: 1, not 3`."""
        found = []
        for name in ("nodes", "kafka_version", "config", "features", "java_options", "proxy_port"):
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs:
                found.append(f"{name}: {mine}, not {theirs}")
        if self.security != other.security:
            found.append("security (users or TLS files)")
        return found

    def obstacles(self, other: Self) -> list[str]:
        """The settings of `other` that are impossible with storage formatted with these settings, as text."""
        found = [text for text in self.differences(other) if text.startswith(("nodes", "features"))]
        if _users(self.security) != _users(other.security):
            found.append("security (users)")
        if _number(other.kafka_version) < _number(self.kafka_version):
            found.append(f"kafka_version: {self.kafka_version} can't be downgraded to {other.kafka_version}")
        return found

    def to_json(self) -> dict[str, Any]:
        """As JSON values for the cluster's record."""
        return {**vars(self), "security": self.security and self.security.to_json()}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Restore from the cluster's record."""
        security = Security.from_json(data["security"]) if data["security"] else None
        options = data["java_options"]
        return cls(**{**data, "security": security, "java_options": None if options is None else tuple(options)})


def _users(security: Security | None) -> Mapping[str, str]:
    return security.users if security else {}


def _number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.partition("-")[0].split("."))
