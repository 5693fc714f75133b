"""Which partition of a topic a message goes to: the given one, the one that its key determines, or the sticky one. No I/O."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from dualwrite.errors import UnknownTopicError
from dualwrite.kafka.messages import MAX_PARTITION, check_number
from dualwrite.kafka.native.partition import Partition
from dualwrite.kafka.native.settings import NativeSettings


class TopicPartitions:
    """The partitions of a topic that one transaction writes to, created when the first message goes to each.

    Their number does not change during the transaction.

    Args:
        topic: The topic's name.
        count: The number of its partitions.
        producer_id: The producer id of the batches.
        epoch: The transaction's epoch.
        settings: Partitioner and compression.
        kafka_transactional_id: For error messages.
        forget: Called with the topic when a message is for a partition that does not exist: it may have been added since the
            topic was looked up, and then the next transaction may write to it.

    Attributes:
        partitions: Every partition by its number, or None if nothing was written to it; also read by the accumulator's loops.
        sticky: The partition that currently gets the messages without a key; None if the next one is to choose it.
    """

    __slots__ = ("_epoch", "_forget", "_id", "_partitioner", "_producer_id", "_settings", "_topic", "partitions", "sticky")

    def __init__(
        self,
        topic: str,
        count: int,
        producer_id: int,
        epoch: int,
        settings: NativeSettings,
        kafka_transactional_id: str,
        forget: Callable[[str], None],
    ) -> None:
        self._topic = topic
        self._producer_id = producer_id
        self._epoch = epoch
        self._settings = settings
        self._partitioner = settings.partitioner
        self._id = kafka_transactional_id
        self._forget = forget
        self.partitions: list[Partition | None] = [None] * count
        self.sticky: Partition | None = None

    def target(self, key: bytes | None, partition: Any) -> Partition:
        """The partition that a message goes to.

        Raises:
            InvalidMessageError, UnknownTopicError: See `check_partition`.
        """
        partitions = self.partitions
        if partition is not None:
            try:
                check_partition(self._topic, partition, len(partitions), self._id)
            except UnknownTopicError:
                self._forget(self._topic)
                raise
            index = partition
        else:
            chosen = self._partitioner(key, len(partitions))
            if chosen is None:
                if self.sticky is None:
                    self.sticky = self._created(random.randrange(len(partitions)))  # noqa: S311  (no secret)
                return self.sticky
            index = chosen
        return partitions[index] or self._created(index)

    def _created(self, index: int) -> Partition:
        found = self.partitions[index]
        if found is None:
            found = Partition(str(self._topic), index, self._producer_id, self._epoch, self._settings.compression)
            self.partitions[index] = found
        return found


def check_partition(topic: str, partition: Any, count: int, kafka_transactional_id: str) -> None:
    """Check a partition number that the user gave.

    Raises:
        InvalidMessageError: It is not a valid partition number.
        UnknownTopicError: The topic has only `count` partitions.
    """
    if check_number("partition", partition, MAX_PARTITION) >= count:
        raise UnknownTopicError(
            f"Topic {topic!r} has no partition {partition}; it has {count} partitions.",
            transactional_id=kafka_transactional_id,
            next_step="omit the partition, so that the key determines it, or add partitions to the topic",
        )
