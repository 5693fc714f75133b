"""Dead letters of processors: the headers that say where one came from and why, and whom a replay is for. No I/O."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

REPLAYED_FOR: Final = "dualwrite.replayed_for"
"""Header of a replayed message: the group whose processor could not process it. Processors of other groups skip it."""

_PREFIX: Final = "dualwrite."
_NAMES: Final = ("topic", "partition", "offset", "timestamp", "group", "attempts", "error", "error.message")
_LONGEST: Final = 1000

Headers = list[tuple[str, Any]]


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A message that a processor could not process, as it is in the dead-letter topic.

    Args:
        partition: Its partition in the dead-letter topic.
        offset: Its offset there.
        key: The message's key.
        value: The message's value.
        headers: The message's own headers.
        topic: The topic that it came from.
        source_partition: Its partition there.
        source_offset: Its offset there.
        timestamp: Its timestamp there, in milliseconds since 1970; None if it had none.
        group: The consumer group that could not process it.
        attempts: How often that was tried.
        error: The class of the last error.
        message: The text of the last error.
        is_replayed: Whether it was replayed.
    """

    partition: int
    offset: int
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...]
    topic: str
    source_partition: int
    source_offset: int
    timestamp: int | None
    group: str
    attempts: int
    error: str
    message: str
    is_replayed: bool = False

    @property
    def name(self) -> str:
        """Its place in the dead-letter topic, as PARTITION:OFFSET."""
        return f"{self.partition}:{self.offset}"


def dead_letter_headers(message: Any, error: BaseException, *, group_id: str, attempts: int) -> Headers:
    """The headers of a message, followed by ours: its origin, and the exception of the last attempt to process it."""
    kind, timestamp = message.timestamp()
    ours = {
        "topic": message.topic(),
        "partition": message.partition(),
        "offset": message.offset(),
        "timestamp": timestamp if kind else "",
        "group": group_id,
        "attempts": attempts,
        "error": type(error).__qualname__,
        "error.message": str(error)[:_LONGEST],
    }
    return [
        *(pair for pair in message.headers() or () if pair[0] != REPLAYED_FOR),
        *((f"{_PREFIX}{name}", str(value).encode(errors="backslashreplace")) for name, value in ours.items()),
    ]


def parsed(message: Any) -> DeadLetter | None:
    """The dead letter that a message of confluent-kafka's is; None if it has not our headers.

    A message that was a dead letter before has them more than once: the last ones count, and the others are its own.
    """
    headers = message.headers() or []
    at = len(headers) - len(_NAMES)
    last = [name for name, _ in headers[at:]] if at >= 0 else []
    if last != [f"{_PREFIX}{name}" for name in _NAMES]:
        return None
    found = [(content or b"").decode(errors="replace") for _, content in headers[at:]]
    topic, partition, offset, timestamp, group, attempts, error, text = found
    try:
        return DeadLetter(
            partition=message.partition(),
            offset=message.offset(),
            key=message.key(),
            value=message.value(),
            headers=tuple(headers[:at]),
            topic=topic,
            source_partition=int(partition),
            source_offset=int(offset),
            timestamp=int(timestamp) if timestamp else None,
            group=group,
            attempts=int(attempts),
            error=error,
            message=text,
        )
    except ValueError:  # a number that is none: not ours
        return None


def replayed_headers(letter: DeadLetter) -> Headers:
    """The headers with which a dead letter is sent again."""
    return [*letter.headers, (REPLAYED_FOR, letter.group.encode())]


def is_for(message: Any, group_id: str) -> bool:
    """Whether a message concerns a group: not if it was replayed for another one, which alone could not process it."""
    headers = message.headers()
    if not headers:
        return True
    last = [content for name, content in headers if name == REPLAYED_FOR]
    return not last or last[-1] == group_id.encode()
