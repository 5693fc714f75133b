"""Starts the brokers of a cluster, and records their processes."""

from __future__ import annotations

from collections.abc import Sequence

from dualwrite.devcluster import interrupts, ports, process, readiness
from dualwrite.devcluster.node import ClusterFiles, JavaCommand
from dualwrite.devcluster.process import Launcher
from dualwrite.devcluster.progress import Progress
from dualwrite.devcluster.record import ClusterRecord, NodeRecord


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
            process.stop([node.process for node in missing if node.process], grace=0)
            self._restore(record, before)
            raise

    def launch(self, record: ClusterRecord, node: NodeRecord, java: JavaCommand) -> None:
        """Start the broker of one node, without waiting for it."""
        with interrupts.delayed():
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
        readiness.wait(record, [node for node in record.nodes if node in missing or node.working], self._files, timeout=timeout)

    def _restore(self, record: ClusterRecord, before: ClusterRecord | None) -> None:
        if before is not None and before.formatted:
            before.save(self._files.data_dir)
        else:
            record.formatted = False
            record.save(self._files.data_dir)
