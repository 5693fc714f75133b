"""The `server.properties` of a node, and the logging configuration; no I/O."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from dualwrite.devcluster.ports import LOOPBACK
from dualwrite.devcluster.record import CONTROLLER, PLAINTEXT, NodeRecord
from dualwrite.devcluster.settings import PROXIED, ClusterSettings

COORDINATOR_PARTITIONS = 4
"""Partitions of each coordinator's topic: few, since each one costs files and time at startup."""

LOG4J2 = """\
# written by dualwrite; a broker's console output goes to its log file
status = error
appender.console.type = Console
appender.console.name = console
appender.console.layout.type = PatternLayout
appender.console.layout.pattern = %d{ISO8601} %-5p [%t] %c{1}: %m%n
rootLogger.level = info
rootLogger.appenderRef.console.ref = console
# these log hundreds of lines of settings at startup
logger.config.name = org.apache.kafka.common.config.AbstractConfig
logger.config.level = warn
logger.kafkaconfig.name = kafka.server.KafkaConfig
logger.kafkaconfig.level = warn
"""


def server_properties(
    settings: ClusterSettings, nodes: Sequence[NodeRecord], node: NodeRecord, *, storage: Path, keystore: Path
) -> dict[str, str]:
    """The properties of one node; those that the user has set override the others.

    Args:
        settings: The cluster's settings.
        nodes: All nodes of the cluster.
        node: The node that the properties are for.
        storage: Its directory for logs and metadata.
        keystore: Its PEM key store, used if the security settings have TLS files.
    """
    replicas = min(3, settings.nodes)
    in_sync = 2 if replicas > 1 else 1  # one of three may be down
    names = (PLAINTEXT, *settings.listeners)
    advertised = dict(node.ports)
    if settings.proxy_port is not None:
        advertised[PROXIED] = settings.proxy_port + node.node_id - 1
    own = {
        "process.roles": "broker,controller",
        "node.id": str(node.node_id),
        "controller.quorum.voters": ",".join(f"{each.node_id}@{LOOPBACK}:{each.ports[CONTROLLER]}" for each in nodes),
        "controller.listener.names": CONTROLLER,
        "listeners": _addresses((*names, CONTROLLER), node.ports),
        "advertised.listeners": _addresses(names, advertised),
        "listener.security.protocol.map": ",".join(
            [f"{CONTROLLER}:PLAINTEXT", *(f"{name}:{PLAINTEXT if name == PROXIED else name}" for name in names)]
        ),
        "inter.broker.listener.name": PLAINTEXT,
        "log.dirs": str(storage),
        # two-phase commit (KIP-939); it needs InitProducerId v6, which is still an unstable version
        "transaction.two.phase.commit.enable": "true",
        "unstable.api.versions.enable": "true",
        # a killed broker can rejoin after 2 s, not after the default session of 9 s
        "broker.session.timeout.ms": "2000",
        "broker.heartbeat.interval.ms": "500",
        # an idle node would write to its metadata log every half a second, a third of the CPU time that it takes
        "metadata.max.idle.interval.ms": "0",
        "group.initial.rebalance.delay.ms": "0",
        "offsets.topic.num.partitions": str(COORDINATOR_PARTITIONS),
        "transaction.state.log.num.partitions": str(COORDINATOR_PARTITIONS),
        "share.coordinator.state.topic.num.partitions": str(COORDINATOR_PARTITIONS),
        "default.replication.factor": str(replicas),
        "offsets.topic.replication.factor": str(replicas),
        "transaction.state.log.replication.factor": str(replicas),
        "share.coordinator.state.topic.replication.factor": str(replicas),
        "min.insync.replicas": str(in_sync),
        "transaction.state.log.min.isr": str(in_sync),
        "share.coordinator.state.topic.min.isr": str(in_sync),
        # the default is 128 MB of heap, allocated at startup
        "log.cleaner.dedupe.buffer.size": "16777216",
        "num.network.threads": "2",
        "num.io.threads": "4",
    }
    secured = settings.security.properties(keystore) if settings.security else {}
    return own | secured | dict(settings.config)


def _addresses(names: Iterable[str], ports: Mapping[str, int]) -> str:
    return ",".join(f"{name}://{LOOPBACK}:{ports[name]}" for name in names)


def render(properties: Mapping[str, str]) -> str:
    """The text of a Java properties file, in ASCII: Java reads it as Latin-1, with escapes for other characters."""
    lines = (f"{_escape(key, also=' =:#!')}={_escape(value)}" for key, value in properties.items())
    return "# written by dualwrite at each start; changes are lost\n" + "\n".join(lines) + "\n"


def _escape(text: str, *, also: str = "") -> str:
    out = ["\\"] if text.startswith(" ") and " " not in also else []  # Java skips leading blanks of a value
    for unit in memoryview(text.encode("utf-16-le")).cast("H"):  # Java's UTF-16 code units
        character = chr(unit)
        if character == "\\" or character in also:
            out.append(f"\\{character}")
        elif " " <= character <= "~":
            out.append(character)
        else:
            out.append(f"\\u{unit:04x}")
    return "".join(out)
