"""A broker to measure on: with the JVM options of Kafka's own start scripts, and warmed up.

The broker of `dualwrite dev` starts fast, with only the JVM's first compiler, and needs about twice the CPU for each request. A
JVM with the optimizing compiler needs some ten thousand requests until it has compiled the code that they run. The warm-up here
uses the native producer; the code for the requests of other clients is compiled in a benchmark's own first round, which is
discarded.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, Final

from dualwrite.devcluster import SERVER_JAVA_OPTIONS, DevCluster
from dualwrite.errors import BrokerAuthorizationError
from dualwrite.kafka import KafkaConfig, NativeProducer
from dualwrite.kafka.inspect.capabilities import probe
from dualwrite.kafka.librdkafka.admin import create_topic, delete_topic
from progress import show_progress

WARM_UP_SECONDS: Final = 60.0
_IDS: Final = 4
_LIMIT: Final = 60.0


@contextmanager
def own_broker(
    warm_up: float = WARM_UP_SECONDS,
    config: Mapping[str, str] | None = None,
    *,
    nodes: int = 1,
    proxy_port: int | None = None,
) -> Iterator[DevCluster]:
    """A cluster, of one broker by default; with a warm-up of 0 seconds, one that starts fast."""
    options = SERVER_JAVA_OPTIONS if warm_up else None
    with DevCluster.temporary(nodes=nodes, config=config, java_options=options, proxy_port=proxy_port) as cluster:
        if warm_up:
            _warm_up(cluster.bootstrap_servers, warm_up)
        yield cluster


def describe_own(cluster: DevCluster, warm_up: float) -> str:
    """What a cluster of `own_broker` is, for reports."""
    state = "JVM options of a server, warm" if warm_up else "starts fast"
    return f"{cluster.status().kafka_version}, our own, {_number_of_nodes(cluster)}, {state}"


def _number_of_nodes(cluster: DevCluster) -> str:
    number = len(cluster.status().nodes)
    return "one node" if number == 1 else f"{number} nodes"


def describe(kafka: Mapping[str, Any]) -> str:
    """What an existing cluster is, for reports."""
    try:
        release = probe(kafka).metadata_version
    except BrokerAuthorizationError:  # the probe needs a right that the benchmark may not need
        release = 0
    return f"{kafka['bootstrap.servers']}, " + (f"release of metadata.version {release}" if release else "release unknown")


def _warm_up(servers: str, seconds: float) -> None:
    """Run transactions of one message and of many, under two-phase commit."""
    topic = f"warm-up-{secrets.token_hex(4)}"
    kafka = {"bootstrap.servers": servers, "log_level": 2}
    create_topic(kafka, topic, 4, timeout=_LIMIT)
    with ExitStack() as opened:
        producers = []
        for number in range(_IDS):
            producer = NativeProducer(KafkaConfig.of(servers), f"{topic}-{number}", two_phase=True)
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
