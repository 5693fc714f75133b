"""How a processor batches, retries, and treats messages that can't be processed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from dualwrite.checks import check_count, check_seconds
from dualwrite.errors import ConfigurationError

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
        batch: The most messages that one transaction processes.
        attempts: How often a message is tried whose processing raises an exception, before it counts as one that can't be
            processed. A failed attempt of a batch of several messages does not count. The count is kept in memory: after a
            restart, or at another member, it begins again.
        dead_letter_topic: Where such a message goes, with the error and its origin in headers, in the same transaction as its
            position; None: the processor stops with MessageFailedError.
        offsets: Where the group's positions are kept: in the "database", moved by compare-and-set with the data; or at "kafka",
            as the group's offsets, in the Kafka transaction (KIP-447). Both are as safe. With "kafka", the transactions of a
            pool are not shared, and a partition whose last transaction is prepared can't be taken over before recovery has
            ended that.
        start: Where a group begins a topic in which it has no position, in the database or at Kafka. With "latest", the ends of
            all its partitions are stored as positions before it is read. A partition that was added to a topic of which the
            group has read others begins at its first message in any case.
        on_gap: If retention has deleted messages behind a position, or the brokers have lost messages before it: "stop" with an
            error, or "skip" to what is there, with a warning.
        on_new_topic: If the topic was deleted and created again: "stop" with an error, or "begin" with its first message. If
            some of its messages may have been read as those of the topic before, the processor stops in any case.
        pause: Seconds before the first retry; doubled each time.
        longest_pause: Seconds between two retries at most.

    Raises:
        ConfigurationError: A value is not allowed.
    """

    batch: int = 500
    attempts: int = 5
    dead_letter_topic: str | None = None
    offsets: Offsets = "database"
    start: Start = "earliest"
    on_gap: OnGap = "stop"
    on_new_topic: OnNewTopic = "stop"
    pause: float = 0.1
    longest_pause: float = 30.0

    def __post_init__(self) -> None:
        for name in ("batch", "attempts"):
            check_count(name, getattr(self, name))
        for name in ("pause", "longest_pause"):
            check_seconds(name, getattr(self, name))
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                raise ConfigurationError(f"{name} must be one of {', '.join(allowed)}, not {getattr(self, name)!r}.")
