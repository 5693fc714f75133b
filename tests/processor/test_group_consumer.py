"""A member of a consumer group, without a processor."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import pytest
from confluent_kafka import Consumer, TopicPartition

from dualwrite.devcluster import DevCluster
from dualwrite.errors import BrokerError
from dualwrite.kafka.librdkafka.consumer import Begin, GroupConsumer
from dualwrite.kafka.librdkafka.group_offsets import Partition
from fixtures.broker import make_topic
from fixtures.fork_server import ForkedProcess
from fixtures.pace import ended, limit, until
from processor.closing_worker import PROTOCOLS, wait_until_assigned

NewName = Callable[[str], str]

TIMES = 300


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


@pytest.mark.soak
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_process_goes_on_after_closing_members_just_when_they_are_assigned_partitions(
    brisk: DevCluster, new_name: NewName, protocol: str
) -> None:
    """Several processes at once, since the wait that never ends needs other threads to come first."""
    topic = new_name("source")
    make_topic(brisk, topic, partitions=2)
    arguments = [brisk.bootstrap_servers, topic, protocol, str(TIMES), str(limit(30))]
    with ExitStack() as running:
        processes = [running.enter_context(ForkedProcess("processor.closing_worker", arguments)) for _ in range(6)]
        for process in processes:
            running.callback(process.kill)
        assert [ended(process, seconds=limit(250)) for process in processes] == [0] * 6
