"""A member of a consumer group, without a processor."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
from confluent_kafka import Consumer, ConsumerGroupState, TopicPartition
from confluent_kafka.admin import AdminClient

from dualwrite.devcluster import DevCluster
from dualwrite.errors import BrokerError
from dualwrite.kafka.librdkafka.consumer import Begin, GroupConsumer
from dualwrite.kafka.librdkafka.group_offsets import Partition
from fixtures.broker import make_topic
from fixtures.pace import LIMIT, until

NewName = Callable[[str], str]
PROTOCOLS: dict[str, dict[str, Any]] = {
    "range": {"partition.assignment.strategy": "range"},
    "cooperative-sticky": {"partition.assignment.strategy": "cooperative-sticky"},
    "consumer": {"group.protocol": "consumer"},
}


def wait_until_assigned(servers: str, group: str) -> None:
    """Wait until the coordinator has assigned the partitions; the member, which isn't polled, does not own them yet."""
    admin = AdminClient({"bootstrap.servers": servers})

    def is_assigned() -> bool:
        found = admin.describe_consumer_groups([group])[group].result(LIMIT)
        return found.state == ConsumerGroupState.STABLE and bool(found.members[0].assignment.topic_partitions)

    until(is_assigned, "the coordinator has assigned the partitions", pause=0.02)


class Observed(GroupConsumer):
    """Notes when librdkafka's close() begins, and when callbacks run."""

    def __init__(self, settings: Mapping[str, Any], topics: Sequence[str], begin: Begin) -> None:
        super().__init__(settings, topics, begin)
        self.seen: list[str] = []
        self._consumer = Noting(self._consumer, self.seen)  # type: ignore[assignment]

    def _assigned(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        self.seen.append("assigned")
        super()._assigned(consumer, partitions)

    def _revoked(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        self.seen.append("revoked")
        super()._revoked(consumer, partitions)


class Noting:
    """confluent-kafka's consumer, whose methods can't be replaced."""

    def __init__(self, consumer: Consumer, seen: list[str]) -> None:
        self._consumer = consumer
        self._seen = seen

    def __getattr__(self, name: str) -> Any:
        return getattr(self._consumer, name)

    def close(self) -> None:
        self._seen.append("close")
        self._consumer.close()


@pytest.mark.slow
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_an_assignment_that_comes_while_it_closes_begins_nothing(brisk: DevCluster, new_name: NewName, protocol: str) -> None:
    """And no callback is left for librdkafka's close(), in which the answer to it can wait forever."""
    topic = new_name("source")
    make_topic(brisk, topic, partitions=2)
    begun: list[Partition] = []

    def begin(partitions: list[Partition]) -> dict[Partition, int]:
        begun.extend(partitions)
        return dict.fromkeys(partitions, 0)

    def was_assigned() -> bool:
        """Whether librdkafka had the assignment when `close` began: the coordinator, which is asked, has it a moment before."""
        group = new_name("group")
        settings = {"bootstrap.servers": brisk.bootstrap_servers, "group.id": group, **PROTOCOLS[protocol]}
        consumer = Observed(settings, [topic], begin)
        wait_until_assigned(brisk.bootstrap_servers, group)
        consumer.close()
        assert begun == []
        assert consumer.owned() == {}
        assert consumer.seen in (["assigned", "revoked", "close"], ["close"])
        return "assigned" in consumer.seen

    until(was_assigned)


@pytest.mark.slow
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_two_members_with_the_same_instance_id(brisk: DevCluster, new_name: NewName, protocol: str) -> None:
    """The older one is fenced, or the newer one is refused (KIP-848): the error says what to change."""
    topic, group = new_name("source"), new_name("group")
    make_topic(brisk, topic)
    settings = {
        "bootstrap.servers": brisk.bootstrap_servers,
        "group.id": group,
        "group.instance.id": "a",
        **PROTOCOLS[protocol],
    }

    def begin(partitions: list[Partition]) -> dict[Partition, int]:
        return dict.fromkeys(partitions, 0)

    members = [GroupConsumer(settings, [topic], begin)]

    def polled() -> bool:
        for member in members:
            member.poll(1, 0.1)
        return False

    until(lambda: polled() or members[0].owned())
    members.append(GroupConsumer(settings, [topic], begin))
    try:
        with pytest.raises(BrokerError, match=r"Next step: give each process a group\.instance\.id of its own"):
            until(polled)
    finally:
        for member in members:
            member.close()
