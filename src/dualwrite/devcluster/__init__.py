"""A local Kafka cluster on loopback: real brokers with two-phase commit enabled, without Docker, Maven or an installed Java.

from dualwrite.devcluster import DevCluster

with DevCluster.temporary() as cluster:
    print(cluster.bootstrap_servers)
"""

from dualwrite.devcluster.cluster import ClusterStatus, DevCluster, NodeStatus
from dualwrite.devcluster.cluster_settings import SERVER_JAVA_OPTIONS, Security, TlsFiles
from dualwrite.devcluster.locations import BrokerExitedError, DevClusterError, SettingsDifferError
from dualwrite.devcluster.programs import DEFAULT_KAFKA_VERSION
from dualwrite.devcluster.progress import ClusterProgress, SilentProgress, TerminalProgress
from dualwrite.devcluster.registry import names as cluster_names

__all__ = [
    "DEFAULT_KAFKA_VERSION",
    "SERVER_JAVA_OPTIONS",
    "BrokerExitedError",
    "ClusterProgress",
    "ClusterStatus",
    "DevCluster",
    "DevClusterError",
    "NodeStatus",
    "Security",
    "SettingsDifferError",
    "SilentProgress",
    "TerminalProgress",
    "TlsFiles",
    "cluster_names",
]
