"""The servers to measure on: those given, or else a PostgreSQL and a broker of our own, gone afterwards."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Final

from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from dualwrite import migration
from dualwrite.devcluster import DevCluster
from dualwrite.testing.postgres import PostgresServer

_ANSWER: Final = 30.0
# PostgresServer's own settings are for tests; these are a small production's. Durability stays as it is: on.
_POSTGRES: Final = {"autovacuum": "on", "shared_buffers": "256MB", "max_wal_size": "2GB", "max_connections": "100"}


@dataclass(frozen=True)
class Services:
    """The servers.

    Args:
        url: The database.
        kafka: Kafka's settings, in librdkafka's names.
        brokers: Process ids of the brokers; empty where they are not ours.
    """

    url: str
    kafka: Mapping[str, Any]
    brokers: frozenset[int]

    def make_topic(self, topic: str, partitions: int) -> None:
        """Make a topic."""
        self._admin.create_topics([NewTopic(topic, partitions)])[topic].result(_ANSWER)

    def delete_topic(self, topic: str) -> None:
        """Delete a topic."""
        self._admin.delete_topics([topic])[topic].result(_ANSWER)

    @functools.cached_property
    def _admin(self) -> AdminClient:
        return AdminClient({**self.kafka, "log_level": 2})  # that our own broker goes away at the end is no news


@contextmanager
def services(url: str | None, bootstrap: str | None, settings: Mapping[str, str]) -> Iterator[Services]:
    """Use what is given; start what is not.

    Args:
        url: A PostgreSQL database that may be written to.
        bootstrap: `bootstrap.servers` of a cluster that may be written to.
        settings: More of Kafka's settings, for every client.
    """
    with ExitStack() as stack:
        brokers: frozenset[int] = frozenset()
        if bootstrap is None:
            cluster = stack.enter_context(DevCluster.temporary())
            bootstrap = cluster.bootstrap_servers
            brokers = frozenset(node.pid for node in cluster.status().nodes if node.pid)
        if url is None:
            url = stack.enter_context(PostgresServer(settings=_POSTGRES)).url
        migration.upgrade(url)
        yield Services(url, {"bootstrap.servers": bootstrap, **settings}, brokers)
