"""A group's offsets at Kafka, for monitors: committed about once a second, asynchronously; nothing else depends on them."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from typing import Final

from confluent_kafka import Consumer, KafkaException, TopicPartition

from dualwrite.kafka.librdkafka.batch import Partition
from dualwrite.logs import SubjectLogger

log = SubjectLogger(__name__)

_INTERVAL: Final = 1.0


class MonitorOffsets:
    """The offsets of a group whose positions are stored elsewhere, until they are committed to Kafka.

    Args:
        consumer: A member of the group.
        group_id: The group.
    """

    def __init__(self, consumer: Consumer, group_id: str) -> None:
        self._consumer = consumer
        self._group = group_id
        self._pending: dict[Partition, int] = {}
        self._committed_at = 0.0

    def add(self, offsets: Mapping[Partition, int]) -> None:
        """Add offsets to be committed; they replace earlier ones of the same partitions."""
        self._pending |= offsets

    def commit_due(self) -> None:
        """Commit what is pending if the last commit was at least a second ago."""
        if time.monotonic() - self._committed_at >= _INTERVAL:
            self.commit()

    def commit(self, keys: Collection[Partition] | None = None) -> None:
        """Commit what is pending, without waiting for the response; an error is only logged.

        Args:
            keys: Only these partitions; None for all.
        """
        chosen = {key: offset for key, offset in self._pending.items() if keys is None or key in keys}
        if not chosen:
            return
        offsets = [TopicPartition(*key, offset) for key, offset in chosen.items()]
        self._pending = {key: offset for key, offset in self._pending.items() if key not in chosen}
        self._committed_at = time.monotonic()
        try:
            self._consumer.commit(offsets=offsets, asynchronous=True)
        except KafkaException as error:
            log.debug("offsets were not committed for monitors: %s", error, group_id=self._group)
