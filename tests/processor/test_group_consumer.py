"""A member of a consumer group, without a processor."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from confluent_kafka import ConsumerGroupState
from confluent_kafka.admin import AdminClient

from dualwrite.devcluster import DevCluster
from dualwrite.kafka.librdkafka.batch import Partition
from dualwrite.kafka.librdkafka.consumer import GroupConsumer
from fixtures.broker import make_topic
from fixtures.pace import LIMIT, until

NewName = Callable[[str], str]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["range", "cooperative-sticky"])
def test_an_assignment_that_comes_while_it_closes_begins_nothing(brisk: DevCluster, new_name: NewName, strategy: str) -> None:
    """librdkafka delivers the callback in its close(), where offsets can't be read any more."""
    topic, group = new_name("source"), new_name("group")
    make_topic(brisk, topic, partitions=2)
    admin = AdminClient({"bootstrap.servers": brisk.bootstrap_servers})

    def is_assigned() -> bool:
        found = admin.describe_consumer_groups([group])[group].result(LIMIT)
        return found.state == ConsumerGroupState.STABLE and bool(found.members[0].assignment.topic_partitions)

    begun: list[Partition] = []

    def begin(partitions: list[Partition]) -> dict[Partition, int]:
        begun.extend(partitions)
        return dict.fromkeys(partitions, 0) | consumer.offsets.committed(partitions, 5)

    settings = {
        "bootstrap.servers": brisk.bootstrap_servers,
        "group.id": group,
        "partition.assignment.strategy": strategy,
    }
    consumer = GroupConsumer(settings, [topic], begin)
    until(is_assigned, "the coordinator has assigned the partitions", pause=0.02)
    consumer.close()
    assert begun == []
    assert consumer.owned() == {}
