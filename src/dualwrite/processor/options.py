"""Options of a processor: batches, retries, positions, and messages that can't be processed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from dualwrite.errors import ConfigurationError
from dualwrite.settings import check_count, check_seconds

Start = Literal["earliest", "latest"]
OnGap = Literal["stop", "skip"]
OnNewTopic = Literal["stop", "begin"]
Offsets = Literal["database", "kafka"]

_CHOICES: Final = {
    "offsets": ("database", "kafka"),
    "start": ("earliest", "latest"),
    "on_gap": ("stop", "skip"),
    "on_new_topic": ("stop", "begin"),
}


@dataclass(frozen=True, slots=True)
class ProcessorOptions:
    """Options of a DualProcessor.

    Args:
        batch: The maximum number of messages that one transaction processes.
        attempts: The maximum number of attempts to process a message whose handler raises an exception; after that, the message
            can't be processed. A failed attempt with a batch of several messages does not count. The number of attempts is kept
            in memory: after a restart, or at another member of the group, it starts again.
        dead_letter_topic: The topic for messages that can't be processed. Such a message is sent there with the error and its
            origin in headers, in the transaction that moves its position. None: the processor stops with MessageFailedError.
        dead_letters_in_a_row: After so many dead letters, without a message in between that could be processed, the processor
            stops with MessageFailedError instead of sending another one: most likely the messages are not the cause. None: no
            limit.
        offsets: Where the group's positions are stored: in the "database", moved by compare-and-set together with the data; or
            at "kafka", as the group's offsets, committed in the Kafka transaction (KIP-447). Both are equally safe. With
            "kafka", the transactions of a pool do not share commits, and a partition whose last transaction is still prepared
            can't be taken over until recovery has ended that transaction.
        start: Where a group starts a topic in which it has no position yet, in the database or at Kafka. With "latest", the
            ends of all its partitions are stored as positions before the topic is read. If the group has positions in other
            partitions of the topic, a new partition is always read from its first message.
        on_gap: What to do if retention has deleted messages that were not read yet, or the brokers have lost messages that were
            already read: "stop" with an error, or "skip" to the first message or the end of the partition, with a warning.
        on_new_topic: What to do if the topic was deleted and created again: "stop" with an error, or "begin" with its first
            message. If messages of the new topic may have been mistaken for messages of the old one, the processor stops in any
            case.
        pause: Seconds before the first retry; doubled after each further one.
        longest_pause: The maximum number of seconds between two retries.

    Raises:
        ConfigurationError: A value is not allowed.
    """

    batch: int = 500
    attempts: int = 5
    dead_letter_topic: str | None = None
    dead_letters_in_a_row: int | None = 10
    offsets: Offsets = "database"
    start: Start = "earliest"
    on_gap: OnGap = "stop"
    on_new_topic: OnNewTopic = "stop"
    pause: float = 0.1
    longest_pause: float = 30.0

    def __post_init__(self) -> None:
        for name in ("batch", "attempts"):
            check_count(name, getattr(self, name))
        if self.dead_letters_in_a_row is not None:
            check_count("dead_letters_in_a_row", self.dead_letters_in_a_row)
        for name in ("pause", "longest_pause"):
            check_seconds(name, getattr(self, name))
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                raise ConfigurationError(f"{name} must be one of {', '.join(allowed)}, not {getattr(self, name)!r}.")
