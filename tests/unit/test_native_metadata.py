"""The producer's view of its topics: which leader is known, and when a topic is looked up again. The network is a stand-in."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from dualwrite.deadline import Deadline
from dualwrite.kafka.client.config import Address, KafkaConfig
from dualwrite.kafka.native.metadata import Topics
from fixtures.pace import LIMIT

SECONDS = LIMIT
FIRST, SECOND = Address("first", 9092), Address("second", 9092)
NONE = -1


class Cluster:
    """Two brokers, 1 and 2; every topic has these leaders."""

    config = KafkaConfig.of("127.0.0.1:9092")

    def __init__(self, *leaders: int) -> None:
        self.leaders = leaders
        self.looked_up = 0

    def metadata(self, topics: list[str], _: Deadline) -> Any:
        self.looked_up += 1
        partitions = [SimpleNamespace(partition_index=i, leader_id=leader) for i, leader in enumerate(self.leaders)]
        return SimpleNamespace(
            brokers=[SimpleNamespace(node_id=n, host=a.host, port=a.port) for n, a in ((1, FIRST), (2, SECOND))],
            topics=[SimpleNamespace(name=name, error_code=0, partitions=partitions) for name in topics],
        )


def topics_of(cluster: Any) -> Topics:
    return Topics(cluster, -1, "orders-1")


def test_a_partition_without_leader_does_not_hide_the_leaders_of_the_others() -> None:
    cluster = Cluster(1, 1)
    topics = topics_of(cluster)
    topics.layout("orders", Deadline.after(SECONDS))
    topics.invalidate("orders")
    assert topics.leader("orders", 0) is None
    cluster.leaders = (2, NONE)
    topics.refresh({"orders"}, Deadline.after(SECONDS))
    assert (topics.leader("orders", 0), topics.leader("orders", 1)) == (SECOND, None)


def test_a_forgotten_topic_is_looked_up_again() -> None:
    cluster = Cluster(1)
    topics = topics_of(cluster)
    assert len(topics.layout("orders", Deadline.after(SECONDS)).leaders) == 1
    cluster.leaders = (1, 2)
    assert len(topics.layout("orders", Deadline.after(SECONDS)).leaders) == 1
    topics.forget("orders")
    assert topics.leader("orders", 0) is None
    assert len(topics.layout("orders", Deadline.after(SECONDS)).leaders) == 2
    assert cluster.looked_up == 2
