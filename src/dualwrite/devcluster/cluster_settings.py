"""The settings of a cluster, apart from its name and directory, and those of its listeners with TLS and SASL."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from dualwrite.devcluster.locations import HIGHEST_PORT, DevClusterError
from dualwrite.devcluster.programs import DEFAULT_KAFKA_VERSION, check_version

SIZES = (1, 3)

PROXIED = "PROXIED"
"""Name of the listener of every node for clients that connect through a proxy."""

_PLAIN = "org.apache.kafka.common.security.plain.PlainLoginModule"
_SCRAM = "org.apache.kafka.common.security.scram.ScramLoginModule"
_SCRAM_MECHANISMS = ("SCRAM-SHA-256", "SCRAM-SHA-512")

STARTS_FAST = (
    "-Xmx512m",
    "-XX:+UseSerialGC",  # fastest start and least memory for a small heap on few cores
    "-XX:TieredStopAtLevel=1",  # a development broker does not run long enough for the optimizing compiler to pay off
)
SERVER_JAVA_OPTIONS = (
    "-server",
    "-Xms1g",
    "-Xmx1g",
    "-XX:+UseG1GC",
    "-XX:MaxGCPauseMillis=20",
    "-XX:InitiatingHeapOccupancyPercent=35",
    "-XX:+ExplicitGCInvokesConcurrent",
)
"""The JVM options of Kafka's own start scripts (`kafka-server-start.sh`, `kafka-run-class.sh`): for measuring."""

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
        "log.dir",
        "log.dirs",
        "metadata.log.dir",
    }
)
"""Properties that dualwrite sets itself; with other values the cluster would not work."""


@dataclass(frozen=True)
class TlsFiles:
    """The broker's certificate, as PEM files; it must be valid for `127.0.0.1`.

    Args:
        ca: The authority's certificate: clients trust it, and brokers trust client certificates that it signed.
        certificate: The broker's certificate, followed by intermediate ones if there are any.
        key: Its private key in PKCS#8 (`BEGIN PRIVATE KEY`), not encrypted; Kafka reads no other format.
    """

    ca: Path
    certificate: Path
    key: Path

    def check(self) -> None:
        """Check the files, before a broker fails because of them.

        Raises:
            DevClusterError: A file is missing, or the key is not PKCS#8.
        """
        for path in (self.ca, self.certificate, self.key):
            if not path.is_file():
                raise DevClusterError(f"The TLS file {path} does not exist.", next_step="create it, or correct its path")
        if "-----BEGIN PRIVATE KEY-----" not in self.key.read_text(encoding="ascii", errors="replace"):
            raise DevClusterError(
                f"The private key {self.key} is not in PKCS#8 format, the only one that Kafka reads.",
                next_step=f"convert it: openssl pkcs8 -topk8 -nocrypt -in {self.key} -out key.pem",
            )


@dataclass(frozen=True)
class Security:
    """What the additional listeners require from a client.

    Each node gets `SASL_PLAINTEXT` (PLAIN, SCRAM-SHA-256, SCRAM-SHA-512) if there are users; `SSL`, and with users
    `SASL_SSL`, if there are TLS files. A client certificate is optional; if a client sends one, it is verified.

    Args:
        users: Name to password.
        tls: The broker's certificate.
    """

    users: Mapping[str, str] = field(default_factory=dict)
    tls: TlsFiles | None = None

    def __post_init__(self) -> None:
        for text in (*self.users.keys(), *self.users.values()):
            if not text or any(character in text for character in '"\\,[]=;\n'):
                raise DevClusterError(
                    'A user name or password is empty, or contains a line break or one of the characters " \\ , [ ] = ;',
                    next_step="choose a simpler one: this is a cluster for development",
                )

    @property
    def listeners(self) -> tuple[str, ...]:
        """Names of the additional listeners; each name is also its protocol."""
        sasl = ("SASL_PLAINTEXT",) if self.users else ()
        tls = ("SSL",) if self.tls else ()
        both = ("SASL_SSL",) if self.users and self.tls else ()
        return (*sasl, *tls, *both)

    @property
    def scram_arguments(self) -> list[str]:
        """Arguments for `kafka-storage format` that create the SCRAM credentials."""
        return [
            argument
            for name, password in self.users.items()
            for mechanism in _SCRAM_MECHANISMS
            for argument in ("--add-scram", f"{mechanism}=[name={name},password={password}]")
        ]

    def properties(self, keystore: Path) -> dict[str, str]:
        """Broker properties of the additional listeners, with the file that `write_keystore` writes."""
        properties: dict[str, str] = {}
        if self.users:
            properties["sasl.enabled.mechanisms"] = ",".join(("PLAIN", *_SCRAM_MECHANISMS))
            accounts = " ".join(f'user_{name}="{password}"' for name, password in self.users.items())
            for listener in ("sasl_plaintext", "sasl_ssl") if self.tls else ("sasl_plaintext",):
                prefix = f"listener.name.{listener}"
                properties[f"{prefix}.plain.sasl.jaas.config"] = f"{_PLAIN} required {accounts};"
                for mechanism in _SCRAM_MECHANISMS:
                    properties[f"{prefix}.{mechanism.lower()}.sasl.jaas.config"] = f"{_SCRAM} required;"
        if self.tls:
            properties |= {
                "ssl.keystore.type": "PEM",
                "ssl.keystore.location": str(keystore),
                "ssl.truststore.type": "PEM",
                "ssl.truststore.location": str(self.tls.ca.absolute()),
                "ssl.client.auth": "requested",
            }
        return properties

    def write_keystore(self, keystore: Path) -> None:
        """Write key and certificate into the one file that Kafka expects, readable by its owner only."""
        if self.tls is None:
            return
        self.tls.check()
        keystore.touch(mode=0o600)
        keystore.write_text(f"{self.tls.key.read_text('ascii')}\n{self.tls.certificate.read_text('ascii')}", "ascii")


@dataclass(frozen=True, kw_only=True)
class ClusterSettings:
    """Settings of a cluster; see `DevCluster` for what each means."""

    nodes: int = 1
    kafka_version: str = DEFAULT_KAFKA_VERSION
    config: Mapping[str, str] = field(default_factory=dict)
    features: Mapping[str, str] = field(default_factory=dict)
    security: Security | None = None
    java_options: tuple[str, ...] = STARTS_FAST
    proxy_port: int | None = None

    def __post_init__(self) -> None:
        if self.nodes not in SIZES:
            raise DevClusterError(f"A cluster has 1 or 3 nodes, not {self.nodes}.")
        check_version(self.kafka_version)
        object.__setattr__(self, "java_options", tuple(self.java_options))  # callers and JSON may have a list
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
        highest = HIGHEST_PORT - self.nodes + 1
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

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Restore from the cluster's record."""
        security = data["security"]
        if security is not None:
            tls = security["tls"] and TlsFiles(**{name: Path(path) for name, path in security["tls"].items()})
            security = Security(security["users"], tls)
        return cls(**{**data, "security": security})


def _users(security: Security | None) -> Mapping[str, str]:
    return security.users if security else {}


def _number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.partition("-")[0].split("."))
