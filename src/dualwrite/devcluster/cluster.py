"""`DevCluster`: one or three brokers to start, inspect, break on purpose, and stop."""

from __future__ import annotations

import secrets
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self, TypedDict, Unpack

from dualwrite.devcluster import broker_process, readiness, registry
from dualwrite.devcluster.broker_process import BrokerProcess, Launcher
from dualwrite.devcluster.cluster_files import ClusterFiles, JavaCommand, follow, tail
from dualwrite.devcluster.cluster_settings import ClusterSettings, Security
from dualwrite.devcluster.locations import DevClusterError, make_directory, require_free_port
from dualwrite.devcluster.progress import ClusterProgress, SilentProgress
from dualwrite.devcluster.registry import PLAINTEXT, ClusterRecord, NodeRecord

DEFAULT_TIMEOUT = 60.0
"""Seconds for a cluster to become ready, after all downloads."""

_GRACE = 10.0


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


class ClusterOptions(TypedDict, total=False):
    """The settings of a cluster, as `DevCluster` describes them."""

    nodes: int | None
    kafka_version: str | None
    config: Mapping[str, str] | None
    features: Mapping[str, str] | None
    security: Security | None
    java_options: Sequence[str] | None
    proxy_port: int | None


class DevCluster:
    """A named Kafka cluster on loopback.

    A setting of None means the existing cluster's value, or the default for a new cluster. Nothing happens before `up()`.

    Args:
        name: The cluster's name, unique for this user.
        data_dir: Directory for data and logs; by default one under the user's state directory.
        port: Port of the first node's plain listener (the next nodes use the following ones); by default free ports
            are chosen once, and kept.
        progress: Receives the steps of preparing the cluster.
        nodes: 1 or 3; each is broker and controller.
        kafka_version: Version of Kafka to run, such as 4.2.2 or 3.9.1.
        config: Broker properties for all nodes; they override those that dualwrite sets.
        features: Feature levels for formatting, such as `{"transaction.version": "1"}`.
        security: Users and certificate of additional listeners.
        java_options: The JVM's options. With the default a broker starts fast and needs little memory, but its throughput is
            only half. `SERVER_JAVA_OPTIONS` are those of Kafka's own start scripts.
        proxy_port: Port on loopback of a proxy that you run. The first node then has one more listener, `PROXIED`, whose
            clients are told to connect to this port (the next nodes: to the following ones). The brokers' own traffic uses it
            only if `config` sets `inter.broker.listener.name` to PROXIED. The proxy forwards to `listeners["PROXIED"]`.
    """

    def __init__(
        self,
        name: str = "default",
        *,
        data_dir: str | Path | None = None,
        port: int | None = None,
        progress: ClusterProgress | None = None,
        **settings: Unpack[ClusterOptions],
    ) -> None:
        self.name = name
        self._requested = {key: value for key, value in settings.items() if value is not None}
        self._port = port
        self._progress = progress or SilentProgress()
        self._registered = True
        self._files = ClusterFiles(Path(data_dir).expanduser().absolute() if data_dir else registry.data_dir(name))
        self._launcher = Launcher()

    @classmethod
    @contextmanager
    def temporary(cls, *, timeout: float = DEFAULT_TIMEOUT, **settings: Unpack[ClusterOptions]) -> Iterator[Self]:
        """A cluster that is ready inside the `with` block and is removed completely at its end.

        If this process ends for any reason, including SIGKILL, its brokers are killed and its directory is removed. Only the
        directory stays if the process is killed while no broker runs: before the first one has started, or after `kill()`.

        The arguments are the settings of the class, and `timeout`: seconds for it to become ready.
        """
        place = Path(tempfile.mkdtemp(prefix="dualwrite-"))
        cluster = cls(f"temporary-{secrets.token_hex(4)}", data_dir=place, **settings)
        cluster._registered = False
        cluster._launcher = Launcher(purge=place)
        try:
            cluster.up(timeout=timeout)
            yield cluster
        finally:
            cluster.down(purge=True)
            shutil.rmtree(place, ignore_errors=True)

    # --- up and down --------------------------------------------------------------------------------------------------

    def up(self, *, timeout: float = DEFAULT_TIMEOUT) -> ClusterStatus:
        """Start all nodes, and wait until they are ready. Nodes that are already running are left as they are.

        The brokers are detached: they outlive this process, and a Ctrl-C at its terminal does not reach them.

        Args:
            timeout: Seconds for the brokers to become ready, not counting downloads.

        Raises:
            SettingsDifferError: The cluster is running, or has data, with other settings than the requested ones.
            BrokerExitedError: A broker exited instead of becoming ready; the message includes the end of its log.
            DevClusterError: No Java, no network, a port in use, a data directory of another cluster, or a timeout.
        """
        with self._locked():
            before = self._claim()
            record = registry.plan(self.name, before, self._requested, self._port)
            # creating an archive of classes takes seconds, which does not pay off for a single test
            java_settings = (record.settings.kafka_version, record.settings.java_options)
            often = self._registered or java_settings == (ClusterSettings.kafka_version, ClusterSettings.java_options)
            java = self._files.java_command(record.settings, self._progress, makes_archive=often)
            missing = [node for node in record.nodes if not node.alive]
            _require_ports(record, missing)
            if self._registered:
                registry.remember(self.name, self._files.data_dir)
            make_directory(self._files.data_dir)
            record.save(self._files.data_dir)
            try:
                self._start_together(record, missing, java, timeout)
            except BaseException:  # the next start must not use the new settings
                broker_process.stop([node.process for node in missing if node.process], grace=0)
                kept = before if before is not None and before.formatted else replace(record, formatted=False)
                kept.save(self._files.data_dir)
                raise
            return self._status(record, ready=all(node.working for node in record.nodes))

    def down(self, *, purge: bool = False) -> None:
        """Stop all nodes. Does nothing if no node is running.

        Args:
            purge: Also remove the data, the logs and everything else that belongs to the cluster.
        """
        with self._locked():
            record = ClusterRecord.load(self._files.data_dir)
            if record is not None:
                self._check_name(record)
                broker_process.stop([node.process for node in record.nodes if node.process], grace=0 if purge else _GRACE)
            self._launcher.reap()
            if purge:
                self._files.purge(record)
                if self._registered:
                    registry.forget(self.name)

    # --- inspecting it ------------------------------------------------------------------------------------------------

    @property
    def data_dir(self) -> Path:
        """Where data and logs are, or will be."""
        return self._files.data_dir

    @property
    def exists(self) -> bool:
        """Whether the cluster has been started before and not been purged since."""
        return ClusterRecord.exists(self._files.data_dir)

    @property
    def bootstrap_servers(self) -> str:
        """Host and port of every node's plain listener, for clients. Raises DevClusterError if there is no cluster."""
        return self._record().bootstrap_servers(PLAINTEXT)

    @property
    def listeners(self) -> dict[str, str]:
        """Bootstrap servers by listener: PLAINTEXT, and what `security` and `proxy_port` added."""
        return self._record().listeners

    def status(self) -> ClusterStatus:
        """The cluster's current state; if all brokers are running, checks whether they are ready (at most 2 s per request).

        Raises:
            DevClusterError: There is no such cluster.
        """
        record = self._record()
        all_work = all(node.working for node in record.nodes)
        return self._status(record, ready=all_work and readiness.obstacle(record, record.nodes) is None)

    def logs(self, node: int = 1, *, lines: int | None = None) -> str:
        """The output of a node's broker.

        Args:
            node: Node id, from 1.
            lines: How many lines from the end; None for all.
        """
        return tail(self.log_file(node), lines)

    def follow_logs(self, node: int = 1, *, lines: int = 10) -> Iterator[str]:
        """The last lines of a node's log, then each new line as the broker prints it; ends when the broker exits.

        Args:
            node: Node id, from 1.
            lines: How many of the existing lines.
        """
        return follow(self.log_file(node), lines, until=lambda: not self._node(self._record(), node).alive)

    def log_file(self, node: int = 1) -> Path:
        """The file with the output of a node's broker."""
        return self._files.log_file(self._node(self._record(), node).node_id)

    # --- breaking it on purpose ---------------------------------------------------------------------------------------

    def kill(self, node: int = 1) -> None:
        """Send SIGKILL to a node, and wait until it is gone."""
        with self._locked():
            self._end(node, 0)

    def pause(self, node: int = 1) -> None:
        """Send SIGSTOP to a node: its connections stay open, but it no longer responds."""
        self._signal(node, BrokerProcess.pause)

    def resume(self, node: int = 1) -> None:
        """Send SIGCONT to a paused node."""
        self._signal(node, lambda process: process.send(signal.SIGCONT))

    def start(self, node: int = 1, *, wait: bool = True, timeout: float = DEFAULT_TIMEOUT) -> None:
        """Start a node again, on its old ports. Does nothing if it is running.

        Args:
            node: Node id, from 1.
            wait: Whether to wait until it works with all other running nodes. This needs two of three nodes.
            timeout: Seconds to wait.

        Raises:
            BrokerExitedError: It exited instead of becoming ready.
            DevClusterError: A port is in use, or the timeout has passed.
        """
        with self._locked():
            record = self._record()
            which = self._node(record, node)
            if not which.alive:
                _require_ports(record, [which])
                self._launch(record, which, self._files.java_command(record.settings, self._progress))
            if wait:
                together = [each for each in record.nodes if each is which or each.working]
                readiness.wait(record, together, self._files, timeout=timeout)

    def restart(self, node: int = 1, *, timeout: float = DEFAULT_TIMEOUT) -> None:
        """Shut a node down cleanly and start it again. Raises the same errors as `start`."""
        with self._locked():
            self._end(node, _GRACE)
        self.start(node, timeout=timeout)

    # --- internals ----------------------------------------------------------------------------------------------------

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """For what changes the cluster: one process at a time, and errors of its files as DevClusterError."""
        try:
            if not self._registered:
                yield
                return
            with registry.lock(self.name, timeout=DEFAULT_TIMEOUT):
                try:
                    yield
                finally:
                    if not ClusterRecord.exists(registry.data_dir(self.name)):
                        registry.forget(self.name)
        except OSError as error:
            raise DevClusterError(
                f"A file of the cluster {self.name!r} can't be read or written.",
                cause=str(error),
                next_step="check the free space on its disk, and its permissions",
                cluster=self.name,
            ) from error

    def _claim(self) -> ClusterRecord | None:
        """Check that name and data directory belong together, and return the existing record, if any."""
        place = registry.data_dir(self.name)
        if self._registered and place != self._files.data_dir and ClusterRecord.exists(place):
            raise DevClusterError(
                f"The data of the cluster {self.name!r} is in {place}, not in {self._files.data_dir}.",
                next_step=f"omit the directory, use another name, or run: dualwrite dev down --purge --name {self.name}",
                cluster=self.name,
                data_dir=place,
            )
        if sys.platform == "win32":
            raise DevClusterError("A development cluster does not run on Windows.", next_step="run it inside WSL")
        self._files.check_owner(self.name)
        return ClusterRecord.load(self._files.data_dir)

    def _start_together(self, record: ClusterRecord, missing: Sequence[NodeRecord], java: JavaCommand, timeout: float) -> None:
        """Start the missing nodes, and wait until all running nodes work together; format the storage first if necessary."""
        if len(missing) == len(record.nodes):
            self._files.write(record)
        if not record.formatted:
            self._progress.step(f"Formatting the storage of {record.name}")
            self._files.format(record, java)
            record.formatted = True
        self._progress.step(f"Starting Kafka {record.settings.kafka_version}")
        for node in missing:
            self._launch(record, node, java)
        working = [node for node in record.nodes if node in missing or node.working]
        readiness.wait(record, working, self._files, timeout=timeout)
        if java.archive is not None:
            for node in missing:
                java.archive.make(self._files.class_list(node.node_id), self._progress)

    def _launch(self, record: ClusterRecord, node: NodeRecord, java: JavaCommand) -> None:
        """Start the broker of one node, without waiting for it."""
        node.process = self._files.start(self._launcher, java, node)
        record.save(self._files.data_dir)

    def _status(self, record: ClusterRecord, *, ready: bool) -> ClusterStatus:
        nodes = [
            NodeStatus(
                node_id=node.node_id,
                port=node.ports[PLAINTEXT],
                pid=node.process.pid if node.process else None,
                alive=node.alive,
                paused=node.process.paused if node.process else False,
                log_file=self._files.log_file(node.node_id),
            )
            for node in record.nodes
        ]
        return ClusterStatus(
            name=record.name,
            kafka_version=record.settings.kafka_version,
            data_dir=self._files.data_dir,
            bootstrap_servers=record.bootstrap_servers(PLAINTEXT),
            listeners=record.listeners,
            nodes=tuple(nodes),
            ready=ready,
        )

    def _record(self) -> ClusterRecord:
        record = ClusterRecord.load(self._files.data_dir)
        if record is None:
            raise DevClusterError(
                f"There is no cluster {self.name!r}.",
                next_step=f"create it: dualwrite dev up --name {self.name}",
                cluster=self.name,
            )
        self._check_name(record)
        return record

    def _check_name(self, record: ClusterRecord) -> None:
        if record.name != self.name:
            raise DevClusterError(
                f"The data directory {self._files.data_dir} belongs to the cluster {record.name!r}, not {self.name!r}.",
                next_step=f"use the name {record.name!r}, or another directory",
            )

    def _node(self, record: ClusterRecord, node_id: int) -> NodeRecord:
        for node in record.nodes:
            if node.node_id == node_id:
                return node
        raise DevClusterError(
            f"The cluster {self.name!r} has no node {node_id}.",
            next_step=f"choose one of its nodes: {', '.join(str(each.node_id) for each in record.nodes)}",
            cluster=self.name,
            node_id=node_id,
        )

    def _end(self, node_id: int, grace: float) -> None:
        process = self._node(self._record(), node_id).process
        if process is not None:
            broker_process.stop([process], grace=grace)

    def _signal(self, node_id: int, send: Callable[[BrokerProcess], bool]) -> None:
        process = self._node(self._record(), node_id).process
        if process is None or not send(process):
            raise DevClusterError(
                f"Node {node_id} of the cluster {self.name!r} is not running.",
                next_step="start it first",
                cluster=self.name,
                node_id=node_id,
            )


def _require_ports(record: ClusterRecord, nodes: Sequence[NodeRecord]) -> None:
    """Check that the nodes can listen on their ports. Raises DevClusterError if a port is in use."""
    for node in nodes:
        for port in node.ports.values():
            require_free_port(port, cluster=record.name, node_id=node.node_id)
