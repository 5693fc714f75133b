"""Three brokers that reach each other through doors, and a marker that waits in one of them: for `test_delayed_marker.py`."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass

from crash.scene import Scene
from dualwrite.devcluster import DevCluster
from dualwrite.kafka.client.brokers import Network
from dualwrite.kafka.client.config import KafkaConfig
from dualwrite.kafka.client.log_reader import LogReader, OffsetGoneError
from dualwrite.kafka.client.retries import RetryingClient
from dualwrite.testing.proxy import Link
from fixtures.broker import make_topic, started
from fixtures.broker_door import Door, doors_in_a_row, open_to
from fixtures.leaders import coordinator_of
from fixtures.pace import LIMIT, until

NODES = 3
_SETTINGS = {
    "inter.broker.listener.name": "PROXIED",
    "request.timeout.ms": "4000",  # after which the coordinator gives the connection up, and sends the marker once more
    # nothing has to pass the doors before they are open
    "default.replication.factor": "1",
    "offsets.topic.replication.factor": "1",
    "transaction.state.log.replication.factor": "1",
    "min.insync.replicas": "1",
    "transaction.state.log.min.isr": "1",
}


@dataclass(frozen=True)
class BrokersBehindDoors:
    """A cluster whose brokers reach each other through doors; clients don't use them."""

    cluster: DevCluster
    doors: list[Door]
    """That of each node, in the order of their ids."""

    def between(self, scene: Scene) -> Door | None:
        """Makes the scene's topic; returns the door of its leader, if the coordinator of the scene's id is another broker."""
        make_topic(self.cluster, scene.topic)
        leader = until(lambda: _leader(scene), f"{scene.topic} has a leader")
        return None if leader == coordinator_of(scene.bootstrap, scene.kafka_id()) else self.doors[leader - 1]


@contextmanager
def brokers_behind_doors(kafka_version: str) -> Iterator[BrokersBehindDoors]:
    """A temporary cluster of this release."""
    with ExitStack() as opened:
        doors = [opened.enter_context(door) for door in doors_in_a_row(NODES)]
        cluster = opened.enter_context(
            started(nodes=NODES, kafka_version=kafka_version, proxy_port=doors[0].port, config=_SETTINGS)
        )
        open_to(cluster, doors)
        yield BrokersBehindDoors(cluster, doors)


class HeldMarker:
    """The next WriteTxnMarkers for a topic: it waits in front of its leader's broker until it is released.

    The coordinator sends it over a connection, gives this up after `request.timeout.ms`, and sends the marker again over
    another one, which nothing holds. What was held stays under way, as in a network that has lost the connection on one side.

    Args:
        door: That of the leader.
        topic: The topic. Of what brokers send to its leader, only WriteTxnMarkers names it.
    """

    def __init__(self, door: Door, topic: str) -> None:
        self._held, self._released, self._answered = threading.Event(), threading.Event(), threading.Event()
        door.on_client_bytes(topic.encode(), self._hold)
        door.on_client_bytes(topic.encode(), lambda _: self._answered.set(), when="answered")
        # the coordinator has closed its side of the connection, so the door would close the other one, too
        door.on_client_bytes(topic.encode(), self._wait_for_answer, when="after")

    def _hold(self, _: Link) -> None:
        self._held.set()
        self._released.wait(LIMIT)

    def _wait_for_answer(self, _: Link) -> None:
        self._answered.wait(LIMIT)

    def wait_until_held(self) -> None:
        """Wait until the coordinator has sent it."""
        assert self._held.wait(LIMIT), "no marker was sent"

    def release(self) -> None:
        """Let it reach the broker, and wait for the broker's answer, which nobody expects any more."""
        self._released.set()
        assert self._answered.wait(LIMIT), "the broker has not answered the marker"


def log_of(scene: Scene) -> list[str]:
    """The log of the scene's topic: a value of each message, and COMMIT or ABORT for each marker, with the producer's epoch."""
    found = []
    client = RetryingClient(KafkaConfig.of(scene.bootstrap), LIMIT)
    with closing(client.network), suppress(OffsetGoneError):  # it may be empty
        for batch in LogReader(client, LIMIT).batches_from(scene.topic, 0, 0):
            if batch.is_control:
                found.append(f"{'COMMIT' if batch.commits else 'ABORT'}/{batch.epoch}")
            else:
                found += [f"{(value or b'').decode()}/{batch.epoch}" for _, value, _, _ in batch.records()]
    return found


def _leader(scene: Scene) -> int | None:
    with closing(Network(KafkaConfig.of(scene.bootstrap))) as network:
        (topic,) = network.metadata([scene.topic]).topics
    return next((partition.leader_id for partition in topic.partitions if partition.leader_id > 0), None)
