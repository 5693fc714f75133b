"""The servers to measure on: existing ones, or a PostgreSQL and a warm broker that are started and removed afterwards.

The broker of `dualwrite dev` starts fast, with only the JVM's first compiler, and needs about twice the CPU for each request. A
JVM with the optimizing compiler needs some ten thousand requests until it has compiled the code that they run, so ours is
warmed up; the code for other clients' requests is compiled in a benchmark's own first round, which is discarded.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Final

from delay import Network
from dualwrite import migration
from dualwrite.devcluster import SERVER_JAVA_OPTIONS, DevCluster
from dualwrite.kafka import KafkaConfig, NativeProducer
from dualwrite.kafka.librdkafka.topic_admin import create_topic, delete_topic
from dualwrite.testing.postgres import PostgresServer
from surroundings import show_progress

POSTGRES: Final = {"autovacuum": "on", "shared_buffers": "256MB", "max_wal_size": "2GB", "max_connections": "300"}
"""PostgresServer's defaults are for tests; these suit a small production server. Durability stays on."""

_IDS: Final = 4
_LIMIT: Final = 60.0


@dataclass(frozen=True)
class Servers:
    """A database (the URL is empty without one), a Kafka cluster, what it is for reports, and a way to both that delays."""

    url: str
    kafka: Mapping[str, Any]
    cluster: str
    owns_cluster: bool
    network: Network | None = None
    broker: DevCluster | None = None
    """The cluster, if it is our own."""

    def reach(self, round_trip: float) -> tuple[str, Mapping[str, Any]]:
        """The database and Kafka's settings for clients for which a round trip takes this many seconds."""
        if not round_trip:
            return self.url, self.kafka
        if self.network is None:
            raise ValueError("these servers were started without a network")
        self.network.proxy.set_round_trip(round_trip)
        return self.network.url, self.network.kafka

    def make_topic(self, topic: str, partitions: int) -> str:
        create_topic({**self.kafka, "log_level": 2}, topic, partitions, timeout=_LIMIT)
        return topic

    def delete_topic(self, topic: str) -> None:
        """Delete a topic, unless its whole cluster is removed afterwards."""
        if not self.owns_cluster:
            delete_topic({**self.kafka, "log_level": 2}, topic, timeout=_LIMIT)


@contextmanager
def servers(
    kafka: str | None,
    *,
    url: str | None = None,
    has_database: bool = True,
    warm_up: float = 0.0,
    config: Mapping[str, str] | None = None,
    has_network: bool = False,
) -> Iterator[Servers]:
    """Use the given servers (`bootstrap.servers`, a PostgreSQL database); start those that are not given.

    A broker of our own is warmed up for some seconds, with 0 it starts fast; it can have settings. A network to both, too, is
    only for brokers of our own, which have to know of it.
    """
    show_progress("starting the servers")
    network, cluster = Network() if has_network else None, None
    with ExitStack() as opened:
        bootstrap, proxied = kafka or "", ""
        if kafka is None:
            java = SERVER_JAVA_OPTIONS if warm_up else None
            port = None if network is None else network.kafka_port
            cluster = opened.enter_context(DevCluster.temporary(config=config, java_options=java, proxy_port=port))
            bootstrap, proxied = cluster.bootstrap_servers, cluster.listeners.get("PROXIED", "")
            warm_up_broker(bootstrap, warm_up)
            state = "JVM options of a server, warm" if warm_up else "starts fast"
            described = f"{cluster.status().kafka_version}, our own, {state}"
        else:
            described = f"{bootstrap}, which ran before"
        if has_database:
            url = url or opened.enter_context(PostgresServer(settings=POSTGRES)).url
            migration.upgrade(url)
        reached = {"bootstrap.servers": bootstrap}
        if network is not None and url is not None:
            opened.enter_context(network.to(url, proxied, reached))
        yield Servers(url or "", reached, described, kafka is None, network, cluster)


def warm_up_broker(bootstrap: str, seconds: float) -> None:
    """Run transactions of one message and of many, under two-phase commit."""
    if not seconds:
        return
    topic = f"warm-up-{secrets.token_hex(4)}"
    kafka = {"bootstrap.servers": bootstrap, "log_level": 2}
    create_topic(kafka, topic, 4, timeout=_LIMIT)
    with ExitStack() as opened:
        producers = []
        for number in range(_IDS):
            producer = NativeProducer(KafkaConfig.of(bootstrap), f"{topic}-{number}", two_phase=True)
            opened.callback(producer.close)
            producer.init_transactions()
            producers.append(producer)
        done, until = 0, time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            if done % 1000 == 0:
                show_progress(f"warming up the broker: {left:.0f} s left")
            producer = producers[done % _IDS]
            producer.begin_transaction()
            for number in range(1 if done % 2 else 32):
                producer.send(topic, b"x" * 200, key=str(number))
            producer.prepare_transaction(timeout=_LIMIT)
            producer.commit_transaction(timeout=_LIMIT)
            done += 1
    delete_topic(kafka, topic, timeout=_LIMIT)
