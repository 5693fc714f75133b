"""The servers to measure on: existing ones, or a PostgreSQL and a broker that are started and removed afterwards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Final

from brokers import describe, describe_own, own_broker
from dualwrite import migration
from dualwrite.kafka.librdkafka.admin import create_topic, delete_topic
from dualwrite.testing.postgres import PostgresServer
from network import Network

_ADMIN_TIMEOUT: Final = 30.0
# PostgresServer's defaults are for tests; these settings suit a small production server. Durability stays on.
POSTGRES: Final = {"autovacuum": "on", "shared_buffers": "256MB", "max_wal_size": "2GB", "max_connections": "300"}


@dataclass(frozen=True)
class Services:
    """The servers.

    Args:
        url: The database.
        kafka: Kafka's settings, in librdkafka's names.
        brokers: Process ids of the brokers; empty if we did not start them.
        owns_database: Whether we started the database.
        cluster: What the cluster is, for reports.
        network: Another way to both, which delays.
    """

    url: str
    kafka: Mapping[str, Any]
    brokers: frozenset[int]
    owns_database: bool
    cluster: str
    network: Network | None = None

    def reach(self, round_trip: float) -> tuple[str, Mapping[str, Any]]:
        """The database and Kafka's settings for clients for which a round trip takes this many seconds."""
        if not round_trip:
            return self.url, self.kafka
        if self.network is None:
            raise ValueError("these services were started without a network")
        self.network.proxy.set_round_trip(round_trip)
        return self.network.url, self.network.kafka

    def make_topic(self, topic: str, partitions: int) -> None:
        """Create a topic."""
        create_topic(self._quiet, topic, partitions, timeout=_ADMIN_TIMEOUT)

    def delete_topic(self, topic: str) -> None:
        """Delete a topic."""
        delete_topic(self._quiet, topic, timeout=_ADMIN_TIMEOUT)

    @property
    def _quiet(self) -> Mapping[str, Any]:
        return {**self.kafka, "log_level": 2}  # don't report that our own broker stops at the end


@contextmanager
def services(
    url: str | None,
    bootstrap: str | None,
    settings: Mapping[str, str],
    *,
    warm_up: float = 0.0,
    config: Mapping[str, str] | None = None,
    has_network: bool = False,
) -> Iterator[Services]:
    """Use the given servers; start those that are not given.

    Args:
        url: A PostgreSQL database to write to.
        bootstrap: `bootstrap.servers` of a cluster to write to.
        settings: Additional Kafka settings for every client.
        warm_up: Seconds for which a broker of our own is warmed up.
        config: Settings of a broker of our own.
        has_network: Whether there is a network to both, too; only with a broker of our own, which has to know of it.
    """
    network = Network() if has_network else None
    with ExitStack() as stack:
        brokers: frozenset[int] = frozenset()
        proxied = ""
        if bootstrap is None:
            cluster = stack.enter_context(own_broker(warm_up, config, proxy_port=network and network.kafka_port))
            proxied = cluster.listeners.get("PROXIED", "")
            bootstrap = cluster.bootstrap_servers
            brokers = frozenset(node.pid for node in cluster.status().nodes if node.pid)
            described = describe_own(cluster, warm_up)
        else:
            described = describe({"bootstrap.servers": bootstrap, **settings})
        owns_database = url is None
        if url is None:
            url = stack.enter_context(PostgresServer(settings=POSTGRES)).url
        migration.upgrade(url)
        kafka = {"bootstrap.servers": bootstrap, **settings}
        if network is not None:
            stack.enter_context(network.to(url, proxied, kafka))
        yield Services(url, kafka, brokers, owns_database, described, network)
