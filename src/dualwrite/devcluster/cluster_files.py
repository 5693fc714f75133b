"""The files of a cluster, and the start of its brokers with them: properties, formatted storage, Java command, logs."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from dualwrite.devcluster.broker_process import BrokerProcess, Launcher
from dualwrite.devcluster.cluster_settings import PROXIED, SIZES, ClusterSettings
from dualwrite.devcluster.locations import LOOPBACK, BrokerExitedError, DevClusterError
from dualwrite.devcluster.programs import ClassArchive, classpath, find_java
from dualwrite.devcluster.progress import ClusterProgress
from dualwrite.devcluster.registry import CONTROLLER, PLAINTEXT, ClusterRecord, NodeRecord, new_id

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


_META = "meta.properties"
_FORMAT_TIMEOUT = 120.0
_POLL = 0.2
_LOGGING = "log4j2.properties"
_TAIL = 12
_ESCAPED = r"\\\g<0>"
_START_MARK = "--- started by dualwrite at"

_HEADLESS = ("-Xshare:auto", "-Djava.awt.headless=true")


@dataclass(frozen=True)
class JavaCommand:
    """The start of a command line that runs a broker's Java."""

    words: tuple[str | Path, ...]
    """Java with its options and class path; the main class follows."""
    archive: ClassArchive | None
    """The class-data archive to create from the broker's classes; None to create none."""


class ClusterFiles:
    """The files of one cluster, in its data directory: their paths and their content."""

    def __init__(self, data_dir: Path) -> None:
        self.data_dir = data_dir

    def node(self, node_id: int) -> Path:
        """Directory of a node."""
        return self.data_dir / f"node-{node_id}"

    def log_file(self, node_id: int) -> Path:
        """The output of the node's broker, of all its runs."""
        return self.node(node_id) / "broker.log"

    def properties(self, node_id: int) -> Path:
        """The node's `server.properties`."""
        return self.node(node_id) / "server.properties"

    def storage(self, node_id: int) -> Path:
        """The node's partitions and metadata."""
        return self.node(node_id) / "storage"

    def write(self, record: ClusterRecord) -> None:
        """Write the files that the brokers read at startup."""
        (self.data_dir / _LOGGING).write_text(LOG4J2, encoding="ascii")
        for node in record.nodes:
            directory = self.node(node.node_id)
            directory.mkdir(parents=True, exist_ok=True)
            keystore = directory / "keystore.pem"
            if record.settings.security:
                record.settings.security.write_keystore(keystore)
            values = server_properties(
                record.settings, record.nodes, node, storage=self.storage(node.node_id), keystore=keystore
            )
            properties = self.properties(node.node_id)
            properties.touch(mode=0o600)
            properties.write_text(render(values), encoding="ascii")

    def format(self, record: ClusterRecord, java: JavaCommand) -> None:
        """Format the storage of all nodes, with feature levels and SCRAM users; what a failed attempt left is removed.

        The other nodes get copies of the first one's storage: this saves a JVM per node, and gives all the same credentials.

        Raises:
            BrokerExitedError: Kafka refused, most often because of a property; the message has the end of its output.
            DevClusterError: Formatting took too long.
        """
        first, *others = (node.node_id for node in record.nodes)
        settings = record.settings
        shutil.rmtree(self.storage(first), ignore_errors=True)
        features = [argument for name, level in settings.features.items() for argument in ("--feature", f"{name}={level}")]
        command = [
            *java.words,
            "kafka.tools.StorageTool",
            "format",
            f"--cluster-id={record.cluster_id}",
            f"--config={self.properties(first)}",
            *features,
            *(settings.security.scram_arguments if settings.security else []),
        ]
        try:
            done = subprocess.run(  # noqa: S603  (dualwrite's own command)
                command, capture_output=True, text=True, errors="replace", timeout=_FORMAT_TIMEOUT, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise DevClusterError(
                f"Formatting the storage took longer than {_FORMAT_TIMEOUT:g} s.",
                cause="the machine or its disk is very busy, or Java hangs",
                next_step="try again",
            ) from error
        if done.returncode != 0:
            lines = [line for line in (done.stdout + done.stderr).splitlines() if not re.match(r"\s+at |\S+ INFO", line)]
            tail = "\n".join(lines[-8:])
            raise BrokerExitedError(
                f"Kafka {settings.kafka_version} refused to format the storage.\n{tail}\n",
                next_step="correct the property, feature or user that Kafka reports",
                log_file=None,
                log_tail=tail,
            )
        for node_id in others:
            shutil.rmtree(self.storage(node_id), ignore_errors=True)
            shutil.copytree(self.storage(first), self.storage(node_id))
            meta = self.storage(node_id) / _META
            text = re.sub(r"(?m)^node\.id=.*$", f"node.id={node_id}", meta.read_text(encoding="ascii"))
            meta.write_text(re.sub(r"(?m)^directory\.id=.*$", f"directory.id={new_id()}", text), encoding="ascii")

    def java_command(self, settings: ClusterSettings, progress: ClusterProgress, *, makes_archive: bool = False) -> JavaCommand:
        """Java with its options and class path. Downloads what is missing."""
        java = find_java()
        jars = classpath(settings.kafka_version, progress)
        options = [*settings.java_options, *_HEADLESS, "-cp", ":".join(map(str, jars))]
        archive = ClassArchive(java, options)
        logging = f"-Dlog4j2.configurationFile={self.data_dir / _LOGGING}"
        return JavaCommand((java.executable, *options, *archive.read_options, logging), archive if makes_archive else None)

    def class_list(self, node_id: int) -> Path:
        """The file to which a broker writes its classes, if it starts without a class-data archive."""
        return self.node(node_id) / "classes"

    def start(self, launcher: Launcher, java: JavaCommand, node: NodeRecord) -> BrokerProcess:
        """Start the node's broker."""
        with self.log_file(node.node_id).open("a", encoding="utf-8") as log:
            log.write(f"{_START_MARK} {datetime.now(UTC).isoformat(timespec='seconds')}\n")
        listing = java.archive.list_options(self.class_list(node.node_id)) if java.archive else []
        command = [*java.words, *listing, "kafka.Kafka", self.properties(node.node_id)]
        return launcher.start(command, log_file=self.log_file(node.node_id), directory=self.node(node.node_id))

    def exit_error(self, cluster: str, node_id: int) -> BrokerExitedError:
        """The error for a broker that exited, with the last messages of its log, without stack frames."""
        this_run = tail(self.log_file(node_id), None).rpartition(_START_MARK)[2]
        lines = [line for line in this_run.splitlines()[1:] if not line.startswith(("\tat ", "\t..."))]
        errors = [line for line in lines if " ERROR " in line or " FATAL " in line or "Exception" in line]
        last_lines = "\n".join(dict.fromkeys((errors or lines)[-_TAIL:]))
        log_file = self.log_file(node_id)
        return BrokerExitedError(
            f"The broker of node {node_id} of cluster {cluster!r} exited. The end of its log:\n{last_lines}\n",
            next_step=f"see the whole log {log_file}",
            cluster=cluster,
            node_id=node_id,
            log_file=log_file,
            log_tail=last_lines,
        )

    def purge(self, record: ClusterRecord | None) -> None:
        """Remove everything that belongs to the cluster, and the data directory if that leaves it empty.

        Without a record nothing in it belongs to the cluster, such as in a directory that `check_owner` refuses.
        """
        if record is not None:
            for node_id in range(1, max(SIZES) + 1):  # a start that failed may have created more nodes than the record has
                shutil.rmtree(self.node(node_id), ignore_errors=True)
            (self.data_dir / _LOGGING).unlink(missing_ok=True)
            ClusterRecord.remove(self.data_dir)
        with suppress(OSError):
            self.data_dir.rmdir()

    def check_owner(self, name: str) -> None:
        """Check that the cluster may use the data directory.

        Raises:
            DevClusterError: It belongs to another cluster, or contains something else.
        """
        if "," in str(self.data_dir):
            raise DevClusterError(
                f"The path {self.data_dir} contains a comma.",
                cause="Kafka splits lists of directories at commas",
                next_step="choose another directory",
            )
        owner = ClusterRecord.load(self.data_dir)
        if owner is not None and owner.name != name:
            state = "is running" if owner.running else "is stopped"
            raise DevClusterError(
                f"The data directory {self.data_dir} belongs to the cluster {owner.name!r}, which {state}.",
                next_step=f"use that cluster (`--name {owner.name}`), purge it, or choose another directory",
                cluster=name,
                data_dir=self.data_dir,
            )
        if owner is None and ClusterRecord.has_other_files(self.data_dir):
            raise DevClusterError(
                f"The data directory {self.data_dir} is not empty, and it is not the directory of a dualwrite cluster.",
                next_step="choose an empty or a new directory",
                cluster=name,
                data_dir=self.data_dir,
            )


def server_properties(
    settings: ClusterSettings, nodes: Sequence[NodeRecord], node: NodeRecord, *, storage: Path, keystore: Path
) -> dict[str, str]:
    """The properties of one of the nodes, with its directory and its PEM key store; those that the user has set come first."""
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
    """The text of a Java properties file, in ASCII: Java reads it as Latin-1, with JSON's escapes for other characters."""
    lines = ["# written by dualwrite at each start; changes are lost"]
    for key, value in properties.items():
        name, text = (json.dumps(str(each))[1:-1] for each in (key, value))  # a value may be a number
        lines.append(f"{re.sub('[ =:#!]', _ESCAPED, name)}={re.sub('^ ', _ESCAPED, text)}")
    return "\n".join([*lines, ""])


def tail(log_file: Path, lines: int | None) -> str:
    """The last lines of a log, or all of it for None; empty if the file does not exist yet."""
    try:
        text = log_file.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return ""
    if lines is None:
        return text
    return "\n".join(text.splitlines()[-lines:] if lines else [])


def follow(log_file: Path, lines: int, *, until: Callable[[], bool]) -> Iterator[str]:
    """The last lines of a log, then each new line as it is written; nothing if there is no log.

    `until` is called before each read; after it returns True, the rest of the log is read and the iteration ends.
    """
    if not log_file.exists():
        return
    with log_file.open(encoding="utf-8", errors="replace") as log:
        yield from log.read().splitlines()[-lines:] if lines else []
        rest = ""
        while True:
            ended = until()
            rest += log.read()
            *complete, rest = rest.split("\n")
            yield from complete
            if ended:
                return
            time.sleep(_POLL)
