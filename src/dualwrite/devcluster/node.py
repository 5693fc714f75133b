"""The files of a cluster and the start of its nodes: directories, properties, the Java command."""

from __future__ import annotations

import shutil
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from dualwrite.devcluster import storage
from dualwrite.devcluster.archive import ClassArchive
from dualwrite.devcluster.errors import BrokerExitedError, DevClusterError
from dualwrite.devcluster.jars import classpath
from dualwrite.devcluster.java import find_java
from dualwrite.devcluster.logs import tail
from dualwrite.devcluster.process import BrokerProcess, Launcher
from dualwrite.devcluster.progress import Progress
from dualwrite.devcluster.properties import LOG4J2, render, server_properties
from dualwrite.devcluster.record import ClusterRecord, NodeRecord
from dualwrite.devcluster.settings import SIZES, ClusterSettings

_LOGGING = "log4j2.properties"
_TAIL = 12
_START_MARK = "--- started by dualwrite at"

_HEADLESS = ("-Xshare:auto", "-Djava.awt.headless=true")
_STARTS_FAST = (
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


@dataclass(frozen=True)
class JavaCommand:
    """The start of a command line that runs a broker's Java."""

    words: tuple[str | Path, ...]
    """Java with its options and class path; the main class follows."""
    archive: ClassArchive | None
    """The class-data archive to create from the broker's classes; None to create none."""


class ClusterFiles:
    """The files of one cluster: their paths and their content.

    Args:
        data_dir: The cluster's data directory.
    """

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
        """Format the storage of all nodes. Raises BrokerExitedError if Kafka rejects the settings."""
        first, *others = record.nodes
        source = self.storage(first.node_id)
        storage.format_storage(
            java.words, record.settings, record.cluster_id, properties=self.properties(first.node_id), storage=source
        )
        for node in others:
            storage.clone_storage(source, self.storage(node.node_id), node.node_id)

    def java_command(
        self, settings: ClusterSettings, java: str | Path | None, progress: Progress, *, makes_archive: bool = False
    ) -> JavaCommand:
        """Java with its options and class path. Downloads what is missing."""
        found = find_java(java)
        version = settings.kafka_version
        chosen = _STARTS_FAST if settings.java_options is None else settings.java_options
        options = [*chosen, *_HEADLESS, "-cp", ":".join(str(jar) for jar in classpath(version, progress))]
        archive = ClassArchive(version, found, options)
        logging = f"-Dlog4j2.configurationFile={self.data_dir / _LOGGING}"
        return JavaCommand((found.executable, *options, *archive.read_options, logging), archive if makes_archive else None)

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
