"""Where a partition begins when it is assigned: the stored position, checked against the topic as it is now. No I/O."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final

from dualwrite.errors import MessagesDeletedError, TopicReplacedError
from dualwrite.processor.options import ProcessorOptions
from dualwrite.stores.positions import Partition, Position

BEGINNING: Final = "beginning"
END: Final = "end"


@dataclass(frozen=True, slots=True)
class Seen:
    """What is known about a partition when it is assigned.

    Args:
        topic_id: Kafka's id of the topic; empty if the brokers have none.
        first_offset: The first offset that retention has left; None if it was not read.
        committed: The group's committed offset at Kafka, if there is one.
    """

    topic_id: str
    first_offset: int | None = None
    committed: int | None = None


def begin_of(
    partition: Partition,
    stored: Position | None,
    seen: Seen,
    options: ProcessorOptions,
    read_before: Collection[str],
) -> int | str:
    """The offset to begin at, or BEGINNING or END.

    Args:
        partition: The partition.
        stored: The stored position.
        seen: The partition as it is now.
        options: The policies.
        read_before: The topics of which the group has a position in some partition.

    Raises:
        TopicReplacedError: The topic was deleted and created again, and the policy is to stop.
        MessagesDeletedError: Retention has deleted messages behind the position, and the policy is to stop.
    """
    topic, number = partition
    if stored is None:
        if seen.committed is not None:
            return seen.committed
        return BEGINNING if topic in read_before or options.start == "earliest" else END
    if stored.topic_id and seen.topic_id and stored.topic_id != seen.topic_id:
        if options.on_new_topic == "begin":
            return BEGINNING
        raise TopicReplacedError(
            f"The topic {topic!r} is not the one that was read before: it was deleted and created again.",
            next_step="to read it from its first message, set on_new_topic='begin', or forget the positions "
            "(`dualwrite offsets forget`)",
            topic=topic,
        )
    if seen.first_offset is not None and seen.first_offset > stored.offset:
        if options.on_gap == "skip":
            return seen.first_offset
        raise MessagesDeletedError(
            f"{seen.first_offset - stored.offset} messages of {topic}-{number} were deleted before they were read: the "
            f"position is {stored.offset}, and the partition begins at {seen.first_offset}.",
            cause="the topic's retention is shorter than the consumer was away",
            next_step="to go on without them, set on_gap='skip', or `dualwrite offsets reset`",
            topic=topic,
            partition=number,
            position=stored.offset,
            first_offset=seen.first_offset,
        )
    return stored.offset


def topics_of(positions: Mapping[Partition, Position]) -> frozenset[str]:
    """The topics in which the group has positions."""
    return frozenset(topic for topic, _ in positions)
