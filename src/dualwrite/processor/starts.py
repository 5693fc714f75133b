"""Where an assigned partition is read from: its position, checked against the topic as it is now. No I/O."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from dualwrite.errors import LogTruncatedError, MessagesDeletedError, TopicReplacedError
from dualwrite.processor.options import ProcessorOptions
from dualwrite.stores.positions import Partition, Position

BEGINNING: Final = "beginning"


@dataclass(frozen=True, slots=True)
class Seen:
    """What is known about a partition when it is assigned.

    Args:
        topic_id: Kafka's id of the topic; empty if the brokers have none.
        first_offset: The first offset that retention has not deleted; None if it was not queried.
        committed: The group's committed offset at Kafka, if there is one.
        end_offset: The partition's end, if Kafka refused to read from the position; None otherwise.
        is_truncated: Whether Kafka refused since the log was truncated before the position; it may have grown again since.
    """

    topic_id: str
    first_offset: int | None = None
    committed: int | None = None
    end_offset: int | None = None
    is_truncated: bool = False


def begin_of(partition: Partition, stored: Position | None, seen: Seen, options: ProcessorOptions) -> int | str:
    """The offset to start at, or BEGINNING.

    Args:
        partition: The partition.
        stored: The stored position.
        seen: The partition as it is now.
        options: The policies.

    Raises:
        TopicReplacedError: The topic was deleted and created again, and the policy is to stop.
        MessagesDeletedError: Retention has deleted messages that were not read yet, and the policy is to stop.
        LogTruncatedError: The partition ends, or was truncated, before the position, and the policy is to stop.
    """
    topic, number = partition
    if stored is not None and stored.topic_id and seen.topic_id and stored.topic_id != seen.topic_id:
        if options.on_new_topic == "begin":
            return BEGINNING
        raise TopicReplacedError(
            f"The topic {topic!r} is not the one that was read before: it was deleted and created again.",
            next_step="to read it from its first message, set on_new_topic='begin', or forget the positions "
            "(`dualwrite offsets forget`)",
            topic=topic,
        )
    position = seen.committed if stored is None else stored.offset
    if position is None:
        return BEGINNING
    if seen.first_offset is not None and seen.first_offset > position:
        if options.on_gap == "skip":
            return seen.first_offset
        raise MessagesDeletedError(
            f"Up to {seen.first_offset - position} messages of {topic}-{number} were deleted before they were read: the "
            f"position is {position}, and the partition begins at {seen.first_offset}.",
            cause="the consumer fell further behind than the topic's retention allows",
            next_step=f"to go on without them, set on_gap='skip', or move the position: {how_to_reset(options)}",
            topic=topic,
            partition=number,
            position=position,
            first_offset=seen.first_offset,
        )
    if seen.end_offset is not None and (seen.end_offset < position or seen.is_truncated):
        if options.on_gap == "skip":
            return min(seen.end_offset, position)
        if seen.end_offset < position:
            what = f"ends at {seen.end_offset}, before the position {position}"
            next_step = f"to go on at the end, set on_gap='skip'; or move the position: {how_to_reset(options)}"
        else:
            what = (
                f"was truncated before the position {position}, and has grown again since, to {seen.end_offset}: an unknown "
                "number of new messages lie before the position"
            )
            next_step = (
                "to process these messages, stop the other processors of the group too, and move the position first: "
                f"{how_to_reset(options)}; they, and a restart, do not notice this, and go on at the position"
            )
        raise LogTruncatedError(
            f"The partition {topic}-{number} {what}.",
            cause="brokers have lost messages that were read already (an unclean election of a leader, a lost disk), or the "
            "topic was deleted and created again",
            next_step=next_step,
            topic=topic,
            partition=number,
            position=position,
            end_offset=seen.end_offset,
        )
    return position


def how_to_reset(options: ProcessorOptions) -> str:
    """The command that moves a position; it depends on where the options say that positions are stored."""
    if options.offsets == "kafka":
        return "`kafka-consumer-groups.sh --reset-offsets`, while the group is stopped"
    return "`dualwrite offsets reset`"
