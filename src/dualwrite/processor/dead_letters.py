"""Dead letters of processors: the headers that say where one came from and why, and whom a replay is for. No I/O."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Final

REPLAYED_FOR: Final = "dualwrite.replayed_for"
"""Header of a replayed message: the group whose processor could not process it. Processors of other groups skip it."""

MARK: Final = b"replayed"
"""Value of a mark: a message in the dead-letter topic that says up to which offset the letters of a group were replayed."""

_MARK_GROUP: Final = "dualwrite.replayed.group"
_MARK_OFFSET: Final = "dualwrite.replayed.through"
_OURS: Final = tuple(
    f"dualwrite.{name}" for name in ("topic", "partition", "offset", "timestamp", "group", "attempts", "error", "error.message")
)
_MAX_ERROR_LENGTH: Final = 1000

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
    ours = (
        message.topic(),
        message.partition(),
        message.offset(),
        timestamp if kind else "",
        group_id,
        attempts,
        type(error).__qualname__,
        f"{error}"[:_MAX_ERROR_LENGTH],
    )
    return [
        *(pair for pair in message.headers() or () if pair[0] != REPLAYED_FOR),
        *((name, str(value).encode(errors="backslashreplace")) for name, value in zip(_OURS, ours, strict=True)),
    ]


def letters_in(messages: Iterable[Any], group: str | None = None) -> list[DeadLetter]:
    """The dead letters in messages of confluent-kafka from a dead-letter topic; those of one group, if it is given."""
    letters, through = list[DeadLetter](), dict[tuple[str, int], int]()
    for message in messages:
        if (mark := parsed_mark(message)) is not None:
            place = mark[0], message.partition()
            through[place] = max(mark[1], through.get(place, mark[1]))
        elif (letter := parsed(message)) is not None and group in (None, letter.group):
            letters.append(letter)
    return [replace(each, is_replayed=each.offset <= through.get((each.group, each.partition), -1)) for each in letters]


def mark_headers(group: str, through: int) -> Headers:
    """The headers of a mark.

    It is sent to the partition of the letters, in the transaction that sends them again. So it is there as long as they are; a
    consumer group's offsets are forgotten after `offsets.retention.minutes`.
    """
    return [(_MARK_GROUP, group.encode()), (_MARK_OFFSET, b"%d" % through)]


def parsed_mark(message: Any) -> tuple[str, int] | None:
    """The group and the offset of a mark; None if the message is none."""
    headers = message.headers()
    if not headers or headers[0][0] != _MARK_GROUP:  # a tracer may have added others
        return None
    group, through = headers[0][1] or b"", dict(headers).get(_MARK_OFFSET) or b""
    return (group.decode(errors="replace"), int(through)) if through.isdigit() else None


def parsed(message: Any) -> DeadLetter | None:
    """The dead letter that a message of confluent-kafka's is; None if it has not our headers.

    A message that was a dead letter before has them more than once: the last ones count, and the others are its own, as are
    those that a tracer has added.
    """
    headers = message.headers() or []
    last = max((at for at, (name, _) in enumerate(headers) if name == _OURS[0]), default=len(headers))
    after = last + len(_OURS)
    if tuple(name for name, _ in headers[last:after]) != _OURS:
        return None
    found = [(content or b"").decode(errors="replace") for _, content in headers[last:after]]
    topic, partition, offset, timestamp, group, attempts, error, text = found
    try:
        return DeadLetter(
            partition=message.partition(),
            offset=message.offset(),
            key=message.key(),
            value=message.value(),
            headers=(*headers[:last], *headers[after:]),
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
    """Whether a message concerns a group: not if it is a mark, or was replayed for another group, which alone has failed."""
    headers = message.headers()
    if not headers:
        return True
    if parsed_mark(message) is not None:
        return False
    last = [content for name, content in headers if name == REPLAYED_FOR]
    return not last or last[-1] == group_id.encode()
