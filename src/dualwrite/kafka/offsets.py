"""A consumer's progress as plain values: which offsets to commit for which group, independent of the client library."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Self

from dualwrite.errors import UsageError

_LIBRDKAFKA_MAGIC: Final = b"CGMDv2:"
_GENERATION: Final = struct.Struct("=i")


@dataclass(frozen=True, slots=True)
class ConsumedOffset:
    """How far one partition is consumed.

    Args:
        topic: The topic.
        partition: The partition.
        offset: The offset of the next message to read.
        leader_epoch: The leader epoch of the last message read, or -1.
        metadata: Free text of the consumer.
    """

    topic: str
    partition: int
    offset: int
    leader_epoch: int = -1
    metadata: str = ""


@dataclass(frozen=True, slots=True)
class GroupMetadata:
    """The member that commits: its generation fences members of the group that were replaced (KIP-447).

    Args:
        group_id: The group.
        generation_id: The generation; -1 without group management.
        member_id: The member; empty without group management.
        group_instance_id: The static member, or None.
    """

    group_id: str
    generation_id: int = -1
    member_id: str = ""
    group_instance_id: str | None = None

    @classmethod
    def from_librdkafka(cls, written: bytes) -> Self:
        """Parse what confluent-kafka's `consumer_group_metadata()` returns.

        The format is that of librdkafka's `rd_kafka_consumer_group_metadata_write`: magic, generation, then zero-terminated
        strings; a byte before the last string shows whether that string is null.

        Raises:
            UsageError: It has another format.
        """
        try:
            written_group = written[len(_LIBRDKAFKA_MAGIC) :]
            (generation,) = _GENERATION.unpack_from(written_group)
            group, member, rest = written_group[_GENERATION.size :].split(b"\0", 2)
            instance = None if rest == b"\1" else rest[1 : rest.index(b"\0", 1)].decode()
            found = cls(group.decode(), generation, member.decode(), instance)
        except (ValueError, TypeError, struct.error) as error:
            raise _unreadable(written) from error
        if found.for_librdkafka() != written:  # another magic, a missing part, or trailing bytes
            raise _unreadable(written)
        return found

    def for_librdkafka(self) -> bytes:
        """The format that librdkafka reads."""
        instance = b"\1" if self.group_instance_id is None else b"\0" + self.group_instance_id.encode() + b"\0"
        parts = [self.group_id.encode(), b"\0", self.member_id.encode(), b"\0", instance]
        return _LIBRDKAFKA_MAGIC + _GENERATION.pack(self.generation_id) + b"".join(parts)


def _unreadable(written: object) -> UsageError:
    return UsageError(
        f"The consumer's group metadata can't be parsed: {written!r}.",
        next_step="pass a confluent-kafka Consumer, or your own GroupMetadata",
    )


def progress_of(
    consumer: Any, offsets: Mapping[tuple[str, int], int] | None = None
) -> tuple[list[ConsumedOffset], GroupMetadata]:
    """The positions of a confluent-kafka Consumer and its group, without partitions from which nothing was read.

    Args:
        consumer: The consumer.
        offsets: The next offset of each partition, instead of what the consumer has returned so far.
    """
    group = GroupMetadata.from_librdkafka(consumer.consumer_group_metadata())
    if offsets is not None:
        return [ConsumedOffset(*key, offset) for key, offset in offsets.items()], group
    positions = consumer.position(consumer.assignment())
    found = [
        ConsumedOffset(p.topic, p.partition, p.offset, p.leader_epoch if p.leader_epoch is not None else -1)
        for p in positions
        if p.offset >= 0
    ]
    return found, group
