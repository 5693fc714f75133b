"""A batch of messages: what it moves, its parts that are still ours, its messages one by one. No I/O."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dualwrite.stores.positions import Move, Partition, Position


@dataclass(frozen=True, slots=True)
class Batch:
    """Messages of partitions that were assigned when they came.

    Args:
        messages: confluent-kafka's messages, in the order of each partition.
        terms: The term of each partition's assignment.
    """

    messages: Sequence[Any]
    terms: Mapping[Partition, object]

    @classmethod
    def of(cls, messages: Sequence[Any], owned: Mapping[Partition, object]) -> Batch:
        """The batch of what has just come."""
        kept = [message for message in messages if partition_of(message) in owned]
        return cls(kept, {key: owned[key] for key in map(partition_of, kept)})

    def still_owned(self, owned: Mapping[Partition, object]) -> Batch:
        """Without the partitions that were given up since, even if they came back: they were begun anew."""
        kept = [message for message in self.messages if owned.get(key := partition_of(message)) is self.terms[key]]
        return Batch(kept, {key: self.terms[key] for key in map(partition_of, kept)})

    def one_by_one(self) -> Iterator[Batch]:
        """A batch for each message."""
        for message in self.messages:
            key = partition_of(message)
            yield Batch([message], {key: self.terms[key]})

    def after(self) -> dict[Partition, int]:
        """The next offset of each partition."""
        return {partition_of(message): message.offset() + 1 for message in self.messages}

    def moves(self, stored: Mapping[Partition, Position], topic_ids: Mapping[str, str]) -> list[Move]:
        """How the positions move.

        Args:
            stored: The position of each partition when it was read, where there is one.
            topic_ids: Kafka's id of each topic.
        """
        return [
            Move(stored.get(key), Position(*key, offset, topic_ids.get(key[0], ""))) for key, offset in self.after().items()
        ]


def partition_of(message: Any) -> Partition:
    """The partition of a message."""
    return message.topic(), message.partition()


def name_of(message: Any) -> str:
    """Readable text: `orders-0 at 17`."""
    return f"{message.topic()}-{message.partition()} at {message.offset()}"
