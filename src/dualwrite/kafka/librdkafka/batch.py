"""A batch of messages, with the term of each partition's assignment: an object that no other assignment has. No I/O."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

Partition = tuple[str, int]
"""A topic, and one of its partitions."""


@dataclass(frozen=True)
class Batch:
    """Messages of partitions that were assigned when the messages were read.

    A pass over the messages is made at most once for a batch, and only if something changes: with small messages these passes
    are a noticeable part of the work.

    Args:
        messages: confluent-kafka's messages, in the order of each partition.
        terms: The term of each partition's assignment.
    """

    messages: tuple[Any, ...]
    terms: Mapping[Partition, object]

    def only(self, keys: Collection[Partition]) -> Batch:
        """The messages of these partitions."""
        if self.terms.keys() <= set(keys):
            return self
        kept = {key: term for key, term in self.terms.items() if key in keys}
        return Batch(tuple(one for one in self.messages if partition_of(one) in kept), kept)

    def still_owned(self, owned: Mapping[Partition, object]) -> Batch:
        """The batch without partitions that have been revoked since; those assigned again are also read again."""
        return self.only({key for key, term in self.terms.items() if owned.get(key) is term})

    def from_offsets(self, begin: Mapping[Partition, int]) -> Batch:
        """The batch without messages before these offsets."""
        if all(first >= begin.get(key, 0) for key, (first, _) in self._ranges.items()):
            return self
        kept = tuple(one for one in self.messages if one.offset() >= begin.get(partition_of(one), 0))
        return Batch(kept, self.terms)

    def one_by_one(self) -> Iterator[Batch]:
        """A batch for each message."""
        for message in self.messages:
            key = partition_of(message)
            yield Batch((message,), {key: self.terms[key]})

    @cached_property
    def after(self) -> Mapping[Partition, int]:
        """The next offset of each partition that has messages here."""
        return {key: after for key, (_, after) in self._ranges.items()}

    @cached_property
    def _ranges(self) -> Mapping[Partition, tuple[int, int]]:
        """The first offset of each partition, and the one after its last message."""
        first: dict[Partition, int] = {}
        after: dict[Partition, int] = {}
        for message in self.messages:
            key, offset = partition_of(message), message.offset()
            first.setdefault(key, offset)
            after[key] = offset + 1
        return {key: (first[key], after[key]) for key in first}


def partition_of(message: Any) -> Partition:
    """The partition of a message."""
    return message.topic(), message.partition()


def fields_of(message: Any) -> dict[str, Any]:
    """The place of a message, for errors and log records."""
    return {"topic": message.topic(), "partition": message.partition(), "offset": message.offset()}


def name_of(message: Any) -> str:
    """Readable text: `orders-0 at 17`."""
    return f"{message.topic()}-{message.partition()} at {message.offset()}"
