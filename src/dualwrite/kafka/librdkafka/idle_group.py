"""A consumer group without members: its offsets at Kafka, read and set from outside the group."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import TracebackType
from typing import Any, Self

from confluent_kafka import Consumer, KafkaException, TopicPartition

from dualwrite.kafka.librdkafka.admin import admin_client
from dualwrite.kafka.librdkafka.batch import Partition
from dualwrite.kafka.librdkafka.errors import broker_error
from dualwrite.kafka.librdkafka.own_lines import with_own_lines


class IdleGroup:
    """A group without members. Must be closed, by `with` or `close()`.

    Args:
        settings: The cluster's settings.
        group_id: The group.
        timeout: Seconds for each request.
    """

    def __init__(self, settings: Mapping[str, Any], group_id: str, timeout: float) -> None:
        self._group = group_id
        self._timeout = timeout
        self._admin = admin_client(settings)
        self._consumer = Consumer(
            with_own_lines({**settings, "group.id": group_id, "enable.auto.commit": False}, group_id=group_id)
        )

    def members(self) -> int:
        """How many members the group has.

        Raises:
            BrokerError: Its coordinator does not respond.
        """
        described = self._admin.describe_consumer_groups([self._group], request_timeout=self._timeout)[self._group]
        try:
            return len(described.result(self._timeout).members or ())
        except KafkaException as error:
            raise broker_error(error, None, f"describing the group {self._group!r}") from error

    def committed(self, keys: Collection[Partition]) -> dict[Partition, int]:
        """The group's offsets, for those partitions that have one.

        Raises:
            BrokerError: They can't be read: a transaction that commits offsets of the group is open, or no broker responds.
        """
        doing = f"reading the offsets of group {self._group!r}"
        try:
            found = self._consumer.committed([TopicPartition(*key) for key in keys], self._timeout) if keys else []
        except KafkaException as error:
            raise broker_error(error, None, doing) from error
        for one in found:
            if one.error is not None:
                raise broker_error(one.error, None, doing)
        return {(one.topic, one.partition): one.offset for one in found if one.offset >= 0}

    def commit(self, offsets: Mapping[Partition, int]) -> None:
        """Set the group's offsets. The coordinator refuses that if the group has a member.

        Raises:
            BrokerError: They were not set.
        """
        doing = f"setting the offsets of group {self._group!r}"
        wanted = [TopicPartition(*key, offset) for key, offset in offsets.items()]
        try:
            done = self._consumer.commit(offsets=wanted, asynchronous=False) if wanted else []
        except KafkaException as error:
            raise broker_error(error, None, doing) from error
        for one in done or ():
            if one.error is not None:
                raise broker_error(one.error, None, doing)

    def close(self) -> None:
        """Close the connections, and pass on what librdkafka has logged."""
        self._admin.poll(0)
        self._consumer.poll(0)
        self._consumer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
