"""A batch of messages, and the terms of the assignments in which they were read. No I/O."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Partition = tuple[str, int]
"""A topic, and one of its partitions."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Messages of partitions that were assigned when the messages were read.

    Args:
        messages: confluent-kafka's messages, in the order of each partition.
        terms: The term of each partition's assignment.
    """

    messages: Sequence[Any]
    terms: Mapping[Partition, object]

    def only(self, keys: Collection[Partition]) -> Batch:
        """The messages of these partitions."""
        return Batch([one for one in self.messages if partition_of(one) in keys], {key: self.terms[key] for key in keys})

    def still_owned(self, owned: Mapping[Partition, object]) -> Batch:
        """Without partitions that were revoked since, even if they were assigned again: they began again then."""
        return self.only({key for key, term in self.terms.items() if owned.get(key) is term})

    def from_offsets(self, begin: Mapping[Partition, int]) -> Batch:
        """Without messages before these offsets."""
        kept = [one for one in self.messages if one.offset() >= begin.get(partition_of(one), 0)]
        return Batch(kept, self.terms)

    def one_by_one(self) -> Iterator[Batch]:
        """A batch for each message."""
        for message in self.messages:
            key = partition_of(message)
            yield Batch([message], {key: self.terms[key]})

    def after(self) -> dict[Partition, int]:
        """The next offset of each partition."""
        return {partition_of(message): message.offset() + 1 for message in self.messages}


def partition_of(message: Any) -> Partition:
    """The partition of a message."""
    return message.topic(), message.partition()


def name_of(message: Any) -> str:
    """Readable text: `orders-0 at 17`."""
    return f"{message.topic()}-{message.partition()} at {message.offset()}"
